"""The content of a report as plain records, without any layout.

The builders of this package, one file per kind of result, make a `Document` from a result record. The renderers
(`terminal`, `html` and `markdown`) render any document and know no kind. Texts may contain anything from untrusted
files: renderers make them printable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lpconv.report.charts import Chart, HeatMap
from lpconv.report.numbers import number_text
from lpconv.results import GateRecord

# A good result, a bad one, and one that proves nothing.
Outcome: TypeAlias = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The conclusion in a sentence. The outcome only sets the colour, so the text must state it too."""

    outcome: Outcome
    text: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A headline number with a label and a detail."""

    label: str
    figure: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table cell, optionally with a sort key, a link, or an outcome that colours it."""

    text: str
    sort: float | None = None
    link: str | None = None
    outcome: Outcome | None = None


Row: TypeAlias = tuple[str | Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings. Columns hold numbers, except the first one and those whose heading begins with ``<``.

    A `sortable` table lists many things of one kind; with `filter`, an example search text, readers can hide rows.
    `has_names`: the first column has dotted names. `compares`: the other columns are values of different runs. A
    terminal shows only the first `most` rows, if set. A `folded` table is collapsed under that title, and a terminal
    shows only the title.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    has_names: bool = False
    sortable: bool = False
    filter: str = ""
    compares: bool = False
    most: int | None = None
    folded: str = ""


def texts_of(table: Table) -> list[list[str]]:
    """The texts of a table's cells, row by row."""
    return [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A step of a verification, or a gate, with its result."""

    name: str
    outcome: Outcome
    text: str


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Steps with their outcomes."""

    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Code:
    """Lines to copy: a command, or a program in `language`."""

    lines: tuple[str, ...]
    language: str = ""


@dataclass(frozen=True, kw_only=True)
class Prose:
    """Text in Markdown by lpconv itself, for documents that are rendered only as Markdown."""

    text: str


# A paragraph, a list of sentences, labelled values, or one of the records above.
Block: TypeAlias = str | tuple[str, ...] | Mapping[str, str] | Table | Checks | Code | Prose | Chart | HeatMap


@dataclass(frozen=True, kw_only=True)
class Section:
    """Blocks under a title. Without a title, each chart becomes a section of its own. `outcome` colours the section.

    `only` restricts it to pages or terminals. Terminals show no charts.
    """

    title: str = ""
    blocks: tuple[Block, ...]
    outcome: Outcome | None = None
    only: Literal["page", "terminal"] | None = None


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report for readers: verdict first, then headline numbers, sections, and provenance.

    `kind` is the kind of result in a word or two. `facts` and `versions` describe how it was made; terminals show
    neither versions nor the command. `front_matter` is the YAML header of a model card.
    """

    kind: str
    title: str
    subtitle: str = ""
    verdict: Verdict | None = None
    summary: str = ""
    tiles: tuple[Tile, ...] = ()
    warnings: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    front_matter: Mapping[str, object] = field(default_factory=dict)


def section(
    title: str,
    *blocks: Block | None,
    outcome: Outcome | None = None,
    only: Literal["page", "terminal"] | None = None,
) -> Section | None:
    """A section of the non-empty blocks; None if the first block is empty and only texts are left."""
    kept = tuple(block for block in blocks if block is not None and _is_filled(block))
    is_bare = all(isinstance(block, str) for block in kept)
    if not kept or (is_bare and blocks[0] is not kept[0]):
        return None
    return Section(title=title, blocks=kept, outcome=outcome, only=only)


def sections_of(*candidates: Section | None) -> tuple[Section, ...]:
    """The candidates that are not None."""
    return tuple(s for s in candidates if s is not None)


def _is_filled(block: Block) -> bool:
    name = {Table: "rows", Checks: "checks", Code: "lines"}.get(type(block))
    return bool(getattr(block, name) if name else block)


def gates_section(gates: Sequence[GateRecord]) -> Section | None:
    """Every gate with its value; None without gates."""
    failed = sum(not g.passed for g in gates)
    title = f"{failed} of {len(gates)} gates failed" if failed else "All gates passed"
    return section(title, Checks(checks=tuple(map(gate_check, gates))), outcome="failed" if failed else "passed")


def failed_gates(gates: Sequence[GateRecord]) -> tuple[str, ...]:
    """The failed gates, each with its value."""
    return tuple(f"gate {g.expression} failed, {gate_check(g).text}" for g in gates if not g.passed)


def gate_check(gate: GateRecord) -> Check:
    """A gate as a check, with the value that was compared."""
    text = "not measured" if gate.value is None else f"the value is {number_text(gate.value)}"
    if gate.detectable is not None:
        only = "a" if gate.passed else "only a"
        text += f"; {only} difference above {number_text(gate.detectable)} would have been seen"
    return Check(name=f"gate {gate.expression}", outcome="passed" if gate.passed else "failed", text=text)
