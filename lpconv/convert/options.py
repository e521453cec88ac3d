"""What the user asked for, checked. Plain Python; nothing here reads a file."""

import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from lpconv.checkpoint.compressed import COMPRESSED_TENSORS
from lpconv.errors import UsageError
from lpconv.formats.grains import GRAINS, TENSOR, Grain, grain_of
from lpconv.formats.spec import FORMATS, Format, get_format
from lpconv.lookup import find, nearest_name
from lpconv.mcf.point_layout import MAX_POINTS
from lpconv.methods import LPCONV, METHODS, TRANSFORMERS, Method
from lpconv.options import Force, Option, Resume, Revision, TrustRemoteCode, check, size_option

__all__ = [
    "LAYOUTS",
    "VERIFY_LEVELS",
    "ConvertOptions",
    "ConvertSettings",
    "FormatRule",
    "PointBudget",
    "VerifyOptions",
    "check_matches",
    "command_line",
    "matches",
    "parse_rule",
    "settings_of",
]

LAYOUTS = (LPCONV, COMPRESSED_TENSORS, TRANSFORMERS)
_LAYOUT_HINTS = {
    LPCONV: f"use --layout {COMPRESSED_TENSORS}",
    COMPRESSED_TENSORS: "use --method unit with --format e4m3fn, or --granularity mx, nvfp4 or group:N",
    TRANSFORMERS: "use --method unit with --format e4m3fn and --granularity 128x128 or mx",
}
VERIFY_LEVELS = ("none", "weights", "logits", "auto")
_POINTS_MAX = 3
_RESIDUALS = (*dict.fromkeys(r for m in METHODS.values() for r in m.residuals), "fp16")
_METHOD_FORMATS = [f for f in FORMATS if any(f in m.formats for m in METHODS.values())]
_SPARE_BITS = 0.5  # the default budget above the bits of an element: scales, and second points for some rows


# Options by the panel of the help that they stand in.
_WHAT, _HOW = "What to write", "How to run"
_what = functools.partial(Option, panel=_WHAT)
_check = functools.partial(Option, panel="Checks")


@dataclass(frozen=True, kw_only=True)
class FormatRule:
    """Tensors whose name matches `pattern` take `format`, or keep their own where it is ``keep``."""

    pattern: str
    format: str


def parse_rule(text: str) -> FormatRule:
    """``PATTERN=FORMAT`` as a rule; FORMAT may be ``keep``. The last ``=`` separates."""
    pattern, separator, name = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"rule `{text}` is not PATTERN=FORMAT", hint="for example --rule 'lm_head*=keep'")
    if name != "keep":
        get_format(name)
    return FormatRule(pattern=pattern, format=name)


def _gate(text: str) -> str:
    from lpconv.gates import CONVERT_GATES  # with the records of all results, which `--help` does without

    return CONVERT_GATES.parse(text).expression


