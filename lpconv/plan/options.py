"""Options of conversions and verifications. Plain Python; nothing here reads a file."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt

from lpconv.errors import UsageError
from lpconv.formats.grains import GRAINS, TENSOR, get_grain
from lpconv.formats.spec import FORMATS
from lpconv.methods import LPCONV, METHODS
from lpconv.options import (
    AllowMissing,
    Force,
    Option,
    Resume,
    Revision,
    TrustRemoteCode,
    check,
    gate_option,
    size_option,
)
from lpconv.plan.patterns import FormatRule, parse_rule
from lpconv.plan.schemes import SCHEMES

LAYOUTS = tuple(dict.fromkeys(layout for m in METHODS.values() for layout in m.forms))
VERIFY_LEVELS = ("none", "weights", "logits", "auto")
POINTS_MAX = 3
ROUNDINGS = NEAREST, GPTQ = ("nearest", "gptq")
FEEDBACK_BITS = 8  # of a format, up to which rounding loses enough to be made up for
CALIBRATION_TOKENS, GPTQ_TOKENS = 4096, 8192  # most tokens of the text that calibration uses
_RESIDUALS = (*dict.fromkeys(r for m in METHODS.values() for r in m.residuals), "fp16")
_METHOD_FORMATS = [f for f in FORMATS if any(f in m.formats for m in METHODS.values())]


# Options by panel of the help; those with `panel=None` come first, in a panel that most people need.
_WHAT, _HOW = "What to write", "How to run"
_what = functools.partial(Option, panel=_WHAT, shapes_output=True)
_check = functools.partial(Option, panel="Checks")
_how = functools.partial(Option, panel=_HOW, of_run=True)


def _granularity(name: str) -> str:
    get_grain(name)
    return name


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Settings of one conversion as the user gave them. `fill_options` (`settings.py`) fills in None.

    Patterns are globs on dotted tensor names, or regular expressions after ``re:`` (matched anywhere in the name).
    """

    scheme: Annotated[
        str | None,
        Option(
            "Layout, format, granularity and method under one name (see --list-schemes)",
            default="the options below",
            choices=SCHEMES,
            short=("-s",),
        ),  # affects the output only through the options that it sets
    ] = None
    method: Annotated[str, _what("Method that rewrites the weights", choices=METHODS, short=("-m",), panel=None)] = (
        "unit"
    )
    format: Annotated[
        str | None,
        _what(
            "Number format on disk",
            default="fp16; bf16 for collage, int4 for multipoint",
            choices=_METHOD_FORMATS,
            short=("-f", "--element"),
            panel=None,
        ),
    ] = None
    residual: Annotated[
        str | None, _what("Form in which collage keeps lost bits", default="bf16, fp16 for fp16", choices=_RESIDUALS)
    ] = None
    layout: Annotated[str, _what("On-disk layout; all but lpconv open without lpconv", choices=LAYOUTS)] = LPCONV
    scale: Annotated[
        str | None,
        _what(
            "Scales rounded to powers of two, exact, or searched for the least squared error (4 and 8 bits with "
            "--granularity)",
            default="pow2; exact for integers, search for NVFP4",
            choices=("pow2", "exact", "search"),
        ),
    ] = None
    granularity: Annotated[
        str,
        _what(
            f"Scale granularity, for unit and scalify: {TENSOR}, {', '.join(GRAINS)} or group:N",
            parse=_granularity,
            example="group:128",
        ),
    ] = TENSOR
    rounding: Annotated[
        str,
        _what(
            "Rounding of each number to nearest, or with error feedback (gptq), which keeps the outputs of layers on a "
            "text; for codes of up to 8 bits",
            choices=ROUNDINGS,
        ),
    ] = NEAREST
    calibrate: Annotated[
        str | None,
        _what(
            "Text file to calibrate on: error feedback of --rounding gptq, or else scales of inputs for NVFP4 and "
            "e4m3fn with one scale; demo: the plays that ship with lpconv",
            default="inputs stay as they are",
            metavar="FILE",
            is_path=True,
        ),
    ] = None
    calibration_tokens: Annotated[
        int | None,
        Ge(1),
        _what(
            "Number of tokens of the text to calibrate on",
            default=f"{GPTQ_TOKENS} for --rounding gptq, the first {CALIBRATION_TOKENS} for scales of inputs",
        ),
    ] = None
    calibration_seed: Annotated[
        int | None,
        Ge(0),
        _what("Seed that chooses the windows of the text, for --rounding gptq", default="0"),
    ] = None
    input_scales: Annotated[
        bool, _what("With --rounding gptq, also store scales of inputs, as --calibrate does without it")
    ] = False
    budget_bits: Annotated[
        float | None,
        Gt(0),
        _what(
            "Stored bits per element, scales and counts included, for multipoint",
            default="half a bit above the format's",
            example="4.5",
        ),
    ] = None
    points_max: Annotated[
        int | None, Ge(1), _what("Largest number of points of a row, for multipoint", default=str(POINTS_MAX))
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
        int | None,
        size_option(
            "Largest size of an output file, such as 5GB", default="as the source's", panel=_WHAT, shapes_output=True
        ),
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
        gate_option("Publish only if this holds, such as 'sqnr>=25'", kind="convert"),
    ] = ()
    revision: Revision = None
    allow_missing: AllowMissing = False
    max_memory: Annotated[
        int | None, size_option("Memory limit, such as 4GB", default="what is free", panel=_HOW, of_run=True)
    ] = None
    cache: Annotated[bool, _how("Copy a remote checkpoint into a cache, and read that")] = False
    workers: Annotated[int | None, Ge(1), _how("Number of encoder threads", default="cores, at most 8")] = None
    resume: Resume = False
    force: Force = False
    trust_remote_code: TrustRemoteCode = False

    @property
    def has_input_scales(self) -> bool:
        """Whether calibration also finds scales of inputs for the files."""
        return self.calibrate is not None and (self.rounding == NEAREST or self.input_scales)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `lpconv verify`."""

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
        gate_option("Condition to pass, such as 'top1>=0.99'", kind="convert"),
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
        int | None,
        Ge(2),
        Option(
            "Number of tokens in a window of the text",
            default="128, or the longest of the model where that is less",
        ),
    ] = None
    max_tokens: Annotated[int, Ge(1), Option("Number of tokens of the text to read at most")] = 4096
    trust_remote_code: TrustRemoteCode = False


def check_verify(options: VerifyOptions) -> None:
    """Raise UsageError for options out of range, and for a comparison without a checkpoint to compare with."""
    check(options)
    if options.against is None and (options.data is not None or options.level == "values"):
        what = "a text" if options.data is not None else "--level values"
        raise UsageError(f"{what} needs a checkpoint to compare with", hint="name it with --against")
