"""Options of an export, and names that its files share. Plain Python."""

import dataclasses

from annotated_types import Ge

from lpconv.forms import Stored, grid_of
from lpconv.forms.grid import Grid
from lpconv.options import AllowMissing, Force, Revision, option

# A protobuf file is limited to 2 GiB, and the graph takes a little of that.
MAX_INLINE_BYTES = 2 * 10**9
# Prefix of the names of inputs with keys and values.
PAST = "past_key_values."
NO_CACHE_HINT = "leave out --cache to export it without"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export. `opset` None selects the lowest that supports the formats, so that most runtimes open the file.

    `tolerance` bounds max |y - ŷ| / max |y| between the model in PyTorch and the file in ONNX Runtime, both in fp32.
    `external_data` stores the weights in a separate file even if they would fit into the graph. With `cache` the graph
    is one step of generation.
    """

    opset: int | None = option(None, "ONNX operator set", default="the oldest that has the formats")
    validate: bool = option(True, "Run the exported file in ONNX Runtime and compare its outputs with the model")
    tolerance: float = option(
        1e-5, "Largest allowed difference from the model, as a fraction of the largest output", Ge(0)
    )
    external_data: bool = option(False, "Always write the weights to model.onnx.data, even if they fit into the graph")
    cache: bool = option(
        False, "For decoders: also take and return the keys and values of earlier tokens, to generate text"
    )
    revision: Revision = None
    allow_missing: AllowMissing = False
    force: Force = False


def integer_grid(form: Stored) -> Grid | None:
    """The grid of a matrix whose codes are integers without zero points, one scale per row or group of a row.

    None for every other form: DequantizeLinear does not decode it.
    """
    grid = grid_of(form)
    if grid is None or not grid.format.twos_complement or len(form.shape) != 2 or grid.is_transposed:
        return None
    rows, cols = grid.block
    is_plain = grid.zeros is None and grid.order is None and grid.columns is None
    return grid if is_plain and rows == 1 and form.shape[1] % cols == 0 else None
