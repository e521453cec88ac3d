"""The claims of Scalify in miniature: one command for tables, a figure and the raw results.

    python -m benchmarks.reproduce.scalify --out DIRECTORY

1. Gradients in fp16 of a loss that was multiplied by 2^-30 to 2^10, with each set of rescaling places.
2. Training from scratch: the five rows of the paper's table, and two that it lacks. One separates the two changes that
   it makes at once between its rows 1 and 2 (fp16 weights; rescaling); the other has no scales at all.
3. The magnitude of the stored gradients of every module before and after that training: what static scales drift to,
   and what rescaling keeps.

The paper: Balanca et al. 2024, arXiv 2407.17353. Writes results.json.xz, table.md and figure.png. `--quick` is for
trying the script: its numbers mean nothing.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import markdown
from benchmarks.reproduce.figures import panels, plot_training
from benchmarks.reproduce.gradient_errors import error_table, gradient_errors
from benchmarks.reproduce.miniature import (
    Arm,
    Curve,
    Size,
    draw,
    observe,
    read_arguments,
    save,
    start_model,
    train_all,
    training_table,
)
from lpconv.scaled import scaled

POWERS = range(-30, 11, 8)
PLACES: dict[str, tuple[str, ...]] = {
    "none": (),
    "layernorm_grad": ("layernorm_grad",),
    "layernorm_grad, weight_grad": ("layernorm_grad", "weight_grad"),
}


def scalify(name: str, compute: str, places: str, **options: Any) -> Arm:
    def prepare(model: nn.Module) -> nn.Module:
        return scaled(model, method="scalify", compute=compute, carrier=torch.float16, rescale=PLACES[places])

    return Arm(name=name, prepare=prepare, options=options)


WEIGHTS_FP16 = {"master": False}
STATE_FP16 = {"master": False, "state_dtype": torch.float16}

ARMS = [
    Arm(name="0: fp32", prepare=lambda m: m),
    scalify("1: fp16, fp32 master weights", "fp16", "none"),
    scalify("1b: fp16 weights, no rescaling", "fp16", "none", **WEIGHTS_FP16),
    scalify("2: fp16 weights, rescaling", "fp16", "layernorm_grad", **WEIGHTS_FP16),
    scalify("3: fp8 products", "fp8", "layernorm_grad", **WEIGHTS_FP16),
    scalify("4: fp8 products, fp16 state", "fp8", "layernorm_grad, weight_grad", **STATE_FP16),
    Arm(
        name="no scales: fp16 weights and state", prepare=lambda m: m.half(), optimizer=torch.optim.AdamW,
        options={"eps": 2.0**-16},
    ),
]  # fmt: skip
WATCHED = {"1: fp16, fp32 master weights": "static scales", "2: fp16 weights, rescaling": "rescaling"}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """RMS of the data of the gradient that reaches a module, before rescaling there."""

    scales: str
    step: int
    module: str
    rms: float


def stored(model: nn.Module, scales: str, step: int, size: Size) -> list[Stored]:
    seen = observe(model, draw("llama", size))
    modules = list(dict.fromkeys(module for module, _ in seen))
    return [Stored(scales=scales, step=step, module=m, rms=seen[m, "gradient"]) for m in modules]


def stored_table(gradients: list[Stored]) -> str:
    rows = []
    for scales, step in dict.fromkeys((s.scales, s.step) for s in gradients):
        sizes = [s.rms for s in gradients if (s.scales, s.step) == (scales, step)]
        ratio = max(sizes) / min(sizes)
        rows.append((scales, str(step), f"{min(sizes):.2g}", f"{max(sizes):.2g}", f"2^{math.log2(ratio):.1f}"))
    head = ("scales", "after step", "smallest RMS", "largest RMS", "largest over smallest")
    return f"Magnitudes of stored gradients, modules with a weight\n\n{markdown(head, rows)}"


def figure(sizes: list[Stored], curves: list[Curve], path: Path) -> None:
    with panels(path, 2) as (left, right):
        for scales, step in dict.fromkeys((s.scales, s.step) for s in sizes):
            line = [math.log2(s.rms) for s in sizes if (s.scales, s.step) == (scales, step)]
            left.plot(line, "-" if step else "--", color="C0" if scales == "rescaling" else "C1",
                      label=f"{scales}, after step {step}")  # fmt: skip
        left.set(title="stored gradients", xlabel="module, first to last", ylabel="log2 RMS")
        plot_training(right, "llama", curves)


def main() -> None:
    out, size = read_arguments(__doc__)

    rescaled = {places: scalify("", "fp16", places).prepare for places in PLACES}
    errors = [error for kind in ("llama", "bert") for error in gradient_errors(kind, size, rescaled, POWERS)]
    watched = {arm.name: arm for arm in ARMS if arm.name in WATCHED}
    sizes = [
        gradient
        for name, scales in WATCHED.items()
        for gradient in stored(watched[name].prepare(start_model("llama", size, 0)), scales, 0, size)
    ]
    curves = []
    for curve, model in train_all(ARMS, "llama", size):
        curves.append(curve)
        if curve.seed == 0 and curve.arm in WATCHED:
            sizes += stored(model, WATCHED[curve.arm], size.steps, size)
    raw = {
        "gradient_errors": [asdict(e) for e in errors],
        "stored_gradients": [asdict(s) for s in sizes],
        "runs": [asdict(c) for c in curves],
    }
    title = "Median relative error of the fp16 gradients of a loss times 2^p"
    tables = [
        error_table(title, "rescaling", errors, POWERS),
        training_table("Training from scratch, llama", curves),
        stored_table(sizes),
    ]
    save(out, asdict(size), raw, tables)
    figure(sizes, curves, out / "figure.png")


if __name__ == "__main__":
    main()
