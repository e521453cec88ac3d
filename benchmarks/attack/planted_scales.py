"""Wrong scales planted in files of other quantisers: what `inspect` says of each.

    python -m benchmarks.attack.missing make --work DIRECTORY # with optimum-quanto, bitsandbytes, torchao, hqq, mlx-lm
    python -m benchmarks.attack.planted_scales --work DIRECTORY --out FILE.json

One matrix of the demo gets a scale that is NaN, infinite, zero, 1000 times too large or too small: its first one, and
then all of them. The files are those that five tools wrote, and every layout that the tests' own writers make. A plant
is *named* if a line names the matrix that the output for the unplanted file does not have, else *not judged* if the
first line says so, else *silent*. Numbers that a dtype does not have (infinity in e4m3, zero in e8m0) are not planted.
"""

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from foreign_files import MAKERS, make_foreign  # after the path to the helpers of the tests

from benchmarks import common
from lpconv.cli.main import app
from lpconv.data import demo_checkpoint

_MATRIX = "model.layers.0.mlp.down_proj"
_ENDS = ("weight._scale", "SCB", "weight.absmax", "_weight_scale", "scale", "scales", "weight_scale",
         "weight_scale_inv", "weight_scale_2", "weight_global_scale", "pre_quant_scale")  # fmt: skip
_FACTORS = {"NaN": torch.nan, "Inf": torch.inf, "zero": 0.0, "x1000": 1e3, "/1000": 1e-3}
_OPTIONS = {"inspect": (), "--stats": ("--stats",), "--strict": ("--strict",)}


def plants(scales: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Every wrong version of a tensor of scales that its dtype can hold, by what is wrong."""
    for what, factor in _FACTORS.items():
        wrong = _times(scales, what, factor)
        if wrong is not None:
            yield f"all scales {what}", wrong
            if scales.numel() > 1:
                one = scales.clone()
                one.view(-1)[:1] = wrong.reshape(-1)[:1]
                yield f"one scale {what}", one


def _times(scales: Tensor, what: str, factor: float) -> Tensor | None:
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):  # exponents: 255 is NaN
        exponents = scales.view(torch.uint8).int()
        wrong = {"NaN": exponents * 0 + 255, "x1000": exponents + 10, "/1000": exponents - 10}.get(what)
        return None if wrong is None else wrong.clamp(0, 255).to(torch.uint8).view(scales.dtype)
    limit = torch.finfo(scales.dtype).max
    if what == "Inf" and scales.dtype == torch.float8_e4m3fn:
        return None
    if what in ("NaN", "Inf"):
        return torch.full_like(scales.float(), factor).to(scales.dtype)
    return (scales.float() * factor).clamp(-limit, limit).to(scales.dtype)


def run(work: Path) -> dict[str, Any]:
    """What is said of every plant, and a count by file."""
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(p for p in work.iterdir() if p.is_dir())
        files += [make_foreign(layout, demo_checkpoint(), Path(folder, layout)) for layout in MAKERS]
        rows = [row for path in files for row in _of_file(path, Path(folder, "planted"))]
    counts = {key: dict(Counter(row[key] for row in rows)) for key in ("file", *_OPTIONS)}
    silent = [row for row in rows if any(row[name] == "silent" for name in _OPTIONS)]
    tools = json.loads((work / "versions.json").read_text())
    return {"tools": tools, "planted": len(rows), "silent": len(silent), "counts": counts, "plants": rows}


def _of_file(path: Path, target: Path) -> Iterator[dict[str, str]]:
    stored = load_file(path / "model.safetensors")
    names = [n for n in stored if n.startswith(f"{_MATRIX}.") and n.removeprefix(f"{_MATRIX}.") in _ENDS]
    if not names:
        raise SystemExit(f"{path.name}: no scales of {_MATRIX}")
    shutil.copytree(path, target)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    healthy = {n: _output(target, options) for n, options in _OPTIONS.items()}
    for name in names:
        for what, wrong in plants(stored[name]):
            save_file(stored | {name: wrong}, target / "model.safetensors", metadata={"format": "pt"})
            said = {n: _said(_output(target, options), healthy[n]) for n, options in _OPTIONS.items()}
            row = {"file": path.name, "scale": name.removeprefix(f"{_MATRIX}."), "planted": what, **said}
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row
    shutil.rmtree(target)


def _said(lines: list[str], healthy: list[str]) -> str:
    """What the lines of an output say of the matrix that those of the healthy file do not."""
    if any(_MATRIX in line for line in lines if line not in healthy):
        return "named"
    return "not judged" if "not judged" in lines[0].lower() else "silent"


def _output(path: Path, options: tuple[str, ...]) -> list[str]:
    done = CliRunner().invoke(app, ["inspect", str(path), *options], env={"COLUMNS": "1000"})
    if done.exit_code not in (0, 4, 5):
        raise SystemExit(f"{path}: exit code {done.exit_code}\n{done.output}")
    return [line.strip() for line in done.output.splitlines()]


def main() -> None:
    """Run from the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    asked = parser.parse_args()
    found = run(asked.work)
    common.save(found, asked.out)
    del found["plants"]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
