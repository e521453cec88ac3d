"""Matmul operands: the format each is cast to, and the one place where two of them are multiplied."""

import torch
from torch import Tensor

from lpconv.formats.spec import get_format
from lpconv.kernels.decode import decode
from lpconv.kernels.matmul import matmul
from lpconv.scaled.pair import Numerics, Role, Scaled, data_of

__all__ = ["decoded", "encoded", "product"]

aten = torch.ops.aten


def product(numerics: Numerics, a: object, b: object, *, alpha: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """alpha · data_a @ data_b + bias, for 2-D or batched 3-D operands, in the wider dtype of the two.

    Where the numerics name formats, operands are cast first: gradients to `gradient`, everything else to `operand`,
    unless one of the two is exact. Codes meet on fp8 tensor cores where the device has them (2-D only), and are decoded
    elsewhere, which is as exact.
    """
    left, right = data_of(a), data_of(b)
    dtype = torch.promote_types(left.dtype, right.dtype)
    if numerics.operand and Role.EXACT not in (_role(a), _role(b)):
        codes_a, codes_b = (encoded(data_of(x), _format(x, numerics)) for x in (a, b))
        if codes_a.device.type == "cuda" and codes_a.dim() == 2 and not torch.compiler.is_compiling():
            gain = torch.full((), alpha, device=codes_a.device)
            out = matmul(codes_a, codes_b, scale_a=gain, out_dtype=dtype)
            return out if bias is None else out + bias.to(dtype)
        left, right = decoded(codes_a, left.dtype), decoded(codes_b, right.dtype)
    if dtype == torch.float16 and left.device.type == "cpu":  # a CPU multiplies fp16 50 times slower than fp32
        return _gemm(left.float(), right.float(), alpha, None if bias is None else bias.float()).to(dtype)
    return _gemm(left.to(dtype), right.to(dtype), alpha, None if bias is None else bias.to(dtype))


def _format(x: object, numerics: Numerics) -> str:
    format = numerics.gradient if _role(x) is Role.GRADIENT else numerics.operand
    assert format is not None
    return format


def encoded(data: Tensor, format: str) -> Tensor:
    """8-bit codes of `data`, one byte each, nearest-even; magnitudes above the largest number saturate."""
    spec = get_format(format)
    assert spec.torch is not None
    return data.clamp(-spec.max, spec.max).to(getattr(torch, spec.torch))


def decoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, exact in every dtype of 16 bits or more; a compiler fuses torch's own cast."""
    return codes.to(dtype) if torch.compiler.is_compiling() else decode(codes, dtype)


def _role(x: object) -> Role:
    return x.role if isinstance(x, Scaled) else Role.ACTIVATION


def _gemm(a: Tensor, b: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    op = aten.addmm.default if a.dim() == 2 else aten.baddbmm.default
    if bias is not None:
        out: Tensor = op(bias, a, b, alpha=alpha)
    elif alpha != 1.0:
        out = op(a.new_zeros((1,) * a.dim()), a, b, beta=0, alpha=alpha)
    else:
        out = aten.mm.default(a, b) if a.dim() == 2 else aten.bmm.default(a, b)
    return out
