"""NVIDIA's ModelOpt: fp8, int8, MX with a scale for a tensor, rows or blocks; NVFP4 with a second that multiplies.

`MODULE.weight` are codes, of 4 bits two e2m1 in a byte, the first in the lower half, with `weight_scale`: e4m3fn beside
`weight_scale_2` (NVFP4), bytes (MX), else fp32, of blocks [rows, 1, columns, 1]. compressed-tensors' second scale
divides: a file of one layout under the other's config is off by its square. Of integers of 4 bits a byte has two rows:
they are not read, nor is what has a `pre_quant_scale` (AWQ), by which readers multiply inputs. Sources:
NVIDIA/Model-Optimizer, `torch/quantization/qtensor/` and `export/quant_utils.py`.
"""

from dataclasses import replace

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.foreign.grid import Grid, block_of
from lpconv.forms.foreign.plane import Plane, one_by_one

__all__ = ["METHODS", "find"]

METHODS = ("modelopt",)
_BLOCK = (128, 128)  # of fp8; the last ones may be smaller
_CODES = {"U8": "e2m1", "F8_E4M3": "e4m3fn", "I8": "int8"}


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    codes, scale = headers.component(name), headers.component(name + "_scale")
    fmt = _CODES.get(codes.dtype) if codes is not None else None
    if codes is None or scale is None or fmt is None or len(codes.shape) < 2:
        return None
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if fmt == "e2m1" else codes.shape
    factor, scale = headers.component(name + "_scale_2"), _of_matrix(scale)
    block = block_of(shape, one_by_one(scale).size, _BLOCK)
    if block is None or (scale.dtype == "F8_E4M3") != (factor is not None) or _is_awq(name, headers):
        return None
    if fmt == "e2m1" and scale.dtype not in ("F8_E4M3", "U8"):
        return None
    return Grid(
        name=name,
        shape=shape,
        format=FORMATS[fmt],
        codes=Plane(component=codes, kind="e2m1") if fmt == "e2m1" else one_by_one(codes),
        scales=one_by_one(scale, block),
        factor=factor,
    )


def _of_matrix(scale: Component) -> Component:
    """Scales of blocks as a matrix: they are stored with an axis of one after each of the two."""
    shape = scale.shape
    is_blocks = len(shape) == 4 and shape[1] == shape[3] == 1
    return replace(scale, shape=(shape[0], shape[2])) if is_blocks else scale


def _is_awq(name: str, headers: Headers) -> bool:
    """Whether readers multiply inputs by numbers that the weight was divided by."""
    return headers.component(name.removesuffix("weight") + "pre_quant_scale") is not None
