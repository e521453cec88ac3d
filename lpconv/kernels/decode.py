"""Decode 8-bit codes to bfloat16, float16 or float32, on the CPU several times faster than torch's own cast.

torch converts fp8 on the CPU one element at a time through float32. But a code's exponent and mantissa bits, shifted to
their place in a wider format, represent the same number up to a fixed power of two, including subnormals; one
multiplication by that power corrects it. That takes four vectorised in-place passes over a piece that stays in the
cache. For float32 a code is first converted to float16, whose cast handles subnormals: a product of subnormal float32
numbers takes a hundred times as long. Inf and NaN do not survive the trick: for tensors with such codes, and on other
devices, whose cast is one fused kernel, torch's cast is used. From e5m2 to float16 no correction is needed: the code is
the upper byte. For bfloat16 the multiplication is half of the total time, since torch computes it through float32.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.spec import FORMATS, Format
from lpconv.kernels.buffers import operand, operand_like
from lpconv.kernels.compiled import is_compiling
from lpconv.kernels.fused import fused_decode

FP8 = {getattr(torch, f.torch): f for f in FORMATS.values() if f.bits == 8 and f.has_sign and f.torch}
_TARGETS = {
    torch.bfloat16: (FORMATS["bf16"], torch.int16),
    torch.float16: (FORMATS["fp16"], torch.int16),
    torch.float32: (FORMATS["fp32"], torch.int32),
}
_SMALL = 1 << 12  # elements; for fewer, one torch call is cheaper than the eight of the trick
_PIECE = 1 << 19  # elements; with its result it fits the last-level cache (1.2 to 1.4 times a whole 64 Mi pass)
_TINY = 5e-324


def decode(codes: Tensor, dtype: torch.dtype = torch.bfloat16, *, out: Tensor | None = None) -> Tensor:
    """The values of fp8 `codes` (e4m3fn, e5m2 or their fnuz twins) in `dtype`, same shape and device; exact.

    `dtype` is bfloat16, float16 or float32, each of which can represent every code; Inf and NaN are kept. `out`, a
    tensor of that shape and dtype, is filled if given. Raises UsageError for other dtypes or shapes.
    """
    _check(codes, dtype, out)
    if out is None and is_compiling():
        return codes.to(dtype)
    if out is None:
        out = torch.empty_like(codes, dtype=dtype)
    spec, (target, integer) = FP8[codes.dtype], _TARGETS[dtype]
    if codes.device.type != "cpu" or is_compiling() or codes.numel() <= _SMALL:
        return out.copy_(codes)
    if dtype == torch.float16 and spec.name == "e5m2":
        for piece, values in _pieces(codes.view(torch.int8), out):
            values.view(integer).copy_(piece).mul_(1 << 8)
        return out
    if not _trick_works(codes, spec, target):
        return out.copy_(codes)
    # To float32 through float16, if that has enough exponents.
    place, integer = _TARGETS[torch.float16 if dtype == torch.float32 and spec.bias <= FORMATS["fp16"].bias else dtype]
    shift = place.mantissa_bits - spec.mantissa_bits
    mask = (-1 << (place.bits - 1)) | (0x7F << shift)
    factor = math.ldexp(1.0, place.bias - spec.bias)
    for piece, values in _pieces(codes.view(torch.int8), out):
        bits = values.view(integer) if place is target else operand("codes as float16", piece.shape, integer)
        # The copy extends the sign to the top bit. The product is a left shift, twice as fast as torch's shift.
        bits.copy_(piece).mul_(1 << shift).bitwise_and_(mask)
        if place is not target:
            values.copy_(bits.view(torch.float16))
        values.mul_(factor)
    return out


def decode_operand(codes: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`decode` for a product, into memory that the next operand of that `name` reuses (see `operand_like`)."""
    out = operand_like(name, codes, dtype)
    if dtype == torch.bfloat16 and codes.device.type == "cpu" and not is_compiling():
        raw, values = (codes, out) if codes.is_contiguous() else (codes.mT, out.mT)
        spec, (target, _) = FP8[codes.dtype], _TARGETS[dtype]
        if raw.is_contiguous() and _trick_works(raw, spec, target) and fused_decode(raw, spec, values) is not None:
            return out
    return decode(codes, dtype, out=out)


def _trick_works(codes: Tensor, spec: Format, target: Format) -> bool:
    """Whether every code is finite, and this thread's arithmetic keeps the shifted bits."""
    if codes.numel() == 0 or spec.bias > target.bias or _TINY * 1.0 == 0.0:  # the last: subnormals are flushed
        return False
    if not spec.has_negative_zero:
        return int(codes.view(torch.int8).amin()) > -128  # NaN is the code of -0
    top = (spec.max_exponent_field << spec.mantissa_bits) | spec.max_mantissa
    return int(codes.view(torch.int8).amax()) <= top and int(codes.view(torch.uint8).amax()) <= top + 128


def _pieces(codes: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if codes.is_contiguous() and out.is_contiguous():
        return zip(torch.split(codes.view(-1), _PIECE), torch.split(out.view(-1), _PIECE), strict=True)
    if codes.dim() == 2 and codes.t().is_contiguous() and out.t().is_contiguous():
        return _pieces(codes.t(), out.t())
    return iter([(codes, out)])


def _check(codes: Tensor, dtype: torch.dtype, out: Tensor | None) -> None:
    if codes.dtype not in FP8:
        known = ", ".join(str(d).removeprefix("torch.") for d in FP8)
        raise UsageError(
            f"cannot decode codes of {codes.dtype}", hint=f"known: {known}; view raw bytes as one of these dtypes"
        )
    if dtype not in _TARGETS:
        raise UsageError(f"cannot decode to {dtype}", hint="use bfloat16, float16 or float32")
    if out is not None and (out.shape != codes.shape or out.dtype != dtype or out.device != codes.device):
        raise UsageError(
            f"out is {tuple(out.shape)} of {out.dtype} on {out.device}",
            hint=f"it must be {tuple(codes.shape)} of {dtype} on {codes.device}",
        )
