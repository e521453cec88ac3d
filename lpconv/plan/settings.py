"""Fill in the defaults of a conversion's options, and reject options that do not fit together."""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any, cast

from lpconv.errors import UsageError
from lpconv.formats.grains import GRAINS, TENSOR, Grain, default_grain, get_grain
from lpconv.formats.spec import CODED, FORMATS, INTEGERS, Format, get_format
from lpconv.gates import CONVERT_GATES, needs_logits
from lpconv.layouts import LAYOUTS, SCHEMES
from lpconv.layouts.compressed_config import COMPRESSED_TENSORS, STATIC, preset_of
from lpconv.lookup import find
from lpconv.mcf.point_layout import MAX_POINTS
from lpconv.methods import LPCONV, METHODS, Method
from lpconv.options import check, command_words, options_of
from lpconv.plan.options import GPTQ_TOKENS, METHOD_FORMATS, NEAREST, POINTS_MAX, ConvertOptions, FilledOptions
from lpconv.results import to_json

_WHY_NO_FEEDBACK = {
    "collage": "its residual keeps what rounding loses",
    "multipoint": "its second points correct the rows that lose most, and its codes must follow from the scales",
}
_OF_FEEDBACK = ("rounding", "calibration_tokens", "calibration_seed", "input_scales")
_USUAL_METHOD = "unit"
_SPARE_BITS = 0.5  # default budget above the bits of an element: scales, and second points for some rows
CODED_BITS = (1.5, 12)  # with fewer, most numbers become 0; with more, a 16-bit float is as good


def with_scheme(options: ConvertOptions) -> ConvertOptions:
    """The options with the values of their scheme filled in, except those that are given, and `scheme` None.

    Raises UsageError for an unknown scheme, or if it needs a calibration text.
    """
    if options.scheme is None:
        return options
    scheme = find("scheme", options.scheme, SCHEMES)
    is_whole = all(getattr(options, n) in (None, v) for n, v in scheme.options.items())
    is_calibrated = scheme.calibrated and is_whole
    if is_calibrated and options.calibrate is None:
        raise UsageError(
            f"--scheme {options.scheme} needs a text to measure input scales on",
            hint="add --calibrate FILE, or --calibrate self for text that the model writes"
            + ("; FP8_DYNAMIC needs no text" if options.scheme == "FP8" else ""),
        )
    if is_calibrated and (options.rounding != NEAREST or options.kv_cache is not None):
        options = dataclasses.replace(options, input_scales=True)
    open_fields: dict[str, Any] = {n: v for n, v in scheme.options.items() if getattr(options, n) is None}
    if not is_whole:  # inputs are rounded like those weights
        open_fields.pop("inputs", None)
    return dataclasses.replace(options, scheme=None, **open_fields)


def fill_options(options: ConvertOptions) -> FilledOptions:
    """The options with the values of their scheme and the method's defaults filled in.

    Filled options are returned as they are. Raises UsageError for options that do not fit together.
    """
    asked, scheme = with_scheme(options), options.scheme
    method = find("method", asked.method or _USUAL_METHOD, METHODS)
    granularity = asked.granularity or _usual_granularity(method, asked.format)
    options = cast(
        FilledOptions,
        dataclasses.replace(asked, method=method.name, layout=asked.layout or LPCONV, granularity=granularity),
    )
    is_coded = options.budget_bits is not None and options.method == _USUAL_METHOD
    if is_coded:
        _check_coded(options, scheme)
    grain = _grain(options, method)
    fmt = CODED if is_coded else method.format(options.format, grain)
    _check_search(options, fmt, grain)
    residual = _residual(method, fmt.name, options.residual)
    budget_bits, points_max = _budget(method, fmt, options.budget_bits, options.points_max)
    check(options)
    for rule in options.rules:
        if rule.bits is not None:
            _check_bits(rule.bits, f"--rule {rule}", is_coded=is_coded)
            continue
        if is_coded and rule.format in INTEGERS:
            bits = FORMATS[rule.format].storage_bits
            raise UsageError(
                f"--rule {rule} is for integers with scales per row or group", hint=f"use ={bits} with --bits"
            )
        if rule.format != "keep" and (grain is None or rule.format not in method.formats_with(grain)):
            method.format(rule.format, is_of_rule=True)  # stored with one scale per tensor, if the method has it
        if method.form(LPCONV).holds_one_format and rule.format not in ("keep", fmt.name):
            raise UsageError(
                f"rule `{rule.pattern}={rule.format}`: a {method.name} checkpoint has only one format, here {fmt.name}",
                hint="use =keep, or another --format",
            )
    if not is_coded:
        _check_layout(options, method, fmt.name, grain)
    options = _with_rounding(options, method, fmt)
    if options.kv_cache is not None and not LAYOUTS[options.layout].has_cache_scales:
        raise UsageError(
            f"layout `{options.layout}` has no scales of keys and values",
            hint=f"use --layout {COMPRESSED_TENSORS}, or leave --kv-cache out",
        )
    _check_inputs(options, fmt.name, grain)
    options.check_patterns()
    compares_none = [g for g in options.gates if options.verify == "none" and needs_logits([CONVERT_GATES.parse(g)])]
    if compares_none:
        raise UsageError(
            f"gate `{compares_none[0]}` compares outputs, and --verify none does not run the models",
            hint="leave --verify out",
        )
    return dataclasses.replace(
        options,
        format=fmt.name,
        residual=residual,
        scale=options.scale or _usual_scale(fmt, grain),
        budget_bits=budget_bits,
        points_max=points_max,
    )


