"""Number of points that fit a bit budget, and their bytes. Plain Python, so planning needs no torch."""

import math
from dataclasses import dataclass

from lpconv.formats.spec import Format

MAX_POINTS = 8  # three e4m3fn points already reach fp32's precision
MAX_COLS = 2**18  # a row is never divided, and blocks have twice as many elements
_SCALE_BITS = 32
_COUNT_BITS = 8


@dataclass(frozen=True, kw_only=True)
class PointLayout:
    """A matrix of `rows` by `cols` stored as `num_points` points, each with the codes of one row and an fp32 scale.

    One byte per row stores its number of points. Tensors with more axes have rows along the last one.
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
        """Total stored bits: codes, scales and counts."""
        return self.num_points * (8 * self.row_bytes + _SCALE_BITS) + self.rows * _COUNT_BITS


def point_layout(shape: tuple[int, ...], element: Format, *, budget_bits: float, points_max: int) -> PointLayout | None:
    """Return the layout with the most points within `budget_bits` per element, at most `points_max` per row.

    Returns None if the budget does not allow one point per row, if the codes of a row do not fill whole bytes, or if
    rows have more than `MAX_COLS` elements.
    """
    rows, cols = math.prod(shape[:-1]), shape[-1] if shape else 1
    if cols > MAX_COLS or cols * element.storage_bits % 8:
        return None
    left = math.floor(budget_bits * rows * cols) - rows * _COUNT_BITS
    num_points = min(left // (cols * element.storage_bits + _SCALE_BITS), rows * points_max)
    return PointLayout(element=element, rows=rows, cols=cols, num_points=num_points) if num_points >= rows else None
