"""Low-precision rewriting of Hugging Face checkpoints.

Importing this package loads neither torch nor transformers. The code is in sub-packages; see `docs/design`.
"""

from typing import TYPE_CHECKING, Any

from lpconv.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from lpconv.probe.track import Tracker

__all__ = ["__version__", "load", "track"]


def load(path: "str | Path", **kwargs: Any) -> Any:
    """Load the model in an output of any method. Short for `lpconv.hf.load`, which documents the arguments."""
    from lpconv.models.load import load as load_output

    return load_output(path, **kwargs)


def track(model: "nn.Module", *, every: int = 50) -> "Tracker":
    """Record what number formats would do to a training run. Short for `lpconv.probe.track.track`."""
    from lpconv.probe.track import track as track_model

    return track_model(model, every=every)
