"""What is wrong with the scales of a checkpoint that others quantised: these are read, codes only where they must be.

Scales that make no number of a code are problems. That two weights which readers fuse have unequal scales, or that a
weight would be far larger than the others, is no contradiction, and yet what most files that "load, speak and are
wrong" have in common.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from lpconv.checkpoint.checkpoint import Checkpoint, Openable
from lpconv.checkpoint.compressed import INPUT_SCALES
from lpconv.checkpoint.source import Source, open_source, read_range, read_tensor
from lpconv.convert.defects import Findings, fused_groups
from lpconv.forms import Component, Headers, grid_of, recognise
from lpconv.forms.foreign.grid import Grid, is_positive
from lpconv.forms.foreign.plane import Span
from lpconv.forms.stored import Fetch, Side
from lpconv.report.numbers import shown
from lpconv.results import InspectResult

# No weight of a trained model is so large; what is larger than others' by so much has lost its scale.
_LARGEST, FACTOR = 1e4, 256.0
_ZERO = 1e-6  # up to here the scale of a weight of zeros
_LEAST_USUAL, _MOST_USUAL = 1e-3, 64.0  # of the largest number of a weight, in the middle of a model
_UNEQUAL = 1.001  # of scales that went through bf16 and back, nothing is left beyond that


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Of one weight: the least and largest scale with all factors, how many are zero and no number, and `one`, the
    scale or factor that the whole tensor has, where there is one. `bound` is what its largest code would become, in the
    column with the least factor where columns have any: no more is sure, since smoothing gives large codes to those."""

    least: float = math.inf
    most: float = 0.0
    num: int = 0
    num_zero: int = 0
    num_bad: int = 0
    one: float | None = None
    bound: float = 0.0

    def __add__(self, other: "Scales") -> "Scales":
        return Scales(
            least=min(self.least, other.least),
            most=max(self.most, other.most),
            num=self.num + other.num,
            num_zero=self.num_zero + other.num_zero,
            num_bad=self.num_bad + other.num_bad,
            one=self.one,
            bound=max(self.bound, other.bound),
        )


def _from_scales(contents: Checkpoint) -> Findings:
    """All that the scales of the layouts of others tell. Raises InputError where files cannot be read."""
    with closing(open_source(contents)) as source:
        grids = grids_of(contents, source)
        found = scales_in(grids, source)
        problems = [*unsound(found, grids, source, contents), *_inverted(found, grids)]
        warnings = (*_unequal(found), *_of_products(grids, source), *lost(found))
        told = Findings(problems=tuple(problems), warnings=warnings)
        return told + (_of_inputs(source) if grids else Findings())


def _of_products(grids: Mapping[str, Grid], source: Source) -> Iterator[str]:
    """Scales of no weight, by which readers divide those of several and multiply their sums."""
    found = {n: read_tensor(source, grid.beside.name).float() for n, grid in grids.items() if grid.beside is not None}
    sound = {n: x for n, x in found.items() if is_positive(x)}
    why = "TensorRT-LLM takes one for them, and refuses others"
    yield from _unequal_of_fused("scales of their products, `weight_scale_2`,", sound, why)


def _of_inputs(source: Source) -> Findings:
    """What the scales of inputs tell: those of weights that readers fuse meet the same inputs."""
    names = {n: n.rpartition(".")[0] for n in source.entries if n.rpartition(".")[2] in INPUT_SCALES}
    found = {f"{module}.weight": read_tensor(source, n).float() for n, module in names.items()}
    wrong = [n for n, x in zip(names, found.values(), strict=True) if not is_positive(x)]
    if wrong:
        return Findings(problems=(f"{shown(wrong)}: scales of inputs that are zero, negative or no number",))
    return Findings(warnings=tuple(_unequal_of_fused("scales of inputs,", found, "they meet the same inputs")))


def _unequal_of_fused(what: str, found: Mapping[str, Tensor], why: str) -> Iterator[str]:
    """Positive scales by weight, where those of weights that readers fuse are not alike."""
    ends = {stem: [float(found[n].max()) for n in fused] for stem, fused in fused_groups(found)}
    ratios = {stem: max(x) / min(x) for stem, x in ends.items()}
    unequal = sorted((s for s in ratios if ratios[s] > _UNEQUAL), key=lambda s: -ratios[s])
    if unequal:
        words = f"by a factor of up to {ratios[unequal[0]]:.3g} in {shown(unequal)}: {why}"
        yield f"weights that readers fuse have unequal {what} {words}"


