"""Options of an export, and checks of what it needs. Plain Python."""

import dataclasses
from collections.abc import Mapping
from contextlib import closing
from typing import Annotated, Any

from annotated_types import Ge

from lpconv.errors import UnsupportedError, UsageError
from lpconv.forms import Headers, Stored, grid_of
from lpconv.forms.grid import Grid
from lpconv.layouts.headers import recognise
from lpconv.options import AllowMissing, Force, Option, Revision
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.source import open_source

# A protobuf file is limited to 2 GiB, and the graph takes a little of that.
MAX_INLINE_BYTES = 2 * 10**9
# The lowest opset of torch's exporter, and the first ones in which DequantizeLinear accepts fp8, and int4 and groups.
_OLDEST_OPSET = 18
_FP8_OPSET = 19
_INTEGERS_OPSET = 21
_FLOAT8_DTYPES = {"F8_E4M3", "F8_E5M2"}
# Prefix of the names of inputs with keys and values.
PAST = "past_key_values."
NO_CACHE_HINT = "leave out --cache to export it without"
_DECODERS = ("ForCausalLM", "LMHeadModel")
_LAYERS_WITH_KEYS = {"full_attention", "sliding_attention", "chunked_attention"}


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


def check_has_cache(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if config.json tells that the model is not a decoder with keys and values in each layer.

    `cache.open_with_cache` knows more models, but imports transformers.
    """
    name = (config.get("architectures") or ["the model"])[0]
    if config.get("is_encoder_decoder") or not str(name).endswith(_DECODERS):
        raise UnsupportedError(f"`{name}` is not a decoder, so it has no cache", hint=NO_CACHE_HINT)
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - _LAYERS_WITH_KEYS) if isinstance(kinds, list) else []
    if others:
        raise UnsupportedError(
            f"`{name}` has layers of type `{others[0]}`, which keep more than keys and values", hint=NO_CACHE_HINT
        )


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


def oldest_opset(checkpoint: Checkpoint) -> int:
    """The oldest opset that has the formats of a checkpoint. Reads headers only."""
    with closing(open_source(checkpoint)) as source:
        headers = {name: entry.info for name, entry in source.entries.items()}
    if any(integer_grid(form) for form in recognise(Headers.of(checkpoint.config, headers)).values()):
        return _INTEGERS_OPSET
    return _FP8_OPSET if any(info.dtype in _FLOAT8_DTYPES for info in headers.values()) else _OLDEST_OPSET


def choose_opset(wanted: int | None, *, oldest: int) -> int:
    """The opset to export with. Raises UsageError if `wanted` is older than the contents of the file allow."""
    if wanted is None:
        return oldest
    if wanted < oldest:
        why = "is older than what torch writes"
        if wanted >= _OLDEST_OPSET:
            why = "has no fp8" if oldest == _FP8_OPSET else "has no integers with a scale per group"
        raise UsageError(f"opset {wanted} {why}", hint=f"pass --opset {oldest} or higher, or leave it out")
    return wanted
