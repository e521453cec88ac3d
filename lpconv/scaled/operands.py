"""Matmul operands: what each is cast to and at which scale, and the one place where two of them are multiplied.

The scale of a tensor propagates, so its data are near 1 by theory; an operand's largest element may be thousands of
times that, and a code holds 448. An operand therefore has a scale of its own from the cast to the product, where it
folds out of the result; `ScaledTensor`'s scale stays as it is.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lpconv.formats.spec import OPERAND_BLOCKS, Format, get_format
from lpconv.kernels.compiled import is_compiling
from lpconv.kernels.decode import decode
from lpconv.kernels.linear import FP4_RECIPES
from lpconv.kernels.matmul import at_half
from lpconv.kernels.operands import Coded, OperandCast, block_values, coded_product, encode_operand
from lpconv.scaled.pair import Numerics, Role, Scaled, data_of

aten = torch.ops.aten


def product(numerics: Numerics, a: object, b: object, *, alpha: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """alpha · data_a @ data_b + bias, for 2-D or batched 3-D operands, in the wider dtype of the two.

    Where the numerics name formats, operands are cast first, at scales of the kind that `scale_kind` says: gradients to
    `gradient`, everything else to `operand`, unless one of the two is exact. Codes meet on fp8 tensor cores where the
    device has them (2-D only), and are decoded elsewhere, which is as exact.
    """
    left, right = data_of(a), data_of(b)
    dtype = torch.promote_types(left.dtype, right.dtype)
    kind = scale_kind(numerics, a, b)
    if kind != "carrier":
        rotated = Role.GRADIENT in (_role(a), _role(b)) and Role.WEIGHT not in (_role(a), _role(b))
        x, y = (_cast(z, numerics, kind, axis=axis, rotated=rotated) for z, axis in ((a, -1), (b, -2)))
        return _coded_product(x, y, alpha, bias, dtype)
    if dtype == torch.float16 and left.device.type == "cpu":  # a CPU multiplies fp16 50 times slower than fp32
        return _gemm(left.float(), right.float(), alpha, None if bias is None else bias.float()).to(dtype)
    return _gemm(left.to(dtype), right.to(dtype), alpha, None if bias is None else bias.to(dtype))


def grouped_product(numerics: Numerics, a: object, b: object, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`multiply(data_a, data_b)`, a product for each group of rows, of operands cast as `product` casts them.

    Codes are decoded to the dtype of the result, on a GPU too; a scale that is not a power of two rounds once more.
    """
    left, right = data_of(a), data_of(b)
    dtype = torch.promote_types(left.dtype, right.dtype)
    kind = scale_kind(numerics, a, b)
    if kind != "carrier" and kind not in OPERAND_BLOCKS:  # blocks along tokens would reach across experts
        left = _cast(a, numerics, kind, axis=-1).decoded(dtype)
        right = _cast(b, numerics, kind, axis=-2).decoded(dtype)
    out: Tensor = at_half(multiply, left.to(dtype), right.to(dtype))
    return out


def scale_kind(numerics: Numerics, a: object, b: object) -> str:
    """Which of `OPERAND_SCALES` the operands of this product are cast at; "carrier" where one of them is exact.

    A gradient meets a weight in the product for an input's gradient, and an activation in that for a weight's: of
    batched ones, which attention makes, all count as gradients of inputs. They are not cast to four bits or in blocks.
    """
    roles, scales = (_role(a), _role(b)), numerics.operand_scales
    if numerics.operand is None or Role.EXACT in roles:
        return "carrier"
    if data_of(a).dim() == 3 and (numerics.operand == "e2m1" or scales.output in OPERAND_BLOCKS):
        return "carrier"
    if Role.GRADIENT not in roles:
        return scales.output
    return scales.grad_input if Role.WEIGHT in roles or data_of(a).dim() == 3 else scales.grad_weight


def _coded_product(x: Coded, y: Coded, alpha: float, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide = torch.float32 if dtype == torch.float16 else dtype  # sums of codes leave the range of fp16
    meets_tensor_cores = x.codes.device.type == "cuda" and x.codes.dim() == 2
    if isinstance(x.scale, float) and isinstance(y.scale, float) and not meets_tensor_cores:
        left, right = (z.codes.to(wide) if z.codes.itemsize > 1 else decode(z.codes, wide) for z in (x, y))
        return _gemm(left, right, alpha, None if bias is None else bias.to(wide)).to(dtype)
    if isinstance(y.scale, Tensor) and y.scale.dim():
        x = Coded(x.codes, x.scale * alpha)
    else:
        x, y = Coded(x.codes, x.scale * y.scale * alpha), Coded(y.codes, 1.0)
    out = coded_product(x, y.mT, out_dtype=wide)
    return (out if bias is None else out.add_(bias)).to(dtype)


def _cast(operand: object, numerics: Numerics, kind: str, *, axis: int, rotated: bool = False) -> Coded:
    """An operand in codes; those of a kind that may saturate are counted where they do."""
    role = _role(operand)
    # Elements of a row are alike, so that gradients with a scale for each row need no wider range than activations.
    has_range = role is Role.GRADIENT and kind not in ("row", *OPERAND_BLOCKS)
    format = numerics.gradient if has_range else numerics.operand
    assert format is not None
    cast = operand_cast(format, kind, role, rotated)
    if kind in OPERAND_BLOCKS:
        coded = encode_operand(data_of(operand) if axis == -1 else data_of(operand).mT, cast)
        coded = Coded(block_values(coded), 1.0) if get_format(format).bits == 8 else coded
        return coded if axis == -1 else coded.mT
    coded = encode_operand(data_of(operand), cast, axis=axis)
    if kind in ("static", "l2") and coded.codes.itemsize == 1:
        _count_saturated(numerics, _role(operand), coded.codes, get_format(format))
    return coded


@functools.cache
def operand_cast(format: str, kind: str, role: Role = Role.ACTIVATION, rotated: bool = False) -> OperandCast:
    """The cast of an operand at a scale of a kind of `OPERAND_SCALES`; `rotated`: for the gradient of a weight."""
    if format == "e2m1":
        recipe = FP4_RECIPES[kind]
        of_input, of_gradient = recipe.grad_weight_casts if rotated else (recipe.input, recipe.gradient)
        return {Role.WEIGHT: recipe.weight, Role.GRADIENT: of_gradient}.get(role, of_input)
    return OperandCast(format=format, scale=kind, narrow=True)


def _count_saturated(numerics: Numerics, role: Role, codes: Tensor, spec: Format) -> None:
    """Count the codes at the largest number, on a CPU, where nothing waits for it; a GPU would."""
    if codes.device.type != "cpu" or is_compiling():
        return
    top = (spec.max_exponent_field << spec.mantissa_bits) | spec.max_mantissa
    count = int((codes.view(torch.uint8) & 0x7F).eq(top).sum())
    if count:
        numerics.counts[f"{role.value} saturated in {spec.name}"] += count


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
