"""How many points a bit budget buys for a matrix, and the bytes they take. Plain Python: planning needs no torch."""

import math
from dataclasses import dataclass

from lpconv.formats.spec import Format

MAX_POINTS = 8  # three of e4m3fn are at fp32's own precision already
MAX_COLS = 2**18  # rows are fitted whole, in blocks of twice as many elements
_SCALE_BITS = 32
_COUNT_BITS = 8


@dataclass(frozen=True, kw_only=True)
class PointLayout:
    """A matrix of `rows` by `cols` as `num_points` points: the codes of one row and an fp32 scale each.

    One byte per row says how many of the points are its own. A tensor of more axes has rows along its last one.
    """

    element: Format
    rows: int
    cols: int
    num_points: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of one point."""
        return self.cols * self.element.storage_bits // 8

    @property
    def num_bits(self) -> int:
        """Bits of everything that is stored: codes, scales and counts."""
        return self.num_points * (8 * self.row_bytes + _SCALE_BITS) + self.rows * _COUNT_BITS


def point_layout(shape: tuple[int, ...], element: Format, *, budget_bits: float, points_max: int) -> PointLayout | None:
    """Return the layout with the most points that fit into `budget_bits` per element, at most `points_max` per row, or
    None if not even one fits.

    None where the budget does not pay for one point a row, where the codes of a row do not fill whole bytes, or where
    rows have more than `MAX_COLS` elements.
    """
    rows, cols = math.prod(shape[:-1]), shape[-1] if shape else 1
    if cols > MAX_COLS or cols * element.storage_bits % 8:
        return None
    left = math.floor(budget_bits * rows * cols) - rows * _COUNT_BITS
    num_points = min(left // (cols * element.storage_bits + _SCALE_BITS), rows * points_max)
    return PointLayout(element=element, rows=rows, cols=cols, num_points=num_points) if num_points >= rows else None
