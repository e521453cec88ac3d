"""`lpconv probe --calibrate`: from a model's name to the static scales that unit scaling should use for it."""

import itertools

from lpconv.models.quiet import quiet_transformers
from lpconv.probe.checkpoint import prepare_run
from lpconv.probe.options import ProbeOptions
from lpconv.progress import Progress, Silent
from lpconv.scaled import EdgeFactors, calibrate, scaled

__all__ = ["calibrate_checkpoint"]


def calibrate_checkpoint(
    name: str, options: ProbeOptions, *, progress: Progress | None = None
) -> dict[str, EdgeFactors]:
    """The factors of the model called `name`, measured in fp32 on the batches that a probe with `options` runs."""
    told = progress or Silent()
    prepared = prepare_run(name, options, told)
    told.start("calibrating", 0)
    with quiet_transformers():
        model = scaled(prepared.opened.model, method="unit")
        batches = itertools.islice(prepared.batches, options.steps)
        return calibrate(model, batches, loss=prepared.loss)
