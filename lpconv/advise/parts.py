"""The cost of each part of a conversion, and the formats of `--bits`.

`--bits` chooses a format for each part, so that converted weights have at most so many bits on average, with scales. A
part is a tensor, the weights that readers fuse, or the experts of a layer. The cost of each is measured in the widest
format that all of them can have, by converting that part alone. In other formats it is taken to change as the noise of
the weights does. All parts start in the narrowest format, and the one that saves the most divergence per additional
byte gets the next wider one, until the bits are used up.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpconv.advise.candidates import Settings, convert_options, describe_conversion
from lpconv.advise.infer import SAMPLE
from lpconv.advise.subject import Subject, job_of, open_converted
from lpconv.convert.apply import noise_of_sample
from lpconv.errors import UsageError
from lpconv.layers import is_same_name
from lpconv.layouts.linears import format_groups, group_pattern
from lpconv.layouts.reader import stored_shapes
from lpconv.models.coded import CodedTensor
from lpconv.models.whole import linears_of
from lpconv.plan.suited import suited_options
from lpconv.progress import Deadline, Progress, TimeIsUp, counted
from lpconv.results import LayerPart, TensorRecord
from lpconv.storage.header import DTYPE_BITS
from lpconv.verify.outputs import compare_outputs, outputs_of

_WIDTHS = ("int2", "int3", "int4", "int5", "int6", "int8")
_WINDOWS = 2


@dataclass(frozen=True, kw_only=True)
class Width:
    """A format for parts: the bytes of each converted tensor in it, and the noise-to-signal ratio of the weights."""

    format: str
    sizes: Mapping[str, int]
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Widths to choose from for each part, narrowest first, the bytes available, and the settings of the conversion.

    Integers have one scale for as many numbers of a row as `convert` would choose.
    """

    settings: Settings
    widths: tuple[Width, ...]
    most_bytes: float

    @property
    def base(self) -> Width:
        """The widest integers that all parts can have."""
        return [w for w in self.widths[:-1] if sum(w.sizes.values()) <= self.most_bytes][-1]


def choice_for(subject: Subject, bits: float) -> Choice:
    """The choice for `bits` per converted weight. Raises UsageError, with the minimum, if these are too few."""
    options, _ = suited_options(convert_options({"format": _WIDTHS[0]}), subject.prepared.checkpoint)
    settings = {"method": "unit", "granularity": options.granularity, "scale": "search"}
    widths = []
    for fmt in _WIDTHS:
        with job_of(subject, settings | {"format": fmt}) as job:
            tensors = [t for t in job.plan.tensors if t.format is not None and t.format.name == fmt]
            sizes = {t.name: t.bytes_out for t in tensors}
            widths.append(Width(format=fmt, sizes=sizes, noise=noise_of_sample(job, elements=SAMPLE)))
    weights = max(sum(t.info.num_elements for t in tensors), 1)
    raised = "fp16" if any(DTYPE_BITS[t.info.dtype] > 16 for t in tensors) else "keep"
    sizes = {t.name: 2 * t.info.num_elements + 4 for t in tensors}  # and a scale, if there is one
    widths.append(Width(format=raised, sizes=sizes))
    if (least := 8 * sum(widths[0].sizes.values()) / weights) > bits:
        least_text = f"{math.ceil(100 * least) / 100:.2f}"
        raise UsageError(
            f"--bits {bits:g}: {_WIDTHS[0]} takes {least_text} bits per weight with its scales",
            hint=f"pass --bits {least_text} or more",
        )
    return Choice(settings=settings, widths=tuple(widths), most_bytes=bits / 8 * weights)


def mixed_conversion(subject: Subject, choice: Choice, deadline: Deadline, progress: Progress) -> tuple[str, Settings]:
    """(name, settings) of the conversion with the chosen format for each part; parts not measured get the base."""
    base = choice.settings | {"format": choice.base.format}
    model, records = open_converted(subject, base, progress)
    parts, _ = parts_of(subject, model, records, deadline, progress)
    chosen = choose_widths(parts, choice, metric=subject.metric)
    rules = [f"{part}={width.format}" for part, width in chosen.items() if width is not choice.base]
    name = f"{describe_conversion(base)}, and {len(rules)} of {len(chosen)} parts in other formats"
    return name, base | {"rules": rules}


def choose_widths(parts: Sequence[LayerPart], choice: Choice, *, metric: str) -> dict[str, Width]:
    """The width for each part, greedily. Relative errors of outputs add up in squares."""
    power = 1 if metric == "loss" else 2
    groups = {group_pattern(names): names for names in format_groups(choice.base.sizes)}
    sizes = {part: [sum(w.sizes[n] for n in names) for w in choice.widths] for part, names in groups.items()}
    costs = {p.tensor: p.divergence**power / (choice.base.noise or 1.0) for p in parts if p.tensor in sizes}
    places = dict.fromkeys(costs, 0)
    left = choice.most_bytes - sum(sizes[p][places.get(p, choice.widths.index(choice.base))] for p in sizes)

    def added(part: str) -> float:
        return sizes[part][places[part] + 1] - sizes[part][places[part]]

    def gain(part: str) -> float:
        noise, less = (choice.widths[places[part] + i].noise for i in (0, 1))
        return costs[part] * (noise - less) / max(added(part), 1)

    while raised := [p for p, place in places.items() if place + 1 < len(choice.widths) and added(p) <= left]:
        part = max(raised, key=gain)
        left -= added(part)
        places[part] += 1
    return {part: choice.widths[place] for part, place in places.items()}


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
