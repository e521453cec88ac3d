"""Text for numbers, lists, formats and roles.

A missing number is a dash, an infinite SQNR is "exact", sizes are decimal (1 MB = 10^6 B).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lpconv.formats.spec import CODED

if TYPE_CHECKING:  # the command line formats sizes before it loads any record
    from lpconv.results import RatioRecord


MISSING = "–"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# Roles of a tensor in a layer, in the order of a training step.
ROLE_WORDS = {
    "weight": "weight",
    "input": "input",
    "output": "output",
    "grad_output": "output gradient",
    "grad_input": "input gradient",
    "weight_grad": "weight gradient",
}

# SQNR in dB of weights between a normal and a Laplace distribution: of floats with any scales, of e2m1 with one per 16
# to 128 elements. `tests/report/test_numbers.py` draws and rounds such weights.
_USUAL_DB = {
    "fp16": (73, 75), "bf16": (55, 57), "e5m2": (25, 27), "e4m3fn": (31, 32), "e2m1": (17, 21),
}  # fmt: skip
# The same for integers is that of steps of equal size, 10.8 dB + 20 log10(largest code), less the crest factor of what
# shares a scale: the largest magnitude over the root mean square, in dB. MiniLM and SmolLM2 lie in these bounds, but
# for rows of MiniLM with outliers.
_CREST_DB = {r"\d (of a row|elements)$": ("in groups", 12, 6), r"(per|for a) row$": ("by row", 15, 10.5)}
# Upper limits of a KL divergence in nats, and their meanings. In `benchmarks/quality/results/granularity.json`, SmolLM2
# keeps 98 % of its top predictions at 0.001, 95 % at 0.008, 91 % at 0.03, 69 % at 0.33 and 57 % at 0.67.
KEPT_KL = 0.01
_KL_WORDS = (
    (0.0, "none"), (0.002, "not visible"), (KEPT_KL, "hardly visible"), (0.05, "slightly visible"), (0.2, "visible"),
    (1.0, "large"), (math.inf, "another model"),
)  # fmt: skip
# Most names in a list before "and N more".
_NAMES = 3


def ratio_text(ratio: "RatioRecord | None") -> str:
    """A ratio with its interval: 1.23 [1.20, 1.26]."""
    return MISSING if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def size_text(size_bytes: float | None) -> str:
    """Bytes with three significant digits: 0 B, 45.5 MB, 1.34 GB."""
    if size_bytes is None:
        return MISSING
    value, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    # With three digits 999.5 would print as 1000, so it belongs to the next unit.
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    if units[0] == "B" or value >= 999.5:
        return f"{value:.0f} {units[0]}"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {units[0]}"


def change_text(before: int, after: int) -> str:
    """Change of size from `before` to `after`: 2.00x smaller, same size, 1.50x larger."""
    if before <= 0 or after <= 0:
        return MISSING
    smaller, larger = f"{before / after:.2f}", f"{after / before:.2f}"
    if smaller == "1.00" or larger == "1.00":
        return "same size"
    return f"{smaller}x smaller" if before > after else f"{larger}x larger"


def rate_text(size_bytes: float, seconds: float | None) -> str:
    """Bytes per second: 37.9 MB/s, 1.34 GB/s."""
    return f"{size_text(size_bytes / seconds)}/s" if seconds else MISSING


def duration_text(seconds: float | None) -> str:
    """A duration: 640 ms, 3.2 s, 4 min 05 s, 2 h 13 min."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count_text(count: int | None) -> str:
    """A whole number with thousands separated: 22,713,216."""
    return MISSING if count is None else f"{count:,}"


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 tensor, 38 tensors."""
    return f"{count_text(count)} {noun}" if count == 1 else f"{count_text(count)} {noun}s"


def share_text(part: float | None, whole: float) -> str:
    """`part` of `whole` in per cent; a nonzero share never prints as 0 % and an incomplete one never as 100 %."""
    if part is None:
        return MISSING
    if whole <= 0 or part <= 0:
        return "0 %"
    percent = 100 * part / whole
    if percent < 0.01:
        return "< 0.01 %"
    if part < whole and percent > 99.99:
        return "> 99.99 %"
    is_whole = part == whole or percent >= 999.5  # %g would print exponents
    return f"{percent:.0f} %" if is_whole else f"{percent:.{3 if percent >= 1 else 2}g} %"


def sqnr_text(decibels: float | None, unit: str = "") -> str:
    """An SQNR in dB: 73.6, "exact" if infinite, a dash if NaN (no signal)."""
    if decibels is None or math.isnan(decibels):
        return MISSING
    if math.isinf(decibels) and decibels > 0:
        return "exact"
    return f"{decibels:.1f}{unit}"


def usual_sqnr(form: str) -> str:
    """The usual SQNR of a form by its words: " (int8 by row usually has 38 to 42)"; empty if unknown."""
    name, _, scales = form.partition(" ")
    if name in _USUAL_DB and " residual" not in scales:
        return " ({} usually has {} to {})".format(name, *_USUAL_DB[name])
    grain = next((words for pattern, words in _CREST_DB.items() if re.search(pattern, scales)), None)
    if grain is None or (found := re.fullmatch(r"int(\d)", name)) is None:
        return ""
    by_steps = 10.8 + 20 * math.log10(2 ** (int(found[1]) - 1) - 1)
    least = (1, min(6 * int(found[1]) - 3, 21))  # scales of least error gain most at few bits
    low, high = (max(by_steps - crest, least) for crest, least in zip(grain[1:], least, strict=True))
    return f" ({name} {grain[0]} usually has {low:.0f} to {high:.0f})"


def kl_words(kl: float) -> str:
    """What a KL divergence in nats means for the text that a model writes: "hardly visible"."""
    return next((words for limit, words in _KL_WORDS if kl <= limit), "not a number")


def kl_text(kl: float) -> str:
    """A KL divergence with its meaning: "0.0052 nats (hardly visible)"."""
    return f"{kl:.2g} nats ({kl_words(kl)})"


def error_text(error: float | None) -> str:
    """An error as text: 0, 4.9e-04, 0.125."""
    if error is None:
        return MISSING
    return f"{error:.3g}" if error == 0 or error >= 0.01 else f"{error:.1e}"


def number_text(value: float | None, digits: int = 3) -> str:
    """A number with three significant digits, or a dash if it is None or NaN."""
    return MISSING if value is None or math.isnan(value) else f"{value:.{digits}g}"


def unit_text(value: float, units: Mapping[str, float]) -> str:
    """A number in the first of the `units`, largest first, in which it is not below 1: 19.2 ms, 1.2 TFLOP/s."""
    unit = next((unit for unit, size in units.items() if value / size >= 0.9995), list(units)[-1])
    return f"{number_text(value / units[unit])} {unit}"


def scale_text(scale: float | None) -> str:
    """A scale: powers of two as 2^-5, other values with five digits."""
    if scale is None:
        return MISSING
    if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:.5g}"


def power_text(log2: int) -> str:
    """A power of two by its exponent: 1, 2^7, 2^-3."""
    return "1" if log2 == 0 else f"2^{log2}"


def raise_exponents(text: str) -> str:
    """Text with the exponents of powers of two (2^-7) as superscripts."""
    return re.sub(r"(?<=2)\^(-?\d+)", lambda found: found[1].translate(_RAISED), text)


def format_text(name: str) -> str:
    """A number format as reports name it; entropy-coded integers by what they are, because they take fewer bits."""
    return "coded integers" if name == CODED.name else name


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as text: 384 x 1536; "scalar" for 0-d."""
    return " x ".join(map(str, shape)) or "scalar"


def name_list(items: Sequence[str]) -> str:
    """The first names of a list, and the number of remaining ones: "a, b, c and 4 more"."""
    first = ", ".join(items[:_NAMES])
    return f"{first} and {len(items) - _NAMES} more" if len(items) > _NAMES else first


def code_list(names: Iterable[str]) -> str:
    """As `name_list`, with names as code: "`a`, `b`, `c` and 4 more"."""
    return name_list([f"`{n}`" for n in names])
