"""NVIDIA's ModelOpt: FP8 with one scale, and NVFP4 with a scale for 16 numbers and a second one that multiplies.

`MODULE.weight` are codes, for NVFP4 bytes of two e2m1, the first in the lower half; `weight_scale` (NVFP4: e4m3fn) and
`weight_scale_2`. compressed-tensors' second scale divides: a file of one layout under the other's config is off by its
square. Sources: NVIDIA/Model-Optimizer, `torch/quantization/qtensor/nvfp4_tensor.py` and `export/quant_utils.py`.
"""

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Headers
from lpconv.forms.foreign.grid import Grid, block_of
from lpconv.forms.foreign.plane import Plane, one_by_one

__all__ = ["METHODS", "find"]

METHODS = ("modelopt",)


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    codes, scale = headers.component(name), headers.component(name + "_scale")
    if codes is None or scale is None or len(codes.shape) < 2 or codes.dtype not in ("U8", "F8_E4M3"):
        return None
    is_fp4 = codes.dtype == "U8"
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if is_fp4 else codes.shape
    factor = headers.component(name + "_scale_2")
    block = block_of(shape, one_by_one(scale).size)
    if block is None or is_fp4 != (factor is not None):
        return None
    return Grid(
        name=name,
        shape=shape,
        format=FORMATS["e2m1" if is_fp4 else "e4m3fn"],
        codes=Plane(component=codes, kind="e2m1" if is_fp4 else "fp8"),
        scales=one_by_one(scale, block),
        factor=factor,
    )
