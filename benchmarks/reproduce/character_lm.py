"""The character-LM sweep of unit scaling in small, and learning rates over widths.

    python benchmarks/reproduce/character_lm.py --out benchmarks/results/character-lm

1. Convolutions, attention and recurrent highways over the bytes of plays, with norms before or after each branch or
   none and branches added in three ways: plain and native (`lpconv.scaled.native`) from scratch, each at the best of
   three learning rates in fp32; at that rate fp16 and fp8. Plain fp16 and fp8 run with the loss scales 1 and 2048, as
   in Blake et al. 2023 (arXiv 2303.11257), native ones with none. fp8 is for linear layers: convolutions stay in bf16.
2. Plain and native attention of three widths over learning rates, the native one by both rules for rates: does the
   best rate stay, as Blake et al. 2024 (arXiv 2407.17465) have it of u-muP?

One seed: differences within a row of the first table are between runs of one start and the same batches. Writes
results.json, table.md and figure.png. `--quick` is for trying the script.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from character_models import KINDS, NORMS, RESIDUALS, CharacterLM, Shape
from figures import panels
from miniature import QUICK, Arm, Size, read_arguments, save, train
from native import PLAIN, native_arm, plain_fp16
from scaled_training import plain_fp8
from torch import nn

PLAIN_RATES, NATIVE_RATES = [2.0**e for e in (-8, -7, -6)], [2.0**e for e in (-5, -4, -3)]
LOSS_SCALES = (1, 2048)
LOW: dict[str, Callable[[nn.Module], nn.Module]] = {"fp16": plain_fp16, "fp8": plain_fp8}
WIDTHS, STEPS = (32, 96, 256), 120
RATES = {"plain": (-10, -5), "unit": (-7, -2), "u-mup": (-3, 2)}  # first and last power of two


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model trained once, and its held-out loss in nats per byte, in the arithmetic of the run."""

    shape: Shape
    method: str
    arithmetic: str
    lr: float
    loss: float
    time_s: float

    @property
    def column(self) -> str:
        return f"{self.method} {self.arithmetic}"


def shapes() -> list[Shape]:
    """Every place of norms at the running mean, and every way to add for attention; two layers of short recurrences."""
    short = {"depth": 2, "length": 32}
    found = [Shape(kind=kind, norm=norm, **(short if kind == "recurrence" else {})) for kind in KINDS for norm in NORMS]
    return found + [Shape(residual=way) for way in RESIDUALS if way != "mean"]


def one(shape: Shape, method: str, arithmetic: str, arm: Arm, lr: float, size: Size) -> Run:
    length = min(shape.length, size.length)
    own = replace(size, lr=lr, length=length, batch=size.batch * size.length // length)
    curve, _ = train(arm, "llama", 0, own, lambda: CharacterLM(replace(shape, length=length)))
    run = Run(
        shape=shape, method=method, arithmetic=arithmetic, lr=lr, loss=curve.held_out_loss[-1], time_s=curve.time_s
    )
    print(run, file=sys.stderr, flush=True)
    return run


def best(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda r: r.loss)


def compare(shape: Shape, size: Size) -> list[Run]:
    """Every run of one shape; recurrences take no part in fp8, whose products of single steps are slow to emulate."""
    formats = ["fp16"] if shape.kind == "recurrence" else list(LOW)
    runs = [one(shape, "plain", "fp32", PLAIN, lr, size) for lr in PLAIN_RATES]
    rate = best(runs).lr
    for compute in formats:
        for scale in LOSS_SCALES:
            arm = Arm(name=compute, prepare=LOW[compute], loss_scale=("constant", {"scale": float(scale)}))
            runs.append(one(shape, "plain", f"{compute}, scale {scale}", arm, rate, size))
    native = [one(shape, "native", "fp32", native_arm("", "fp32", "unit", lr), lr, size) for lr in NATIVE_RATES]
    rate = best(native).lr
    return runs + native + [one(shape, "native", c, native_arm("", c, "unit", rate), rate, size) for c in formats]


def widths(size: Size) -> list[Run]:
    """Attention of two layers, every width at every rate of every rule."""
    runs = []
    for width in WIDTHS:
        shape = Shape(width=width, depth=2)
        for rule, (first, last) in RATES.items():
            for power in range(first, last + 1):
                lr = 2.0**power
                arm = PLAIN if rule == "plain" else native_arm("", "fp32", rule, lr)
                runs.append(one(shape, rule, "fp32", arm, lr, size))
    return runs


def shape_table(runs: Sequence[Run]) -> str:
    """Losses of plain and native fp32 at their best rates, and what low precision adds to each."""
    low = [c for c in dict.fromkeys(r.column for r in runs) if not c.endswith("fp32")]
    lines = ["| model | norm | branches | plain fp32 | native fp32 | " + " | ".join(low) + " |"]
    lines.append("|---" * (5 + len(low)) + "|")
    for shape in dict.fromkeys(r.shape for r in runs):
        here = [r for r in runs if r.shape == shape]
        base = {m: best([r for r in here if r.column == f"{m} fp32"]) for m in ("plain", "native")}
        found = {r.column: f"{r.loss - base[r.method].loss:+.4f}" for r in here}
        cells = [f"{b.loss:.3f} (2^{math.log2(b.lr):.0f})" for b in base.values()] + [found.get(c, "") for c in low]
        lines.append(f"| {shape.kind} | {shape.norm} | {shape.residual} | " + " | ".join(cells) + " |")
    title = "Held-out loss in fp32 (best rate of three), and what fp16 and fp8 add to it at that rate"
    return "\n".join([title, "", *lines, ""])


def width_table(runs: Sequence[Run]) -> str:
    """For each rule and width the loss at every rate, the best in bold."""
    lines = []
    for rule in dict.fromkeys(r.method for r in runs):
        mine = [r for r in runs if r.method == rule]
        rates = sorted({r.lr for r in mine})
        lines += [f"| {rule}: width |" + "".join(f" 2^{math.log2(lr):.0f} |" for lr in rates)]
        lines += ["|---" * (1 + len(rates)) + "|"]
        for width in WIDTHS:
            here = sorted((r for r in mine if r.shape.width == width), key=lambda r: r.lr)
            cells = [f"**{r.loss:.3f}**" if r is best(here) else f"{r.loss:.3f}" for r in here]
            lines.append(f"| {width} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(["Held-out loss over learning rates and widths, attention, fp32", "", *lines])


def main() -> None:
    out, given = read_arguments(__doc__)
    size = replace(given, steps=STEPS if given is not QUICK else 2, evaluate_every=STEPS if given is not QUICK else 2)
    compared = [run for shape in shapes()[:: 1 if given is not QUICK else 3] for run in compare(shape, size)]
    over_widths = widths(size)
    save(out, asdict(size), {"sweep": [asdict(r) for r in compared], "widths": [asdict(r) for r in over_widths]},
         [shape_table(compared), width_table(over_widths)])  # fmt: skip
    with panels(out / "figure.png", len(RATES)) as drawn:
        for axes, rule in zip(drawn, RATES, strict=True):
            for width in WIDTHS:
                line = [r for r in over_widths if (r.method, r.shape.width) == (rule, width)]
                axes.plot([math.log2(r.lr) for r in line], [r.loss for r in line], "o-", label=f"width {width}")
            axes.set(title=rule, xlabel="log2 of the learning rate", ylabel="held-out loss, nats per byte")


if __name__ == "__main__":
    main()
