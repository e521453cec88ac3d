"""Scale search: for each group of numbers, the storable scale with the least squared error.

The usual scale of a group comes from its largest magnitude or its root mean square. A few other storable scales near it
are tried: neighbouring powers of two, neighbouring e4m3fn numbers, or multiples that bf16 can represent, so that
readers that keep scales in bf16 change none. The usual scale wins ties, so no group gets worse. Every group is decided
by its own numbers, independently of blocks.

This file knows no form; `tiles.py` passes in what stored scales multiply codes by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.formats.narrow import nearest_code_
from lpconv.formats.spec import Format
from lpconv.forms.blocks import Workspace, as_float32
from lpconv.forms.form import Over

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
    elif stored.dtype == torch.float16:  # GGUF's; those of 4-bit codes have a sign
        signs = (1, -1) if format.storage_bits == 4 else (1,)
        multiples = [m * sign for m in _CLIPPING[format.storage_bits] for sign in signs]
        others = [(stored.float() * m).half() for m in multiples if m != 1]
    else:
        multiples = list(_CLIPPING[format.storage_bits] if format.twos_complement else _WITHIN_BINADE)
        others = [(stored.float() * m).clamp_(*_SCALES).bfloat16().to(stored.dtype) for m in multiples if m != 1]
    return [stored, *others]


@dataclass(frozen=True, kw_only=True)
class ScaleSearch:
    """Finds the best scales of tiles of `height` rows, in a matrix of `cols` columns with codes in `format`.

    `factor_of(stored, start, stop)` expands stored scales for the elements `start` to `stop`, to [rows, tiles, 1] or
    [rows, cols]: what their codes are multiplied by. `sum_tiles` sums rows [rows, cols] over each tile's part of them,
    to [rows, tiles]. `importance` weights the squared error of each column: fp32 [cols], or [matrices, cols] if the
    `num_rows` rows belong to several matrices.
    """

    format: Format
    height: int
    num_rows: int
    cols: int
    factor_of: Callable[[Tensor, int, int], Tensor]
    sum_tiles: Callable[[Tensor], Tensor]
    importance: Tensor | None = None

    def in_rows(self, x: Tensor, usual: Tensor, work: Workspace, start: int = 0) -> Tensor:
        """The best scales, as stored, for a block (1-D) from element `start` on, whose tiles are parts of one row."""
        tried, weights = candidates(usual, self.format), self._weights(start, len(x))
        return best_scales(tried, [self._errors(x, 0, scales, weights, work) for scales in tried])

    def over_blocks(self, over: Over, usual: Tensor) -> Tensor:
        """The best scales, as stored, for all tiles; blocks may end within tiles of several rows."""
        if self.height == 1:

            def find(x: Tensor, start: int, work: Workspace) -> Tensor:
                return self.in_rows(x, usual[start // self.cols : (start + len(x)) // self.cols], work, start)

            return torch.cat(list(over(find)))
        tried = candidates(usual, self.format)
        sums = torch.zeros((len(tried), *usual.shape), dtype=torch.float64)

        def add(x: Tensor, start: int, work: Workspace) -> tuple[int, Tensor]:
            tile_of_row = torch.arange(start // self.cols, (start + len(x)) // self.cols) // self.height
            first = int(tile_of_row[0])
            num_rows = torch.bincount(tile_of_row - first).tolist()
            weights = self._weights(start, len(x))
            errors = torch.stack([self._errors(x, start, scales, weights, work) for scales in tried]).double()
            return first, torch.stack([part.sum(1) for part in torch.split(errors, num_rows, 1)], 1)

        for first, errors in over(add):
            sums[:, first : first + errors.shape[1]] += errors
        return best_scales(tried, list(sums))

    def _weights(self, start: int, count: int) -> Tensor | None:
        """The importance of `count` elements from `start` on, [cols] or [rows, cols]."""
        if self.importance is None or self.importance.ndim == 1:
            return self.importance
        rows = torch.arange(start // self.cols, (start + count) // self.cols)
        return self.importance[rows * len(self.importance) // self.num_rows]

    def _errors(self, x: Tensor, start: int, stored: Tensor, weights: Tensor | None, work: Workspace) -> Tensor:
        """Σ weight · (x - code · scale)² for each tile's part of the rows of a block (1-D), [rows, tiles]."""
        rows = as_float32(x, work).view(-1, self.cols)
        scales = self.factor_of(stored, start, start + len(x))
        tiled = rows.view(*scales.shape[:-1], -1)
        error = work.scratch.coded[: len(x)].view(tiled.shape)
        nearest_code_(torch.div(tiled, scales, out=error), self.format).mul_(scales).sub_(tiled).square_()
        squares = error.view(rows.shape)
        return self.sum_tiles(squares if weights is None else squares.mul_(weights))


def best_scales(tried: Sequence[Tensor], errors: Sequence[Tensor]) -> Tensor:
    """The scale with the least error for each group, the first one in a tie; errors may be NaN."""
    chosen_scales, least = tried[0].view(torch.uint8) if tried[0].itemsize == 1 else tried[0], errors[0]
    for scales, error in zip(tried[1:], errors[1:], strict=True):
        is_better = error < least
        chosen_scales = torch.where(is_better, scales.view(chosen_scales.dtype), chosen_scales)
        least = torch.where(is_better, error, least)
    return chosen_scales.view(tried[0].dtype)
