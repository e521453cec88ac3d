"""What the rules compute with: a (data, scale) pair, the role it plays, and the numerics of the model.

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

from lpconv.scaled.choices import OperandScales
from lpconv.scaled.scales import Scale, ratio, split_number, times, uninitialised_like


class Role(enum.Enum):
    """What a tensor is for; it decides the format of a matmul operand and what may be saved in 8 bits."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    GRADIENT = "gradient"
    EXACT = "exact"  # never cast below the carrier dtype: loss head, critical matmuls


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How the rules compute. Tensors carry it, because a backward pass may run in a thread that knows no context.

    `operand` and `gradient` name the formats of matmul operands (None: the dtype of the data), `operand_scales` the
    scales that they are cast at. `unit_factors` moves the √K of each contraction from the data to the scale; without it
    data keep the raw magnitudes. `fit_joins` makes an addition choose the smallest scale whose data fit their dtype
    (adaptive loss scaling), and a cast to 16 bits one that loses a share of at most `cast_underflow`, where data leave
    room for it. Gradients start, and are rescaled, at data of 1/`headroom`: a power of two that `StepGuard` raises
    after an overflow. `softmax_grad` rescales what softmax hands down. With `native` factors are square roots
    themselves, as unit scaling has them, and rules that predict sizes at initialisation stand in for some
    (`rules.native`); `causal` tells them how far attention averages where a mask hides it. `counts` collects fall-backs
    and saturations, `places` the module where each op first fell back; all tensors of a model share them, and they take
    no part in equality.
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
        """Itself: a deep copy of a model counts with the original, as its tensors do."""
        return self


class Scaled(NamedTuple):
    """value = data · scale."""

    data: Tensor
    scale: Scale
    role: Role = Role.ACTIVATION

    def with_data(self, data: Tensor) -> "Scaled":
        """The same scale and role over other data."""
        return Scaled(data, self.scale, self.role)


class Call(NamedTuple):
    """The ATen op being computed and the numerics of its operands."""

    op: OpOverload
    numerics: Numerics


Rule = Callable[..., Any]
"""`rule(call, *args, **kwargs)` with pairs for scaled tensors; returns pairs, plain tensors, lists or tuples of them,
or NotImplemented where it does not cover the arguments."""


def static(scale: Scale) -> bool:
    """Whether the scale is known before the run."""
    return isinstance(scale, float)


def pair(x: Any) -> tuple[Any, Scale]:
    """(data, scale) of any operand: a plain tensor has the scale 1, a number is split by `split_number`."""
    if isinstance(x, Scaled):
        return x.data, x.scale
    if isinstance(x, Tensor):
        return x, 1.0
    return split_number(float(x))


def data_of(x: Any) -> Any:
    """The data of a pair; anything else as it is."""
    return x.data if isinstance(x, Scaled) else x


def widen_16_bit(x: Any) -> Any:
    """A 16-bit tensor in fp32; anything else unchanged."""
    narrow = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if narrow else x


def value(x: Any) -> Any:
    """data · scale, computed in at least fp32 (data of 16 bits with a scale of 2^-20 would vanish in 16 bits).

    fp32 and fp64 data keep their dtype; everything that is not a pair passes unchanged. The strides are those of the
    data, slices too: torch's functions of contiguous and of strided memory differ in the last bit.
    """
    if not isinstance(x, Scaled):
        return x
    out = times(widen_16_bit(x.data), x.scale)
    if out.stride() == x.data.stride() or 0 in x.data.stride() or torch.compiler.is_compiling():
        return out
    return uninitialised_like(x.data, out.dtype).copy_(out)


def in_units_of(plain: Tensor, x: Scaled) -> Tensor:
    """A plain tensor over the scale of `x`, in its dtype; finite numbers stay finite (finfo.min is a mask)."""
    limit = torch.finfo(x.data.dtype).max
    wide = plain.to(torch.promote_types(x.data.dtype, torch.float32))
    over = times(wide, ratio(1.0, x.scale)).clamp(-limit, limit)
    return torch.where(wide.isinf(), wide, over).to(x.data.dtype)


def move_factor(x: Scaled, factor: float) -> Scaled:
    """The same value: (d·factor, s/factor)."""
    return Scaled(times(x.data, factor), ratio(x.scale, factor), x.role)


def with_nonzero_scale(x: Scaled) -> Scaled:
    """`x` with a scale other than 0, at which a number beside it can be expressed: a static zero at the scale 1."""
    is_zero = isinstance(x.scale, float) and x.scale == 0
    return Scaled(torch.zeros_like(x.data), 1.0, x.role) if is_zero else x
