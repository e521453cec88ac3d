"""Learning rates over widths: does the best rate stay under u-muP's rule (Blake et al. 2024, arXiv 2407.17465)?

    python benchmarks/reproduce/learning_rates.py --out benchmarks/results/learning-rates

Attention of two layers over the bytes of plays, three widths: plain, and native (`lpconv.scaled.native`) by both rules
for learning rates, in fp32; three seeds. Runs are kept in runs.jsonl as they end, and the same command goes on where it
stopped. Writes results.json, table.md and figure.png. `--quick` is for trying the script.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from character_lm import Run, Runs, sized
from character_models import Shape
from figures import panels
from miniature import QUICK, read_arguments, save, spread
from native import PLAIN, native_arm

WIDTHS, STEPS = (32, 96, 256), 120
RATES = {"plain": (-10, -4), "unit": (-7, -2), "u-mup": (-3, 2)}  # first and last power of two


def widths(kept: Runs, seed: int, tried: Sequence[int]) -> list[Run]:
    """Attention of two layers, every width at every rate of every rule."""
    runs = []
    for width in tried:
        shape = Shape(width=width, depth=2)
        for rule, (first, last) in RATES.items():
            for power in range(first, last + 1):
                lr = 2.0**power
                arm = PLAIN if rule == "plain" else native_arm("", "fp32", rule, lr)
                runs.append(kept.get(shape, rule, "fp32", arm, lr, seed))
    return runs


def mean_losses(runs: Sequence[Run], rule: str, width: int) -> dict[float, float]:
    """The mean loss over seeds at each learning rate, in rising order of rates."""
    mine = [r for r in runs if (r.method, r.shape.width) == (rule, width)]
    rates = sorted({r.lr for r in mine})
    return {lr: statistics.fmean(r.loss for r in mine if r.lr == lr) for lr in rates}


def width_table(runs: Sequence[Run]) -> str:
    """For each rule and width the mean loss at every rate, the best in bold."""
    lines = []
    sizes = list(dict.fromkeys(r.shape.width for r in runs))
    for rule in dict.fromkeys(r.method for r in runs):
        rates = list(mean_losses(runs, rule, sizes[0]))
        lines += [f"| {rule}: width |" + "".join(f" 2^{math.log2(lr):.0f} |" for lr in rates)]
        lines += ["|---" * (1 + len(rates)) + "|"]
        for width in sizes:
            losses = mean_losses(runs, rule, width)
            lowest = min(losses.values())
            cells = [f"**{loss:.3f}**" if loss == lowest else f"{loss:.3f}" for loss in losses.values()]
            lines.append(f"| {width} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(["Held-out loss over learning rates and widths, attention, fp32, mean over seeds", "", *lines])


def transfer_table(runs: Sequence[Run]) -> str:
    """The best rate of each width, and what the best rate of the least width costs at the greatest, seed by seed."""
    sizes = list(dict.fromkeys(r.shape.width for r in runs))
    seeds = list(dict.fromkeys(r.seed for r in runs))
    head = [f"width {w}" for w in sizes]
    last = f"width {sizes[-1]} at the rate of width {sizes[0]}, over its best"
    lines = ["| rule | " + " | ".join([*head, last]) + " |", "|---" * (2 + len(head)) + "|"]
    for rule in dict.fromkeys(r.method for r in runs):
        cells = []
        for width in sizes:
            losses = mean_losses(runs, rule, width)
            lr = min(losses, key=losses.__getitem__)
            at = [r.loss for r in runs if (r.method, r.shape.width, r.lr) == (rule, width, lr)]
            cells.append(f"2^{math.log2(lr):.0f}: {spread(at, '.3f')}")
        costs = []
        for seed in seeds:
            small, great = (
                {r.lr: r.loss for r in runs if (r.method, r.shape.width, r.seed) == (rule, w, seed)}
                for w in (sizes[0], sizes[-1])
            )
            costs.append(great[min(small, key=small.__getitem__)] - min(great.values()))
        lines.append(f"| {rule} | " + " | ".join([*cells, spread(costs, "+.3f")]) + " |")
    return "\n".join([f"Does the best rate stay? {len(seeds)} seeds", "", *lines, ""])


def main() -> None:
    out, given = read_arguments(__doc__)
    size = sized(given, STEPS)
    kept, tried = Runs(out / "runs.jsonl", size), WIDTHS[: 2 if given is QUICK else None]
    found = [run for seed in range(size.seeds) for run in widths(kept, seed, tried)]
    save(out, asdict(size), {"runs": [asdict(r) for r in found]}, [transfer_table(found), width_table(found)])
    with panels(out / "figure.png", len(RATES)) as drawn:
        for axes, rule in zip(drawn, RATES, strict=True):
            for width in tried:
                losses = mean_losses(found, rule, width)
                axes.plot([math.log2(lr) for lr in losses], list(losses.values()), "o-", label=f"width {width}")
            axes.set(title=rule, xlabel="log2 of the learning rate", ylabel="held-out loss, nats per byte")


if __name__ == "__main__":
    main()
