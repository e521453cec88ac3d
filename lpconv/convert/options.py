"""What the user asked for, checked. Plain Python; nothing here reads a file."""

import dataclasses
import math
import re
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lpconv.checkpoint.compressed import COMPRESSED_TENSORS
from lpconv.errors import UsageError
from lpconv.formats.spec import Format, get_format
from lpconv.lookup import find
from lpconv.mcf.point_layout import MAX_POINTS
from lpconv.methods import METHODS, Method

__all__ = [
    "LAYOUTS",
    "VERIFY_LEVELS",
    "ConvertOptions",
    "FormatRule",
    "command_line",
    "matches",
    "parse_rule",
    "parse_size",
    "with_defaults",
]

LAYOUTS = ("lpconv", COMPRESSED_TENSORS)
VERIFY_LEVELS = ("none", "weights", "logits", "auto")
_POINTS_MAX = 3
_SPARE_BITS = 0.5  # the default budget above the bits of an element: scales, and second points for some rows
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, kw_only=True)
class FormatRule:
    """Tensors whose name matches `pattern` take `format`, or keep their own where it is ``keep``."""

    pattern: str
    format: str


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Settings of one conversion. `with_defaults` fills in what is None.

    Patterns are globs on dotted tensor names, or regular expressions after ``re:`` (matched anywhere in the name).
    `max_memory` bounds the run in bytes, `max_shard_size` the payload of an output file (None: as the source's).
    `budget_bits` per element, scales and counts included, and at most `points_max` points a row belong to multipoint.
    Only `method`, `format`, `residual`, `layout`, `scale`, `budget_bits`, `points_max`, `include`, `exclude`, `rules`
    and `max_shard_size` shape the bytes.
    """

    method: str = "unit"
    format: str | None = None
    residual: str | None = None
    layout: str = "lpconv"
    scale: str = "pow2"
    budget_bits: float | None = None
    points_max: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rules: tuple[FormatRule, ...] = ()
    revision: str | None = None
    max_memory: int | None = None
    workers: int | None = None
    max_shard_size: int | None = None
    verify: str = "auto"
    gates: tuple[str, ...] = ()
    resume: bool = False
    force: bool = False
    trust_remote_code: bool = False


def with_defaults(options: ConvertOptions) -> tuple[ConvertOptions, Method]:
    """The options with the method's defaults filled in, and the method. Raises UsageError for what does not fit."""
    method = find("method", options.method, METHODS)
    fmt = method.format(options.format)
    residual = _residual(method, fmt.name, options.residual)
    budget_bits, points_max = _budget(method, fmt, options.budget_bits, options.points_max)
    if options.scale not in ("pow2", "exact"):
        raise UsageError(f"unknown scale `{options.scale}`", hint="use pow2 or exact")
    if options.verify not in VERIFY_LEVELS:
        raise UsageError(f"unknown verification level `{options.verify}`", hint="use " + ", ".join(VERIFY_LEVELS))
    if options.resume and options.force:
        raise UsageError("--resume and --force exclude each other", hint="resume continues a run, force starts anew")
    for rule in options.rules:
        if rule.format != "keep":
            method.format(rule.format)
        if method.encoder != "scaled" and rule.format not in ("keep", fmt.name):
            raise UsageError(
                f"rule `{rule.pattern}={rule.format}`: a {method.name} checkpoint has one format, {fmt.name}",
                hint="use =keep, or another --format",
            )
    _check_layout(options, method, fmt.name)
    for pattern in (*options.include, *options.exclude, *(r.pattern for r in options.rules)):
        _check_pattern(pattern)
    filled = dataclasses.replace(
        options, format=fmt.name, residual=residual, budget_bits=budget_bits, points_max=points_max
    )
    return filled, method


def command_line(model: str, options: ConvertOptions) -> str:
    """The command that makes the same output: no folder, and nothing of how a run goes, such as --resume."""
    single = (
        ("method", options.method),
        ("format", options.format),
        ("residual", options.residual),
        ("layout", options.layout if options.layout != "lpconv" else None),
        ("scale", options.scale if options.scale != "pow2" else None),
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


def _check_layout(options: ConvertOptions, method: Method, format_name: str) -> None:
    if options.layout not in LAYOUTS:
        raise UsageError(f"unknown layout `{options.layout}`", hint="use " + " or ".join(LAYOUTS))
    if options.layout != COMPRESSED_TENSORS:
        return
    if method.encoder != "scaled" or format_name != "e4m3fn":
        raise UsageError(
            f"layout `{options.layout}` holds e4m3fn codes with one scale, not {method.name} in {format_name}",
            hint="use --method unit --format e4m3fn",
        )
    for rule in options.rules:
        if rule.format not in ("keep", "e4m3fn"):
            raise UsageError(
                f"rule `{rule.pattern}={rule.format}`: layout `{options.layout}` holds e4m3fn codes only",
                hint="use =keep or =e4m3fn",
            )


def _budget(
    method: Method, fmt: Format, budget_bits: float | None, points_max: int | None
) -> tuple[float | None, int | None]:
    if method.encoder != "points":
        if budget_bits is not None or points_max is not None:
            raise UsageError(
                f"method `{method.name}` has no bit budget", hint="--budget-bits and --points-max belong to multipoint"
            )
        return None, None
    budget_bits = fmt.storage_bits + _SPARE_BITS if budget_bits is None else budget_bits
    points_max = _POINTS_MAX if points_max is None else points_max
    if not fmt.storage_bits < budget_bits < math.inf:
        raise UsageError(
            f"a budget of {budget_bits:g} bits does not pay for {fmt.name} codes and their scales",
            hint=f"use more than {fmt.storage_bits}, such as --budget-bits {fmt.storage_bits + _SPARE_BITS}",
        )
    if not 1 <= points_max <= MAX_POINTS:
        raise UsageError(f"{points_max} points a row at most is not possible", hint=f"use 1 to {MAX_POINTS}")
    return budget_bits, points_max


def _check_pattern(pattern: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as e:
        raise UsageError(f"pattern `{pattern}` is no regular expression: {e}", hint="escape dots as \\.") from e


def matches(pattern: str, name: str) -> bool:
    """Whether a tensor name fits a pattern: a glob over the whole name, or ``re:`` and an expression found anywhere."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


def parse_rule(text: str) -> FormatRule:
    """``PATTERN=FORMAT`` as a rule; FORMAT may be ``keep``. The last ``=`` separates."""
    pattern, separator, name = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"rule `{text}` is not PATTERN=FORMAT", hint="for example --rule 'lm_head*=keep'")
    if name != "keep":
        get_format(name)
    return FormatRule(pattern=pattern, format=name)


def parse_size(text: str) -> int:
    """``4GB``, ``512MiB`` or plain bytes as a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?\s*", text.upper())
    if not match or match[2] not in _UNITS:
        raise UsageError(f"size `{text}` is not a number of bytes", hint="for example 4GB, 512MiB or 1000000")
    size = float(match[1]) * _UNITS[match[2]]
    if not 1 <= size < math.inf:
        raise UsageError(f"size `{text}` is not a positive number of bytes", hint="for example 4GB")
    return int(size)
