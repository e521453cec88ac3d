"""A heatmap of what number formats lose: layers down, blocks of columns across. A template draws it as inline SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lpconv.report.plot import Tick

# Page units.
_WIDTH, _CELL_HEIGHT, _LABEL_CHARACTER, _MAX_LABEL = 1000.0, 19.0, 7.1, 300.0
_BLOCK_GAP = 0.4  # of a column
_STEPS = ((0.0, 0), (1e-3, 1), (1e-2, 2), (0.1, 3), (0.5, 4))  # a share above the bound gets the depth of colour
_LEAST_SHARE = 0.005  # that is worth a figure


# What the depths of colour mean, in the order of a legend: CSS classes and words.
SCALE = (
    ("depth-none", "nothing"),
    *(
        (f"{cause} depth-{depth}", f"{words if depth == 0 else ''}{100 * low:g} to {100 * high:g} %")
        for cause, words in (("under", "to zero: "), ("over", "beyond the range ↑: "))
        for (low, depth), (high, _) in pairwise((*_STEPS, (1.0, 0)))
    ),
)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What one layer loses at one place of the map: shares of its elements, and the words that the pointer gets."""

    layer: str
    block: str
    column: str
    underflow: float
    overflow: float
    title: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layer in one column: how much is lost, by depth of colour and figure, and a title that says of what."""

    x: float
    y: float
    kind: str
    text: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A finished map. `head` is the room above the first row for the names of blocks and columns."""

    description: str
    cells: tuple[Cell, ...]
    rows: tuple[Tick, ...]
    columns: tuple[Tick, ...]
    blocks: tuple[Tick, ...]
    cell_width: float
    cell_height: float
    label_x: float
    head: float
    width: float
    height: float
    scale: tuple[tuple[str, str], ...] = SCALE


def loss_map(
    losses: Sequence[Loss], *, blocks: Sequence[str], columns: Sequence[str], description: str, head: float
) -> Heatmap:
    """The map of some losses: every block has all the columns, and layers stand in the order of the losses."""
    layers = list(dict.fromkeys(loss.layer for loss in losses))
    label_x = min(max(len(layer) for layer in layers) * _LABEL_CHARACTER, _MAX_LABEL) + 8
    width = (_WIDTH - label_x) / (len(blocks) * (len(columns) + _BLOCK_GAP))

    def left(block: str, column: str) -> float:
        place = blocks.index(block) * (len(columns) + _BLOCK_GAP) + columns.index(column)
        return round(label_x + place * width, 1)

    def top(layer: str) -> float:
        return head + layers.index(layer) * _CELL_HEIGHT

    return Heatmap(
        description=description,
        cells=tuple(_cell(loss, left(loss.block, loss.column), top(loss.layer)) for loss in losses),
        rows=tuple(Tick(position=top(layer) + 0.5 * _CELL_HEIGHT + 4, label=_shortened(layer)) for layer in layers),
        columns=tuple(
            Tick(position=round(left(block, column) + width / 2 + 4, 1), label=column)
            for block in blocks
            for column in columns
        ),
        blocks=tuple(
            Tick(position=round(left(block, columns[0]) + len(columns) * width / 2, 1), label=block) for block in blocks
        ),
        cell_width=round(width - 1, 1),
        cell_height=_CELL_HEIGHT - 1,
        label_x=label_x - 8,
        head=head,
        width=_WIDTH,
        height=head + len(layers) * _CELL_HEIGHT + 4,
    )


def _cell(loss: Loss, x: float, y: float) -> Cell:
    lost = loss.underflow + loss.overflow
    depth = max((d for bound, d in _STEPS if lost > bound), default=0) if lost > 0 else "none"
    cause = "over" if loss.overflow > loss.underflow else "under"
    return Cell(x=x, y=y, kind=f"{cause} depth-{depth}", text=_figure(lost, cause), title=loss.title)


def _figure(lost: float, cause: str) -> str:
    """The lost share in whole per cent, with an arrow where it is overflow; empty where it is below a half."""
    if lost < _LEAST_SHARE:
        return ""
    return f"{100 * lost:.0f}" + ("↑" if cause == "over" else "")


def _shortened(layer: str) -> str:
    most = int(_MAX_LABEL / _LABEL_CHARACTER)
    return layer if len(layer) <= most else "…" + layer[1 - most :]