def grids_of(contents: Checkpoint, source: Source) -> dict[str, Grid]:
    """The weights of a checkpoint that lie in layouts of others, by name."""
    forms = recognise(Headers.of(contents.config, {n: e.info for n, e in source.entries.items()}))
    return {n: grid for n, form in forms.items() if (grid := grid_of(form))}


def scales_in(grids: Mapping[str, Grid], source: Source) -> dict[str, Scales]:
    """What their scales are, all read."""
    return {n: _look(grid, source) for n, grid in grids.items()}


def unsound(
    found: Mapping[str, Scales], grids: Mapping[str, Grid], source: Source, contents: Checkpoint
) -> Iterator[str]:
    """What makes no number of a code, or contradicts the rest of the file."""
    yield from _no_numbers(found)
    yield from _dead(found, grids, source)
    yield from _parts(grids, source, contents.config.get("quantization_config") or {})


def judged(found: InspectResult, model: Openable) -> InspectResult:
    """The record of a checkpoint with what its scales tell."""
    told = _from_scales(Checkpoint.open(model))
    return replace(
        found,
        problems=(*found.problems, *told.problems),
        warnings=(*found.warnings, *told.warnings),
        checked=(*found.checked, "scales"),
        not_checked=tuple(what for what in found.not_checked if what != "scales"),
    )


def fetch_from(source: Source) -> Fetch:
    """Reads elements of stored tensors."""

    def fetch(component: Component, start: int, stop: int) -> Tensor:
        return read_range(source, component.name, start, stop)

    return fetch


def _whole(grid: Grid) -> Iterator[Span]:
    """Each matrix of a weight, in the order of the file."""
    rows, cols = grid.matrix[::-1] if grid.on_its_side else grid.matrix
    for index in range(math.prod(grid.shape[:-2])):
        yield Span(index=index, top=0, bottom=rows, left=0, right=cols)


def side_of(grid: Grid, source: Source) -> Side:
    """What a weight has beside codes and scales, read."""
    return {c.name: read_tensor(source, c.name) for c in grid.side}


def _look(grid: Grid, source: Source) -> Scales:
    side, fetch = side_of(grid, source), fetch_from(source)
    one = None if grid.factor is None else float(side[grid.factor.name])
    total = Scales(one=one)
    for span in _whole(grid):
        scales = grid.scales_of(grid.scales.fetch(fetch, span), span, side)
        total = total + _count(scales, scales * _columns(grid, side), grid.format.max)
        if grid.factor is None and grid.scales.component.shape in ((), (1,)):  # [1, 1] may be a block
            total = replace(total, one=float(scales))
    return total


def _columns(grid: Grid, side: Side) -> Tensor:
    """The least factor of the columns of each block, [blocks of a row]; 1 where they have none."""
    if grid.columns is None:
        return torch.ones(1)
    numbers, width = side[grid.columns.name].float(), grid.block[1]
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % width), value=math.inf).view(-1, width).amin(1)


def _count(scales: Tensor, with_columns: Tensor, largest_code: float) -> Scales:
    is_sound = torch.isfinite(scales) & (scales > 0)
    sound = scales[is_sound]
    zeros = int((scales == 0).sum())
    return Scales(
        least=float(sound.min()) if sound.numel() else math.inf,
        most=float(sound.max()) if sound.numel() else 0.0,
        num=scales.numel(),
        num_zero=zeros,
        num_bad=scales.numel() - zeros - sound.numel(),
        bound=float(with_columns[is_sound].max()) * largest_code if sound.numel() else 0.0,
    )


def _no_numbers(found: Mapping[str, Scales]) -> Iterator[str]:
    for name, s in found.items():
        if s.num_bad:
            yield f"`{name}`: {s.num_bad} of {s.num} scales are negative or no number"


def _dead(found: Mapping[str, Scales], grids: Mapping[str, Grid], source: Source) -> Iterator[str]:
    """Scales of zero, where their codes are not."""
    for name in (n for n, s in found.items() if s.num_zero and n in grids):
        grid, fetch, lost = grids[name], fetch_from(source), 0
        for span in _whole(grid):
            codes = grid.codes.numbers(grid.codes.fetch(fetch, span), span)
            scales = grid.scales.numbers(grid.scales.fetch(fetch, span), span)
            lost += int(((codes != 0) & (grid.scales.spread(scales, span) == 0)).sum())
        if lost:
            yield f"`{name}`: {found[name].num_zero} scales are zero, and {lost} of their codes are not"


