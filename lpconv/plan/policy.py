"""Which tensor is converted to which format, and why. Decided from names, shapes and dtypes alone.

In order: tensors that are not floating point are kept; `--exclude` keeps; `--rule` decides; `--include` keeps
everything else; then the default of the method's form. For codes the default converts matrices, and formats of at most
8 bits leave small but sensitive weights in 16 bits: embeddings, output heads, routers, filters, states of state space
models. A form that represents any value exactly (Collage's pair) converts every tensor wider than 16 bits, because the
residual holds the rounding error.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from lpconv.errors import UnsupportedError
from lpconv.formats.grains import get_grain
from lpconv.formats.spec import CODED, FORMATS, Format
from lpconv.forms import Form, FormSettings, Kept
from lpconv.gguf.arranged import transposed
from lpconv.layouts.compressed_config import COMPRESSED_TENSORS
from lpconv.layouts.linears import LinearModules
from lpconv.methods import METHODS
from lpconv.plan.options import NEAREST, FilledOptions, FormatRule, matches
from lpconv.storage.header import DTYPE_BITS, TensorInfo

# Weights left in 16 bits, by parts of their names in known architectures; other names follow the rule for matrices. The
# same choice as NVIDIA's ModelOpt 0.47, `default_disabled_quantizers.yaml`.
_WIDE = {
    what: re.compile(rf"(^|\.)({parts})(\.|$)")
    for what, parts in {
        "embedding": r"embeddings?|shared|embed_\w+|\w+_embeddings?|\w+_embed|wte|wpe|embed|relative_attention_bias",
        "output head": r"lm_head|\w*_lm_head|embed_out|predictions|classifier|score|qa_outputs|vocab_projector",
        "router": r"gate|shared_expert_gate|\w*router",
        "state": r"A_log|dt_proj(_weight)?|in_proj_(a|b|ba)",  # decay and input of state space models
        "bias": r"\w*bias",  # biases of experts, one row each
    }.items()
}
# Families without a Linear weight, and those of which transformers 5.24 cannot open one packed, except the head.
CONV1D = ("gpt2", "imagegpt", "openai-gpt")
UNPACKABLE = ("longt5", "modernbert", "modernbert-decoder", "mt5", "switch_transformers", "t5", "umt5")
# 3-D tensors of all experts of a layer, by their names in transformers 5.24.
_STACK = re.compile(
    r"\bexperts\.(gate_up_proj|(gate|up|down)_proj|fc[12]\.weight)$|\bmoe\.(gate|up|down)_proj\.weight$"
    r"|\.(in|out)put_linear\.weight$"
)
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NARROW = 16


# A number format, None to keep the tensor as it is, and the reason in words.
_Decision = tuple[Format | None, str]


def form_type(options: FilledOptions) -> type[Form]:
    """The form of converted tensors, or the form that selects another one."""
    return METHODS[options.method].form(options.layout)


def decide(info: TensorInfo, options: FilledOptions, *, linears: LinearModules | None = None) -> tuple[Form, str]:
    """The form of one tensor in the output, and the reason. `options` have their defaults filled in.

    `linears` are the only modules whose weights the layout converts; None if it converts all.
    """
    fmt, reason = _decide(info, options)
    kind, settings = form_type(options), settings_for(options, linears, info.name)
    is_other = settings.is_stack or (settings.is_table and deciding_rule(info.name, options) is not None)
    if linears is not None and info.name not in linears.weights and not is_other:
        fmt, reason = None, f"not a Linear weight, which {options.layout} requires"
    elif linears is not None and fmt is not None and not kind.holds(fmt, settings.grain):
        fmt = None  # the layout has no 16-bit codes
    shape = transposed(info.shape) if settings.is_stack else info.shape
    refused = None if fmt is None else kind.refusal(shape, fmt, settings)
    if fmt is None or refused is not None:
        return Kept.unchanged(info), refused or reason
    form = kind.of(info.name, shape, fmt, settings)
    if linears is not None and info.name in linears.unpackable and info.name not in {c.name for c in form.data}:
        return Kept.unchanged(info), "transformers cannot open it packed"
    return form, reason


def check_family(config: Mapping[str, Any], options: FilledOptions) -> None:
    """Raise UnsupportedError for a model of which the layout converts nothing, or that transformers cannot open in it.

    For compressed-tensors, transformers 5.24 builds the experts of Llama 4 one by one, but saves them in one tensor
    (`quantizers/base.py`, SequentialLlama4TextExperts).
    """
    family = str(config.get("model_type"))
    if options.layout == COMPRESSED_TENSORS and family in ("llama4", "llama4_text"):
        raise UnsupportedError(
            f"transformers cannot open models of type {family} in layout `{options.layout}`: it expects each expert in "
            "a tensor of its own",
            hint="use --layout transformers with --exclude '*.experts.*', or --layout lpconv",
        )
    number = FORMATS[options.format]
    is_packed = number.storage_bits < 8 or (number.twos_complement and options.inputs is None)
    if family in CONV1D:
        why, other = f"a {family} model has no Linear weights, which {options.layout} requires", ""
    elif family in UNPACKABLE and options.layout == COMPRESSED_TENSORS and is_packed:
        why, other = f"transformers cannot open packed weights of a {family} model", "--scheme FP8_DYNAMIC, or "
    else:
        return
    if not options.rules:  # they may name the head
        hint = f"use {other}--layout lpconv without --scheme"
        raise UnsupportedError(f"no tensor would be converted: {why}", hint=hint)


def check_stacks(infos: Mapping[str, TensorInfo], options: FilledOptions, fused: Collection[str] | None = None) -> None:
    """Raise UnsupportedError for tensors of several experts that options convert, but the layout cannot store.

    `fused` are their names; None for those that their name and shape give away.
    """
    if fused is None:
        fused = [n for n, info in infos.items() if len(info.shape) == 3 and _STACK.search(n)]
    refused = [n for n in infos if n in fused and _decide(infos[n], options)[0] is not None]
    if not refused or form_type(options).of_stacks:
        return
    blocks = dict.fromkeys(n.removesuffix(".weight").split(".")[-2] for n in refused)
    excludes = " ".join(f"--exclude '*.{block}.*'" for block in blocks)
    raise UnsupportedError(
        f"`{refused[0]}` contains all experts of a layer, which plain transformers cannot decode in this layout",
        hint=f"leave them unconverted with {excludes}, or convert them with --layout lpconv, or those of gpt-oss with "
        "--scheme GPT_OSS_MXFP4",
    )


def settings_for(options: FilledOptions, linears: LinearModules | None = None, name: str = "") -> FormSettings:
    """The options that the form of a tensor needs; None for those that the method's form does not use."""
    rule = deciding_rule(name, options)
    bits = options.budget_bits if rule is None or rule.bits is None else rule.bits
    named = {"residual": options.residual, "budget_bits": bits, "points_max": options.points_max}
    settings: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    return FormSettings(
        scale=options.scale or "pow2",
        grain=get_grain(options.granularity),
        has_feedback=options.rounding != NEAREST,
        inputs=options.rounds_inputs,
        kv_cache=options.kv_cache is not None,
        is_expert=linears is not None and name in linears.experts,
        family="" if linears is None else linears.family,
        is_stack=linears is not None and name in linears.fused,
        is_table=linears is not None and name.removesuffix(".weight") in linears.tables,
        **settings,
    )


