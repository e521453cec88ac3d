"""The operands of rules: a (data, scale) pair with its role, and the numerics of the model.

Rules are pure functions of pairs. They never see the tensor subclass, so each can be read, tested and differentiated on
its own.
"""

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lpconv.kernels.compiled import is_compiling
from lpconv.scaled.choices import OperandScales
from lpconv.scaled.scales import Scale, ratio, split_number, times, uninitialised_like


class Role(enum.Enum):
    """The purpose of a tensor; it decides the format of a matmul operand and what may be saved in 8 bits."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    GRADIENT = "gradient"
    EXACT = "exact"  # never cast below the carrier dtype: loss head, critical matmuls

    @property
    def is_stored(self) -> bool:
        """Whether the tensor is a parameter, or like one: a write goes into its storage and keeps its scale."""
        return self in (Role.WEIGHT, Role.EXACT)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Settings of the rules. Tensors carry them, because a backward pass may run in another thread.

    `operand` and `gradient` name the formats of matmul operands (None: the dtype of the data), `operand_scales` the
    scales at which they are cast. `unit_factors` moves the √K of each contraction from the data to the scale; without
    it data keep the raw magnitudes. `fit_joins` makes an addition choose the smallest scale whose data fit their dtype
    (adaptive loss scaling), and a cast to 16 bits a scale that loses a fraction of at most `cast_underflow`, if the
    data leave headroom. Gradients start, and are rescaled, at data of 1/`headroom`: a power of two that `StepGuard`
    raises after an overflow. `softmax_grad` rescales the gradient of softmax's input. With `native`, factors are exact
    square roots, as in unit scaling, and some rules are replaced by rules that predict sizes at initialisation
    (`rules.native`); `causal` tells these that attention masks average over past keys only. `counts` collects fallbacks
    and saturations, `places` the module of each op's first fallback; all tensors of a model share them, and they are
    not compared.
    """

    operand: str | None = None
    gradient: str | None = None
    operand_scales: OperandScales = field(default_factory=OperandScales)
    unit_factors: bool = True
    fit_joins: bool = False
    cast_underflow: float = 0.0
    headroom: float = 1.0
    softmax_grad: bool = False
    native: bool = False
    causal: bool = False
    strict: bool = False
    counts: "Counter[str]" = field(default_factory=Counter, compare=False)
    places: dict[str, str] = field(default_factory=dict, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Numerics":
        """Itself, so that a deep copy of a model shares counts with the original, as its tensors do."""
        return self


class Scaled(NamedTuple):
    """A pair with value = data · scale."""

    data: Tensor
    scale: Scale
    role: Role = Role.ACTIVATION

    def with_data(self, data: Tensor) -> "Scaled":
        """The same scale and role with other data."""
        return Scaled(data, self.scale, self.role)


class Call(NamedTuple):
    """The ATen op being computed and the numerics of its operands."""

    op: OpOverload
    numerics: Numerics


Rule = Callable[..., Any]
"""`rule(call, *args, **kwargs)` with pairs for scaled tensors; returns pairs, plain tensors, lists or tuples of them,
or NotImplemented for arguments that it does not cover."""


def pair(x: Any) -> tuple[Any, Scale]:
    """(data, scale) of any operand: 1 for a plain tensor or a complex number, other numbers by `split_number`."""
    if isinstance(x, Scaled):
        return x.data, x.scale
    if isinstance(x, (Tensor, complex)):
        return x, 1.0
    return split_number(float(x))


def data_of(x: Any) -> Any:
    """The data of a pair; anything else unchanged."""
    return x.data if isinstance(x, Scaled) else x


def widen_16_bit(x: Any) -> Any:
    """A 16-bit tensor in fp32; anything else unchanged."""
    narrow = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if narrow else x


def value(x: Any) -> Any:
    """data · scale, computed in at least fp32 (16-bit data with a scale of 2^-20 would vanish in 16 bits).

    fp32 and fp64 data keep their dtype; anything but a pair is returned unchanged. The strides are those of the data,
    also for slices: torch's functions on contiguous and on strided memory differ in the last bit.
    """
    if not isinstance(x, Scaled):
        return x
    out = times(widen_16_bit(x.data), x.scale)
    if out.stride() == x.data.stride() or 0 in x.data.stride() or is_compiling():
        return out
    return uninitialised_like(x.data, out.dtype).copy_(out)


def in_units_of(plain: Tensor, x: Scaled) -> Tensor:
    """A plain tensor divided by the scale of `x`, in its dtype; finite numbers stay finite (finfo.min is a mask)."""
    limit = torch.finfo(x.data.dtype).max
    wide = plain.to(torch.promote_types(x.data.dtype, torch.float32))
    quotient = times(wide, ratio(1.0, x.scale)).clamp(-limit, limit)
    return torch.where(wide.isinf(), wide, quotient).to(x.data.dtype)


def move_factor(x: Scaled, factor: float) -> Scaled:
    """The same value as (d·factor, s/factor)."""
    return Scaled(times(x.data, factor), ratio(x.scale, factor), x.role)


def with_nonzero_scale(x: Any) -> Any:
    """A pair with a non-zero scale, so that other numbers can be expressed at it: a static zero gets the scale 1."""
    is_zero = isinstance(x, Scaled) and isinstance(x.scale, float) and x.scale == 0
    return Scaled(torch.zeros_like(x.data), 1.0, x.role) if is_zero else x