def is_inverted(scales: Scales) -> bool:
    """Whether a weight is so large that one of its scales can only be inverted or lost."""
    return scales.bound > _LARGEST


def _inverted(found: Mapping[str, Scales], grids: Mapping[str, Grid]) -> Iterator[str]:
    wrong = [n for n in grids if is_inverted(found[n])]
    if wrong:
        first = grids[wrong[0]]
        which = "the scale" if first.factor is None else "the second scale"
        how = "divides" if first.divides else "multiplies"
        yield (
            f"{shown(wrong)}: weights of up to {found[wrong[0]].bound:.2g}; {which}, which {how} in this layout, is "
            "inverted or lost"
        )


def _parts(grids: Mapping[str, Grid], source: Source, config: Mapping[str, object]) -> Iterator[str]:
    """Shapes, orders of groups and zero points that contradict the rest."""
    for name, grid in grids.items():
        side = side_of(grid, source)
        if grid.size is not None and tuple(side[grid.size.name].tolist()) != grid.shape:
            said = tuple(side[grid.size.name].tolist())
            yield f"`{name}`: `{grid.size.name}` says {said}, the codes are {grid.shape}"
        elif grid.order is not None and not grid.has_sound(side):
            yield f"`{name}`: `{grid.order.name}` names groups that have no scale"
        wrong = [c.name for c in (grid.columns, grid.beside) if c is not None and not is_positive(side[c.name])]
        if wrong:
            yield f"`{name}`: `{wrong[0]}` is zero, negative or no number"
        if grid.zeros is not None and config.get("sym") is True:
            span = next(_whole(grid))
            zeros = grid.zeros.numbers(grid.zeros.fetch(fetch_from(source), span), span)
            middle = (grid.format.max + 1) if grid.format.name == "int4" else 128.0
            if bool((zeros != middle).any()):
                yield (
                    f"`{name}`: zero points of {float(zeros.min()):g} to {float(zeros.max()):g}, and config.json says "
                    f"that codes are symmetric about {middle:g}: is `checkpoint_format` another version's?"
                )


def fused_factors(found: Mapping[str, Scales]) -> dict[str, tuple[tuple[str, ...], float]]:
    """Weights that readers fuse, which each have one scale: by where they lie, their names and the factor between the
    largest scale and the least; 1 where that is no more than scales lose on the way through bf16."""
    factors = {}
    for stem, names in fused_groups(found):
        ones = [s for n in names if (s := found[n].one) is not None and 0 < s < math.inf]
        if len(ones) == len(names):
            factor = max(ones) / min(ones)
            factors[stem] = (names, factor if factor > _UNEQUAL else 1.0)
    return factors


def _unequal(found: Mapping[str, Scales]) -> Iterator[str]:
    """Weights that readers fuse and take one scale for, where each has its own."""
    ratios = {stem: factor for stem, (_, factor) in fused_factors(found).items()}
    wrong = sorted((s for s in ratios if ratios[s] > 1), key=lambda s: -ratios[s])
    if wrong:
        yield (
            f"{len(wrong)} of {len(ratios)} groups of weights that readers fuse have unequal scales, by a factor of up "
            f"to {ratios[wrong[0]]:.3g} in {shown(wrong)}: who takes one scale for them decodes the others wrongly"
        )


def lost(found: Mapping[str, Scales]) -> Iterator[str]:
    """Scales that somebody may have left out."""
    ones = [n for n, s in found.items() if s.least == s.most == 1.0]
    if ones:
        yield f"{shown(ones)}: all scales are 1: were they dropped?"
    usual = usual_bound(found)
    large = [n for n, s in found.items() if s.bound > FACTOR * usual > 0 and n not in ones]
    small = [n for n, s in found.items() if _ZERO < s.bound < usual / FACTOR and n not in ones]
    for far in filter(None, (large, small)):
        bound = found[far[0]].bound
        yield f"{shown(far)}: weights of up to {bound:.2g}, where others have {usual:.2g}: is a scale lost?"
    if usual > _ZERO and not _LEAST_USUAL < usual < _MOST_USUAL:
        yield f"most weights are of up to {usual:.2g}, which no trained model has: are their scales lost?"


def usual_bound(found: Mapping[str, Scales]) -> float:
    """How large the weights are that most have, 0 where there is none."""
    return median(s.bound for s in found.values()) if found else 0.0
