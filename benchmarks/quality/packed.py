"""Bits per weight before and after `lpconv convert --pack`, and its rates next to `cp`.

    python -m benchmarks.quality.packed --work DIRECTORY [--models demo,smollm2]

`entropy` is the order-0 entropy of each tensor's numbers: of 16 bits, or of 4-bit codes or bytes, whichever is
less. Rates are bytes of the original per second, once each, in one process with the copy. Converted weights are counted
with their scales; the row `bf16` counts all weights.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import uint8

from benchmarks import common
from benchmarks.quality.peers import model_at
from lpconv import inspect
from lpconv.convert import ConvertOptions, convert, pack, restore
from lpconv.storage.packed import BLOCK_BYTES, packed_blocks

SCHEMES = {
    "bf16": {}, "FP8_DYNAMIC": {}, "W4A16": {"granularity": "group:128"}, "NVFP4A16": {}, "MXFP4A16": {},
}  # fmt: skip


def entropy_bytes(raw: NDArray[np.uint8], itemsize: int) -> float:
    """Bytes of a tensor at its order-0 entropy."""
    if itemsize == 2:
        return _bits(raw.view(np.uint16)) / 8
    return min(_bits(np.stack([raw & 15, raw >> 4]).reshape(-1)), sum(map(_bits, raw.reshape(-1, itemsize).T))) / 8


def _bits(x: NDArray[np.unsignedinteger]) -> float:
    counts = np.bincount(x)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / x.size)).sum())


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(folder: Path, model: str, scheme: str, work: Path) -> dict[str, object]:
    found, before, after, entropy = inspect(folder).tensors, 0, 0.0, 0.0
    plain = {t.name for t in found if t.stored_as is None}
    for name, x in load_file(folder / "model.safetensors").items():
        if (name not in plain or scheme == "bf16") and x.numel():
            raw = np.atleast_1d(x.numpy() if x.dtype == uint8 else x.reshape(-1).view(uint8).numpy()).reshape(-1)
            pieces = (
                []
                if scheme == "bf16"
                else [raw[i : i + 64 * BLOCK_BYTES].tobytes() for i in range(0, raw.size, 64 * BLOCK_BYTES)]
            )
            before, entropy = before + raw.size, entropy + entropy_bytes(raw, x.itemsize)
            after += sum(len(coded) for p in pieces for coded, _ in packed_blocks(p, x.itemsize))
    num = sum(math.prod(t.shape) for t in found if t.stored_as is not None or scheme == "bf16")
    megabytes = (folder / "model.safetensors").stat().st_size / 1e6
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        out = Path(temporary)
        times = [
            seconds(lambda: shutil.copyfile(folder / "model.safetensors", out / "copy")),
            seconds(lambda: pack(str(folder), out / "packed", ConvertOptions())),
            seconds(lambda: restore(out / "packed", out / "again")),
        ]
        packed = (out / "packed" / "model.safetensors").stat().st_size / 1e6
    after = after or packed * 1e6
    bits = {"before": before, "after": after, "entropy": entropy}
    rates = {f"{k}, MB/s": megabytes / t for k, t in zip(("cp", "pack", "restore"), times, strict=True)}
    return {"model": model, "scheme": scheme, **{k: 8 * b / num for k, b in bits.items()},
            "file, MB": megabytes, "packed, MB": packed, **rates}  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default="demo,smollm2")
    args = parser.parse_args()
    rows = []
    for model in args.models.split(","):
        source = model_at(args.work, model)
        for scheme, options in SCHEMES.items():
            folder = source if scheme == "bf16" else args.work / f"{model}-{scheme}"
            if not folder.exists():
                convert(str(source), folder, ConvertOptions(scheme=scheme, verify="none", **options))
            rows.append(measure(folder, model, scheme, args.work))
    common.save({"schema_version": 1, "command": common.command(), **common.machine(), "rows": rows}, args.out)
    print(
        common.markdown(tuple(rows[0]), ([v if isinstance(v, str) else f"{v:.2f}" for v in r.values()] for r in rows))
    )


if __name__ == "__main__":
    main()
