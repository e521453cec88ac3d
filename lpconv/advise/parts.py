"""The cost of each part of a conversion, and the formats of `--bits`.

`--bits` chooses a format for each part, so that the checkpoint has at most so many bits per weight. A part is a tensor,
the weights that readers fuse, or the experts of a layer. All start in a narrow format. The cost of each is measured by
converting that part alone; those with the largest cost per additional byte are raised to a wider format until the bits
are used up.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpconv.advise.candidates import Settings, describe_conversion
from lpconv.advise.subject import Subject, job_of, open_converted
from lpconv.errors import UsageError
from lpconv.layers import is_same_name
from lpconv.layouts.linears import format_groups, group_pattern
from lpconv.layouts.reader import stored_shapes
from lpconv.models.whole import linears_of
from lpconv.progress import Deadline, Progress, TimeIsUp, counted
from lpconv.results import LayerPart, TensorRecord
from lpconv.storage.header import DTYPE_BITS
from lpconv.verify.outputs import compare_outputs, outputs_of

# Base settings, widest first, and the format for raised tensors if the source is wider than 16 bits; otherwise raised
# tensors are kept, at the same size and without loss.
_LADDERS: tuple[tuple[Settings, str], ...] = (
    ({"method": "unit", "format": "e4m3fn", "granularity": "row"}, "fp16"),
    ({"method": "multipoint", "format": "int4", "budget_bits": 4.5}, "keep"),
)
_WINDOWS = 2


@dataclass(frozen=True, kw_only=True)
class Base:
    """The narrow conversion to start from, the format of raised tensors, and the bytes available for raising."""

    settings: Settings
    raised: str
    raised_bits: int
    spare_bytes: float


def base_for(subject: Subject, bits: float) -> Base:
    """The widest base that fits. Raises UsageError, with the minimum number of bits, if none does."""
    least = 0.0
    for settings, raised in _LADDERS:
        with job_of(subject, settings) as job:
            weights = job.plan.num_weights
            widest = max(DTYPE_BITS[t.info.dtype] for t in job.plan.tensors if t.action != "tie")
            spare = weights * bits / 8 - job.plan.bytes_out
            least = 8 * job.plan.bytes_out / weights
        if spare >= 0:
            kept = raised == "keep" or widest <= 16
            return Base(
                settings=settings,
                raised="keep" if kept else raised,
                raised_bits=widest if kept else 16,
                spare_bytes=spare,
            )
    raise UsageError(
        f"--bits {bits:g}: this model needs at least {least:.2f} bits per weight, with {describe_conversion(settings)}",
        hint="embeddings and output heads are stored in 16 bits; pass a larger value",
    )


def raise_costly_parts(subject: Subject, base: Base, deadline: Deadline, progress: Progress) -> tuple[str, Settings]:
    """(name, settings) of the base with those parts raised whose cost per additional byte is largest."""
    model, records = open_converted(subject, base.settings, progress)
    parts, _ = parts_of(subject, model, records, deadline, progress)
    bytes_of = {r.name: r.bytes_out for r in records}
    sizes = {group_pattern(names): sum(bytes_of[n] for n in names) for names in format_groups(_converted(records))}
    chosen = choose_parts(parts, sizes, base, metric=subject.metric)
    rules = [f"{p.tensor}={base.raised}" for p in chosen]
    to = "kept" if base.raised == "keep" else f"in {base.raised}"
    name = f"{describe_conversion(base.settings)} with {len(chosen)} of {len(parts)} parts {to}"
    return name, base.settings | {"rules": rules}


def choose_parts(parts: Sequence[LayerPart], sizes: Mapping[str, int], base: Base, *, metric: str) -> list[LayerPart]:
    """Choose parts greedily, by divergence saved per byte. Relative errors of outputs add up in squares."""
    power = 1 if metric == "loss" else 2

    def extra(part: LayerPart) -> float:
        return sizes[part.tensor] * (base.raised_bits / part.bits - 1)

    left, chosen = base.spare_bytes, []
    for part in sorted(parts, key=lambda p: -(p.divergence**power) / max(extra(p), 1.0)):
        if 0 < extra(part) <= left:
            chosen.append(part)
            left -= extra(part)
    return chosen


def parts_of(
    subject: Subject, model: Any, records: Sequence[TensorRecord], deadline: Deadline, progress: Progress
) -> tuple[tuple[LayerPart, ...], float | None]:
    """The cost of each part in which the converted `model` differs from the subject, and of all parts together.

    A part is a tensor, the weights that readers fuse, or the experts of a layer. The largest come first, because
    formats are chosen for those. If time runs out, the others are missing and the cost of all is None.
    """
    own, other = dict(subject.model.named_parameters()), dict(model.named_parameters())
    changed = [n for n in own if not torch.equal(own[n], other[n])]
    checkpoint, converted = subject.prepared.checkpoint, _converted(records)
    experts = linears_of(checkpoint, stored_shapes(checkpoint)).experts
    groups = ((names, _parameters_of(names, changed, experts)) for names in format_groups(converted))
    held = sorted((g for g in groups if g[1]), key=lambda g: -sum(own[n].numel() for n in g[1]))
    windows = subject.windows[:_WINDOWS]
    with torch.inference_mode():
        wanted = [outputs_of(subject.model, w) for w in windows]
    parts: list[LayerPart] = []
    with suppress(TimeIsUp):
        for names, parameters in counted(held, "cost of each part", "parts", progress):
            if deadline.left_s <= 0:
                break
            values = {n: other[n] for n in parameters}
            parts.append(_part([converted[n] for n in names], _divergence(subject, values, windows, wanted)))
    is_whole = len(parts) == len(held)
    whole = _divergence(subject, {n: other[n] for n in changed}, windows, wanted) if is_whole else None
    return tuple(sorted(parts, key=lambda p: -p.divergence)), whole


def _divergence(
    subject: Subject, values: Mapping[str, Tensor], windows: Sequence[Any], wanted: Sequence[Tensor]
) -> float:
    """Divergence of the outputs when some parameters have other values."""
    parameters = dict(subject.model.named_parameters())
    own = {n: parameters[n].data for n in values}
    try:
        for name, value in values.items():
            parameters[name].data = value.data
        with torch.inference_mode():
            checks = [compare_outputs(a, outputs_of(subject.model, w)) for a, w in zip(wanted, windows, strict=True)]
    finally:
        for name, data in own.items():
            parameters[name].data = data
    gaps = [c.mean_kl if subject.metric == "loss" else c.rel_error for c in checks]
    return max(0.0, sum(math.inf if gap is None else gap for gap in gaps) / len(gaps))


def _converted(records: Iterable[TensorRecord]) -> dict[str, TensorRecord]:
    return {r.name: r for r in records if r.action == "convert"}


def _parameters_of(names: Sequence[str], parameters: Iterable[str], experts: Mapping[str, str]) -> list[str]:
    """The parameters that hold stored tensors, or into whose module transformers merges them as experts."""
    modules = {experts[n] for n in names if n in experts}
    return [p for p in parameters if p.rpartition(".")[0] in modules or any(is_same_name(p, n) for n in names)]


def _part(records: Sequence[TensorRecord], divergence: float) -> LayerPart:
    """The cost of tensors that are decided together."""
    elements = sum(math.prod(r.shape) for r in records)
    return LayerPart(
        tensor=group_pattern([r.name for r in records]),
        format=records[0].format or "",
        bits=8 * sum(r.bytes_out for r in records) / elements if elements else 0.0,
        sqnr_db=min((r.sqnr_db for r in records if r.sqnr_db is not None), default=None),
        divergence=divergence,
    )