def shaping_options(options: ConvertOptions) -> dict[str, Any]:
    """The options that determine the written bytes, as JSON. The calibration text is reduced to its name."""
    names = [d.field for d in options_of(ConvertOptions).values() if d.option.shapes_output]
    shaping = {n: to_json(getattr(options, n)) for n in names}
    if options.format == CODED.name:
        shaping["format"] = None  # the budget implies it
    text = shaping.pop("calibrate")
    for name in _OF_FEEDBACK if options.rounding == NEAREST else ():
        if name != "input_scales" or options.kv_cache is None:
            del shaping[name]
    for name in ("kv_cache", "inputs"):
        if shaping[name] is None:
            del shaping[name]
    return shaping if text is None else shaping | {"calibrate": Path(text).name}


def command_line(model: str, options: FilledOptions) -> str:
    """The command that makes the same output, without folders and without run options such as --resume."""
    usual = _usual_scale(FORMATS[options.format], get_grain(options.granularity))
    # A value equal to this, else to the default, is left out.
    unsaid = {"method": None, "scale": usual, "layout": LPCONV, "granularity": TENSOR}
    if options.format == CODED.name:
        unsaid["format"] = CODED.name  # the budget implies it
    values = {}
    for name, d in options_of(ConvertOptions).items():
        value = getattr(options, d.field)
        if not d.option.of_run and value != unsaid.get(d.field, d.default):
            values[name] = Path(value).name if d.option.is_path and value is not None else value
    return shlex.join(["lpconv", "convert", model, *command_words(ConvertOptions, values)])


def _with_rounding(options: FilledOptions, method: Method, fmt: Format) -> FilledOptions:
    """The options with the defaults of error feedback filled in. Raises UsageError if others contradict it."""
    if options.rounding == NEAREST:
        only = _OF_FEEDBACK[1:] if options.kv_cache is None else _OF_FEEDBACK[1:-1]
        wrong = next((n for n in only if getattr(options, n) not in (None, False)), None)
        if wrong is not None:
            flag = "--" + wrong.replace("_", "-")
            raise UsageError(
                f"{flag} only applies to --rounding gptq and gptaq", hint=f"add one of them, or leave {flag} out"
            )
        return options
    if not method.has_granularity or not fmt.is_narrow:
        what = f"method `{method.name}`" if not method.has_granularity else f"format `{fmt.name}`"
        why = _WHY_NO_FEEDBACK.get(method.name, f"{fmt.bits} bits lose too little")
        raise UsageError(
            f"{what} does not support --rounding {options.rounding}: {why}",
            hint="use --method unit or scalify with integers, e2m1, e4m3fn or e5m2",
        )
    if options.calibrate is None:
        raise UsageError(
            f"--rounding {options.rounding} needs a text to calibrate on",
            hint="add --calibrate FILE, or --calibrate self for text that the model writes",
        )
    tokens = GPTQ_TOKENS if options.calibration_tokens is None else options.calibration_tokens
    return dataclasses.replace(options, calibration_tokens=tokens, calibration_seed=options.calibration_seed or 0)


