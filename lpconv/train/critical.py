"""The layers that a run multiplies in 16 bits: named ones, and those whose measured inputs require it."""

import dataclasses
from collections.abc import Sequence

from lpconv.models.quiet import quiet_transformers
from lpconv.scaled.critical import InputRisk, critical_modules, input_risks
from lpconv.train.job import MEASURED_BATCHES, TrainingJob, first_batches
from lpconv.train.sharded import start_in_fp32


def with_critical(job: TrainingJob) -> tuple[TrainingJob, tuple[InputRisk, ...]]:
    """The job with "auto" replaced by layer names, and the measurements of those layers.

    The starting model runs forward on the first batches of the first seed.
    """
    options = job.options
    chosen: tuple[InputRisk, ...] = ()
    if "auto" in options.critical and options.arithmetic.casts_operands:
        with quiet_transformers():
            model = start_in_fp32(job, options.seed)
            batches = first_batches(job, job.stream(options.seed, held_out=False), MEASURED_BATCHES, model.device)
            chosen = critical_modules(input_risks(model.eval(), batches))
    critical = tuple(dict.fromkeys((*options.critical_patterns, *(r.layer for r in chosen))))
    return dataclasses.replace(job, options=dataclasses.replace(options, critical=critical)), chosen


def critical_facts(patterns: Sequence[str], chosen: Sequence[InputRisk]) -> dict[str, str]:
    """Labelled facts about layers that multiply in 16 bits, with reason and cost; empty if there are none."""
    measured = {r.layer for r in chosen}
    words = [p for p in patterns if p not in measured]
    if chosen:
        shown = ", ".join(f"{r.layer} (crest {r.crest:.3g})" for r in chosen)
        share = 100 * sum(r.share for r in chosen)
        words.append(f"{shown}: {share:.2g} % of the matmul work, at up to twice the time of fp8")
    return {"16-bit products": "; ".join(words)} if words else {}
