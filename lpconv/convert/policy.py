"""Which tensor is converted to what, and why. Decided from names, shapes and dtypes alone.

In order: what is not floating point is kept; `--exclude` keeps; `--rule` decides; `--include` keeps what it does not
name; then the method's default. For scaled codes the default converts matrices, and 8-bit formats leave embeddings and
output heads in 16 bits. For a pair (Collage) the default converts every tensor wider than 16 bits, because nothing is
lost: the residual holds what rounding took.
"""

import re
from collections.abc import Container
from dataclasses import dataclass, replace

from lpconv.checkpoint.header import DTYPE_BITS, TensorInfo
from lpconv.convert.options import ConvertOptions, matches
from lpconv.formats.spec import FORMATS, Format
from lpconv.mcf.point_layout import PointLayout, point_layout
from lpconv.methods import Method

__all__ = ["Decision", "decide"]

# Name parts of embeddings and output heads across architectures; unknown architectures fall back to the matrix rule.
_EMBEDDING = re.compile(
    r"(^|\.)(embeddings?|shared|embed_\w+|\w+_embeddings?|\w+_embed|wte|wpe|embed|relative_attention_bias)(\.|$)"
)
_HEAD = re.compile(
    r"(^|\.)(lm_head|\w*_lm_head|embed_out|predictions|classifier|score|qa_outputs|vocab_projector)(\.|$)"
)
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NARROW = 16


@dataclass(frozen=True, kw_only=True)
class Decision:
    """`format` is None where the tensor is kept as it is. `reason` is for people, `points` the layout of rows."""

    format: Format | None
    reason: str
    points: PointLayout | None = None


def decide(
    info: TensorInfo, options: ConvertOptions, method: Method, *, convertible: Container[str] | None = None
) -> Decision:
    """What to do with one tensor. `options` have their defaults filled in.

    `convertible` are the names that the layout has a form for, None where it has all.
    """
    if convertible is not None and info.name not in convertible:
        return Decision(format=None, reason=f"no Linear weight: {options.layout} leaves it")
    decision = _decide(info, options, method)
    if convertible is not None and decision.format is not None and decision.format.name != options.format:
        return Decision(format=None, reason=decision.reason)  # codes of a second format
    # 16-bit formats are for what has no points: embeddings and output heads.
    if method.encoder == "points" and decision.format is not None and decision.format.storage_bits < _NARROW:
        return _with_points(info, decision, decision.format, options)
    return decision


def _with_points(info: TensorInfo, decision: Decision, element: Format, options: ConvertOptions) -> Decision:
    assert options.budget_bits is not None
    assert options.points_max is not None
    layout = point_layout(info.shape, element, budget_bits=options.budget_bits, points_max=options.points_max)
    if layout is not None:
        return replace(decision, points=layout)
    cols = info.shape[-1] if info.shape else 1
    return Decision(format=None, reason=f"no point fits rows of {cols} in {options.budget_bits:g} bits")


def _decide(info: TensorInfo, options: ConvertOptions, method: Method) -> Decision:
    if info.dtype not in _FLOATS:
        return Decision(format=None, reason="not floating point" if info.dtype[0] != "F" else f"already {info.dtype}")
    if info.num_elements == 0:
        return Decision(format=None, reason="empty")
    for pattern in options.exclude:
        if matches(pattern, info.name):
            return Decision(format=None, reason=f"excluded by `{pattern}`")
    wanted = FORMATS[options.format or method.default_format]
    for rule in options.rules:
        if matches(rule.pattern, info.name):
            return _by_rule(rule.pattern, rule.format)
    if options.include and not any(matches(p, info.name) for p in options.include):
        return Decision(format=None, reason="not included")
    return _pair_default(info, wanted) if method.encoder == "pair" else _scaled_default(info, wanted)


def _by_rule(pattern: str, name: str) -> Decision:
    return Decision(format=None if name == "keep" else FORMATS[name], reason=f"rule `{pattern}`")


def _pair_default(info: TensorInfo, wanted: Format) -> Decision:
    if DTYPE_BITS[info.dtype] <= _NARROW and info.dtype == wanted.safetensors:
        return Decision(format=None, reason=f"already {wanted.name}: the residual is zero")
    return Decision(format=wanted, reason="pair")


def _scaled_default(info: TensorInfo, wanted: Format) -> Decision:
    if len(info.shape) < 2:
        return Decision(format=None, reason="norm, bias or other vector")
    what = "embedding" if _EMBEDDING.search(info.name) else "output head" if _HEAD.search(info.name) else None
    if wanted.storage_bits >= _NARROW or what is None:
        return Decision(format=wanted, reason=what or "matrix")
    if DTYPE_BITS[info.dtype] <= _NARROW:
        return Decision(format=None, reason=f"{what}: 16 bits by default")
    return Decision(format=FORMATS["fp16"], reason=f"{what}: 16 bits by default")
