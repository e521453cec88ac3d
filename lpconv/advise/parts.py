"""The cost of each part of a conversion, and the bits of each part for `--bits`.

A part is a tensor, the weights that readers fuse, or the experts of a layer. Its cost is the divergence of the outputs
if that part alone is converted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lpconv.advise.candidates import Settings
from lpconv.advise.subject import Subject, open_converted
from lpconv.formats.spec import CODED
from lpconv.layouts.linears import format_groups, group_pattern
from lpconv.layouts.reader import stored_shapes
from lpconv.lookup import is_same_name
from lpconv.models.coded import CodedTensor
from lpconv.models.whole import linears_of
from lpconv.plan.settings import CODED_BITS
from lpconv.progress import Deadline, Progress, TimeIsUp, counted
from lpconv.results import LayerPart, TensorRecord
from lpconv.verify.outputs import compare_outputs, outputs_of

_WINDOWS, _MOST = 2, 1e30  # of text, and a cost that counts for larger and infinite ones


def with_bits_of_parts(subject: Subject, start: Settings, deadline: Deadline, progress: Progress) -> Settings:
    """The conversion `start`, to entropy-coded integers, with other bits for each part; as many on average."""
    model, records = open_converted(subject, start, progress)
    parts, _ = parts_of(subject, model, records, deadline, progress)
    power = 1 if subject.metric == "loss" else 2  # relative errors of outputs add up in squares
    sizes = {r.name: math.prod(r.shape) for r in records if r.format == CODED.name}
    elements = {group_pattern(names): sum(sizes[n] for n in names) for names in format_groups(sizes)}
    costs = {p.tensor: (p.divergence**power, elements[p.tensor]) for p in parts if p.tensor in elements}
    chosen = choose_bits(costs, start["budget_bits"])
    return start | {"rules": [f"{part}={bits:.2f}" for part, bits in chosen.items()]}


def choose_bits(parts: Mapping[str, tuple[float, int]], bits: float) -> dict[str, float]:
    """The bits of each part, `bits` on average, that minimise the sum of costs.

    `parts` have (cost with `bits`, number of elements). A cost falls by a factor of 4 per bit, so in the minimum all
    elements cost the same: a part has ½ log2(cost / elements) bits and a constant, within the range of the coder.
    """
    least = min((cost for cost, _ in parts.values() if 0 < cost < _MOST), default=1.0)
    wanted = {part: math.log2(min(max(cost, least), _MOST) / num) / 2 for part, (cost, num) in parts.items()}
    elements = sum(num for _, num in parts.values())

    def chosen(constant: float) -> dict[str, float]:
        low, high = CODED_BITS
        return {part: math.floor(100 * min(max(x + constant, low), high)) / 100 for part, x in wanted.items()}

    below, above = -100.0, 100.0
    for _ in range(40):
        middle = (below + above) / 2
        fits = sum(parts[part][1] * x for part, x in chosen(middle).items()) <= bits * elements
        below, above = (middle, above) if fits else (below, middle)
    return chosen(below)


def parts_of(
    subject: Subject, model: Any, records: Sequence[TensorRecord], deadline: Deadline, progress: Progress
) -> tuple[tuple[LayerPart, ...], float | None]:
    """The cost of each part in which the converted `model` differs from the subject, and of all parts together.

    A part is a tensor, the weights that readers fuse, or the experts of a layer. The largest come first, because
    their bits matter most. If time runs out, the others are missing and the cost of all is None.
    """
    own = dict(subject.model.named_parameters())
    other = {n: p.decode() if isinstance(p, CodedTensor) else p for n, p in model.named_parameters()}
    changed = [n for n in own if not torch.equal(own[n], other[n])]
    checkpoint, converted = subject.prepared.checkpoint, {r.name: r for r in records if r.action == "convert"}
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
    return max(0.0, sum(math.inf if gap is None or math.isnan(gap) else gap for gap in gaps) / len(gaps))


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
