"""Learning rates over widths: does the best rate stay under u-muP's rule (Blake et al. 2024, arXiv 2407.17465)?

    python benchmarks/reproduce/learning_rates.py --out benchmarks/results/learning-rates

Attention of two layers over the bytes of plays, three widths: plain, and native (`lpconv.scaled.native`) by both rules
for learning rates, in fp32; one seed. Runs are kept in runs.jsonl as they end, and the same command goes on where it
stopped. Writes results.json, table.md and figure.png. `--quick` is for trying the script.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict

from character_lm import Run, Runs, best, sized
from character_models import Shape
from figures import panels
from miniature import read_arguments, save
from native import PLAIN, native_arm

WIDTHS, STEPS = (32, 96, 256), 120
RATES = {"plain": (-10, -5), "unit": (-7, -2), "u-mup": (-3, 2)}  # first and last power of two


def widths(kept: Runs) -> list[Run]:
    """Attention of two layers, every width at every rate of every rule."""
    runs = []
    for width in WIDTHS:
        shape = Shape(width=width, depth=2)
        for rule, (first, last) in RATES.items():
            for power in range(first, last + 1):
                lr = 2.0**power
                arm = PLAIN if rule == "plain" else native_arm("", "fp32", rule, lr)
                runs.append(kept.get(shape, rule, "fp32", arm, lr))
    return runs


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
    size = sized(given, STEPS)
    found = widths(Runs(out / "runs.jsonl", size))
    save(out, asdict(size), {"runs": [asdict(r) for r in found]}, [width_table(found)])
    with panels(out / "figure.png", len(RATES)) as drawn:
        for axes, rule in zip(drawn, RATES, strict=True):
            for width in WIDTHS:
                line = [r for r in found if (r.method, r.shape.width) == (rule, width)]
                axes.plot([math.log2(r.lr) for r in line], [r.loss for r in line], "o-", label=f"width {width}")
            axes.set(title=rule, xlabel="log2 of the learning rate", ylabel="held-out loss, nats per byte")


if __name__ == "__main__":
    main()
