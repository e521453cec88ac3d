"""Positions of a chart's parts on the page: data becomes paths and rectangles of an inline SVG.

Inline SVG instead of matplotlib, for three reasons: colours follow the page's light and dark themes, every mark carries
its tensor's name, and equal results give equal bytes. A wide chart takes the whole page width and scrolls in its box on
a phone; two narrow charts fit side by side, and one fits a phone.
"""

import math
from collections.abc import Iterator
from itertools import groupby, pairwise

from lpconv.report.charts import Axis, Box, Chart, HeatMap, Loss, Mark, Tick

_CHARACTER = 7.0  # width of a character in a label, in page units
_LABEL_GAP = 10.0  # least distance between labels
_LABEL_HEIGHT = 18.0
_ROW, _STRIP, _BAR = 40.0, 19.0, 11.0
_MAX_RADIUS, _MIN_RADIUS = 4.5, 2.2


class Drawing:
    """Layout of a chart: its frame and marks in page units of the SVG."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.top = 14.0
        strips = sum(not tick.has_line for tick in chart.y.ticks)
        if chart.is_wide:
            self.width, self.left, self.right, self.bottom, below = 1000.0, 58.0, 986.0, 330.0, 50.0
        elif chart.rows:
            self.width, self.left, self.right, self.bottom, below = 490.0, 14.0, 474.0, 14 + _ROW * len(chart.rows), 46
        else:
            self.width, self.left, self.right, self.bottom, below = 490.0, 70.0, 476.0, 200 + _STRIP * strips, 46
        self.height = self.bottom + below
        columns = (chart.x.high - chart.x.low) if chart.is_wide else 1
        # Large enough to see, small enough that neighbours do not touch.
        self.radius = round(min(max(0.4 * (self.right - self.left) / columns, _MIN_RADIUS), _MAX_RADIUS), 1)

    def x(self, value: float) -> float:
        """Page coordinate of an x value."""
        return _position(self.chart.x, value, self.left, self.right)

    def y(self, value: float) -> float:
        """Page coordinate of a y value, from the top."""
        return _position(self.chart.y, value, self.bottom, self.top)

    def path(self, mark: Mark) -> str:
        """The SVG path of a mark."""
        points = [(self.x(x), self.y(y)) for x, y in mark.points if math.isfinite(x) and math.isfinite(y)]
        if mark.shape == "line":
            return "".join(self._segments(mark))
        if mark.shape == "area":
            return f"M{'L'.join(f'{x} {y}' for x, y in points)}Z"
        if mark.shape == "whisker":
            (low, y), (high, _) = points
            return f"M{low} {y}H{high}" + "".join(f"M{x} {y - _BAR / 2}v{_BAR}" for x in (low, high))
        return "".join(symbol(mark.shape, x, y, self.radius) for x, y in points)

    def _segments(self, mark: Mark) -> Iterator[str]:
        """Path segments between finite points: a dash for an isolated point, a gap for non-finite values."""
        for is_finite, run in groupby(mark.points, key=lambda p: math.isfinite(p[0]) and math.isfinite(p[1])):
            if is_finite:
                ends = [f"{self.x(x)} {self.y(y)}" for x, y in run]
                yield f"M{'L'.join(ends)}" + ("m-3 0h6" if len(ends) == 1 else "")

    def rectangle(self, box: Box) -> tuple[float, float, float, float]:
        """x, y, width and height of a box on the page."""
        left, right = (self.x(v) for v in box.x)
        bottom, top = (self.y(v) for v in box.y)
        return left, top, round(right - left, 1), round(bottom - top, 1)

    def has_room(self, box: Box) -> bool:
        """Whether the label of a box fits into it."""
        _, _, width, height = self.rectangle(box)
        return len(box.label) * _CHARACTER < width and height > _LABEL_HEIGHT

    def axis_labels(self) -> list[tuple[float, str]]:
        """Positions and texts of the labels below the frame. A label that would collide with an earlier one is dropped.

        In a wide chart labels name groups, so labels at the ends may move inwards; in other charts they are dropped.
        """
        placed: list[tuple[float, str]] = []
        taken: list[tuple[float, float]] = []
        low, high = (self.left, self.right) if self.chart.is_wide else (0.0, self.width)
        for tick in self.chart.x.ticks:
            x, half = self.x(tick.at), len(tick.label) * _CHARACTER / 2
            if self.chart.is_wide:
                x = min(max(x, low + half), high - half)
            elif not low + half <= x <= high - half:
                continue
            if all(x + half + _LABEL_GAP <= start or x - half - _LABEL_GAP >= end for start, end in taken):
                placed.append((round(x, 1), tick.label))
                taken.append((x - half, x + half))
        return placed

    def label_position(self, x: float) -> tuple[float, str]:
        """Position and SVG text anchor of a label for a point at `x`, on the side with more room."""
        is_left = self.x(x) < (self.left + self.right) / 2
        return (self.x(x) + 9, "start") if is_left else (self.x(x) - 9, "end")


def _position(axis: Axis, value: float, start: float, end: float) -> float:
    share = (value - axis.low) / (axis.high - axis.low)
    return round(start + min(max(share, 0.0), 1.0) * (end - start), 1)


def legend_path(mark: Mark) -> str:
    """The path of a legend symbol in a box of 14 by 14."""
    if mark.shape in ("line", "whisker"):
        return "M1 12V5H7V2H13V12" if mark.kind == "outline" else "M1 7H13"
    return symbol(mark.shape, 7, 7, 5)


def symbol(shape: str, x: float, y: float, r: float) -> str:
    """The path of a symbol centred at (x, y)."""
    d = 2 * r
    shapes = {
        "circle": f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {d:.1f} 0a{r} {r} 0 1 0 {-d:.1f} 0z",
        "square": f"M{x - r:.1f} {y - r:.1f}h{d:.1f}v{d:.1f}h{-d:.1f}z",
        "triangle": f"M{x:.1f} {y - r:.1f}l{r:.1f} {d:.1f}h{-d:.1f}z",
        "diamond": f"M{x:.1f} {y - r:.1f}l{r:.1f} {r:.1f}l{-r:.1f} {r:.1f}l{-r:.1f} {-r:.1f}z",
        "tip": f"M{x - r:.1f} {y - r:.1f}h{d:.1f}l{-r:.1f} {d:.1f}z",
        "bar": f"M{x - r:.1f} {y - r / 2:.1f}h{d:.1f}v{r:.1f}h{-d:.1f}z",
        "dash": f"M{x - r:.1f} {y:.1f}h{d:.1f}",
    }
    return shapes[shape]


_WIDTH, _CELL_HEIGHT, _MAX_LABEL = 1000.0, 19.0, 300.0
_BLOCK_GAP = 0.4  # as a fraction of a column
_STEPS = ((0.0, 0), (1e-3, 1), (1e-2, 2), (0.1, 3), (0.5, 4))  # (bound, colour depth) for shares above the bound
_LEAST_SHARE = 0.005  # smallest share shown as a number

# Meaning of the colour depths in the order of the legend: CSS classes and text.
HEAT_SCALE = (
    ("depth-none", "nothing"),
    *(
        (f"{cause} depth-{depth}", f"{words if depth == 0 else ''}{100 * low:g} to {100 * high:g} %")
        for cause, words in (("under", "to zero: "), ("over", "beyond the range ↑: "))
        for (low, depth), (high, _) in pairwise((*_STEPS, (1.0, 0)))
    ),
)


class HeatDrawing:
    """Layout of a heat map's cells on the page."""

    def __init__(self, heat: HeatMap) -> None:
        self.heat = heat
        self.layers = list(dict.fromkeys(loss.layer for loss in heat.losses))
        self.label_x = min(max(len(layer) for layer in self.layers) * 7.1, _MAX_LABEL)
        longest = max(map(len, heat.columns))
        self._column = (_WIDTH - self.label_x - 8) / (len(heat.blocks) * (len(heat.columns) + _BLOCK_GAP))
        self.is_upright = longest * _CHARACTER > self._column  # long labels of columns run upwards
        self.head = 24 + (6.7 * longest if self.is_upright else 13)
        self.width, self.height = _WIDTH, self.head + len(self.layers) * _CELL_HEIGHT + 4
        self.cell_width, self.cell_height = round(self._column - 1, 1), _CELL_HEIGHT - 1

    def x(self, block: str, column: str) -> float:
        """The left edge of a column."""
        place = self.heat.blocks.index(block) * (len(self.heat.columns) + _BLOCK_GAP) + self.heat.columns.index(column)
        return round(self.label_x + 8 + place * self._column, 1)

    def y(self, layer: str) -> float:
        """The top of a layer's row."""
        return self.head + self.layers.index(layer) * _CELL_HEIGHT

    def rows(self) -> list[Tick]:
        """Row labels: the layers' names, with the beginning of long names cut."""
        most = int(_MAX_LABEL / 7.1)
        names = [layer if len(layer) <= most else "…" + layer[1 - most :] for layer in self.layers]
        return [Tick(at=self.y(layer) + 13.5, label=name) for layer, name in zip(self.layers, names, strict=True)]

    def columns(self) -> list[Tick]:
        """Labels of all columns."""
        return [
            Tick(at=round(self.x(block, column) + self._column / 2 + 4 * self.is_upright, 1), label=column)
            for block in self.heat.blocks
            for column in self.heat.columns
        ]

    def blocks(self) -> list[Tick]:
        """Labels of the blocks, centred above their columns."""
        middle = len(self.heat.columns) * self._column / 2
        return [Tick(at=round(self.x(b, self.heat.columns[0]) + middle, 1), label=b) for b in self.heat.blocks]


def depth_of(loss: Loss) -> str:
    """The CSS classes of a loss: its cause and colour depth."""
    lost = loss.underflow + loss.overflow
    depth = max((d for bound, d in _STEPS if lost > bound), default=0) if lost > 0 else "none"
    return f"{'over' if loss.overflow > loss.underflow else 'under'} depth-{depth}"


def figure_of(loss: Loss) -> str:
    """The lost share in whole per cent, with an arrow for overflow; empty below half a per cent."""
    lost = loss.underflow + loss.overflow
    if lost < _LEAST_SHARE:
        return ""
    return f"{100 * lost:.0f}" + ("↑" if loss.overflow > loss.underflow else "")
