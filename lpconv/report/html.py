"""Render a document as one self-contained HTML page for browsers, printing and screen readers.

jinja2 escapes all text; all markup, style and script is in the template.
"""

import functools
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup

from lpconv.report.charts import Chart
from lpconv.report.document import Block, Document, Section
from lpconv.report.drawing import HEAT_SCALE, Drawing, HeatDrawing, depth_of, figure_of, legend_path
from lpconv.report.numbers import MISSING, raise_exponents
from lpconv.report.printable import printable_record

_LONG = 5  # number of sections from which a page gets a table of contents


def html(document: Document) -> str:
    """Render a document as an HTML page."""
    shown = printable_record(document)
    sections = [s for s in shown.sections if s.only != "terminal"]
    # Without a title, each chart of a section gets a heading.
    titles = [t.title for s in sections for t in ((s,) if s.title else s.blocks) if isinstance(t, (Section, Chart))]
    contents = titles if len(titles) >= _LONG else ()
    return _template().render(document=shown, sections=sections, contents=contents).lstrip()


def _runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks one by one, with consecutive charts grouped."""
    groups = groupby(blocks, key=lambda block: Chart if isinstance(block, Chart) else id(block))
    return [list(run) for _, run in groups]


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lpconv.report"),
        autoescape=True,
        finalize=_format_value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "sortable": _sortable,
        "runs": _runs,
        "kind": lambda block: type(block).__name__,
    }
    environment.globals |= {
        "drawing": Drawing,
        "heat_drawing": HeatDrawing,
        "heat_scale": HEAT_SCALE,
        "depth_of": depth_of,
        "figure_of": figure_of,
        "legend_path": legend_path,
        "made_by": _made_by,
    }
    return environment.get_template("document.html.j2")


def _made_by(document: Document) -> dict[str, str]:
    """The facts, and the version of every package."""
    return {**document.facts, **{f"Version of {name}": text for name, text in sorted(document.versions.items())}}


def _format_value(value: Any) -> Any:
    """A value as the template prints it: superscript powers of two, unbreakable per cents, a dash for nothing."""
    if value is None or value in ((), []):
        return MISSING
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    value = raise_exponents(value) if "^" in value else value  # a quick check first, since cells are many
    return value.replace(" %", "\N{NO-BREAK SPACE}%")


def _sortable(value: float) -> str:
    """A number in JavaScript's syntax; empty for NaN."""
    if math.isnan(value):
        return ""
    return repr(value) if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _breakable(name: str) -> Markup:
    """A dotted name that may wrap after its dots."""
    return Markup(".<wbr>").join(name.split("."))
