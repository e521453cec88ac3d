"""NVIDIA's ModelOpt: fp8, int8, int4, MX and NVFP4, for reading."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.grid import FP8_BLOCK, Grid, grid_of_blocks
from lpconv.forms.planes import Plane, one_by_one
from lpconv.layouts.layout import Layout

_SVD = "NVFP4_SVD"
_FLOATS = ("F32", "F16", "BF16")


def _read(name: str, headers: Headers) -> Grid | None:
    """NVIDIA's ModelOpt: fp8, int8, int4, MX with a scale per tensor, row or block; NVFP4 with one more for the tensor.

    `MODULE.weight` are codes, 4-bit ones as two e2m1 per byte, the first in the lower half, with `weight_scale`: e4m3fn
    next to `weight_scale_2`, which multiplies (NVFP4), bytes (MX), otherwise fp32, of blocks [rows, 1, columns, 1].
    compressed-tensors' second scale divides instead: a file of one layout with the other's config is off by its square.

    4-bit integers (W4A16_AWQ, W4A8_AWQ) are bytes [out / 2, in] of two's complement: rows 2i and 2i + 1 are in the
    lower and upper half of row i, with fp32 scales [out, in / group]. W4A8_AWQ also has a `weight_scale_2`: readers
    divide `weight_scale` by it, round code · scale to e4m3fn, and multiply sums by it again. Values do not depend on
    it.

    `MODULE.pre_quant_scale` [in] (AWQ, also with other codes) is the factor by which readers multiply inputs, and by
    which the weight was divided. ModelOpt stores it for o_proj and down_proj; for modules that share inputs it folds
    the factor into the preceding norm, and their weights stay divided by it. Sources: NVIDIA/Model-Optimizer 0.47,
    `torch/quantization/qtensor/` and `export/quant_utils.py` (pack_int4_in_uint8, fuse_prequant_layernorm);
    NVIDIA/TensorRT-LLM, `_torch/modules/linear.py`, W4A16_AWQ_LinearMethod and W4A8_AWQ_LinearMethod.
    """
    codes, scale, module = headers.component(name), headers.component(name + "_scale"), name.removesuffix("weight")
    if codes is None or scale is None or len(codes.shape) < 2 or headers.component(module + "svdquant_lora_a"):
        return None
    layout = _modelopt_integers if codes.dtype == "U8" and scale.dtype in _FLOATS else _modelopt_others
    grid = layout(codes, _as_matrix(scale), headers)
    return None if grid is None else replace(grid, columns=headers.component(module + "pre_quant_scale"))


def _modelopt_integers(codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """4-bit integers, with a scale per group of a row."""
    *lead, pairs, cols = codes.shape
    shape, of_products = (*lead, pairs * 2, cols), headers.component(codes.name + "_scale_2")
    if of_products is None and headers.quantization.get("quant_algo") == "W4A8_AWQ":
        return None
    grid = grid_of_blocks(codes.name, shape, FORMATS["int4"], Plane(component=codes, kind="int4", axis=0), scale)
    return replace(grid, cancelling=of_products) if grid is not None and grid.scales.block[0] == 1 else None


def _modelopt_others(codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """8-bit floats and integers, and 4-bit floats."""
    fmt = {"U8": "e2m1", "F8_E4M3": "e4m3fn", "I8": "int8"}.get(codes.dtype)
    factor = headers.component(codes.name + "_scale_2")
    if fmt is None or (scale.dtype == "F8_E4M3") != (factor is not None):
        return None
    if fmt == "e2m1" and scale.dtype not in ("F8_E4M3", "U8"):
        return None
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if fmt == "e2m1" else codes.shape
    plane = Plane(component=codes, kind="e2m1") if fmt == "e2m1" else one_by_one(codes)
    return grid_of_blocks(codes.name, shape, FORMATS[fmt], plane, scale, FP8_BLOCK, factor=factor)


def _as_matrix(scale: Component) -> Component:
    """Block scales as a matrix, without the axes of size one that are stored after each of the two."""
    shape = scale.shape
    is_blocks = len(shape) == 4 and shape[1] == shape[3] == 1
    return replace(scale, shape=(shape[0], shape[2])) if is_blocks else scale


def _why_unreadable(settings: Mapping[str, Any]) -> str | None:
    if settings.get("quant_algo") != _SVD:
        return None
    tool = f"ModelOpt's {_SVD} (a part of each weight is the product of two thin matrices)"
    return f"the checkpoint is quantised by {tool}, which lpconv does not read"


MODELOPT = Layout(
    name="modelopt",
    methods=("modelopt",),
    read=_read,
    why_unreadable=_why_unreadable,
    numbers_key="quant_algo",
    numbers_of={
        "FP8": {"e4m3fn"}, "NVFP4": {"e2m1"}, "NVFP4_AWQ": {"e2m1"}, "W4A16_AWQ": {"int4"}, "W4A8_AWQ": {"int4"},
    },
)  # fmt: skip
