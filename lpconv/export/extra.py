"""The libraries of the [onnx] extra, asked for before any work is done."""

import importlib

from lpconv.errors import UnsupportedError

__all__ = ["need"]


def need(*modules: str) -> None:
    """Raise UnsupportedError, with the line that installs them, unless all `modules` import."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise UnsupportedError(f"exporting to ONNX needs {' and '.join(missing)}", hint="pip install 'lpconv[onnx]'")
