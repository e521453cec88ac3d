"""Rounding to a number format: the reference that every fast path is tested against.

Everything is computed in float64, which represents every input dtype and every format here exactly, so only the
rounding step is inexact. Special values:

| x                                      | overflow="saturate" | "inf" | "nan" |
|----------------------------------------|---------------------|-------|-------|
| NaN                                    | NaN                 | NaN   | NaN   |
| ±Inf                                   | ±largest            | ±Inf  | NaN   |
| finite, rounds beyond the largest      | ±largest            | ±Inf  | NaN   |
| finite beyond it, toward zero          | ±largest, as in IEEE 754-2019 §7.4, under all three |||
| rounds to zero                         | zero of x's sign; +0 if the format has no -0        |||
| e8m0fnu: zero, or rounds to zero       | its smallest number, 2^-127 (it has no zero)        |||
| e8m0fnu: negative                      | NaN (it has no sign)                                |||

NaN stays NaN in the result even if the format has no code for NaN (fp6, fp4): hiding it here would hide it for good.
`encode` refuses such values. "inf" and "nan" need a format with such codes.

"Largest" is the largest number that both the format and x's dtype can represent: 65280, not 65504, for fp16 in a
bfloat16 tensor. A result is therefore always a number of both, and casting twice equals casting once.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.spec import Format, get_format

Rounding = Literal["nearest", "stochastic", "toward_zero"]
Overflow = Literal["saturate", "inf", "nan"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def cast(
    x: Tensor,
    format: str | Format,
    *,
    rounding: Rounding = "nearest",
    overflow: Overflow = "saturate",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Round `x` to `format` and return the values in the dtype, shape and device of `x`.

    `rounding` is "nearest" (ties to even), "toward_zero" or "stochastic" (to one of the two neighbours, with
    probabilities that make the mean x; drawn from `generator`). Numbers of the format are returned unchanged. For
    special values see the table of this module.

    The gradient is the identity (straight-through), also for saturated elements.

    Raises UsageError for an unknown format or option, a dtype other than float64, float32, bfloat16 or float16, and an
    overflow rule that needs a code the format lacks.
    """
    spec = check_cast(x, format, rounding, overflow)
    with torch.no_grad():
        rounded = _round(x.double(), spec, rounding, generator)
        rounded = _overflow(rounded, x, spec, rounding, overflow)
        if not spec.has_zero:
            info = torch.finfo(x.dtype)
            rounded = rounded.clamp(min=max(spec.min_subnormal, info.smallest_normal * info.eps))
        if not spec.has_sign:
            rounded = torch.where(x < 0, math.nan, rounded)
        if not spec.has_negative_zero:
            rounded = rounded + 0.0  # -0 + 0 is +0
        result = rounded.to(x.dtype)
    return straight_through(x, result)


def _round(x64: Tensor, spec: Format, rounding: Rounding, generator: torch.Generator | None) -> Tensor:
    """Round `x64` to the format's grid, ignoring its largest exponent."""
    # floor(log2|x|) from the exponent field. Zero and float64's subnormals give -1023, raised to the format's minimum;
    # Inf and NaN give 1024, lowered so that the step stays finite and leaves them unchanged.
    exponent = (x64.view(torch.int64) >> 52).bitwise_and_(0x7FF).sub_(1023)
    exponent.clamp_(min=spec.min_exponent, max=1023).sub_(spec.mantissa_bits)
    step = exponent.add_(1023).bitwise_left_shift_(52).view(torch.float64)
    steps = x64 / step  # a power of two: exact
    if rounding == "nearest":
        return steps.round_().mul_(step)  # torch rounds halves to even
    whole = steps.trunc()
    if rounding == "stochastic":
        draw = torch.rand(steps.shape, dtype=torch.float64, device=steps.device, generator=generator)
        whole = whole + torch.where(draw < (steps - whole).abs(), steps.sign(), 0.0)
    return torch.copysign(whole, steps) * step


def _overflow(rounded: Tensor, x: Tensor, spec: Format, rounding: Rounding, overflow: Overflow) -> Tensor:
    limit = largest_number(spec, x.dtype)
    saturated = rounded.clamp(-limit, limit)
    if overflow == "saturate":
        return saturated
    too_large = rounded.abs() > limit
    if rounding == "toward_zero":
        rounded, too_large = saturated, x.isinf()
    replacement = torch.copysign(torch.full_like(rounded, math.inf if overflow == "inf" else math.nan), rounded)
    return torch.where(too_large, replacement, rounded)


def largest_number(format: str | Format, dtype: torch.dtype) -> float:
    """The largest number that both `format` and `dtype` can represent, e.g. 65280 for fp16 in bfloat16."""
    spec, info = get_format(format), torch.finfo(dtype)
    top = min(spec.max, info.max)
    step = math.ldexp(max(spec.eps, info.eps), math.frexp(top)[1] - 1)
    return top // step * step


def check_cast(x: Tensor, format: str | Format, rounding: str, overflow: str) -> Format:
    """Check the arguments of a cast and return the format as a `Format`."""
    spec = get_format(format)
    if x.dtype not in _DTYPES:
        raise UsageError(
            f"cannot cast a tensor of {x.dtype} to {spec.name}",
            hint="pass float64, float32, bfloat16 or float16; `decode` turns codes into such values",
        )
    if rounding not in ("nearest", "stochastic", "toward_zero"):
        raise UsageError(f"unknown rounding `{rounding}`", hint="known: nearest, stochastic, toward_zero")
    if overflow not in ("saturate", "inf", "nan"):
        raise UsageError(f"unknown overflow rule `{overflow}`", hint="known: saturate, inf, nan")
    if (overflow == "inf" and not spec.has_inf) or (overflow == "nan" and not spec.has_nan):
        rules = ["saturate"] + ["inf"] * spec.has_inf + ["nan"] * spec.has_nan
        raise UsageError(
            f"{spec.name} has no code for {overflow.capitalize()}, so overflow=`{overflow}` does not apply",
            hint="for this format use " + " or ".join(f"`{r}`" for r in rules),
        )
    return spec


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded` with the gradient of the identity with respect to `x` (Bengio et al. 2013, arXiv 1308.3432)."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return rounded
    result: Tensor = _StraightThrough.apply(x, rounded)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Saves nothing: the gradient does not depend on the values."""

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        return grad_out, None
