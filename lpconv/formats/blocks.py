"""Block formats: MX (OCP Microscaling 1.0) and NVFP4, as codes and as values.

A block of elements along the last axis shares one scale, and NVFP4 adds one scale for the whole tensor:

    value = tensor_scale · scale[block] · element

A block that holds Inf or NaN gets the scale NaN, and so decodes to NaN throughout (for MX as the specification says for
NaN; it leaves Inf open). A block of zeros decodes to zeros.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats import codes
from lpconv.formats.cast import Rounding, cast, check_cast, straight_through
from lpconv.formats.scale import amax, mx_scale
from lpconv.formats.spec import BlockFormat, get_block_format

__all__ = ["EncodedBlocks", "cast_blocks", "decode_blocks", "encode_blocks"]


@dataclass(frozen=True, kw_only=True)
class EncodedBlocks:
    """A tensor in a block format.

    `codes` are packed as in `lpconv.formats.codes`; `scales`, in the format's scale dtype, have one entry per block:
    x.shape[:-1] + (x.shape[-1] / size,). `tensor_scale` is a float32 scalar, 1 where the format has none.
    """

    format: BlockFormat
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor


def encode_blocks(
    x: Tensor,
    format: str | BlockFormat,
    *,
    rounding: Rounding = "nearest",
    mx_scale_mode: Literal["floor", "ceil"] = "floor",
    generator: torch.Generator | None = None,
) -> EncodedBlocks:
    """`x` in a block format; elements saturate.

    `mx_scale_mode` is the rule of `mx_scale`; "floor", the specification's, lets a block's largest element saturate.
    NVFP4's scales are amax_block / 6 / tensor_scale rounded to e4m3fn, and never below its smallest number, so that no
    block is lost, with tensor_scale = amax / (6 · 448). Raises UsageError where blocks do not divide the last axis.
    """
    spec = get_block_format(format)
    elements, scales, tensor_scale = _split(x.detach(), spec, rounding, mx_scale_mode, generator)
    return EncodedBlocks(
        format=spec,
        codes=codes.encode(elements.nan_to_num(0.0).reshape(x.shape), spec.element),
        scales=codes.encode(scales.squeeze(-1), spec.scale),
        tensor_scale=tensor_scale,
    )


def decode_blocks(encoded: EncodedBlocks, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values in `dtype`: exact products of element and scales, rounded once."""
    spec = encoded.format
    elements = codes.decode(encoded.codes, spec.element, torch.float64)
    scales = codes.decode(encoded.scales, spec.scale, torch.float64)
    blocks = elements.reshape(*scales.shape, spec.size)
    return (blocks * (scales * encoded.tensor_scale.double()).unsqueeze(-1)).reshape(elements.shape).to(dtype)


def cast_blocks(
    x: Tensor,
    format: str | BlockFormat,
    *,
    rounding: Rounding = "nearest",
    mx_scale_mode: Literal["floor", "ceil"] = "floor",
    generator: torch.Generator | None = None,
) -> Tensor:
    """The values of `x` after a trip through a block format, in x's dtype; the gradient is straight-through."""
    spec = get_block_format(format)
    elements, scales, tensor_scale = _split(x.detach(), spec, rounding, mx_scale_mode, generator)
    values = (elements * (scales * tensor_scale.double())).reshape(x.shape).to(x.dtype)
    return straight_through(x, values)


def _split(
    x: Tensor, spec: BlockFormat, rounding: Rounding, mode: Literal["floor", "ceil"], generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounded elements and the scales of their blocks in float64, shaped (..., blocks, size) and (..., blocks, 1)."""
    check_cast(x, spec.element, rounding, "saturate")
    if x.ndim == 0 or x.shape[-1] % spec.size:
        raise UsageError(
            f"{spec.name} has blocks of {spec.size}, which do not divide the last axis of {tuple(x.shape)}",
            hint=f"pad the last axis to a multiple of {spec.size}, or convert this tensor to another format",
        )
    blocks = x.double().reshape(*x.shape[:-1], x.shape[-1] // spec.size, spec.size)
    block_amax = amax(blocks, (*(1 for _ in blocks.shape[:-1]), -1))
    tensor_scale = torch.ones((), dtype=torch.float32, device=x.device)
    if spec.has_tensor_scale:
        scales, tensor_scale = _two_level_scales(block_amax, spec)
    else:
        scales = mx_scale(block_amax, spec.element, mode).double()
    ratio = blocks / (scales * tensor_scale.double())
    elements = cast(ratio, spec.element, rounding=rounding, generator=generator)
    return torch.where(scales.isnan(), math.nan, elements), scales, tensor_scale


def _two_level_scales(block_amax: Tensor, spec: BlockFormat) -> tuple[Tensor, Tensor]:
    finite = torch.where(block_amax.isfinite(), block_amax, 0.0)
    top = amax(finite)
    tensor_scale = torch.where(top > 0, top / (spec.element.max * spec.scale.max), 1.0).float()
    tensor_scale = tensor_scale.clamp(min=torch.finfo(torch.float32).smallest_normal)
    scales = cast(finite / spec.element.max / tensor_scale.double(), spec.scale)
    scales = scales.clamp(min=spec.scale.min_subnormal)
    return torch.where(block_amax.isfinite(), scales, math.nan), tensor_scale
