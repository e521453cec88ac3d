"""`--bits`: choose a format for each tensor so that the checkpoint has at most so many bits per weight.

All tensors start in a narrow format. The cost of each is measured by converting that tensor alone; those with the
largest cost per additional byte are raised to a wider format until the bits are used up. The choice is a list of rules
for `convert --rule`.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpconv.advise.candidates import Settings, describe_conversion
from lpconv.advise.subject import Subject, job_of, open_converted
from lpconv.errors import UsageError
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
            stored = [t for t in job.plan.tensors if t.action != "tie"]
            weights = sum(t.info.num_elements for t in stored)
            widest = max(DTYPE_BITS[t.info.dtype] for t in stored)
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


def raise_costly_tensors(subject: Subject, base: Base, deadline: Deadline, progress: Progress) -> tuple[str, Settings]:
    """(name, settings) of the base with those tensors raised whose cost per additional byte is largest."""
    model, records = open_converted(subject, base.settings, progress)
    parts = parts_of(subject, model, records, deadline, progress)
    sizes = {r.name: r.bytes_out for r in records}
    chosen = _choose(parts, sizes, base)
    rules = [f"{p.tensor}={base.raised}" for p in chosen]
    to = "kept" if base.raised == "keep" else f"in {base.raised}"
    name = f"{describe_conversion(base.settings)} with {len(chosen)} of {len(parts)} tensors {to}"
    return name, base.settings | {"rules": rules}


def _choose(parts: Sequence[LayerPart], sizes: dict[str, int], base: Base) -> list[LayerPart]:
    """Choose tensors greedily, by divergence saved per byte."""

    def extra(part: LayerPart) -> float:
        return sizes[part.tensor] * (base.raised_bits / part.bits - 1)

    left, chosen = base.spare_bytes, []
    for part in sorted(parts, key=lambda p: -p.divergence / max(extra(p), 1.0)):
        if 0 < extra(part) <= left:
            chosen.append(part)
            left -= extra(part)
    return chosen


def parts_of(
    subject: Subject, model: Any, records: Sequence[TensorRecord], deadline: Deadline, progress: Progress
) -> tuple[LayerPart, ...]:
    """The cost of each parameter in which the converted `model` differs from the subject, as far as time allows.

    The largest parameters come first, because formats are chosen for those.
    """
    own, other = dict(subject.model.named_parameters()), dict(model.named_parameters())
    changed = sorted((n for n in own if not torch.equal(own[n], other[n])), key=lambda n: -own[n].numel())
    windows = subject.windows[:_WINDOWS]
    with torch.inference_mode():
        wanted = [outputs_of(subject.model, w) for w in windows]
    parts: list[LayerPart] = []
    with suppress(TimeIsUp):
        for name in counted(changed, "cost of each tensor", "tensors", progress):
            record = _record_of(name, records)
            if deadline.left_s <= 0:
                break
            if record is not None:
                parts.append(_part(record, _divergence(subject, own[name], other[name], windows, wanted)))
    return tuple(sorted(parts, key=lambda p: -p.divergence))


def _divergence(subject: Subject, own: Any, other: Any, windows: Sequence[Any], wanted: Sequence[Tensor]) -> float:
    """Divergence of the outputs when one parameter has the other model's values."""
    own_values, own.data = own.data, other.data
    try:
        with torch.inference_mode():
            checks = [compare_outputs(a, outputs_of(subject.model, w)) for a, w in zip(wanted, windows, strict=True)]
    finally:
        own.data = own_values
    values = [c.mean_kl if subject.metric == "loss" else c.rel_error for c in checks]
    return max(0.0, sum(math.inf if v is None else v for v in values) / len(values))


def _record_of(parameter: str, records: Iterable[TensorRecord]) -> TensorRecord | None:
    """The record of a parameter's tensor: transformers may add or remove a prefix of its name."""
    ends = f".{parameter}"
    named = (r for r in records if ends.endswith(f".{r.name}") or r.name.endswith(ends))
    return next((r for r in named if r.action == "convert"), None)


def _part(record: TensorRecord, divergence: float) -> LayerPart:
    elements = math.prod(record.shape)
    return LayerPart(
        tensor=record.name,
        format=record.format or "",
        bits=8 * record.bytes_out / elements if elements else 0.0,
        sqnr_db=record.sqnr_db,
        divergence=divergence,
    )
