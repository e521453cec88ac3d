"""lpconv rewrites Hugging Face checkpoints into low-precision forms that still are the model.

Importing this package loads neither torch nor transformers. The pieces live in sub-packages; see `docs/design`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["__version__", "load"]

__version__ = "0.1.0"


def load(path: "str | Path", **kwargs: Any) -> Any:
    """The model in an output of any method; the short name of `lpconv.hf.load`, which has the arguments."""
    from lpconv.hf.load import load as load_output

    return load_output(path, **kwargs)
