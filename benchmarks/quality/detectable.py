"""Intervals of paired comparisons and the numbers of pairs that they plan, on resampled pairs of real models.

    python -m benchmarks.quality.detectable --out FILE.json

The demo model is compared with its int4 and int3 versions on the held-out play: the rise of the loss in each window,
and for each token whether either model predicts it, which is an answer that is right or wrong. All pairs together are a
population whose mean difference is known. `coverage` is the share of samples of 200 pairs whose interval contains it.
`planned` is the median of the numbers that these samples plan for a difference as large as the truth, and `needed` the
smallest number of which 80 % of samples have an interval that excludes 0.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.quality import held_out
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint, demo_text
from lpconv.plan.options import ConvertOptions
from lpconv.results import GapEstimate
from lpconv.student import estimate_mean, estimate_share, with_plan

_NAMES = ("loss by window", "answers by token")
_PAIRS, _SAMPLES, _POWER = 200, 2000, 0.8


def populations(work: Path, format: str) -> tuple[Tensor, Tensor]:
    """Differences of all pairs: rises of the loss, by window, and answers lost (1) or won (-1), by token."""
    source, out = Path(demo_checkpoint()), work / format
    convert(str(source), out, ConvertOptions(format=format, granularity="group:128", layout="compressed-tensors",
                                             verify="none"))  # fmt: skip
    windows = held_out.windows_of(source, {"play": demo_text("heldout")}, count=None)
    ids = windows["play"]
    before, after = (held_out.predictions(m, windows)["play"].view(*ids.shape, -1)[:, :-1] for m in (source, out))
    rises = (before - after).gather(2, ids[:, 1:, None]).squeeze(2).double().mean(1)
    right = [(p.argmax(-1) == ids[:, 1:]).double() for p in (before, after)]
    return rises, (right[0] - right[1]).flatten()


def estimate_answers(differences: Tensor) -> GapEstimate:
    return estimate_share(int((differences == 1).sum()), int((differences == -1).sum()), len(differences))


def checked(population: Tensor, estimate: Callable[[Tensor], GapEstimate], draws: torch.Generator) -> dict[str, Any]:
    truth = float(population.mean())

    def samples(count: int) -> list[GapEstimate]:
        chosen = torch.randint(len(population), (_SAMPLES, count), generator=draws)
        return [estimate(population[row]) for row in chosen]

    pilots = samples(_PAIRS)
    planned = sorted(n for p in pilots if (e := with_plan(p, abs(truth))) and (n := e.num_needed))
    low, high = 2, 4 * planned[len(planned) // 2]
    while high - low > max(low // 50, 1):  # the power rises with the number
        middle = (low + high) // 2
        power = sum(not e.low <= 0 <= e.high for e in samples(middle)) / _SAMPLES
        low, high = (middle, high) if power < _POWER else (low, middle)
    return {
        "population": len(population),
        "mean": truth,
        "differing": float((population != 0).double().mean()),
        "coverage": sum(p.low <= truth <= p.high for p in pilots) / len(pilots),
        "planned": planned[len(planned) // 2],
        "needed": high,
    }


def main() -> None:
    args = common.parser(__doc__, work="folder for the converted model").parse_args()
    estimates = (lambda d: estimate_mean(d.tolist()), estimate_answers)
    draws = torch.Generator().manual_seed(0)
    with common.work_folder(args.work) as work:
        rows = {
            f"{format}, {name}": checked(population, estimate, draws)
            for format in ("int4", "int3")
            for name, population, estimate in zip(_NAMES, populations(work, format), estimates, strict=True)
        }
    for name, row in rows.items():
        print(name, row)
    common.save({"machine": common.machine(), "pairs": _PAIRS, "samples": _SAMPLES, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
