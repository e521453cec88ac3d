"""Several runs of one kind described side by side, and the names that tell them apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from lpconv.report.charts import Chart
from lpconv.report.document import Bullets, Document, Section, Table, chart_sections, sections_of
from lpconv.report.numbers import MISSING, plural


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the comparison: a label and its value in each run."""

    label: str
    values: tuple[str, ...]


def run_names(outputs: Sequence[str]) -> tuple[str, ...]:
    """A short name for each run: its output's last path component, numbered where two share it."""
    names = [PurePath(output).name or output for output in outputs]
    return tuple(f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, start=1))


def figures_of(runs: Sequence[Mapping[str, str]]) -> tuple[Figure, ...]:
    """The figures of all runs by their labels, in the order of the first. Rows that no run has are left out."""
    labels = dict.fromkeys(label for run in runs for label in run)
    rows = (Figure(label=label, values=tuple(run.get(label, MISSING) for run in runs)) for label in labels)
    return tuple(row for row in rows if set(row.values) != {MISSING})


def compare_document(
    names: Sequence[str],
    figures: Sequence[Mapping[str, str]],
    words: Sequence[str],
    *,
    charts: Sequence[Chart | None] = (),
    table: Section | None = None,
) -> Document:
    """Runs by their names: the first charts, the figures of each, the other charts, a table, and each run in words.

    Rows of figures stand in the order of the first run; those that no run has are left out.
    """
    drawn = [chart for chart in charts if chart is not None]
    top = 1 if drawn and drawn[0].is_wide else 2
    labels = dict.fromkeys(label for run in figures for label in run)
    rows = [(label, *(run.get(label, MISSING) for run in figures)) for label in labels]
    compared = Table(
        columns=("Figure", *names), rows=tuple(row for row in rows if set(row[1:]) != {MISSING}), compares=True
    )
    summaries = Bullets(lines=tuple(f"{name}: {said}" for name, said in zip(names, words, strict=True)))
    return Document(
        kind="comparison",
        title=f"{plural(len(names), 'run')} compared",
        subtitle=", ".join(names),
        sections=(
            *chart_sections(*drawn[:top]),
            *sections_of(Section(title="Figures", blocks=(compared,))),
            *chart_sections(*drawn[top:]),
            *sections_of(
                table,
                Section(title="The runs in words", blocks=(summaries,), only="page"),
            ),
        ),
    )
