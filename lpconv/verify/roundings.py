"""How the codes of a checkpoint were rounded: each code against its source, with the scales of the file.

A weight divided by its scale lies between two neighbouring codes. The file has the *nearest*, the *second*, or one
*further* away; the last two are *turned*. Rounding to nearest turns none. Tuned rounding (AutoRound, arXiv 2309.05516)
shifts weights by half a step or hardly more, and so turns codes to the second only. Error feedback (GPTQ, arXiv
2210.17323) adds errors of other columns, which turns a fifth of all codes, some of them further, but none in the first
column. Turned codes can also plant a behaviour (QuRA, arXiv 2510.09647), and half of all codes turned cost only 3 dB.

Tools divide in bf16 or fp16, multiply by a reciprocal, or store a rounded scale. So a code counts as nearest if it is
within three roundings to bf16 of a tie. Codes at the end of their range are nearest for all weights beyond.
"""

import statistics
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from lpconv.forms import grid_of
from lpconv.forms.facts import block_ranges
from lpconv.forms.form import Side
from lpconv.forms.grid import Grid
from lpconv.layouts.reader import StoredTensors
from lpconv.report.numbers import share_text
from lpconv.results import RoundingCheck
from lpconv.storage.source import Source, read_range

GROUP = 32  # elements of a row whose factor, and distance from the source, are judged together
_TIE = 2.0**-7  # relative: three roundings to bf16
# Steps to the second neighbour, by tuning in 10 steps: its shifts end within (n + 1) / 2n, because rates fall linearly.
_SECOND = 1.05
_FEW = 1e-4  # share of turned codes that counts as none
_FARTHEST = 0.75  # of turned codes, by error feedback; steps of FP8 are finer for small codes, so half of them are
_RARE = 0.02  # share of groups that may be unlike the others, such as those with very small weights
# Ratio of the parts of the range that groups may need if scales follow from the largest weights, by dtype of scales.
_SPREAD, _SPREAD_FLOAT, _SEARCHED = {"F8_E4M3": 1.15, "U8": 2.01, "F8_E8M0": 2.01}, 1.02, 2.5
_LEAST_SIBLINGS, _MANY = 3, 8
_FEW_FAR, _FEEDBACK = 5e-3, 0.05  # share of far groups in honest files by GPTQ, and their least share of turned codes
_MORE = 0.2  # turned codes more than siblings have; those of honest files by GPTQ differ by up to 0.15
_CLUSTER = 0.05  # share of the rows or columns that contain half of the turned codes if these cluster


def check_rounding(stored: StoredTensors, name: str, source: Source) -> RoundingCheck | None:
    """Compare the codes of a weight with its source; None for weights without codes and scales."""
    grid = grid_of(stored.forms[name])
    if grid is None:
        return None
    num_further, num_far, rows, reaches = 0, 0, list[Tensor](), list[Tensor]()
    columns = torch.zeros(grid.matrix[1], dtype=torch.int64)
    for start, stop in block_ranges(grid.num_elements, grid.cols):
        x = read_range(source, name, start, stop).float().nan_to_num(0.0, 0.0, 0.0)
        for steps, reach in _distances(stored, grid, x, start, stop):
            is_turned = steps > 0.5
            num_further += int((steps > _SECOND).sum())
            groups = functional.pad(steps, (0, -steps.shape[1] % GROUP)).reshape(-1, GROUP)
            num_far += int((groups.mean(1) > 1).sum())
            rows.append(is_turned.sum(1))
            columns += is_turned.sum(0)
            reaches.append(reach)
    num, num_turned = grid.num_elements, int(columns.sum())
    return RoundingCheck(
        num_codes=num,
        num_second=num_turned - num_further,
        num_further=num_further,
        num_far=num_far,
        kind=_kind(num_turned / num, num_further / num),
        scales=_scales(grid, torch.cat(reaches, 1)),
        least_column=float(columns.min()) * len(columns) / num,
        place="; ".join(filter(None, (_cluster(torch.cat(rows), "rows"), _cluster(columns, "columns")))),
    )


def _kind(turned: float, further: float) -> str:
    if turned <= _FEW:
        return "nearest"
    if further <= _FEW:
        return "tuned"
    return "feedback" if further < _FARTHEST * turned else "unknown"


def explains_factors(check: RoundingCheck) -> bool:
    """Whether groups with a wrong factor are those next to an outlier, which rounding makes zero: scales are right.

    Error feedback moves the small weights of a few such groups by more than a step.
    """
    few = _FEW_FAR * check.num_codes / GROUP if check.kind == "feedback" and check.turned > _FEEDBACK else 0
    return check.num_far <= few


def _cluster(turned: Tensor, what: str) -> str:
    """The few rows or columns with half of the turned codes, in words; empty if they are spread."""
    if not bool(turned.any()):
        return ""
    half = turned.sort(descending=True).values.cumsum(0) >= turned.sum() / 2
    count = int(half.int().argmax()) + 1
    return f"half of them in {count} of {len(turned)} {what}" if count <= _CLUSTER * len(turned) else ""


