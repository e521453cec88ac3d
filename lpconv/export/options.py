"""Options of an export, and a check for the libraries that it needs. Plain Python."""

import dataclasses
import importlib
from contextlib import closing
from typing import Annotated

from annotated_types import Ge

from lpconv.errors import UnsupportedError, UsageError
from lpconv.options import AllowMissing, Force, Option, Revision
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.source import open_source

# A protobuf file is limited to 2 GiB, and the graph takes a little of that.
MAX_INLINE_BYTES = 2 * 10**9
# The lowest opset of torch's exporter, and the first one in which DequantizeLinear accepts fp8.
_OLDEST_OPSET = 18
_FP8_OPSET = 19
_FLOAT8_DTYPES = {"F8_E4M3", "F8_E5M2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export. `opset` None selects the lowest that supports the formats, so that most runtimes open the file.

    `tolerance` bounds max |y - ŷ| / max |y| between the model in PyTorch and the file in ONNX Runtime, both in fp32.
    `external_data` stores the weights in a separate file even if they would fit into the graph.
    """

    opset: Annotated[int | None, Option("ONNX operator set", default="the oldest that has the formats")] = None
    validate: Annotated[
        bool, Option("Run the exported file in ONNX Runtime and compare its outputs with the model")
    ] = True
    tolerance: Annotated[
        float, Ge(0), Option("Largest allowed difference from the model, as a fraction of the largest output")
    ] = 1e-5
    external_data: Annotated[
        bool, Option("Always write the weights to model.onnx.data, even if they fit into the graph")
    ] = False
    revision: Revision = None
    allow_missing: AllowMissing = False
    force: Force = False


def has_fp8(checkpoint: Checkpoint) -> bool:
    """Whether any tensor is stored in fp8. Reads headers only."""
    with closing(open_source(checkpoint)) as source:
        return any(e.info.dtype in _FLOAT8_DTYPES for e in source.entries.values())


def choose_opset(wanted: int | None, *, has_fp8: bool) -> int:
    """The opset to export with. Raises UsageError if `wanted` is too low for the contents of the file."""
    least = _FP8_OPSET if has_fp8 else _OLDEST_OPSET
    if wanted is None:
        return least
    if wanted < least:
        why = "has no fp8" if wanted >= _OLDEST_OPSET else "is older than what torch writes"
        raise UsageError(f"opset {wanted} {why}", hint=f"pass --opset {least} or higher, or leave it out")
    return wanted


def require_packages(*modules: str) -> None:
    """Raise UnsupportedError, with the install command, unless all `modules` can be imported."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise UnsupportedError(f"exporting to ONNX needs {' and '.join(missing)}", hint="pip install 'lpconv[onnx]'")
