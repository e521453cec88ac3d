"""Candidates for advice: every conversion in the tables of methods and formats; judging, ranking and choosing rows."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from lpconv.advise.options import Budget
from lpconv.errors import UsageError
from lpconv.formats.grains import GRAINS, Grain, get_grain
from lpconv.formats.spec import CODED, FORMATS, INTEGERS, Format
from lpconv.layouts import SCHEMES
from lpconv.methods import LPCONV, METHODS, Method
from lpconv.options import make
from lpconv.plan.options import GPTAQ, ConvertOptions, parse_rule
from lpconv.plan.settings import fill_options
from lpconv.results import AdviceRow

Settings = dict[str, Any]  # settings of a conversion, as in a manifest job
_GRANULARITIES = (*GRAINS, "group:128", "group:32")  # group sizes for which runtimes have kernels
_NOT_TRIED = {*INTEGERS} - {"int4", "int8"}  # measuring each width takes time
_CODED_BITS = (2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0)  # per number, of entropy-coded integers
_WORDS = {"row": "rows", "mx": "MX", "nvfp4": "NVFP4"}
_ORDER = ("measured", "unmeasured", "pruned", "failed")


def convert_options(settings: Settings, **further: Any) -> ConvertOptions:
    """The options for the settings of a manifest job."""
    rules = tuple(map(parse_rule, settings.get("rules", ())))
    return make(ConvertOptions, settings | {"rules": rules} | further)


def conversions(runtime: str | None = None) -> dict[str, Settings]:
    """The conversions to try, by name: the schemes that a runtime opens, or all that store different bytes.

    Those of eight bits come first, as the most likely ones. Scales of four bits are searched, which costs no bytes.
    """
    chosen: list[Settings]
    if runtime is None:
        chosen = _all_conversions()
    else:  # schemes with calibrated input scales store the same weights as others; mxfp4 is for gpt-oss alone
        opened = {n: s for n, s in SCHEMES.items() if s.is_opened_by(runtime)}
        chosen = [{"scheme": n} for n, s in opened.items() if not s.calibrated and s.layout != "mxfp4"]
    likely_first = sorted(chosen, key=lambda s: abs(s.get("budget_bits", number_of(s).storage_bits) - 8))
    better = (s if number_of(s).storage_bits > 4 else with_search(s) for s in likely_first)
    return {describe_conversion(settings): settings for settings in better}


def _all_conversions() -> list[Settings]:
    """One per method, format, granularity and residual that stores different bytes; rows before whole tensors."""
    candidates: dict[tuple[Any, ...], Settings] = {}
    for method in METHODS.values():
        for settings in (s for s in _settings(method) if s["format"] not in _NOT_TRIED):
            kind = method.form(LPCONV)
            same_bytes = (kind, *(v for k, v in settings.items() if k != "method"))
            candidates.setdefault(same_bytes, settings)
    return [*candidates.values(), *map(coded, _CODED_BITS)]


def coded(bits: float) -> Settings:
    """The conversion to entropy-coded integers with so many bits per weight."""
    return {"method": "unit", "budget_bits": bits}


def number_of(settings: Settings) -> Format:
    """The format of a conversion's numbers."""
    return FORMATS[SCHEMES[settings["scheme"]].format if "scheme" in settings else settings.get("format", CODED.name)]


def with_search(settings: Settings) -> Settings:
    """The same conversion with searched scales, if it can have them."""
    searched = settings | {"scale": "search"}
    return searched if _is_possible(searched) else settings


def with_feedback(settings: Settings, text: str) -> Settings | None:
    """The same conversion with error feedback on `text`, and searched scales if it can have them; None if it cannot."""
    asked = with_search(settings | {"rounding": GPTAQ, "calibrate": text})
    return asked if _is_possible(asked) else None


def _is_possible(settings: Settings) -> bool:
    try:
        fill_options(convert_options(settings))
    except UsageError:
        return False
    return True


