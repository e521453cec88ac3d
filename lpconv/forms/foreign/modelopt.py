"""NVIDIA's ModelOpt: fp8, int8, int4, MX with a scale for a tensor, rows or blocks; NVFP4 with one more for all.

`MODULE.weight` are codes, of 4 bits two e2m1 in a byte, the first in the lower half, with `weight_scale`: e4m3fn beside
`weight_scale_2`, which multiplies (NVFP4), bytes (MX), else fp32, of blocks [rows, 1, columns, 1]. compressed-tensors'
second scale divides: a file of one layout under the other's config is off by its square.

Integers of 4 bits (W4A16_AWQ, W4A8_AWQ) are bytes [out / 2, in] of two's complement: rows 2i and 2i + 1 lie in the
lower and the upper half of row i, with fp32 scales [out, in / group]. Beside W4A8_AWQ's lies another `weight_scale_2`:
readers divide `weight_scale` by it, round code · scale to e4m3fn, and multiply sums by it again. No value has it.

`MODULE.pre_quant_scale` [in] (AWQ, also of other codes) is what readers multiply inputs by, and the weight was divided
by. ModelOpt leaves it at o_proj and down_proj; that of modules which share inputs it puts into the norm before them,
and then their weights stay divided by it. Sources: NVIDIA/Model-Optimizer 0.47, `torch/quantization/qtensor/` and
`export/quant_utils.py` (pack_int4_in_uint8, fuse_prequant_layernorm); NVIDIA/TensorRT-LLM, `_torch/modules/linear.py`,
W4A16_AWQ_LinearMethod and W4A8_AWQ_LinearMethod.
"""

from dataclasses import replace

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.foreign.grid import Grid, block_of
from lpconv.forms.foreign.plane import Plane, one_by_one

METHODS = ("modelopt",)
# The algorithm that leaves a part of each weight as the product of two thin matrices, which is not read.
SVD = "NVFP4_SVD"
_BLOCK = (128, 128)  # of fp8; the last ones may be smaller
_CODES = {"U8": "e2m1", "F8_E4M3": "e4m3fn", "I8": "int8"}
_FLOATS = ("F32", "F16", "BF16")


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    codes, scale, module = headers.component(name), headers.component(name + "_scale"), name.removesuffix("weight")
    if codes is None or scale is None or len(codes.shape) < 2 or headers.component(module + "svdquant_lora_a"):
        return None
    layout = _integers if codes.dtype == "U8" and scale.dtype in _FLOATS else _others
    found = layout(codes, _of_matrix(scale), headers)
    return None if found is None else replace(found, columns=headers.component(module + "pre_quant_scale"))


def _integers(codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """Integers of 4 bits, a scale for so many of a row."""
    *lead, pairs, cols = codes.shape
    shape, of_products = (*lead, pairs * 2, cols), headers.component(codes.name + "_scale_2")
    block = block_of(shape, one_by_one(scale).size)
    if block is None or block[0] != 1 or (of_products is None and headers.quantization.get("quant_algo") == "W4A8_AWQ"):
        return None
    return Grid(
        name=codes.name,
        shape=shape,
        format=FORMATS["int4"],
        codes=Plane(component=codes, kind="int4", axis=0),
        scales=one_by_one(scale, block),
        beside=of_products,
    )


def _others(codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """Floats and integers of 8 bits, and floats of 4."""
    fmt, factor = _CODES.get(codes.dtype), headers.component(codes.name + "_scale_2")
    if fmt is None or (scale.dtype == "F8_E4M3") != (factor is not None):
        return None
    if fmt == "e2m1" and scale.dtype not in ("F8_E4M3", "U8"):
        return None
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if fmt == "e2m1" else codes.shape
    block = block_of(shape, one_by_one(scale).size, _BLOCK)
    if block is None:
        return None
    return Grid(
        name=codes.name,
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