def _residual(method: Method, format_name: str, residual: str | None) -> str | None:
    if not method.residuals:
        if residual is not None:
            raise UsageError(
                f"method `{method.name}` does not store a residual", hint="--residual only applies to --method collage"
            )
        return None
    allowed, other = (("fp16",), "bf16") if format_name == "fp16" else (method.residuals, "fp16")
    chosen = find("residual", residual or allowed[0], {r: r for r in (*method.residuals, "fp16")})
    if chosen not in allowed:
        hint = f"--format {other}, or --residual {' or '.join(allowed)}"
        raise UsageError(f"residual `{chosen}` needs format {other}, but the format is {format_name}", hint=hint)
    return chosen


def _usual_scale(fmt: Format, grain: Grain | None) -> str:
    """The default scale: powers of two, which keep products and casts exact.

    Integers get exact scales: their codes are evenly spaced, and power-of-two scales would cost up to 6 dB. NVFP4's are
    searched, which lowered KL on every model and text tried (`benchmarks/quality/scale_search.py`).
    """
    if grain is not None and grain.has_factor:
        return "search"
    return "exact" if (grain is not None or fmt is CODED) and fmt.twos_complement else "pow2"


def _check_coded(options: FilledOptions, scheme: str | None) -> None:
    """Raise UsageError for options that contradict integers with one step in a budget of bits."""
    assert options.budget_bits is not None
    _check_bits(options.budget_bits, f"--bits {options.budget_bits:g}")
    given = {"format": options.format, "scale": options.scale, "points_max": options.points_max}
    usual = {"format": CODED.name, "scale": "exact", "granularity": TENSOR, "layout": LPCONV}
    given |= {name: getattr(options, name) for name in usual}
    wrong = next((n for n, value in given.items() if value not in (None, usual.get(n))), None)
    if wrong is not None:
        of_scheme = scheme is not None and wrong in find("scheme", scheme, SCHEMES).options
        flag = f"--scheme {scheme}" if of_scheme else f"--{wrong.replace('_', '-')} {given[wrong]}"
        raise UsageError(
            f"{flag} does not apply to entropy-coded integers, which --bits asks for",
            hint=f"leave {flag} or --bits out; --method multipoint has another kind of budget",
        )


def _check_bits(bits: float, flag: str, *, is_coded: bool = True) -> None:
    if not is_coded:
        raise UsageError(f"{flag} needs --bits, for the other tensors", hint="add --bits N, or name a format")
    low, high = CODED_BITS
    if not low <= bits <= high:
        raise UsageError(f"{flag} is out of range", hint=f"use {low:g} to {high:g} bits")


def _check_search(options: FilledOptions, fmt: Format, grain: Grain | None) -> None:
    """Raise UsageError if a scale search has no effect, or if the method trains with the tensor's single scale."""
    if options.scale == "search" and (grain is None or not grain.is_searched(fmt)):
        raise UsageError(
            f"--scale search does not apply to {fmt.name} codes with {grain.words if grain else 'one scale'}",
            hint="it is for e2m1 and integers, and for e4m3fn and e5m2 with --granularity row or 128x128",
        )


def _usual_granularity(method: Method, format: str | None) -> str:
    """The granularity if none is given: one scale per tensor, or finer for formats that the method writes only so."""
    fmt = get_format(format, METHOD_FORMATS) if format is not None and method.has_granularity else None
    return TENSOR if fmt is None or fmt.name in method.formats else default_grain(fmt.name) or TENSOR


def _grain(options: FilledOptions, method: Method) -> Grain | None:
    """The granularity of scales, validated against method and scale; None for one scale per tensor."""
    grain = get_grain(options.granularity)
    if grain is not None and not method.has_granularity:
        raise UsageError(
            f"method `{method.name}` does not support {grain.words[2:]}", hint="use --method unit or scalify"
        )
    if grain is not None and grain.scale_dtype == "U8" and options.scale == "exact":
        raise UsageError(f"granularity `{grain.name}` always has power-of-two scales", hint="leave --scale out")
    return grain


