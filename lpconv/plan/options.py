"""Options of conversions, with their patterns of tensor names. Plain Python; reads no files."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from annotated_types import Ge, Gt

from lpconv.errors import UsageError
from lpconv.formats.grains import GRAINS, TENSOR, get_grain
from lpconv.formats.spec import FORMATS, INTEGERS, SPELLINGS, get_format, spellings
from lpconv.layouts import SCHEMES
from lpconv.layouts.compressed_config import DYNAMIC, NOT_ROUNDED, STATIC
from lpconv.lookup import nearest_name
from lpconv.methods import LPCONV, METHODS
from lpconv.options import AllowMissing, Force, Resume, Revision, TrustRemoteCode, gate_option, option, size_option

LAYOUTS = METHODS["unit"].layouts
VERIFY_LEVELS = ("none", "weights", "logits", "auto")
POINTS_MAX = 3
ROUNDINGS = NEAREST, GPTQ, GPTAQ = ("nearest", "gptq", "gptaq")
FEEDBACK_BITS = 8  # most bits of a format for which error feedback is worthwhile
CALIBRATION_TOKENS, GPTQ_TOKENS = 4096, 8192  # most tokens of the text that calibration uses
_RESIDUALS = (*dict.fromkeys(r for m in METHODS.values() for r in m.residuals), "fp16")
# Schemes that a format alone names. fp8 is FP8, in any case.
_SCHEME_SPELLINGS = spellings(
    {"e4m3fn": "FP8", "e2m1": "NVFP4A16", "fp16": "UNIT_FP16", "bf16": "COLLAGE"}
    | {name: f"W{FORMATS[name].bits}A16" for name in INTEGERS}
)
METHOD_FORMATS = [f for f in FORMATS if any(f in m.formats for m in METHODS.values())]


# Options by panel of the help; those with `panel=None` come first, in a panel that most people need.
_WHAT, _HOW = "What to write", "How to run"
_what = functools.partial(option, panel=_WHAT, shapes_output=True)
_check = functools.partial(option, panel="Checks")
_how = functools.partial(option, panel=_HOW, of_run=True)


def _granularity(name: str) -> str:
    get_grain(name.lower())
    return name.lower()


@dataclass(frozen=True, kw_only=True)
class FormatRule:
    """Tensors whose name matches `pattern` get `format`, or so many bits, or stay as they are if it is ``keep``."""

    pattern: str
    format: str

    def __str__(self) -> str:
        return f"{self.pattern}={self.format}"

    @property
    def bits(self) -> float | None:
        """Bits per number of entropy-coded integers, None for a format or ``keep``."""
        return float(self.format) if self.format[0].isdigit() else None


def parse_rule(text: str) -> FormatRule:
    """Parse ``PATTERN=FORMAT``; FORMAT may be ``keep`` or a number of bits. The last ``=`` separates."""
    pattern, separator, name = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"rule `{text}` is not PATTERN=FORMAT", hint="for example --rule 'lm_head*=keep'")
    is_plain = name.lower() == "keep" or re.fullmatch(r"\d+(\.\d+)?", name)
    return FormatRule(pattern=pattern, format=name.lower() if is_plain else get_format(name, METHOD_FORMATS).name)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Settings of one conversion as the user gave them. `fill_options` (`settings.py`) fills in None.

    Patterns are globs on dotted tensor names, or regular expressions after ``re:`` (matched anywhere in the name).
    """

    scheme: str | None = option(
        None,
        "One name for a layout, format, granularity and method, which their options replace (see --list-schemes)",
        default="none",
        choices=SCHEMES,
        spellings=_SCHEME_SPELLINGS,
        short=("-s",),
    )  # affects the output only through the options that it sets
    method: str | None = _what(None, "Method for rewriting the weights", default="unit", choices=METHODS, short=("-m",))
    format: str | None = _what(
        None,
        "Number format on disk; fp8 is e4m3fn, and fp4 is e2m1",
        default="fp16, but e4m3fn by row for a 16-bit checkpoint without other options; bf16 for collage, int4 for "
        "multipoint",
        choices=METHOD_FORMATS,
        spellings=SPELLINGS,
        short=("-f", "--element"),
        panel=None,
    )
    residual: str | None = _what(
        None,
        "Format of the rounding residual that collage keeps",
        default="bf16; fp16 for format fp16",
        choices=_RESIDUALS,
        spellings=SPELLINGS,
    )
    layout: str | None = _what(
        None, "On-disk layout; all but lpconv open without lpconv", default=LPCONV, choices=LAYOUTS
    )
    scale: str | None = _what(
        None,
        "Rounding of scales: pow2 (to powers of two), exact (none), or search (least squared error; up to 8 bits "
        "with --granularity)",
        default="pow2; exact for integers, search for NVFP4",
        choices=("pow2", "exact", "search"),
    )
    granularity: str | None = _what(
        None,
        f"Scale granularity, for unit and scalify: {TENSOR}, {', '.join(GRAINS)} or group:N",
        parse=_granularity,
        default="tensor; mx for e2m1; for integers the largest of group:128, :64 and :32 that divides all rows",
        example="group:128",
        panel=None,
    )
    rounding: str = _what(
        NEAREST,
        "How to round weights: each to nearest, or with error feedback, which preserves layer outputs on a "
        "calibration text (gptq), or the outputs that layers have in the source (gptaq); for codes of at most 8 "
        "bits and for --bits",
        choices=ROUNDINGS,
        panel=None,
    )
    calibrate: str | None = _what(
        None,
        "Calibration text, for --rounding gptq and gptaq, or otherwise for input scales of NVFP4 and "
        "e4m3fn with one scale: a file of text or rows, self for text that the model writes, or demo for the "
        "sample text",
        default="inputs are not quantised",
        panel=None,
        metavar="FILE",
        is_path=True,
    )
    calibration_tokens: int | None = _what(
        None,
        "Number of calibration tokens",
        Ge(1),
        default=f"{GPTQ_TOKENS} for --rounding gptq and gptaq, the first {CALIBRATION_TOKENS} for input scales",
    )
    calibration_seed: int | None = _what(
        None, "Seed for choosing windows of the calibration text, for --rounding gptq and gptaq", Ge(0), default="0"
    )
    input_scales: bool = _what(False, "With --rounding gptq, gptaq or --kv-cache, also store input scales")
    inputs: str | None = _what(
        None,
        "How readers round inputs: none, or dynamic, with scales of their own; for layout compressed-tensors",
        default="as usual for format and granularity; with --calibrate by the stored scales",
        choices=(NOT_ROUNDED, DYNAMIC),
    )
    kv_cache: str | None = _what(
        None,
        "Store scales for keys and values in fp8, for vLLM: 1, or measured on the text of --calibrate",
        default="none",
        choices=("fp8",),
        spellings=spellings({"e4m3fn": "fp8"}),
    )
    budget_bits: float | None = _what(
        None,
        "Stored bits per element with scales: for unit, entropy-coded integers in 1.5 to 12 bits, with one step per "
        "tensor, or per column if rounded with feedback; and for multipoint",
        Gt(0),
        default="for multipoint, half a bit more than the format; otherwise the format decides",
        example="4.5",
        flag="bits",
    )
    points_max: int | None = _what(
        None, "Largest number of points per row, for multipoint", Ge(1), default=str(POINTS_MAX)
    )
    include: tuple[str, ...] = _what(
        (), "Convert only tensors that match this glob or re:EXPRESSION", default="all", metavar="PATTERN"
    )
    exclude: tuple[str, ...] = _what(
        (), "Leave tensors that match this pattern unconverted", default="none", metavar="PATTERN", panel=None
    )
    rules: tuple[FormatRule, ...] = _what(
        (),
        "Format, or keep, or with --bits a number of bits, of the tensors that match a pattern; the first match "
        "decides",
        flag="rule",
        metavar="PATTERN=FORMAT",
        parse=parse_rule,
    )
    allow_mixed_groups: bool = option(
        False,
        "Allow several formats within q/k/v or gate/up, for readers that do not fuse them; vLLM and SGLang do",
        panel=_WHAT,
    )
    max_shard_size: int | None = option(
        None,
        size_option(
            "Largest size of an output file, such as 5GB", default="as in the source", panel=_WHAT, shapes_output=True
        ),
    )
    verify: str = _check(
        "auto",
        "What to verify; auto also opens both models with transformers and runs them, if they are small",
        what="verification level",
        choices=VERIFY_LEVELS,
    )
    gates: tuple[str, ...] = option((), gate_option("Publish only if this holds, such as 'sqnr>=25'", kind="convert"))
    revision: Revision = None
    allow_missing: AllowMissing = False
    max_memory: int | None = option(
        None, size_option("Memory limit, such as 4GB", default="the free memory", panel=_HOW, of_run=True)
    )
    cache: bool = _how(False, "Download a remote checkpoint into a local cache first")
    workers: int | None = _how(None, "Number of encoder threads", Ge(1), default="one per core, at most 8")
    resume: Resume = False
    force: Force = False
    trust_remote_code: TrustRemoteCode = False

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns of tensor names."""
        return (*self.include, *self.exclude, *(r.pattern for r in self.rules))

    def check_patterns(self) -> None:
        """Raise UsageError if a pattern after ``re:`` is not a valid regular expression."""
        for pattern in (p for p in self.patterns if p.startswith("re:")):
            try:
                re.compile(pattern[3:])
            except (re.error, OverflowError, RecursionError) as e:
                text = f"pattern `{pattern}` is not a valid regular expression: {e}"
                raise UsageError(text, hint="escape dots as \\.") from e

    def decides(self, name: str) -> bool:
        """Whether a pattern keeps a tensor unconverted or chooses its format."""
        chosen = (*self.exclude, *(r.pattern for r in self.rules))
        included = not self.include or any(matches(p, name) for p in self.include)
        return not included or any(matches(p, name) for p in chosen)

    @property
    def has_input_scales(self) -> bool:
        """Whether calibration also finds scales of inputs for the files."""
        is_for_inputs = self.rounding == NEAREST and self.kv_cache is None
        return self.calibrate is not None and (is_for_inputs or self.input_scales)

    @property
    def rounds_inputs(self) -> str | None:
        """How readers round inputs, None as usual."""
        return STATIC if self.has_input_scales else self.inputs

    @property
    def measures_cache(self) -> bool:
        """Whether calibration finds the scales of keys and values."""
        return self.calibrate is not None and self.kv_cache is not None


if TYPE_CHECKING:

    class FilledOptions(ConvertOptions):
        """What `fill_options` returns: the same record, in which these are never None."""

        method: str
        format: str
        layout: str
        granularity: str
        scale: str

else:
    FilledOptions = ConvertOptions


def check_matches(pattern: str, names: Iterable[str]) -> None:
    """Raise UsageError, with the nearest name, unless the pattern matches a tensor. Catches typos."""
    names = list(names)
    if any(matches(pattern, n) for n in names):
        return
    if matched := sum(matches(f"*{pattern}*", n) for n in names):
        raise UsageError(
            f"pattern `{pattern}` matches no whole name",
            hint=f"'*{pattern}*' matches {matched} tensor{'s' * (matched > 1)}",
        )
    near = nearest_name(pattern.removeprefix("re:").strip("*.^$"), names)
    hint = f"did you mean `{near}`?" if near else "`lpconv inspect MODEL --all` lists the names"
    if matches(pattern, "lm_head.weight"):
        hint = "the head may be tied to the embedding: --rule '*embed*=FORMAT' changes both"
    raise UsageError(f"pattern `{pattern}` matches no tensor", hint=hint)


def matches(pattern: str, name: str) -> bool:
    """Whether a tensor name matches a pattern: a glob over the whole name, or ``re:`` and an expression within it.

    Globs may leave out `.weight`.
    """
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)