def _settings(method: Method) -> Iterator[Settings]:
    if method.has_granularity:
        for granularity in _GRANULARITIES:
            grain = get_grain(granularity)
            assert grain is not None
            for fmt in _formats_with(method, grain):
                layout = _layout_for(method, fmt, grain)
                written = {} if layout == LPCONV else {"layout": layout}
                yield {"method": method.name, "format": fmt, "granularity": granularity} | written
    for fmt in method.formats:
        settings: Settings = {"method": method.name, "format": fmt}
        if method.residuals:
            own = [r for r in method.residuals if fmt == method.default_format] or [fmt]
            yield from (settings | {"residual": residual} for residual in own)
        elif method.has_budget:
            bits = method.format(fmt).storage_bits
            yield from (settings | {"budget_bits": bits + spare} for spare in (0.5, bits / 2))
        else:
            yield settings


def _formats_with(method: Method, grain: Grain) -> tuple[str, ...]:
    """The formats for which a granularity is useful. In 16 bits and more, blocks gain nothing over rows."""
    if grain.formats or not grain.tile[1]:
        return grain.formats or method.formats
    return tuple(f for f in method.formats if method.format(f).storage_bits <= 8)


def _layout_for(method: Method, fmt: str, grain: Grain) -> str:
    """The first layout that supports a format with a granularity: lpconv's own, except for NVFP4."""
    return next(name for name in method.layouts if method.form(name).holds(method.format(fmt, grain), grain))


def describe_conversion(settings: Settings) -> str:
    """A short description of a conversion without commas: "unit e4m3fn rows"."""
    words = str(settings.get("scheme") or f"{settings['method']} {settings.get('format', 'coded')}")
    if "residual" in settings and settings["residual"] != settings["format"]:
        words += f" + {settings['residual']}"
    if "budget_bits" in settings:
        words += f" {settings['budget_bits']:g} bits"
    if "granularity" in settings:
        words += f" {_WORDS.get(settings['granularity'], settings['granularity'].replace('group:', 'groups of '))}"
    words += " by part" if settings.get("rules") else ""
    further = [settings["rounding"]] if "rounding" in settings else []
    further += ["scale search"] if settings.get("scale") == "search" else []
    return f"{words} with {' and '.join(further)}" if further else words


def judge_row(row: AdviceRow, budget: Budget) -> AdviceRow:
    """The row with `meets` set: whether it is within the budget."""
    if row.status != "measured" or row.gap is None:
        return replace(row, meets=None)
    fits = row.memory_bytes is None or budget.memory_bytes is None or row.memory_bytes <= budget.memory_bytes
    return replace(row, meets=row.gap.high <= budget.quality and fits)


def rank_rows(rows: Iterable[AdviceRow]) -> tuple[AdviceRow, ...]:
    """Rows best first, inference before training: those within the budget by cost, others by gap."""
    rows = tuple(rows)
    has_parts = any("rules" in r.settings for r in rows)  # all of one size; gaps have more noise than divergences
    return tuple(sorted(rows, key=lambda r: (r.purpose, r.figures.get("kl", 9e9) if has_parts else 0.0, *_place(r))))


def _place(row: AdviceRow) -> tuple[object, ...]:
    status = _ORDER.index(row.status)
    gap = row.gap.high if row.gap is not None else math.inf
    value = abs(row.gap.value) if row.gap is not None else math.inf
    return row.purpose != "infer", status, not row.meets, _ranking_cost(row) if row.meets or status else 0.0, gap, value


def _ranking_cost(row: AdviceRow) -> float:
    """Cost used for ranking: bytes on disk, or bytes of memory in a step.

    It is rounded to two digits, so that noise does not decide.
    """
    taken = row.size_bytes if row.purpose == "infer" else row.memory_bytes
    return math.inf if not taken else float(f"{taken:.1e}")


def best(rows: Iterable[AdviceRow], purpose: str) -> AdviceRow | None:
    """The best row for a purpose within the budget, or None; with `--bits`, the row with bits for each part."""
    ranked = [r for r in rank_rows(rows) if r.purpose == purpose]
    mixed = (r for r in ranked if "rules" in r.settings and r.gap is not None)
    return next(chain(mixed, (r for r in ranked if r.meets)), None)
