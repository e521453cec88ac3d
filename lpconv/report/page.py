"""What all HTML pages share: templates with their filters, headline figures, and the pages of several runs."""

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jinja2
from markupsafe import Markup

from lpconv.report.compare import Figure
from lpconv.report.numbers import (
    MISSING,
    count_text,
    error_text,
    number_text,
    raised,
    scale_text,
    shape_text,
    share_text,
    size_text,
    sqnr_text,
)
from lpconv.report.plot import Plot
from lpconv.report.printable import printable, printable_record

_HEADING = re.compile("<h2>(.*?)</h2>", re.DOTALL)
_LONG = 5  # headings that make a page long

# A headline figure: its label, the figure, and a detail below it.
Tile: TypeAlias = tuple[str, str, str]


def page(template: str, **values: Any) -> str:
    """The page that a template of this package makes of the values."""
    return _with_contents(_environment().get_template(f"{template}.html.j2").render(values))


def _with_contents(html: str) -> str:
    """The page with a list of its headings below its header, where there are many.

    All text in a page is escaped, so that only a template writes a heading.
    """
    titles = _HEADING.findall(html)
    if len(titles) < _LONG:
        return html
    items = "".join(f'<li><a href="#part-{i}">{title}</a></li>' for i, title in enumerate(titles))
    numbers = itertools.count()
    html = _HEADING.sub(lambda found: f'<h2 id="part-{next(numbers)}">{found[1]}</h2>', html)
    return html.replace("</header>", f'</header>\n<nav aria-label="Contents"><ul>{items}</ul></nav>', 1)


def _shown(value: Any) -> Any:
    """What a template prints for a value: powers of two raised, per cents in one piece, a dash for nothing."""
    if value is None or value in ((), []):
        return MISSING
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return raised(value).replace(" %", "\N{NO-BREAK SPACE}%")


def html_runs(
    names: Sequence[str],
    figures: Sequence[Figure],
    plots: Sequence[Plot | None],
    summaries: Sequence[str],
    rows: Sequence[Any] = (),
) -> str:
    """The page of several runs: a wide plot or two narrow ones, the figures, the other plots, and each run in words.

    `rows` are tensors by name, with a record of each run.
    """
    drawn = [p for p in plots if p is not None]
    top = 1 if drawn and drawn[0].is_wide else 2
    return page(
        "compare",
        names=names,
        version=None,
        figures=figures,
        first=drawn[:top],
        plots=drawn[top:],
        rows=rows,
        summaries=list(zip(names, summaries, strict=True)),
    )


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run of a folder, written at a local time. `link` is the way from the index to its page, None without one."""

    name: str
    kind: str
    what: str
    found: str
    written: str
    link: str | None


def html_index(folder: str, entries: Sequence[RunEntry], compared: Mapping[str, str]) -> str:
    """The page of a folder. `compared` holds the ways to the pages that compare all runs of a kind."""
    runs = [printable_record(e) for e in entries]
    kinds = {kind: [e for e in runs if e.kind == kind] for kind in dict.fromkeys(e.kind for e in runs)}
    return page("index", folder=printable(folder), version=None, kinds=kinds, compared=compared)


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates of this package with the filters they use; all text is escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("lpconv.report"),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "breakable": breakable,
        "count": count_text,
        "error": error_text,
        "number": number_text,
        "percent": lambda share: share_text(share, 1),
        "scale": scale_text,
        "shape": shape_text,
        "size": size_text,
        "sortable": _sortable,
        "sqnr": sqnr_text,
    }
    return made


def _sortable(value: float | None) -> str:
    """A number as JavaScript reads it; empty where there is none."""
    if value is None or math.isnan(value):
        return ""
    return repr(value) if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def breakable(name: str) -> Markup:
    """A dotted name that may wrap after its dots."""
    return Markup(".<wbr>").join(name.split("."))
