"""How often `verify --against` finds turned roundings, and whether it suspects files that nobody changed.

    python -m benchmarks.quality.roundings --honest FOLDER --out FILE.json

`--honest` holds quantised checkpoints in folders SOURCE/NAME, next to their sources in SOURCE.source, such as those of
`peer_files.py` and outputs of lpconv. Every one is compared with its source: kinds of rounding, and weights unlike
their siblings, of which there should be none. The demo is converted to W4A16 by nearest rounding, GPTQ and GPTAQ; in 20
plants each, a random share of the codes of a random weight is turned to the second neighbour: 0.1 %, 5 % and 5 %. So
are codes of the `_PEERS` among the honest files, which `honest_files.py` makes.
"""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import common
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import LpconvError
from lpconv.layouts.reader import DecodedSource, StoredTensors
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.results import RoundingCheck
from lpconv.verify import roundings
from lpconv.verify.compare import compare

_PLANTS = 20
_OURS = {"nearest": 0.001, "gptq": 0.05, "gptaq": 0.05}
# Files of other packages with codes in words of 32 bits, and shares of the codes of a weight to turn.
_PEERS = {
    "llm-compressor W4A16 mse g64": (0.001,), "llm-compressor W4A16 gptq g128": (0.05,),
    "AutoRound W4A16 g32": (0.001, 0.05),
}  # fmt: skip


def honest(folder: Path) -> dict[str, Any]:
    rows = {}
    for path in sorted(p for p in folder.glob("*/*") if p.parent.suffix != ".source" and p.is_dir()):
        rows[f"{path.parent.name}/{path.name}"] = row = judged(path)
        print(path.name, row)
    return rows


def judged(path: Path) -> dict[str, Any]:
    try:
        result = compare(path, f"{path.parent}.source", gates=(), progress=Silent())
    except LpconvError as e:
        return {"refused": str(e)}
    checks = [t.rounding for t in result.tensors if t.rounding]
    shares = [c.turned for c in checks] or [0.0]
    kinds = dict(Counter(c.kind for c in checks))
    return {
        "kinds": kinds,
        "turned": [min(shares), max(shares)],
        "unusual": [t.name for t in result.tensors if t.rounding and t.rounding.unusual],
        "problems": result.problems,
    }


def converted(work: Path, rounding: str) -> Path:
    """The demo in W4A16, rounded by lpconv."""
    made, text = work / rounding, None if rounding == "nearest" else "demo"
    options = ConvertOptions(scheme="W4A16", granularity="group:128", rounding=rounding, calibrate=text, verify="none")
    convert("demo", made, options)
    return made


def planted(work: Path, made: Path, source: Path, share: float) -> dict[str, Any]:
    """Plants in a file whose weight is found, and those in which another weight is suspected."""
    changed = work / "planted"
    stored, weights = load_file(made / "model.safetensors"), load_file(source / "model.safetensors")
    names = sorted(n.removesuffix("_packed") for n in stored if n.endswith("_packed"))
    before = {n: check for n in names if (check := check_of(made, source, n))}
    draws, found, others = torch.Generator().manual_seed(0), 0, 0
    for _ in range(_PLANTS):
        name = names[int(torch.randint(len(names), (), generator=draws))]
        packed = turned(stored[f"{name}_packed"], weights[name], stored[f"{name}_scale"].float(), share, draws)
        shutil.copytree(made, changed)
        save_file(stored | {f"{name}_packed": packed}, changed / "model.safetensors", {"format": "pt"})
        after = check_of(changed, source, name)
        suspected = roundings.unusual(before | ({name: after} if after else {}))
        found, others = found + (name in suspected), others + bool({*suspected} - {name})
        shutil.rmtree(changed)
    return {"plants": _PLANTS, "found": found, "others suspected": others}


def check_of(made: Path, source: Path, name: str) -> RoundingCheck | None:
    """The check of one weight, which does not depend on others."""
    with StoredTensors.open(made) as stored, StoredTensors.open(source) as reference:
        return roundings.check_rounding(stored, name, DecodedSource(reference))


def turned(packed: Tensor, weight: Tensor, scales: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """Packed int4 codes, a share of which is moved by one step to the other side of the weight."""
    shifts = 4 * torch.arange(8)
    codes = ((packed.long().unsqueeze(2) >> shifts) & 15).flatten(1) - 8
    wide = scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    side = torch.where(weight / wide > codes, 1, -1)  # AutoRound has negative scales
    moved = (torch.rand(codes.shape, generator=draws) < share) & ((codes + side).abs() < 8)
    words = (((codes + side * moved + 8).view(len(codes), -1, 8)) << shifts).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def main() -> None:
    parser = common.parser(__doc__, work="folder for the converted model")
    parser.add_argument("--honest", type=Path, help="folder of quantised checkpoints that nobody changed")
    parser.add_argument("--rounding", nargs="*", choices=_OURS, default=_OURS, help="plants in outputs of lpconv")
    args = parser.parse_args()
    with common.work_folder(args.work) as work:
        demo = Path(demo_checkpoint())
        plants = {f"{r}, {_OURS[r]:.1%}": planted(work, converted(work, r), demo, _OURS[r]) for r in args.rounding}
        for name, shares in _PEERS.items() if args.honest else ():
            for share in shares:
                path = args.honest / "demo" / name
                plants[f"{name}, {share:.1%}"] = planted(work, path, args.honest / "demo.source", share)
        print(plants)
        rows = honest(args.honest) if args.honest else {}
    common.save({"machine": common.machine(), "plants": plants, "honest": rows}, args.out)


if __name__ == "__main__":
    main()
