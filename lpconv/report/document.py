"""What a result tells its reader, as plain records without any layout.

The builders of this package, one file per kind of result, make a `Document` of a result record. The renderers
(`terminal`, `html` and `markdown`) lay out any document and know no kind. Texts may hold anything that a file held:
renderers make them printable.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from lpconv.report.charts import Chart, HeatMap
from lpconv.report.numbers import number_text
from lpconv.results import GateRecord

T = TypeVar("T")

# A good answer, a bad one, and one that proves nothing.
Outcome: TypeAlias = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer in a sentence. Its outcome decides the colour, so the text must say it too."""

    outcome: Outcome
    text: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A headline figure with its label and a detail."""

    label: str
    figure: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table with a number to sort by, the address that it links to, or an outcome that colours it."""

    text: str
    sort: float | None = None
    link: str | None = None
    outcome: Outcome | None = None


Row: TypeAlias = tuple[str | Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings. Columns hold numbers; the first one, and those whose heading begins with ``<``, hold text.

    A table that is `sortable` lists many things of one kind; with `filter`, an example of words to look for, a reader
    can hide rows. `has_names` means dotted names in the first column, `compares` that the rest of each row are values
    of different runs. A terminal shows the first `most` rows, if that is not None.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    has_names: bool = False
    sortable: bool = False
    filter: str = ""
    compares: bool = False
    most: int | None = None


def texts_of(table: Table) -> list[list[str]]:
    """The texts of a table's cells."""
    return [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Labels and values."""

    values: Mapping[str, str]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Bullets:
    """A list of sentences."""

    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One step of a verification, or one gate, with what it found."""

    name: str
    outcome: Outcome
    text: str


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Steps that passed, failed or were not run."""

    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Code:
    """Lines to copy: a command, or a program in `language`."""

    lines: tuple[str, ...]
    language: str = ""


@dataclass(frozen=True, kw_only=True)
class Prose:
    """Text of our own that is Markdown already, for documents that are only rendered as Markdown."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A table that a reader opens if its title interests them. A terminal shows the title only."""

    title: str
    table: Table


Block: TypeAlias = str | Table | Facts | Bullets | Checks | Code | Prose | Folded | Chart | HeatMap


@dataclass(frozen=True, kw_only=True)
class Section:
    """Blocks under a title; without one, each chart is a section of its own. An outcome colours the whole section.

    `only` restricts it to pages or terminals. Terminals show no charts.
    """

    title: str = ""
    blocks: tuple[Block, ...]
    outcome: Outcome | None = None
    only: Literal["page", "terminal"] | None = None


@dataclass(frozen=True, kw_only=True)
class Document:
    """A result as its reader meets it: the verdict first, then headline figures, sections, and how it was made.

    `kind` names the kind of result in a word or two. Facts and versions tell how it was made; terminals show no
    versions and no command. `front_matter` is the YAML header of a model card.
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

    def section(self, title: str) -> Section:
        """The section with this title; KeyError without one."""
        found = next((s for s in self.sections if s.title == title), None)
        if found is None:
            raise KeyError(title)
        return found

    def all_of(self, kind: type[T]) -> Iterator[T]:
        """Every block of a kind, in order."""
        return (block for section in self.sections for block in section.blocks if isinstance(block, kind))

    @property
    def charts(self) -> dict[str, Chart]:
        """The charts by their titles."""
        return {chart.title: chart for chart in self.all_of(Chart)}


def section(
    title: str,
    *blocks: Block | None,
    outcome: Outcome | None = None,
    only: Literal["page", "terminal"] | None = None,
) -> Section | None:
    """A section of those blocks that hold anything; None if the first one does not and only texts are left."""
    kept = tuple(block for block in blocks if block is not None and _is_filled(block))
    is_bare = all(isinstance(block, str) for block in kept)
    if not kept or (is_bare and blocks[0] is not kept[0]):
        return None
    return Section(title=title, blocks=kept, outcome=outcome, only=only)


def sections_of(*candidates: Section | None) -> tuple[Section, ...]:
    """The sections that there are."""
    return tuple(s for s in candidates if s is not None)


def _is_filled(block: Block) -> bool:
    if isinstance(block, Folded):
        return bool(block.table.rows)
    empty = {Table: "rows", Facts: "values", Bullets: "lines", Checks: "checks", Code: "lines"}
    name = empty.get(type(block))
    return bool(getattr(block, name) if name else block)


def gates_section(gates: Sequence[GateRecord]) -> Section | None:
    """Every gate with the value it met; None without gates."""
    failed = sum(not g.passed for g in gates)
    title = f"{failed} of {len(gates)} gates failed" if failed else "All gates passed"
    return section(title, Checks(checks=tuple(map(_gate_check, gates))), outcome="failed" if failed else "passed")


def failed_gates(gates: Sequence[GateRecord]) -> str:
    """Which gates failed; empty if none did."""
    return ", ".join(f"gate {g.expression} failed" for g in gates if not g.passed)


def _gate_check(gate: GateRecord) -> Check:
    met = "nothing" if gate.value is None else number_text(gate.value)
    return Check(name=f"gate {gate.expression}", outcome="passed" if gate.passed else "failed", text=f"met {met}")