def _granularity(name: str) -> str:
    grain_of(name)
    return name


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Settings of one conversion, as asked. `settings_of` decides what is None.

    Patterns are globs on dotted tensor names, or regular expressions after ``re:`` (matched anywhere in the name).
    Only `method`, `format`, `residual`, `layout`, `scale`, `granularity`, `budget_bits`, `points_max`, `include`,
    `exclude`, `rules` and `max_shard_size` shape the bytes.
    """

    method: Annotated[str, _what("Method that rewrites the weights", choices=METHODS, short=("-m",))] = "unit"
    format: Annotated[
        str | None,
        _what(
            "Number format on disk",
            default="fp16, of collage bf16, of multipoint int4",
            choices=_METHOD_FORMATS,
            short=("-f", "--element"),
        ),
    ] = None
    residual: Annotated[
        str | None, _what("Form in which collage keeps the lost bits", default="bf16", choices=_RESIDUALS)
    ] = None
    layout: Annotated[
        str,
        _what(
            "Layout of the files; those of others open without lpconv",
            choices=LAYOUTS,
        ),
    ] = LPCONV
    scale: Annotated[
        str | None,
        _what("Scales as powers of two, or as they come", default="pow2, of integers exact", choices=("pow2", "exact")),
    ] = None
    granularity: Annotated[
        str,
        _what(
            f"What has a scale of its own, of unit and scalify: {TENSOR}, {', '.join(GRAINS)} or group:N",
            parse=_granularity,
            example="group:128",
        ),
    ] = TENSOR
    budget_bits: Annotated[
        float | None,
        _what(
            "Stored bits per element of multipoint, scales and counts included",
            default="half a bit above the format's",
            above=0,
            example="4.5",
        ),
    ] = None
    points_max: Annotated[
        int | None, _what("Largest number of points of a row of multipoint", default=str(_POINTS_MAX), least=1)
    ] = None
    include: Annotated[
        tuple[str, ...],
        _what("Pattern of the tensors to convert, a glob or re:EXPRESSION", default="all", metavar="PATTERN"),
    ] = ()
    exclude: Annotated[
        tuple[str, ...], _what("Pattern of tensors that are kept as they are", default="none", metavar="PATTERN")
    ] = ()
    rules: Annotated[
        tuple[FormatRule, ...],
        _what(
            "Format, or keep, for the tensors that match a pattern; the first match decides",
            flag="rule",
            metavar="PATTERN=FORMAT",
            parse=parse_rule,
        ),
    ] = ()
    max_shard_size: Annotated[
        int | None, size_option("Largest size of an output file, such as 5GB", default="as the source's", panel=_WHAT)
    ] = None
    verify: Annotated[
        str,
        _check(
            "Depth of the verification; auto runs both models where they are small",
            what="verification level",
            choices=VERIFY_LEVELS,
        ),
    ] = "auto"
    gates: Annotated[
        tuple[str, ...],
        _check(
            "Condition to publish, such as 'sqnr>=25'",
            flag="gate",
            metavar="CONDITION",
            parse=_gate,
        ),
    ] = ()
    revision: Revision = None
    max_memory: Annotated[
        int | None, size_option("Bound of the whole run, such as 4GB", default="what is free", panel=_HOW)
    ] = None
    cache: Annotated[bool, Option("Copy a remote checkpoint into a cache, and read that", panel=_HOW)] = False
    workers: Annotated[
        int | None, Option(panel=_HOW, help="Number of encoder threads", default="cores, at most 8", least=1)
    ] = None
    resume: Resume = False
    force: Force = False
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is checked of an output that is there."""

    against: Annotated[
        str | None, Option("Source that the output was made from", default="the one it names", metavar="MODEL")
    ] = None
    level: Annotated[
        str | None,
        Option(
            "Depth of the check: hashes, every element of the weights, or what both models compute; or `values`, which "
            "compares the weights of any two checkpoints, whatever layouts they are in",
            default="hash; with --against weights, and logits where the models are small; values of what is no output",
            choices=("hash", "weights", "logits", "values"),
        ),
    ] = None
    gates: Annotated[
        tuple[str, ...],
        Option(
            "Condition to pass, such as 'top1>=0.99'",
            flag="gate",
            metavar="CONDITION",
            parse=_gate,
        ),
    ] = ()
    data: Annotated[
        Path | None,
        Option(
            "Text file on which to compare what both models say of every token, read from their files layer by layer",
            metavar="FILE",
            parse=Path,
            is_path=True,
        ),
    ] = None
    seq_len: Annotated[
        int | None, Option("Number of tokens in a window of the text", default="128, or the model's most", least=2)
    ] = None
    max_tokens: Annotated[int, Option("Number of tokens of the text to read at most", least=1)] = 4096
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class PointBudget:
    """What the points of a matrix may take: `bits` stored per element, scales and counts included; `most` a row."""

    bits: float
    most: int


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """What a conversion does: `options` with everything decided that they may leave open.

    `options` have the names of what was decided filled in, so that records and locks can be made of them. `residual` is
    there for pairs only, `budget` for points only.
    """

    options: ConvertOptions
    method: Method
    format: Format
    residual: str | None
    budget: PointBudget | None


def settings_of(options: ConvertOptions) -> ConvertSettings:
    """What `options` come to with the method's defaults. Raises UsageError for what does not fit together."""
    method = find("method", options.method, METHODS)
    grain = _grain(options, method)
    fmt = method.format(options.format, grain)
    residual = _residual(method, fmt.name, options.residual)
    budget = _budget(method, fmt, options.budget_bits, options.points_max)
    check(options)
    for rule in options.rules:
        if rule.format != "keep":
            _check_rule(rule, method, grain)
        if method.form(LPCONV).holds_one_format and rule.format not in ("keep", fmt.name):
            raise UsageError(
                f"rule `{rule.pattern}={rule.format}`: a {method.name} checkpoint has one format, {fmt.name}",
                hint="use =keep, or another --format",
            )
    _check_layout(options, method, fmt.name, grain)
    for pattern in (*options.include, *options.exclude, *(r.pattern for r in options.rules)):
        _check_pattern(pattern)
    filled = dataclasses.replace(
        options,
        format=fmt.name,
        residual=residual,
        scale=options.scale or _usual_scale(fmt, grain),
        budget_bits=budget.bits if budget else None,
        points_max=budget.most if budget else None,
    )
    return ConvertSettings(options=filled, method=method, format=fmt, residual=residual, budget=budget)