def _check_layout(options: FilledOptions, method: Method, format_name: str, grain: Grain | None) -> None:
    if not _supports(method, options.layout, FORMATS[format_name], grain):
        words = "" if grain is None else f" with {grain.words}"
        hint = _layout_hint(options.layout, method, FORMATS[format_name], grain)
        raise UsageError(
            f"layout `{options.layout}` cannot store method {method.name} in {format_name}{words}", hint=hint
        )
    form = method.form(options.layout)
    if LAYOUTS[options.layout].file and options.max_shard_size is not None:
        raise UsageError(f"--max-shard-size: layout `{options.layout}` writes one file", hint="leave it out")
    for rule in options.rules if options.layout != LPCONV else ():
        if rule.format != "keep" and not form.holds(FORMATS[rule.format], grain):
            one = "e4m3fn" if form.holds(FORMATS["e4m3fn"], grain) else format_name
            raise UsageError(
                f"rule `{rule.pattern}={rule.format}`: layout `{options.layout}` cannot store that format",
                hint="use =keep, " + " or ".join(f"={n}" for n in dict.fromkeys((format_name, one))),
            )


def _supports(method: Method, layout: str, fmt: Format, grain: Grain | None) -> bool:
    return layout in method.layouts and fmt.name in method.formats_with(grain) and method.form(layout).holds(fmt, grain)


def _layout_hint(layout: str, method: Method, fmt: Format, grain: Grain | None) -> str:
    """Hint that lists the layouts that support these options, and what this layout supports."""
    others = [name for name in method.layouts if _supports(method, name, fmt, grain)]
    grains_of: dict[str, list[str]] = {}
    for name in (TENSOR, *GRAINS, "group:N") if layout != LPCONV else ():  # lpconv's own layout holds nearly everything
        grain_of_name = get_grain(name.replace("N", "32"))
        formats = [f for f in FORMATS.values() if any(_supports(m, layout, f, grain_of_name) for m in METHODS.values())]
        if formats:
            grains_of.setdefault(" or ".join(f.name for f in formats), []).append(name)
    held = "; ".join(f"--format {f} with --granularity {' or '.join(grains)}" for f, grains in grains_of.items())
    parts = [f"use --layout {' or '.join(others)}"] if others else []
    return "; ".join([*parts, f"{layout} holds {held}"] if held else parts)


def _check_inputs(options: FilledOptions, format_name: str, grain: Grain | None) -> None:
    """Raise UsageError unless readers of the layout and format can round inputs so.

    Only two combinations store input scales.
    """
    is_named = options.layout == COMPRESSED_TENSORS
    known = preset_of(format_name, grain, options.inputs) if is_named else None
    if options.inputs is not None and known is None:
        raise UsageError(
            f"--inputs {options.inputs}: layout `{options.layout}` has no such scheme for {format_name} with "
            f"--granularity {options.granularity}",
            hint="leave --inputs out, or use --scheme MXFP4",
        )
    is_static = is_named and options.inputs is None and preset_of(format_name, grain, STATIC) is not None
    if is_static or not options.has_input_scales:
        return
    if known is not None and (known.inputs is not None or options.inputs is not None):
        words = f"{known.name} stores no input scales, so there is nothing to calibrate"
        hint = "leave --calibrate out"
    else:
        words = "only NVFP4 and e4m3fn with one scale have input scales, in layout compressed-tensors"
        hint = "add --rounding gptaq to round weights by the text, or leave --calibrate out"
    raise UsageError(f"--calibrate: {words}", hint=hint)


def _budget(
    method: Method, fmt: Format, budget_bits: float | None, points_max: int | None
) -> tuple[float | None, int | None]:
    """(bits per element, points per row) that multipoint may use; (None, None) for other methods."""
    if fmt is CODED:
        return budget_bits, None
    if not method.has_budget:
        if budget_bits is not None or points_max is not None:
            raise UsageError(
                f"method `{method.name}` does not use a bit budget",
                hint="--bits applies to --method unit and multipoint, --points-max to multipoint",
            )
        return None, None
    budget_bits = fmt.storage_bits + _SPARE_BITS if budget_bits is None else budget_bits
    points_max = POINTS_MAX if points_max is None else points_max
    if not fmt.storage_bits < budget_bits < math.inf:
        raise UsageError(
            f"a budget of {budget_bits:g} bits is too small for {fmt.name} codes plus scales",
            hint=f"use more than {fmt.storage_bits}, for example --bits {fmt.storage_bits + _SPARE_BITS}",
        )
    if not 1 <= points_max <= MAX_POINTS:
        raise UsageError(f"--points-max {points_max} is out of range", hint=f"use 1 to {MAX_POINTS}")
    return budget_bits, points_max
