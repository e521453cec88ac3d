"""`lpconv init` as a library call, with its light checks before torch and transformers are imported."""

from pathlib import Path

from lpconv.init.architecture import find_architecture
from lpconv.init.options import InitOptions
from lpconv.options import check
from lpconv.progress import Progress, Silent
from lpconv.results import InitResult
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.staging import check_free


def init(model: str, output: Path, options: InitOptions, *, progress: Progress | None = None) -> InitResult:
    """Write a fresh checkpoint of the architecture of `model` to `output`, in the files of `convert --method unit`.

    `model` is a preset, a config file, a directory, or with `reinit` any model. Weights are fp32 and depend on `seed`
    only, bit for bit. Raises UsageError and UnsupportedError, with the reason, for models that cannot be drawn: for
    method native also if one step on random inputs meets an operator without a native rule.
    """
    check(options)
    architecture = find_architecture(model, options)
    if isinstance(architecture.place, Checkpoint):
        architecture.place.check_apart(output)
    check_free(output, force=options.force)
    from lpconv.init.draw import draw  # late: torch and transformers take seconds to import

    return draw(architecture, output, options, progress or Silent())