def _decide(info: TensorInfo, options: FilledOptions) -> _Decision:
    if info.dtype not in _FLOATS:
        return None, "not floating point" if info.dtype[0] != "F" else f"already {info.dtype}"
    if info.num_elements == 0:
        return None, "empty"
    for pattern in options.exclude:
        if matches(pattern, info.name):
            return None, f"excluded by `{pattern}`"
    wanted = FORMATS[options.format or METHODS[options.method].default_format]
    rule = deciding_rule(info.name, options)
    if rule is not None:
        fmt = CODED if rule.bits is not None else FORMATS.get(rule.format)  # none for keep
        return fmt, f"rule `{rule.pattern}`"
    if options.include and not any(matches(p, info.name) for p in options.include):
        return None, "not included"
    if not form_type(options).holds_anything:
        return _codes_default(info, wanted)
    if DTYPE_BITS[info.dtype] <= _NARROW and info.dtype == wanted.safetensors:
        return None, f"already {wanted.name}, so the residual is zero"
    return wanted, "pair"


def deciding_rule(name: str, options: FilledOptions) -> FormatRule | None:
    """The `--rule` that decides the format of a tensor; None if there is none, or if it is excluded."""
    is_excluded = any(matches(pattern, name) for pattern in options.exclude)
    return None if is_excluded else next((r for r in options.rules if matches(r.pattern, name)), None)


def _codes_default(info: TensorInfo, wanted: Format) -> _Decision:
    if len(info.shape) < 2:
        return None, "norm, bias or other vector"
    what = sensitive_kind(info)
    if not wanted.is_narrow or what is None:
        return wanted, what or "matrix"
    return None if DTYPE_BITS[info.dtype] <= _NARROW else FORMATS["fp16"], f"{what}: 16 bits by default"


def sensitive_kind(info: TensorInfo) -> str | None:
    """Why 8 bits are too few for a tensor, such as "embedding"; None if they are enough."""
    named = next((what for what, parts in _WIDE.items() if parts.search(info.name)), None)
    is_filter = len(info.shape) > 2 and info.shape[1] == 1  # each output sees one channel: few numbers, used everywhere
    return named or ("one-channel filter" if is_filter else None)
