"""The claims of unit scaling in miniature: one command for tables, a figure and the raw results.

    python -m benchmarks.reproduce.unit --out DIRECTORY

1. Gradients of a loss that was multiplied by 2^-30 to 2^10, in fp16 and fp8: their error against fp64.
2. The magnitude of every activation and gradient at initialisation, as they are and as unit scaling stores them.
3. Training from scratch: fp32, fp16 with and without a loss scale, and unit scaling in fp16 and fp8 without one. fp16
   and unit fp16 again with a loss 2^20 times smaller, as a mean over many more tokens would make the gradients.

The paper: Blake et al. 2023, arXiv 2303.11257. Writes results.json.xz, table.md and figure.png. `--quick` is for trying
the script: its numbers mean nothing.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from benchmarks.common import markdown
from benchmarks.reproduce.figures import panels, plot_training
from benchmarks.reproduce.gradient_errors import GradientError, error_table, gradient_errors
from benchmarks.reproduce.miniature import (
    Arm,
    Curve,
    Size,
    amp_fp16,
    draw,
    observe,
    read_arguments,
    save,
    start_model,
    train_all,
    training_table,
)
from benchmarks.reproduce.scaled_training import plain_fp8
from lpconv.scaled import scaled

POWERS = range(-30, 11, 4)
SHOWN = (-30, -22, -14, -2, 10)
SMALL_LOSS = 2.0**-20

PREPARE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fp16": lambda m: m.half(),
    "unit fp16": lambda m: scaled(m, method="unit", compute="fp16"),
    "fp8": plain_fp8,
    "unit fp8": lambda m: scaled(m, method="unit", compute="fp8"),
}

ARMS = [
    Arm(name="fp32", prepare=lambda m: m),
    Arm(name="fp16, no loss scale", prepare=lambda m: m, around=amp_fp16),
    Arm(name="fp16, loss scale 2^11", prepare=lambda m: m, around=amp_fp16, loss_scale=("constant", {"scale": 2048.0})),
    Arm(name="unit fp16", prepare=PREPARE["unit fp16"]),
    Arm(name="unit fp8", prepare=PREPARE["unit fp8"]),
    Arm(
        name="fp16, loss times 2^-20", prepare=lambda m: m, around=amp_fp16,
        loss_scale=("constant", {"scale": SMALL_LOSS}),
    ),
    Arm(
        name="unit fp16, loss times 2^-20", prepare=PREPARE["unit fp16"],
        loss_scale=("constant", {"scale": SMALL_LOSS}),
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Magnitude:
    """RMS of a module's output or of the gradient that reaches it, in order of the forward pass."""

    form: str
    module: str
    direction: str
    rms: float


def magnitudes(kind: str, size: Size) -> list[Magnitude]:
    """RMS at every module with a weight: values of the plain fp32 model, and data of the scaled one."""
    forms = {"plain": start_model(kind, size, 0), "unit": PREPARE["unit fp16"](start_model(kind, size, 0))}
    return [
        Magnitude(form=form, module=module, direction=direction, rms=rms)
        for form, model in forms.items()
        for (module, direction), rms in observe(model, draw(kind, size)).items()
    ]


def magnitude_table(magnitudes: list[Magnitude]) -> str:
    rows = []
    for form, direction in dict.fromkeys((m.form, m.direction) for m in magnitudes):
        sizes = [m.rms for m in magnitudes if (m.form, m.direction) == (form, direction)]
        near = sum(0.25 <= s <= 4 for s in sizes) / len(sizes)
        rows.append((form, f"{direction}s", f"{min(sizes):.2g}", f"{max(sizes):.2g}", f"{near:.0%}"))
    head = ("stored values", "of", "smallest RMS", "largest RMS", "within 4 times of 1")
    return f"Magnitudes at initialisation, modules with a weight\n\n{markdown(head, rows)}"


def figure(errors: list[GradientError], sizes: list[Magnitude], curves: list[Curve], path: Path) -> None:
    small = [arm.name for arm in ARMS if "2^-20" in arm.name]
    with panels(path, 3) as (left, middle, right):
        model = errors[0].model
        for arithmetic in PREPARE:
            line = [e for e in errors if (e.model, e.arithmetic) == (model, arithmetic)]
            left.plot([e.power for e in line], [e.median_error for e in line], label=arithmetic)
        left.set(title=f"gradients, {model}", xlabel="loss times 2^p", ylabel="median relative error", yscale="log")
        for form, colour in (("plain", "C1"), ("unit", "C0")):
            for direction, style in (("activation", "-"), ("gradient", "--")):
                line = [math.log2(s.rms) for s in sizes if (s.form, s.direction) == (form, direction)]
                label = f"{form}: {direction}s"
                middle.plot(range(len(line)), line if direction == "activation" else line[::-1], style, color=colour,
                            label=label)  # fmt: skip
        middle.axhspan(-24, -14, color="0.85")
        middle.set(
            title="RMS at initialisation", xlabel="module, first to last", ylabel="log2 RMS (grey: fp16 subnormal)"
        )
        plot_training(right, "llama", curves, dashed=small)


def main() -> None:
    out, size = read_arguments(__doc__)

    errors = [error for kind in ("llama", "bert") for error in gradient_errors(kind, size, PREPARE, POWERS)]
    sizes = magnitudes("llama", size)
    curves = [curve for curve, _ in train_all(ARMS, "llama", size)]
    raw = {
        "gradient_errors": [asdict(e) for e in errors],
        "magnitudes": [asdict(s) for s in sizes],
        "runs": [asdict(c) for c in curves],
    }
    title = "Median relative error of the gradients of a loss times 2^p; 1: nothing arrived"
    tables = [
        error_table(title, "arithmetic", errors, SHOWN),
        magnitude_table(sizes),
        training_table("Training from scratch, llama", curves),
    ]
    save(out, asdict(size), raw, tables)
    figure(errors, sizes, curves, out / "figure.png")


if __name__ == "__main__":
    main()
