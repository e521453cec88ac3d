"""MX (OCP Microscaling 1.0) and NVFP4 as values, the slow and obvious way: what encoders are compared with.

Elements along the last axis share a scale, and NVFP4 adds one for the tensor: value = tensor_scale · scale · element.
"""

from torch import Tensor

from lpconv.formats.cast import cast
from lpconv.formats.scale import pow2_floor
from lpconv.formats.spec import BLOCK_FORMATS

__all__ = ["cast_blocks"]


def cast_blocks(x: Tensor, name: str) -> Tensor:
    """The finite values of `x` after a trip through a block format, in x's dtype.

    MX rounds scales down, so that the largest element of a block may saturate (§6.3).
    """
    spec = BLOCK_FORMATS[name]
    blocks = x.double().reshape(*x.shape[:-1], x.shape[-1] // spec.size, spec.size)
    largest = blocks.abs().amax(-1, keepdim=True)
    whole = 1.0
    if spec.has_tensor_scale:
        whole = float((largest.max() / (spec.element.max * spec.scale.max)).float())
        scales = cast(largest / spec.element.max / whole, spec.scale).clamp(min=spec.scale.min_subnormal)
    else:
        scales = (pow2_floor(largest) / 2.0**spec.element.max_exponent).clamp(2.0**-127, 2.0**127)
    elements = cast(blocks / (scales * whole), spec.element)
    return (elements * scales * whole).reshape(x.shape).to(x.dtype)
