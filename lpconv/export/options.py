"""Options of an export, and names that its files share. Plain Python."""

import dataclasses
from typing import Annotated

from annotated_types import Ge

from lpconv.forms import Stored, grid_of
from lpconv.forms.grid import Grid
from lpconv.options import AllowMissing, Force, Option, Revision

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
    cache: Annotated[
        bool, Option("For decoders: also take and return the keys and values of earlier tokens, to generate text")
    ] = False
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
