"""What all HTML pages share: the templates' environment with its filters, and headline figures."""

import functools
import math
from typing import Any, TypeAlias

import jinja2
from markupsafe import Markup

from lpconv.report.numbers import (
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

__all__ = ["Tile", "breakable", "page"]

# A headline figure: its label, the figure, and a detail below it.
Tile: TypeAlias = tuple[str, str, str]


def page(template: str, **values: Any) -> str:
    """The page that a template of this package makes of the values."""
    return _environment().get_template(f"{template}.html.j2").render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates of this package with the filters they use; all text is escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("lpconv.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "breakable": breakable,
        "count": count_text,
        "error": error_text,
        "lower_first": lambda text: text[:1].lower() + text[1:],
        "number": number_text,
        "percent": lambda share: share_text(share, 1),
        "power": raised,
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
