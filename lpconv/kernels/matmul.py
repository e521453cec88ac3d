"""Products of low-precision matrices, by the fastest exact method of the device.

- CUDA, fp8: tensor cores through `aten._scaled_mm_v2`, after its layout rules are met: the left operand row-major, the
  right one column-major, both inner sizes multiples of 16 (padded with zeros, which change no sum). Compiled or not.
- CPU, fp8: decode to bfloat16, which represents every code, and multiply there. Products are exact and sums are
  float32; torch's own fp8 product is several times slower and `fp8 @ fp8` hundreds of times.
- CPU, float16: multiply in float32 and round once. torch's float16 product is ten or more times slower there, and so is
  its bfloat16 product on a CPU without arithmetic for it: see `HalfProducts`.

Scales follow `value = scale · component`: the result is (a · scale_a) @ (b · scale_b).
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lpconv.errors import UsageError
from lpconv.kernels.buffers import operand
from lpconv.kernels.decode import FP8, decode_operand
from lpconv.kernels.fused import fused_transpose
from lpconv.kernels.scaled_cast import scale_product_

aten = torch.ops.aten
_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}
_WIDE = {torch.bfloat16, torch.float16}
# Elements from which a transposed left operand is copied to row-major: oneDNN multiplies large transposed ones more
# slowly, with AMX at half the rate or less (2048 cubed in bfloat16: 40 ms instead of 16), with the same bits.
_LARGE = 1 << 20
_ALIGNMENT = 16  # cuBLASLt requires rows of multiples of 16 bytes, which are fp8 elements
_TENSOR_WISE, _ROW_WISE = F.ScalingType.TensorWise.value, F.ScalingType.RowWise.value


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(a · scale_a) @ (b · scale_b) + bias, for a (M, K) and b (K, N): both fp8, or both bfloat16, or both float16.

    Both may be batches (B, M, K) and (B, K, N), which fp8 tensor cores do not take. Scales are float32, one number or
    one per row of a (M, 1) and per column of b (1, N). `bias` is (N,). `out_dtype` is bfloat16 (the default for fp8),
    float16 or float32. Sums are float32; tensor cores keep about 14 bits of those of fp8. A bfloat16 result on the CPU
    is rounded before scales that are not powers of two are applied, and before the bias is added, which fp8 tensor
    cores do in float32 if both are bfloat16. Has no gradient: see `kernels.linear`. Raises UsageError for unsuitable
    operands.
    """
    _check(a, b, scale_a, scale_b, bias)
    out_dtype = out_dtype or (torch.bfloat16 if a.dtype in FP8 else a.dtype)
    if 0 in (*a.shape, *b.shape):
        out = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=out_dtype, device=a.device)
    elif a.dtype in FP8 and a.is_cuda and why_not_scaled_mm(a, b) is None:
        if out_dtype != torch.bfloat16 and _has_rows(scale_a, scale_b):  # row-wise kernels write bfloat16 only
            out = _scaled_mm(a, b, None, None, torch.float32)
        else:
            takes_bias = bias is not None and bias.dtype == out_dtype == torch.bfloat16 and b.shape[1] % _ALIGNMENT == 0
            out = _scaled_mm(a, b, scale_a, scale_b, out_dtype, bias if takes_bias else None)
            scale_a, scale_b, bias = None, None, None if takes_bias else bias
    else:
        out = _wide_matmul(a, b, out_dtype)
    out = scale_product_(out, scale_a, scale_b)
    out = out if bias is None else out.add_(bias)
    return out.to(out_dtype)


def why_not_scaled_mm(a: Tensor, b: Tensor) -> str | None:
    """Why a product of fp8 matrices on CUDA runs in bfloat16 instead of on fp8 tensor cores; None if it does not."""
    fnuz = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
    if a.dim() == 3:
        return "cuBLASLt has no batched product of fp8 matrices"
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "cuBLASLt has no product of two e5m2 matrices"
    if torch.version.hip is None and (a.dtype in fnuz or b.dtype in fnuz):
        return "fnuz formats run on AMD only"
    if torch.version.hip is None and _capability(a.get_device()) < (8, 9):
        return "fp8 tensor cores need compute capability 8.9"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _capability(index: int) -> tuple[int, int]:
    """Compute capability of a GPU; torch.compile cannot trace the query and treats the result as a constant."""
    return torch.cuda.get_device_capability(index)


