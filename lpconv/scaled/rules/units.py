"""Plain constants beside scaled tensors, and numbers moved between data and scale."""

import torch
from torch import Tensor

from lpconv.scaled.pair import Scaled
from lpconv.scaled.scales import ratio, times


def in_units(plain: Tensor, x: Scaled) -> Tensor:
    """A plain tensor over the scale of `x`, in its dtype; finite numbers stay finite (finfo.min is a mask)."""
    limit = torch.finfo(x.data.dtype).max
    wide = plain.to(torch.promote_types(x.data.dtype, torch.float32))
    over = times(wide, ratio(1.0, x.scale)).clamp(-limit, limit)
    return torch.where(wide.isinf(), wide, over).to(x.data.dtype)


def moved(x: Scaled, factor: float) -> Scaled:
    """The same value: (d·factor, s/factor)."""
    return Scaled(times(x.data, factor), ratio(x.scale, factor), x.role)


def measurable(x: Scaled) -> Scaled:
    """`x` with a scale other than 0, at which a number beside it can be expressed: a static zero at the scale 1."""
    is_zero = isinstance(x.scale, float) and x.scale == 0
    return Scaled(torch.zeros_like(x.data), 1.0, x.role) if is_zero else x
