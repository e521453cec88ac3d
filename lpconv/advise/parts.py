"""Each tensor's part in what a conversion costs: the model with that one tensor as it would be stored."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lpconv.advise.subject import Subject
from lpconv.advise.time import Deadline
from lpconv.convert.logits import compare, outputs_of
from lpconv.progress import Progress
from lpconv.results import LayerPart, TensorRecord

_WINDOWS = 2


def parts_of(
    subject: Subject, model: Any, records: Sequence[TensorRecord], deadline: Deadline, progress: Progress
) -> tuple[LayerPart, ...]:
    """The parts of the parameters in which `model`, a converted one, differs from the subject's; as far as time goes.

    The largest are first in line, since those are what formats are chosen for.
    """
    own, other = dict(subject.model.named_parameters()), dict(model.named_parameters())
    changed = sorted((n for n in own if not torch.equal(own[n], other[n])), key=lambda n: -own[n].numel())
    windows = subject.windows[:_WINDOWS]
    with torch.inference_mode():
        wanted = [outputs_of(subject.model, w) for w in windows]
    found: list[LayerPart] = []
    progress.start("layer by layer", len(changed), unit="steps")
    for name in changed:
        if deadline.left_s <= 0:
            break
        record = _record_of(name, records)
        if record is not None:
            found.append(_part(record, _divergence(subject, own[name], other[name], windows, wanted)))
        progress.advance(1)
    return tuple(sorted(found, key=lambda p: -p.divergence))


def _divergence(subject: Subject, own: Any, other: Any, windows: Sequence[Any], wanted: Sequence[Tensor]) -> float:
    """Of the outputs while one parameter has the other model's values."""
    kept, own.data = own.data, other.data
    try:
        with torch.inference_mode():
            checks = [compare(a, outputs_of(subject.model, w), "", "") for a, w in zip(wanted, windows, strict=True)]
    finally:
        own.data = kept
    values = [c.mean_kl if subject.metric == "loss" else c.rel_error for c in checks]
    return max(0.0, sum(v or 0.0 for v in values) / len(values))


def _record_of(parameter: str, records: Iterable[TensorRecord]) -> TensorRecord | None:
    """The tensor that a parameter came from: transformers may put a prefix on its name, or take one off."""
    for r in records:
        if r.action == "convert" and _same_name(parameter, r.name):
            return r
    return None


def _same_name(a: str, b: str) -> bool:
    return a == b or a.endswith("." + b) or b.endswith("." + a)


def _part(record: TensorRecord, divergence: float) -> LayerPart:
    elements = 1
    for size in record.shape:
        elements *= size
    return LayerPart(
        tensor=record.name,
        format=record.format or "",
        bits=8 * record.bytes_out / elements if elements else 0.0,
        sqnr_db=record.sqnr_db,
        divergence=divergence,
    )
