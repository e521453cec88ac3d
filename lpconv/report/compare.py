"""Documents about several runs: a comparison of one kind, or an index of a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from lpconv.report.charts import Chart
from lpconv.report.document import Cell, Document, Row, Section, Table, Verdict, section, sections_of
from lpconv.report.numbers import MISSING, name_list, plural


def run_names(outputs: Sequence[str]) -> tuple[str, ...]:
    """A short name for each run: the last path component of its output, numbered if ambiguous."""
    names = [PurePath(output).name or output for output in outputs]
    return tuple(f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, start=1))


def compare_document(
    names: Sequence[str],
    figures: Sequence[Mapping[str, str]],
    verdicts: Sequence[Verdict],
    *,
    choice: str = "",
    charts: Sequence[Chart | None] = (),
    table: Section | None = None,
) -> Document:
    """A comparison of runs: the first charts, their figures, the other charts, a table, and the verdict on each run.

    The verdict gives the `choice` among the runs, and those that did not pass. Rows of figures are in the order of the
    first run; rows without any value are left out.
    """
    drawn = [chart for chart in charts if chart is not None]
    top = 1 if drawn and drawn[0].is_wide else 2
    labels = dict.fromkeys(label for run in figures for label in run)
    rows = [(label, *(run.get(label, MISSING) for run in figures)) for label in labels]
    compared = Table(
        columns=("Figure", *names), rows=tuple(row for row in rows if set(row[1:]) != {MISSING}), compares=True
    )
    named = list(zip(names, verdicts, strict=True))
    return Document(
        kind="comparison",
        title=f"{plural(len(names), 'run')} compared",
        subtitle=", ".join(names),
        verdict=_verdict(named, choice),
        sections=sections_of(
            section("", *drawn[:top]),
            section("Figures", compared),
            section("", *drawn[top:]),
            table,
            section("Summary of the runs", tuple(f"{n}: {v.text}" for n, v in named), only="page"),
        ),
    )


def _verdict(runs: Sequence[tuple[str, Verdict]], choice: str) -> Verdict:
    """Which run to choose or how many passed, which failed, and which prove nothing."""
    failed, unproven = ([n for n, v in runs if v.outcome == outcome] for outcome in ("failed", "not run"))
    parts = [choice or f"{len(runs) - len(failed) - len(unproven)} of {len(runs)} passed"]
    parts += [f"failed: {name_list(failed)}"] if failed else []
    parts += [f"proves nothing: {name_list(unproven)}"] if unproven else []
    return Verdict(outcome="failed" if failed else "not run" if unproven else "passed", text="; ".join(parts))


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run in a folder, with its local time of writing. `link` is the relative path of its page, or None."""

    name: str
    kind: str
    what: str
    found: str
    written: str
    link: str | None


def index_document(folder: str, entries: Sequence[RunEntry], compared: Mapping[str, str]) -> Document:
    """The runs of a folder by kind. `compared` maps kinds to links to their comparison pages."""
    kinds = {kind: [e for e in entries if e.kind == kind] for kind in dict.fromkeys(e.kind for e in entries)}
    return Document(
        kind="index",
        title=folder,
        subtitle="Runs of lpconv in this folder",
        sections=sections_of(*(_kind_section(kind, runs, compared.get(kind)) for kind, runs in kinds.items())),
    )


def _kind_section(kind: str, entries: Sequence[RunEntry], compared: str | None) -> Section | None:
    rows: list[Row] = [(Cell(text=e.name, link=e.link), e.what, e.found, e.written) for e in entries]
    if compared is not None:
        rows.insert(0, (Cell(text=f"All {len(entries)} side by side", link=compared), "", "", ""))
    return section(kind, Table(columns=("Run", "<What", "<Result", "<Written"), rows=tuple(rows)))
