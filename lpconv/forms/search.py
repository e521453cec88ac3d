"""Scale search: for each group of numbers, the storable scale with the least squared error.

The usual scale of a group comes from its largest magnitude or its root mean square. A few other storable scales near it
are tried: neighbouring powers of two, neighbouring e4m3fn numbers, or multiples that bf16 can represent, so that
readers that keep scales in bf16 change none. The usual scale wins ties, so no group gets worse. Every group is decided
by its own numbers, independently of blocks.

This file knows no form; `tiles.py` calls it with the scales and their factors.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lpconv.formats.narrow import nearest_
from lpconv.formats.spec import Format

_EXPONENTS = (-1, 1)  # steps between stored powers of two
_NEIGHBOURS = tuple(range(-6, 8))  # steps between stored e4m3fn numbers, of which 8 make a binade
# Multiples of the usual scale. Integers gain by clipping their largest number, floats only by the place in a binade.
_CLIPPING = {4: tuple(i / 64 for i in range(44, 76, 2)), 8: tuple(i / 256 for i in range(226, 258, 2))}
_WITHIN_BINADE = tuple(1 + i / 16 for i in range(16))
_SCALES = (2.0**-126, 2.0**127)


def candidates(stored: Tensor, format: Format) -> list[Tensor]:
    """Scales to try for each group, as stored, the given ones first; their dtype tells what a file can represent."""
    if stored.dtype == torch.uint8:  # exponents of two
        others = [(stored.int() + step).clamp_(1, 254).to(torch.uint8) for step in _EXPONENTS]
    elif stored.dtype == torch.float8_e4m3fn:
        codes = stored.view(torch.uint8).int()
        others = [(codes + n).clamp_(1, 126).to(torch.uint8).view(stored.dtype) for n in _NEIGHBOURS if n]
    else:
        multiples = _CLIPPING[format.storage_bits] if format.twos_complement else _WITHIN_BINADE
        others = [(stored * m).clamp_(*_SCALES).bfloat16().float() for m in multiples if m != 1]
    return [stored, *others]


def squared_errors(
    rows: Tensor,
    scales: Tensor,
    format: Format,
    sum_parts: Callable[[Tensor], Tensor],
    *,
    spare: Tensor,
    importance: Tensor | None = None,
) -> Tensor:
    """Σ importance · (x - code · scale)² over each part of fp32 rows [H, C]; `sum_parts` maps [H, C] to [H, parts].

    `scales` broadcast to a view of the rows, [H, parts, 1] or [H, C]. `importance` is fp32 [C], or None for 1. `spare`
    is an fp32 buffer of the rows' size.
    """
    tiled = rows.view(*scales.shape[:-1], -1)
    error = spare[: rows.numel()].view(tiled.shape)
    codes_(torch.div(tiled, scales, out=error), format).mul_(scales).sub_(tiled).square_()
    flat = error.view(rows.shape)
    return sum_parts(flat if importance is None else flat.mul_(importance))


def codes_(x: Tensor, format: Format) -> Tensor:
    """Round finite fp32 to the numbers of a format of at most 8 bits, in place; for integers including -8 or -128."""
    if not format.twos_complement:
        return nearest_(x, format)
    return x.round_().clamp_(-format.max - 1, format.max)


def best(tried: Sequence[Tensor], errors: Sequence[Tensor]) -> Tensor:
    """The scale with the least error for each group, the first one in a tie; errors may be NaN."""
    chosen_scales, least = tried[0].view(torch.uint8) if tried[0].itemsize == 1 else tried[0], errors[0]
    for scales, error in zip(tried[1:], errors[1:], strict=True):
        is_better = error < least
        chosen_scales = torch.where(is_better, scales.view(chosen_scales.dtype), chosen_scales)
        least = torch.where(is_better, error, least)
    return chosen_scales.view(tried[0].dtype)