def command_line(model: str, options: ConvertOptions) -> str:
    """The command that makes the same output: no folder, and nothing of how a run goes, such as --resume."""
    usual = _usual_scale(FORMATS[options.format], grain_of(options.granularity)) if options.format else None
    single = (
        ("method", options.method),
        ("format", options.format),
        ("residual", options.residual),
        ("layout", options.layout if options.layout != LPCONV else None),
        ("scale", options.scale if options.scale != usual else None),
        ("granularity", options.granularity if options.granularity != TENSOR else None),
        ("budget-bits", options.budget_bits),
        ("points-max", options.points_max),
        ("revision", options.revision),
        ("max-shard-size", options.max_shard_size),
        ("verify", options.verify if options.verify != "auto" else None),
    )
    repeated = (
        ("include", options.include),
        ("exclude", options.exclude),
        ("rule", tuple(f"{r.pattern}={r.format}" for r in options.rules)),
        ("gate", options.gates),
    )
    words = ["lpconv", "convert", model]
    for option, value in (*single, *((o, v) for o, values in repeated for v in values)):
        if value is not None:
            words += [f"--{option}", str(value)]
    return shlex.join([*words, *(["--trust-remote-code"] if options.trust_remote_code else [])])


def _residual(method: Method, format_name: str, residual: str | None) -> str | None:
    if not method.residuals:
        if residual is not None:
            raise UsageError(f"method `{method.name}` has no residual", hint="--residual belongs to collage")
        return None
    if format_name == "fp16":
        if residual not in (None, "fp16"):
            raise UsageError(f"residual `{residual}` needs format bf16", hint="leave --residual out with fp16")
        return "fp16"
    return find("residual", residual or method.residuals[0], {r: r for r in method.residuals})


def _usual_scale(fmt: Format, grain: Grain | None) -> str:
    """Powers of two, which keep products and casts exact; integers, whose codes are spread evenly, lose up to 6 dB by
    them."""
    return "exact" if grain is not None and fmt.twos_complement else "pow2"


def _grain(options: ConvertOptions, method: Method) -> Grain | None:
    """What has a scale of its own."""
    grain = grain_of(options.granularity)
    if grain is not None and not method.has_granularity:
        raise UsageError(f"method `{method.name}` has no {grain.words[2:]}", hint="use --method unit or scalify")
    if grain is not None and grain.scale_dtype == "U8" and options.scale == "exact":
        raise UsageError(f"scales of `{grain.name}` are powers of two", hint="leave --scale out")
    return grain


def _check_rule(rule: FormatRule, method: Method, grain: Grain | None) -> None:
    """Formats that a granularity is not for are stored with one scale each."""
    if grain is None or rule.format not in grain.formats:
        method.format(rule.format)


def _check_layout(options: ConvertOptions, method: Method, format_name: str, grain: Grain | None) -> None:
    hint = _LAYOUT_HINTS[options.layout]
    if options.layout not in method.forms or not method.form(options.layout).holds(FORMATS[format_name], grain):
        words = "" if grain is None else f" with {grain.words}"
        raise UsageError(f"layout `{options.layout}` does not hold {method.name} in {format_name}{words}", hint=hint)
    form = method.form(options.layout)
    for rule in options.rules if form.of_linears else ():
        if rule.format != "keep" and not form.holds(FORMATS[rule.format], grain):
            one = "e4m3fn" if form.holds(FORMATS["e4m3fn"], grain) else format_name
            raise UsageError(
                f"rule `{rule.pattern}={rule.format}`: layout `{options.layout}` does not hold that",
                hint="use =keep, " + " or ".join(f"={n}" for n in dict.fromkeys((format_name, one))),
            )


def _budget(method: Method, fmt: Format, budget_bits: float | None, points_max: int | None) -> PointBudget | None:
    if not method.has_budget:
        if budget_bits is not None or points_max is not None:
            raise UsageError(
                f"method `{method.name}` has no bit budget", hint="--budget-bits and --points-max belong to multipoint"
            )
        return None
    budget_bits = fmt.storage_bits + _SPARE_BITS if budget_bits is None else budget_bits
    points_max = _POINTS_MAX if points_max is None else points_max
    if not fmt.storage_bits < budget_bits < math.inf:
        raise UsageError(
            f"a budget of {budget_bits:g} bits does not pay for {fmt.name} codes and their scales",
            hint=f"use more than {fmt.storage_bits}, such as --budget-bits {fmt.storage_bits + _SPARE_BITS}",
        )
    if not 1 <= points_max <= MAX_POINTS:
        raise UsageError(f"{points_max} points a row at most is not possible", hint=f"use 1 to {MAX_POINTS}")
    return PointBudget(bits=budget_bits, most=points_max)


def _check_pattern(pattern: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as e:
        raise UsageError(f"pattern `{pattern}` is no regular expression: {e}", hint="escape dots as \\.") from e


def check_matches(pattern: str, names: Iterable[str], *, what: str = "tensor") -> None:
    """Raise UsageError, with the nearest name, unless a pattern matches one of `names`: a typo must not pass."""
    names = list(names)
    if any(matches(pattern, n) for n in names):
        return
    near = nearest_name(pattern.removeprefix("re:").strip("*.^$"), names)
    hint = f"did you mean `{near}`?" if near else "`lpconv inspect MODEL` lists the names"
    raise UsageError(f"pattern `{pattern}` matches no {what}", hint=hint)


def matches(pattern: str, name: str) -> bool:
    """Whether a tensor name fits a pattern: a glob over the whole name, or ``re:`` and an expression found anywhere."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)
