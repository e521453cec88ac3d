"""Usual scales next to searched ones, without calibration: squared error of the weights, and predictions of the model.

    python -m benchmarks.quality.scale_search --out FILE.json [--model demo minilm smollm2] [--windows 16]

For every layout that `--scale search` applies to: 10·log10(Σx² / Σ(x - x̂)²) of the converted weights, and on windows
of 128 tokens of two texts (held-out plays, and this project's pages on methods) the KL of the source to the output in
nats per token, the share of equal first choices, and the difference of KL (searched minus usual) with its standard
error over tokens. MiniLM has no head, so its figure is the relative error of the last hidden states. SmolLM2's weights
had 4 bits before. Existing rows of the file are not measured again.
"""

import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lpconv
from benchmarks import common
from benchmarks.models import model_folder
from benchmarks.quality.granularity import sqnr
from benchmarks.quality.held_out import LENGTH, kl_of, outputs_of, windows_of
from lpconv.convert.run import convert
from lpconv.data import demo_text
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions

FORMS: dict[str, dict[str, str]] = {
    "int4, groups of 32": {"format": "int4", "granularity": "group:32"},
    "NVFP4": {"format": "e2m1", "granularity": "nvfp4"},
    "MXFP4": {"format": "e2m1", "granularity": "mx"},
    "e4m3fn, rows": {"format": "e4m3fn", "granularity": "row"},
    "int4, groups of 128": {"format": "int4", "granularity": "group:128"},
    "e4m3fn, blocks": {"format": "e4m3fn", "granularity": "128x128"},
    "int8, groups of 128": {"format": "int8", "granularity": "group:128"},
}


def usual(settings: Mapping[str, str]) -> str:
    """The scale from which a search starts."""
    return "exact" if settings["format"].startswith("int") else "pow2"


def texts(folder: Path) -> dict[str, Path]:
    pages = sorted((common.ROOT / "docs/methods").glob("*.md"))
    (folder / "pages.txt").write_text("\n".join(p.read_text(encoding="utf-8") for p in pages), encoding="utf-8")
    return {"plays": demo_text("heldout"), "pages": folder / "pages.txt"}


def figures(source: Tensor, outputs: Mapping[str, Tensor], *, has_head: bool) -> dict[str, Any]:
    """Figures of the outputs with usual and with searched scales, compared with the source."""
    if not has_head:
        return {n: {"rel_error": float((got - source).norm() / source.norm())} for n, got in outputs.items()}
    kls = {n: kl_of(source, got) for n, got in outputs.items()}
    same = {n: (source.argmax(-1) == got.argmax(-1)).double() for n, got in outputs.items()}
    row: dict[str, Any] = {n: {"kl": float(kls[n].mean()), "top1": float(same[n].mean())} for n in outputs}
    difference = kls["search"] - kls["usual"]
    row["difference"] = {"kl": float(difference.mean()), "error": float(difference.std()) / len(difference) ** 0.5}
    return row


def measure(path: Path, folder: Path, num_windows: int, rows: dict[str, Any], save: Any) -> None:
    model = lpconv.load(path, dtype=torch.float32)
    plain = {n: p.detach().clone() for n, p in model.named_parameters()}
    has_head, windows = type(model).__name__.endswith("CausalLM"), windows_of(path, texts(folder), num_windows)
    sources = {name: outputs_of(model, ids) for name, ids in windows.items()}

    def outputs(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            for name, x in weights.items():
                model.get_parameter(name).copy_(x)
            answers = {name: outputs_of(model, ids) for name, ids in windows.items()}
            for name in weights:
                model.get_parameter(name).copy_(plain[name])
        return answers

    for form, settings in FORMS.items():
        if form in rows:
            continue
        row, answers = {}, {}
        for name, scale in (("usual", usual(settings)), ("search", "search")):
            options: Any = {"layout": "compressed-tensors", "verify": "none", "scale": scale, "force": True, **settings}
            result = convert(str(path), folder / "out", ConvertOptions(**options))
            done = [t.name for t in result.tensors if t.action == "convert"]
            with StoredTensors.open(folder / "out") as stored:
                weights = {n: stored.tensor(n).float() for n in done}
            row[name], answers[name] = {"sqnr_db": sqnr(plain, weights)}, outputs(weights)
        of_texts = {
            text: figures(source, {n: a[text] for n, a in answers.items()}, has_head=has_head)
            for text, source in sources.items()
        }
        rows[form] = {"tensors": len(done), "tokens": num_windows * LENGTH, **row, **of_texts}
        save()
        print(form, json.dumps(rows[form]), flush=True)


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--model", nargs="+", default=["demo", "minilm", "smollm2"])
    parser.add_argument("--windows", type=int, default=16)
    args = parser.parse_args()
    result = common.load_or_begin(args.out)
    for model in args.model:
        with tempfile.TemporaryDirectory() as name:
            folder, save = Path(name), partial(common.save, result, args.out)
            measure(model_folder(model, folder), folder, args.windows, result.setdefault(model, {}), save)


if __name__ == "__main__":
    main()
