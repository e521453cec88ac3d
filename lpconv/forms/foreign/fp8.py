"""transformers' own fp8, which DeepSeek-V3 began: e4m3fn blocks, and `NAME_scale_inv`, which multiplies.

Scales are fp32 or bf16 numbers, or powers of two as e8m0 or bytes (``scale_fmt`` ue8m0; "mxfp8" has them for 32 numbers
of a row). Sources: transformers 5.23, `integrations/finegrained_fp8.py`; the config of deepseek-ai/DeepSeek-V3.
"""

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Headers
from lpconv.forms.foreign.grid import Grid, block_of
from lpconv.forms.foreign.plane import one_by_one

__all__ = ["METHODS", "find"]

METHODS = ("fp8", "mxfp8")
_CODES = {"F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2"}


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    codes, scale = headers.component(name), headers.component(name + "_scale_inv")
    fmt = _CODES.get(codes.dtype) if codes is not None else None
    if codes is None or scale is None or fmt is None or len(codes.shape) < 2:
        return None
    found = headers.quantization.get("weight_block_size")
    hint = tuple(found) if isinstance(found, list) and len(found) == 2 and all(type(n) is int for n in found) else ()
    block = block_of(codes.shape, one_by_one(scale).size, hint)
    if block is None:
        return None
    return Grid(
        name=name,
        shape=codes.shape,
        format=FORMATS[fmt],
        codes=one_by_one(codes),
        scales=one_by_one(scale, block),
    )
