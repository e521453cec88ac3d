"""Time `inspect` and `convert` of checkpoints with very many tiny tensors, and measure what they print and write.

    python -m benchmarks.speed.many_tensors --work DIRECTORY [--counts 10000,100000] [--out FILE]

Every tensor is a 4 x 8 matrix in fp32, named like those of experts. Each command is its own process; `cpu_s` is its
processor time over all cores, while `wall_s` depends on other work on the machine.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from lpconv.storage.header import TensorInfo, encode_header

_SHAPE = (4, 8)


def make(folder: Path, count: int) -> Path:
    """A checkpoint with `count` tensors and an unknown architecture."""
    folder.mkdir(parents=True, exist_ok=True)
    elements = _SHAPE[0] * _SHAPE[1]
    infos = [
        TensorInfo(
            name=f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.up_proj.weight",
            dtype="F32", shape=_SHAPE, begin=4 * elements * i, end=4 * elements * (i + 1),
        )
        for i in range(count)
    ]  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "many_tensors", "architectures": ["ManyTensors"]}))
    data = np.random.default_rng(0).standard_normal(count * elements, dtype=np.float32)
    (folder / "model.safetensors").write_bytes(encode_header(infos, {"format": "pt"}) + data.tobytes())
    return folder


def timed(*words: str) -> dict[str, Any]:
    """Run one command in its own process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "lpconv", *words], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "lines": len(done.stdout.splitlines()),
    }


def measure(work: Path, count: int) -> dict[str, Any]:
    source, output = make(work / f"in-{count}", count), work / f"out-{count}"
    inspected = timed("inspect", str(source))
    load = os.getloadavg()[0]
    converted = timed("convert", str(source), "--format", "e4m3fn", "-o", str(output), "--force", "--quiet")
    return {
        "tensors": count,
        "load": round(load, 1),
        "inspect": inspected,
        "convert": converted,
        "page_bytes": (output / "report.html").stat().st_size,
        "record_bytes": (output / "lpconv.json").stat().st_size,
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--counts", type=lambda text: [int(n) for n in text.split(",")], default=[10_000, 100_000])
    args = parser.parse_args()
    rows = [measure(args.work, count) for count in args.counts]
    text = json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
