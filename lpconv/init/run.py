"""`lpconv init` as a library call: its light checks, before torch and transformers are imported."""

from pathlib import Path

from lpconv.init.architecture import find_architecture
from lpconv.init.options import InitOptions
from lpconv.options import check
from lpconv.progress import Progress, Silent
from lpconv.results import InitResult
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.staging import check_apart, check_free


def init(model: str, output: Path, options: InitOptions, *, progress: Progress | None = None) -> InitResult:
    """Write a fresh checkpoint of the architecture of `model` into `output`, as `convert` writes one of method unit.

    `model` is a preset, a config file, a directory, or any model with `reinit`. Weights are fp32, bit for bit those
    that `seed` gives. Raises UsageError and UnsupportedError, with the reason, for what cannot be drawn: with method
    native also for an op that has no native rule, which one step on random inputs finds.
    """
    check(options)
    architecture = find_architecture(model, options)
    if isinstance(architecture.place, Checkpoint):
        check_apart(architecture.place.directory, output)
    check_free(output, force=options.force)
    from lpconv.init.draw import draw  # torch and transformers, which take seconds to import, from here on

    return draw(architecture, output, options, progress or Silent())
