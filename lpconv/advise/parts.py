"""The cost of each part of a conversion, and the formats of `--bits`.

`--bits` chooses a format for each part, so that converted weights have at most so many bits on average, with scales. A
part is a tensor, the weights that readers fuse, or the experts of a layer. The cost of each is measured in the widest
integers that all of them can have, by converting that part alone; each additional bit is taken to divide it by 4, as it
does the noise of the weights. All parts start in the narrowest format, and steps to the next wider one are taken by the
divergence that they save per bit, until the bits are used up.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpconv.advise.candidates import Settings, convert_options, describe_conversion
from lpconv.advise.subject import Subject, job_of, open_converted
from lpconv.errors import UsageError
from lpconv.layouts.linears import format_groups, group_pattern
from lpconv.layouts.reader import stored_shapes
from lpconv.lookup import is_same_name
from lpconv.models.coded import CodedTensor
from lpconv.models.whole import linears_of
from lpconv.plan.suited import suited_options
from lpconv.progress import Deadline, Progress, TimeIsUp, counted
from lpconv.results import LayerPart, TensorRecord
from lpconv.storage.header import DTYPE_BITS
from lpconv.verify.outputs import compare_outputs, outputs_of

_INTEGERS = {n: f"int{n}" for n in (2, 3, 4, 5, 6, 8)}
_WINDOWS = 2


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Formats to choose from by their bits, and the bits per weight to add to the narrowest.

    `settings` are those of the conversion without a format, `elements` the sizes of the tensors that it converts.
    """

    settings: Settings
    formats: Mapping[int, str]
    elements: Mapping[str, int]
    spare: float

    @property
    def base(self) -> int:
        """The bits of the widest integers that all parts can have."""
        return max(bits for bits in _INTEGERS if bits - min(_INTEGERS) <= self.spare)

    @property
    def start(self) -> Settings:
        """The conversion of all parts to the base."""
        return self.settings | {"format": self.formats[self.base]}


def choice_for(subject: Subject, bits: float) -> Choice:
    """The choice for `bits` per converted weight. Raises UsageError, with the minimum, if these are too few.

    Rows have as many scales as `convert` would choose.
    """
    narrowest = _INTEGERS[min(_INTEGERS)]
    options, _ = suited_options(convert_options({"format": narrowest}), subject.prepared.checkpoint)
    settings = {"method": "unit", "granularity": options.granularity, "scale": "search"}
    with job_of(subject, settings | {"format": narrowest}) as job:
        tensors = [t for t in job.plan.tensors if t.format is not None and t.format.name == narrowest]
    elements = {t.name: t.info.num_elements for t in tensors}
    least = 8 * sum(t.bytes_out for t in tensors) / max(sum(elements.values()), 1)
    if least > bits:
        known = f"{math.ceil(100 * least) / 100:.2f}"
        raise UsageError(
            f"--bits {bits:g}: {narrowest} takes {known} bits per weight with its scales",
            hint=f"pass --bits {known} or more",
        )
    wide = "fp16" if any(DTYPE_BITS[t.info.dtype] > 16 for t in tensors) else "keep"
    return Choice(settings=settings, formats=_INTEGERS | {16: wide}, elements=elements, spare=bits - least)


def mixed_conversion(subject: Subject, choice: Choice, deadline: Deadline, progress: Progress) -> tuple[str, Settings]:
    """(name, settings) of the conversion with the chosen format for each part; parts not measured get the base."""
    model, records = open_converted(subject, choice.start, progress)
    parts, _ = parts_of(subject, model, records, deadline, progress)
    chosen = choose_bits(parts, choice, metric=subject.metric)
    rules = [f"{part}={choice.formats[bits]}" for part, bits in chosen.items() if bits != choice.base]
    name = f"{describe_conversion(choice.start)}, and {len(rules)} of {len(chosen)} parts in other formats"
    return name, choice.start | {"rules": rules}


def choose_bits(parts: Sequence[LayerPart], choice: Choice, *, metric: str) -> dict[str, int]:
    """The bits of each part, greedily. Relative errors of outputs add up in squares."""
    power = 1 if metric == "loss" else 2
    groups = {group_pattern(names): names for names in format_groups(choice.elements)}
    elements = {part: sum(choice.elements[n] for n in names) for part, names in groups.items()}
    costs = {p.tensor: p.divergence**power for p in parts if p.tensor in elements}
    chosen = {part: min(choice.formats) if part in costs else choice.base for part in elements}
    left = sum(n * (choice.spare + min(choice.formats) - chosen[part]) for part, n in elements.items())
    steps = [(part, low, high) for part in costs for low, high in itertools.pairwise(choice.formats)]

    def gain(step: tuple[str, int, int]) -> float:
        part, low, high = step
        return costs[part] * (4.0**-low - 4.0**-high) / (elements[part] * (high - low))

    for part, low, high in sorted(steps, key=gain, reverse=True):
        if chosen[part] == low and elements[part] * (high - low) <= left:
            chosen[part] = high
            left -= elements[part] * (high - low)
    return chosen


def parts_of(
    subject: Subject, model: Any, records: Sequence[TensorRecord], deadline: Deadline, progress: Progress
) -> tuple[tuple[LayerPart, ...], float | None]:
    """The cost of each part in which the converted `model` differs from the subject, and of all parts together.

    A part is a tensor, the weights that readers fuse, or the experts of a layer. The largest come first, because
    formats are chosen for those. If time runs out, the others are missing and the cost of all is None.
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
    return max(0.0, sum(math.inf if gap is None else gap for gap in gaps) / len(gaps))


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
