"""Matmul operands: the format each is cast to, and the one place where two of them are multiplied."""

import torch
from torch import Tensor

from lpconv.formats.spec import get_format
from lpconv.scaled.pair import Arithmetic, Role, Scaled, data_of

__all__ = ["decoded", "encoded", "product", "rounded"]

aten = torch.ops.aten


def product(arithmetic: Arithmetic, a: object, b: object, *, alpha: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """alpha · data_a @ data_b + bias, for 2-D or batched 3-D operands, in the wider dtype of the two.

    Where the arithmetic names formats, operands are cast first: gradients to `gradient`, everything else to `operand`,
    unless one of the two is exact.
    """
    left, right = data_of(a), data_of(b)
    dtype = torch.promote_types(left.dtype, right.dtype)
    if arithmetic.operand and Role.EXACT not in (_role(a), _role(b)):
        left, right = (rounded(x, arithmetic) for x in (a, b))
    if dtype == torch.float16 and left.device.type == "cpu":  # a CPU multiplies fp16 50 times slower than fp32
        return _gemm(left.float(), right.float(), alpha, None if bias is None else bias.float()).to(dtype)
    return _gemm(left.to(dtype), right.to(dtype), alpha, None if bias is None else bias.to(dtype))


def rounded(x: object, arithmetic: Arithmetic) -> Tensor:
    """The data of an operand on the grid of its format, in their dtype."""
    data: Tensor = data_of(x)
    format = arithmetic.gradient if _role(x) is Role.GRADIENT else arithmetic.operand
    assert format is not None
    return decoded(encoded(data, format), data.dtype)


def encoded(data: Tensor, format: str) -> Tensor:
    """8-bit codes of `data`, one byte each, nearest-even; magnitudes above the largest number saturate."""
    spec = get_format(format)
    assert spec.torch is not None
    return data.clamp(-spec.max, spec.max).to(getattr(torch, spec.torch))


def decoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, exact in every dtype of 16 bits or more."""
    return codes.to(dtype)


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