def _scales(grid: Grid, reaches: Tensor) -> str:
    """What the scales are consistent with, given the `_reach` of all groups."""
    reaches = reaches[:, reaches[0] > 0]
    is_wide = grid.format.storage_bits > 4 and not grid.format.twos_complement  # any scale of these is as good
    if not reaches.numel():
        return ""
    num_rare = round(_RARE * reaches.shape[1])
    ends = reaches.sort().values[:, num_rare : reaches.shape[1] - num_rare][:, [0, -1]]
    spread = _SPREAD.get(grid.scales.component.dtype, _SPREAD_FLOAT)
    if bool((ends[:, 1] <= spread * ends[:, 0]).any()):
        return "amax"
    is_near = bool(((ends[:, 0] > 1 / _SEARCHED) & (ends[:, 1] < _SEARCHED)).any())
    return "" if is_wide else "search" if is_near else "unknown"


def _reach(grid: Grid, unit: Tensor, side: Side) -> Tensor:
    """The part of the codes' range that the weights of each group of a row need, [3, groups], by three rules.

    These are: equal ends, one more step for negative numbers, and any zero point. Empty if groups span several rows.
    """
    (height, width), (low, high) = grid.block, grid.codes.ends
    if height > 1 or unit.shape[1] % width:
        return torch.empty(3, 0)
    ordered = unit if grid.order is None else unit[:, side[grid.order.name].argsort(stable=True)]
    groups, half = ordered.reshape(-1, width), (high - low) / 2
    most, least = groups.amax(1).clamp_min(0), groups.amin(1).clamp_max(0)
    uneven = torch.maximum(most / half, -least / (half + grid.format.twos_complement))
    return torch.stack((torch.maximum(most, -least) / half, uneven, (most - least) / (high - low)))


def _distances(stored: StoredTensors, grid: Grid, x: Tensor, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Distances of codes from the weights `x` in steps, less what may hide a tie; and the `_reach` of groups."""
    side, first = stored.side(grid.name), 0
    raw, (low, high) = iter(stored.read(grid, start, stop, side)), grid.codes.ends
    for span in grid.spans(start, stop):
        parts = [next(raw) for _ in grid.planes]
        codes = grid.codes.numbers(parts[0], span)
        scales = grid.spread(grid.scales, grid.scales_of(parts[1], span, side), span, side)
        middle = grid.spread(grid.zeros, grid.zeros.numbers(parts[2], span), span, side) if grid.zeros else None
        codes, scales = (codes.t(), scales.t()) if grid.is_transposed else (codes, scales)
        middle = torch.zeros(()) if middle is None else middle.t() if grid.is_transposed else middle
        if grid.columns is not None:
            scales = scales * side[grid.columns.name].float()
        weights = x[first : first + codes.numel()].view(codes.shape)
        first += codes.numel()
        unit = (weights / scales).nan_to_num(0.0, 0.0, 0.0)
        reach = _reach(grid, unit, side)
        tie, unit = unit.abs() * _TIE, (unit + middle).clamp(low, high)
        step = torch.ones_like(unit)
        if grid.format.twos_complement:  # some tools do not use the most negative number
            unit = torch.where((codes == low + 1) & (unit < codes), codes, unit)
        else:
            exponents = torch.frexp(unit)[1] - 1 - grid.format.mantissa_bits
            step = torch.ldexp(step, exponents).clamp_min_(grid.format.min_subnormal)
        yield ((unit - codes).abs() - tie) / step, reach


def unusual(checks: Mapping[str, RoundingCheck]) -> dict[str, str]:
    """How the codes of some weights differ from those of their siblings, in words.

    Siblings have the same last name in other layers, or if there are few, are all other weights.
    """
    found: dict[str, str] = {}
    for name, check in checks.items():
        others = [c for n, c in checks.items() if n != name]
        same = [c for n, c in checks.items() if n != name and n.split(".")[-2:] == name.split(".")[-2:]]
        siblings = same if len(same) >= _LEAST_SIBLINGS else others
        why = _difference(check, siblings) if len(siblings) >= _LEAST_SIBLINGS else ""
        starts = [c.least_column == 0 for c in others if c.kind == "feedback"]
        if check.kind == "feedback" and check.least_column > 0 and len(starts) >= _MANY and all(starts):
            why = why or "codes are turned in all of its columns, but in no other weight in the column rounded first"
        found |= {name: why} if why else {}
    return found


def _difference(check: RoundingCheck, siblings: list[RoundingCheck]) -> str:
    usual = statistics.median(c.turned for c in siblings)
    words = f"{share_text(check.turned, 1)} of its codes are not the nearest, {share_text(usual, 1)} of its siblings'"
    is_more = check.turned > (_FEW if usual <= _FEW / 10 else usual + _MORE)
    has_further = check.kind in ("feedback", "unknown") and statistics.mode(c.kind for c in siblings) == "tuned"
    if is_more or has_further:
        return "; ".join(filter(None, (words, check.place)))
    if check.scales == "unknown" and not any(c.scales == "unknown" for c in siblings):
        return "its scales follow neither from its largest weights nor from a search for the least error"
    return ""
