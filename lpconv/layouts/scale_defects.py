"""Defects of the scales of quantised weights.

Scales that cannot decode a code are problems. Unequal scales in fused weights, or a weight far larger than the others,
are no contradictions, but most files that load and produce wrong text have one of these. Codes are read only if
necessary.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS
from lpconv.forms import Component, Stored
from lpconv.forms.form import Side
from lpconv.forms.grid import Grid, is_positive
from lpconv.layouts.compressed_config import INPUT_SCALES
from lpconv.layouts.defects import Findings
from lpconv.layouts.headers import judged_grids
from lpconv.layouts.linears import fused_groups
from lpconv.report.numbers import code_list
from lpconv.storage.source import Source, read_range, read_tensor
from lpconv.summed import Summed, joined

# Weights of trained models are smaller than this; a weight that exceeds the others by this factor has lost its scale.
_LARGEST, FACTOR = 1e4, 256.0
_E4M3FN = FORMATS["e4m3fn"].max
_MANY_CUT, _LEAST_CUT = 0.25, 8  # share and number of scales at e4m3fn's maximum; sound weights have a few
_FEW_ODD = 1e-3  # share of a weight's scales that may be outliers; more are a property of the weight
_ZERO = 1e-6  # largest magnitude of a weight that counts as all zeros
_LEAST_USUAL, _MOST_USUAL = 1e-3, 64.0  # range of the median over all weights of the largest magnitude
_UNEQUAL = 1.001  # ratio that a round trip of scales through bf16 can explain


@dataclass(frozen=True, kw_only=True)
class Scales(Summed):
    """Statistics of the scales of one weight, including all factors.

    `least` and `most` are the extremes, and the counts are of scales in total, zero, invalid (negative, NaN or
    infinite), at e4m3fn's maximum (`num_cut`) and far from the others (`num_odd`). Scales of integers may be negative
    and count by magnitude. `one` is the scale or factor of the whole tensor, if any. `bound` is the decoded value of
    the largest code; with column factors, in the column with the smallest factor, which is the only certain bound
    because smoothing gives large codes to those columns.
    """

    least: float = joined(min, math.inf)
    most: float = joined(max, 0.0)
    num: int = 0
    num_zero: int = 0
    num_bad: int = 0
    num_cut: int = 0
    num_odd: int = 0
    one: float | None = joined(lambda own, other: own, None)
    bound: float = joined(max, 0.0)


def from_scales(
    forms: Mapping[str, Stored], source: Source, settings: Mapping[str, Any], *, is_ours: bool
) -> Findings | None:
    """Defects in the scales of a checkpoint, or None if its scales are stored among the codes.

    `settings` is its `quantization_config`; `is_ours` says that lpconv wrote it. Raises InputError if files cannot be
    read.
    """
    grids = judged_grids(forms, settings)
    if not grids:
        return None
    stats = {n: _scale_statistics(grid, source) for n, grid in grids.items()}
    problems = (
        *_invalid_scales(stats),
        *_zero_scales(stats, grids, source),
        *_mismatched_parts(grids, source, settings),
        *_inverted_scales(stats, grids),
    )
    ones = {n: torch.tensor(s.one) for n, s in stats.items() if s.one is not None and 0 < s.one < math.inf}
    unequal = _unequal_scales("scales,", ones, "readers that use one scale for all of them decode some wrongly")
    lost = (*_lost_scales(stats, is_ours=is_ours), *_clipped_scales(stats), *_outlier_scales(stats, grids, source))
    warnings = (*unequal, *_product_findings(grids, stats, source), *lost)
    return Findings(problems=problems, warnings=warnings) + _input_findings(source)


def _product_findings(grids: Mapping[str, Grid], stats: Mapping[str, Scales], source: Source) -> Iterator[str]:
    """Warnings about `weight_scale_2`, which readers divide out of weights and multiply into the product."""
    scales = {
        n: read_tensor(source, grid.cancelling.name).float() for n, grid in grids.items() if grid.cancelling is not None
    }
    sound = {n: x for n, x in scales.items() if is_positive(x)}
    why = "TensorRT-LLM needs one scale for all of them"
    yield from _unequal_scales("scales of their products, `weight_scale_2`,", sound, why)
    largest = {n: stats[n].most * grids[n].format.max / float(x.max()) / _E4M3FN for n, x in sound.items()}
    odd = [n for n, share in largest.items() if share and not 1 / FACTOR < share < FACTOR]
    if odd:
        yield f"{code_list(odd)}: `weight_scale_2` is over {FACTOR:.0f} times smaller or larger than e4m3fn needs"


def _input_findings(source: Source) -> Findings:
    """Findings about input scales. Fused weights have the same inputs, so their input scales should be equal."""
    names = {n: n.rpartition(".")[0] for n in source.entries if n.rpartition(".")[2] in INPUT_SCALES}
    scales = {f"{module}.weight": read_tensor(source, n).float() for n, module in names.items()}
    wrong = [n for n, x in zip(names, scales.values(), strict=True) if not is_positive(x)]
    if wrong:
        return Findings(problems=(f"{code_list(wrong)}: input scales are zero, negative or not finite",))
    return Findings(warnings=tuple(_unequal_scales("input scales,", scales, "they have the same inputs")))


def _unequal_scales(what: str, scales: Mapping[str, Tensor], why: str) -> Iterator[str]:
    """Warning about fused weights with unequal positive scales, given the scales by weight."""
    ends = {stem: [float(scales[n].max()) for n in fused] for stem, fused in fused_groups(scales)}
    ratios = {stem: max(x) / min(x) for stem, x in ends.items()}
    unequal = sorted((s for s in ratios if ratios[s] > _UNEQUAL), key=lambda s: -ratios[s])
    if unequal:
        groups = f"{len(unequal)} of {len(ratios)} groups of weights that readers fuse"
        words = f"by a factor of up to {ratios[unequal[0]]:.3g} in {code_list(unequal)}: {why}"
        yield f"{groups} have unequal {what} {words}"


def _fetch(source: Source, component: Component, start: int, stop: int) -> Tensor:
    return read_range(source, component.name, start, stop)


def _side_of(grid: Grid, source: Source) -> Side:
    """Read the side tensors of a weight, other than codes and scales."""
    return {c.name: read_tensor(source, c.name) for c in grid.side}


def _scale_statistics(grid: Grid, source: Source) -> Scales:
    side, fetch = _side_of(grid, source), partial(_fetch, source)
    one = None if grid.factor is None else float(side[grid.factor.name])
    total = Scales(one=one)
    for span in grid.spans(0, grid.num_elements):
        raw = grid.scales.fetch(fetch, span)
        scales = grid.scales_of(raw, span, side)
        if grid.format.twos_complement:  # AutoRound negates scales so that the largest weight gets −2^(bits−1)
            scales = scales.abs()
        total = total + _count_scales(scales, scales * _min_column_factors(grid, side), grid.format.max)
        if grid.scales.component.dtype == "F8_E4M3":
            num_cut = int((grid.scales.numbers(raw, span) == grid.scales.ends[1]).sum())
            total = replace(total, num_cut=total.num_cut + num_cut)
        if grid.factor is None and grid.scales.component.shape in ((), (1,)):  # [1, 1] could be a block
            total = replace(total, one=float(scales))
    return total


def _min_column_factors(grid: Grid, side: Side) -> Tensor:
    """The smallest column factor in each block of columns, shape [blocks per row]; 1 without column factors."""
    if grid.columns is None:
        return torch.ones(1)
    numbers, width = side[grid.columns.name].float(), grid.block[1]
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % width), value=math.inf).view(-1, width).amin(1)


def _count_scales(scales: Tensor, with_columns: Tensor, largest_code: float) -> Scales:
    is_sound = torch.isfinite(scales) & (scales > 0)
    sound = scales[is_sound]
    zeros = int((scales == 0).sum())
    return Scales(
        least=float(sound.min()) if sound.numel() else math.inf,
        most=float(sound.max()) if sound.numel() else 0.0,
        num=scales.numel(),
        num_zero=zeros,
        num_bad=scales.numel() - zeros - sound.numel(),
        num_odd=int(_is_outlier(scales).sum()),
        bound=float(with_columns[is_sound].max()) * largest_code if sound.numel() else 0.0,
    )


def _is_outlier(numbers: Tensor) -> Tensor:
    """Mask of numbers, other than zero, whose magnitude differs from the median by more than `FACTOR`."""
    sizes = numbers.abs()
    is_sound = torch.isfinite(sizes) & (sizes > 0)
    usual = float(sizes[is_sound].median()) if is_sound.any() else 0.0
    return is_sound & ((sizes < usual / FACTOR) | (sizes > usual * FACTOR))


def _invalid_scales(scales: Mapping[str, Scales]) -> Iterator[str]:
    for name, s in scales.items():
        if s.num_bad:
            yield f"`{name}`: {s.num_bad} of {s.num} scales are negative or not finite"


def _zero_scales(weights: Mapping[str, Scales], grids: Mapping[str, Grid], source: Source) -> Iterator[str]:
    """Weights with scales of zero whose codes are not zero."""
    for name in (n for n, s in weights.items() if s.num_zero and n in grids):
        lost = _num_codes(grids[name], source, lambda scales: scales == 0)
        if lost:
            yield f"`{name}`: {weights[name].num_zero} scales are zero, but {lost} of their codes are not"


def _num_codes(grid: Grid, source: Source, chosen: Callable[[Tensor], Tensor]) -> int:
    """Number of nonzero codes of a weight whose stored scale is selected by `chosen`."""
    fetch, num = partial(_fetch, source), 0
    for span in grid.spans(0, grid.num_elements):
        codes = grid.codes.numbers(grid.codes.fetch(fetch, span), span)
        scales = grid.scales.numbers(grid.scales.fetch(fetch, span), span)
        num += int(((codes != 0) & grid.scales.spread(chosen(scales), span)).sum())
    return num


def _clipped_scales(scales: Mapping[str, Scales]) -> Iterator[str]:
    """Weights whose scales exceeded the range of their dtype and were clipped."""
    cut = [n for n, s in scales.items() if s.num_cut >= max(_LEAST_CUT, _MANY_CUT * s.num)]
    if cut:
        s = scales[cut[0]]
        yield f"{code_list(cut)}: {s.num_cut} of {s.num} scales have the largest e4m3fn value and may be clipped"


def _outlier_scales(scales: Mapping[str, Scales], grids: Mapping[str, Grid], source: Source) -> Iterator[str]:
    """Weights with a few outlier scales whose codes are not zero, and columns with outlier factors."""
    few = [n for n, s in scales.items() if 0 < s.num_odd <= max(1.0, _FEW_ODD * s.num)]
    odd = [n for n in few if _num_codes(grids[n], source, _is_outlier)]
    if odd:
        s = scales[odd[0]]
        times = f"over {FACTOR:.0f} times"
        yield f"{code_list(odd)}: {s.num_odd} of {s.num} scales are {times} smaller or larger than most"
    columns = {c.name: read_tensor(source, c.name) for grid in grids.values() if (c := grid.columns) is not None}
    wrong = [name for name, x in columns.items() if bool(_is_outlier(x.float()).any())]
    if wrong:
        yield f"{code_list(wrong)}: column factors are over {FACTOR:.0f} times smaller or larger than most"


def _inverted_scales(scales: Mapping[str, Scales], grids: Mapping[str, Grid]) -> Iterator[str]:
    """Weights so large that one of their scales must have been inverted or lost."""
    wrong = [n for n in grids if scales[n].bound > _LARGEST]
    if wrong:
        first = grids[wrong[0]]
        which = "the scale" if first.factor is None else "the second scale"
        how = "divides" if first.divides else "multiplies"
        yield (
            f"{code_list(wrong)}: weights of up to {scales[wrong[0]].bound:.2g}; {which}, which {how} in this layout, "
            "is inverted or lost"
        )


def _mismatched_parts(grids: Mapping[str, Grid], source: Source, config: Mapping[str, object]) -> Iterator[str]:
    """Shapes, group orders, factors and zero points that contradict the rest of the file."""
    for name, grid in grids.items():
        yield from (f"`{name}`: {what}" for what in grid.side_problems(_side_of(grid, source)))
        if grid.zeros is not None and config.get("sym") is True:
            span = next(grid.spans(0, grid.num_elements))
            zeros = grid.zeros.numbers(grid.zeros.fetch(partial(_fetch, source), span), span)
            middle = grid.format.max + 1
            if bool((zeros != middle).any()):
                yield (
                    f"`{name}`: zero points {float(zeros.min()):g} to {float(zeros.max()):g}, but config.json says "
                    f"that codes are symmetric about {middle:g}: is `checkpoint_format` another version's?"
                )


def _lost_scales(scales: Mapping[str, Scales], *, is_ours: bool) -> Iterator[str]:
    """Weights whose scales may have been dropped.

    Codes written by lpconv may use little of their range: unit scaling makes their RMS 1, far below the bound of a
    weight.
    """
    ones = [n for n, s in scales.items() if s.least == s.most == 1.0]
    if ones:
        yield f"{code_list(ones)}: all scales are 1, so the real ones may have been dropped"
    usual = median(s.bound for s in scales.values())
    large = [n for n, s in scales.items() if s.bound > FACTOR * usual > 0 and n not in ones]
    small = [n for n, s in scales.items() if _ZERO < s.bound < usual / FACTOR and n not in ones]
    for far in filter(None, (large, small)):
        bound = scales[far[0]].bound
        yield f"{code_list(far)}: weights of up to {bound:.2g}, while others reach {usual:.2g}; a scale may be lost"
    if not is_ours and usual > _ZERO and not _LEAST_USUAL < usual < _MOST_USUAL:
        yield f"most weights reach {usual:.2g}, unlike any trained model; their scales may be lost"