def scaled_mm_operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a row-major and b column-major, with K and N padded with zeros to multiples of 16; copied only if needed."""
    pad_k, pad_n = -a.shape[1] % _ALIGNMENT, -b.shape[1] % _ALIGNMENT
    return _pad(a, 0, pad_k), _pad(b.t(), pad_n, pad_k).t()


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    if not rows and not columns:
        return _dense(x)
    return F.pad(x.contiguous().view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)  # code 0 is zero


def _dense(x: Tensor) -> Tensor:
    """Row-major including strides: a (1, C) that was (C, 1) or expanded counts as contiguous, but not for CUDA."""
    return x.contiguous().view(-1).view(x.shape)


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The product on tensor cores, by op: some torch builds break the graph at `F.scaled_mm` (pytorch#180604)."""
    rows, columns = a.shape[0], b.shape[1]
    a, b = scaled_mm_operands(a, b)
    one = torch.ones((), dtype=torch.float32, device=a.device)
    scale_a, scale_b = one if scale_a is None else scale_a.float(), one if scale_b is None else scale_b.float()
    recipe = _TENSOR_WISE
    if _has_rows(scale_a, scale_b):  # then both must have rows
        recipe = _ROW_WISE
        scale_a, scale_b = scale_a.expand(rows, 1), scale_b.expand(1, columns)
        scale_a, scale_b = _dense(scale_a), _dense(F.pad(scale_b, (0, b.shape[1] - columns), value=1.0))
    op = torch.ops.aten._scaled_mm_v2.default
    out: Tensor = op(a, b, [scale_a], [recipe], [], [scale_b], [recipe], [], bias, out_dtype)
    return out[:, :columns]


def _has_rows(*scales: Tensor | None) -> bool:
    return any(s is not None and s.numel() > 1 for s in scales)


def _wide_matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product in bfloat16, or in float32 if more is needed; the result has the dtype of the computation."""
    if a.dtype in FP8:
        wide = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
        return _mm(decode_operand(a, wide, "left"), decode_operand(b, wide, "right"))
    if (a.device.type == "cpu" and a.dtype == torch.float16) or out_dtype != a.dtype:
        return _mm(a.float(), b.float())
    return _mm(a, b)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() == 3:
        return torch.bmm(a, b)
    if a.device.type == "cpu" and a.dtype == torch.bfloat16 and a.numel() >= _LARGE and not a.is_contiguous():
        out = operand("turned", a.shape, a.dtype)
        a = out.copy_(a) if fused_transpose(a, out) is None else out
    return torch.mm(a, b)


def _check(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None) -> None:
    if not (a.ndim == b.ndim in (2, 3)) or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise UsageError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}", hint="pass (M, K) and (K, N)")
    if not ({a.dtype, b.dtype} <= FP8.keys() or (a.dtype == b.dtype and a.dtype in _WIDE)):
        raise UsageError(
            f"cannot multiply {a.dtype} by {b.dtype}", hint="both must be fp8, or both bfloat16, or both float16"
        )
    for name, scale, full in (
        ("scale_a", scale_a, (*a.shape[:-1], 1)),
        ("scale_b", scale_b, (*b.shape[:-2], 1, b.shape[-1])),
    ):
        if scale is not None and scale.numel() != 1 and tuple(scale.shape) != full:
            raise UsageError(f"{name} has shape {tuple(scale.shape)}", hint=f"pass one number or {full}")
    if bias is not None and bias.shape != b.shape[-1:]:
        raise UsageError(f"bias has shape {tuple(bias.shape)}", hint=f"it must be ({b.shape[-1]},)")


class HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Compute 16-bit matrix products and convolutions on a CPU in float32 and round once, where torch's own are slow.

    A context manager for float16, which is ten or more times slower, and for bfloat16 on a CPU without arithmetic for
    it, where a gradient's product takes up to 50 times as long. Sums are float32 either way. Products on other devices
    and in other dtypes are unchanged, and so are tensor subclasses: a scaled tensor does this by itself for float16,
    and a cast here would remove its scale. Covers the backward pass too, if that runs inside.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        return _rounded_once(_slow_dtypes(), func, *args, **(kwargs or {}))


def at_half(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op`; if all its tensors are plain float16 ones on a CPU, compute in float32 and round once."""
    return _rounded_once((torch.float16,), op, *args, **kwargs)


@functools.cache
def _slow_dtypes() -> tuple[torch.dtype, ...]:
    """The 16-bit dtypes whose products torch computes element by element on this CPU."""
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float16,) if has_bf16 else (torch.float16, torch.bfloat16)


def _rounded_once(slow: tuple[torch.dtype, ...], op: Any, *args: Any, **kwargs: Any) -> Any:
    dtypes = {a.dtype for a in args if isinstance(a, Tensor)}
    if len(dtypes) != 1 or not dtypes <= {*slow} or not all(map(_is_plain_on_cpu, args)):
        return op(*args, **kwargs)
    (dtype,) = dtypes
    out = op(*(a.float() if isinstance(a, Tensor) else a for a in args), **kwargs)
    return out.to(dtype) if isinstance(out, Tensor) else tuple(x if x is None else x.to(dtype) for x in out)


def _is_plain_on_cpu(x: Any) -> bool:
    return not isinstance(x, Tensor) or (x.device.type == "cpu" and not is_traceable_wrapper_subclass(x))
