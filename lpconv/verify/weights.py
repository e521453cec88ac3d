"""Check that the stored weights are what the source implies, by converting it again and comparing.

Three things must agree for every tensor. Its side tensors (scales, counts) equal those of a new first pass over the
source. Every stored block equals, byte for byte, the encoded block of the source. And the decoded block agrees with the
slow reference of the form, which shares no code with the encoder. The figures measured on the way (scale, RMS, SQNR,
largest error) must equal those in the record of the conversion.

Codes from error feedback or training cannot be made again. They must be on the grid, within the recorded distance of
the source, and keep its signal unless rounding to nearest loses it.

*Other machines.* Machines with another vector width sum in another order, so RMS, exact scales and fitted points may
differ in their last bits. The recorded figures then differ as well, which reveals such a machine: only if they are
close but not bit-equal may side tensors differ, and only if no block gets worse.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpconv.forms.blocks import Workspace, as_float32, block_error, block_stats
from lpconv.forms.codes import all_match_reference
from lpconv.forms.facts import BlockError, BlockFacts, BlockStats, Measurement
from lpconv.forms.form import Form, Side
from lpconv.plan.job import Job
from lpconv.plan.plan import PlannedTensor
from lpconv.plan.provenance import planned_record, sqnr_db, tensor_record
from lpconv.progress import Progress
from lpconv.results import TensorRecord, WeightsCheck
from lpconv.results.verify import LOST_DB
from lpconv.summed import Summed, joined
from lpconv.verify.reader import OutputReader
from lpconv.workers import SingleThreadedTorch, TensorBlock, Workers

_PIECE = 2**14  # elements of a sample
_SMALL, _TOGETHER = 2**11, 512  # largest tensor that is confirmed together with others, and how many of them
# Differences that another order of summing may cause: of figures in dB, and relative, also of a block's squared error.
_DB, _SHARE = 0.01, 1e-3


@dataclass(frozen=True, kw_only=True)
class _Compared(Summed):
    """Result of comparing blocks with the source.

    `right`: the blocks are right for the stored side tensors, and no worse than with the implied ones. `error` is the
    error of the stored values, `implied` the error of encoding the source now. `left` still has to be confirmed by the
    reference.
    """

    right: bool = joined(operator.and_, True)
    stats: BlockStats = field(default_factory=BlockStats)
    error: BlockError = field(default_factory=BlockError)
    implied: BlockError = field(default_factory=BlockError)
    left: "_Small | None" = field(default=None, metadata={"join": lambda own, other: own or other})


@dataclass(frozen=True, kw_only=True)
class _Small:
    """A whole small tensor that waits for the slow reference: its values in fp32, and the decoded stored values."""

    form: Form
    value: Tensor
    got: Tensor
    side: Side


def _wrong_tensors(waiting: Iterable[_Small]) -> Iterator[str]:
    """Names of the tensors that differ from the reference. Checks in batches, since one call for hundreds is cheap."""
    alike = defaultdict[tuple[Any, ...], list[tuple[_Small, Tensor]]](list)
    for s in waiting:
        scales = s.form.rows_of_scales(s.side)
        assert scales is not None, "others are confirmed at once"
        alike[s.form.format, scales.shape[1:], s.value.numel() // len(scales)].append((s, scales))
    for (fmt, *_), several in alike.items():
        if not all_match_reference([(s.value, s.got, scales) for s, scales in several], fmt):
            yield from (s.form.name for s, _ in several if not s.form.is_right(s.value, s.got, 0, s.side))


def whole_tensors(tensors: Iterable[PlannedTensor], seconds: float) -> frozenset[str]:
    """The tensors that can be compared completely in about `seconds` on one core, smallest first.

    The speeds are the constants `Form.checked_per_second`, not measured, so the choice is the same on every machine.
    """
    chosen, left = set(), seconds
    for t in sorted(tensors, key=lambda t: (t.info.num_elements, t.name)):
        left -= t.form.seconds_at(t.form.checked_per_second)
        if left < 0:
            break
        chosen.add(t.name)
    return frozenset(chosen)


def check_weights(
    job: Job,
    tensors: Mapping[str, PlannedTensor],
    output: OutputReader,
    progress: Progress,
    *,
    whole: frozenset[str] | None = None,
) -> WeightsCheck:
    """Compare the stored `tensors`, by name, with the source of `job`, and measure their errors again.

    Tensors outside of `whole` (None: all are inside) are compared in three pieces, and their side tensors with the
    records.
    """
    names = [n for n in output.records if n in tensors]
    progress.start("comparing weights", sum(tensors[n].info.num_bytes for n in names))
    records, wrong, checked = [], [n for n in output.records if n not in tensors], 0
    waiting: list[_Small] = []
    with SingleThreadedTorch(), closing(Workers(job.source, job.memory.workers)) as workers:
        for name in names:
            t, record = tensors[name], output.records[name]
            if not output.holds(t.form):
                wrong.append(name)
                continue
            if whole is None or name in whole:
                compared, right, left = _compare_whole(t, output, workers, progress)
                waiting += [] if left is None else [left]
                checked += t.info.num_elements
            else:
                compared = record
                count, right = _compare_pieces(t, output, workers)
                checked += count
                progress.advance(t.info.num_bytes)
            records.append(compared)
            wrong += [] if right and not compared.num_saturated else [name]
            if len(waiting) == _TOGETHER:
                wrong += _wrong_tensors(waiting)
                waiting.clear()
        wrong += _wrong_tensors(waiting)
    total = sum(t.info.num_elements for t in tensors.values())
    return _summary(records, total, checked, [*dict.fromkeys(wrong)])


def _summary(records: list[TensorRecord], total: int, checked: int, wrong: list[str]) -> WeightsCheck:
    converted = {r.name: math.inf if r.sqnr_db is None else r.sqnr_db for r in records if r.action == "convert"}
    worst = min(converted, key=lambda n: converted[n], default=None)
    sqnr = math.inf if worst is None else converted[worst]
    return WeightsCheck(
        max_rel_error=max((r.max_rel_error or 0.0 for r in records), default=0.0),
        min_sqnr_db=sqnr,
        worst=worst if sqnr < math.inf else None,
        num_tensors=len(converted),
        num_elements_checked=checked,
        num_elements=total,
        miss_probability=1 - checked / total if total else 0.0,
        mismatched=tuple(wrong),
    )


def _compare_whole(
    t: PlannedTensor, output: OutputReader, workers: Workers, progress: Progress
) -> tuple[TensorRecord, bool, _Small | None]:
    """(record measured from the files, whether all is right, what the reference must still confirm) for a whole tensor.

    The stored side tensors are assumed to be the implied ones until all blocks have been read; if they are not, the
    blocks are compared again.
    """
    side = _stored_side(t, output)

    def look(x: Tensor, start: int, work: Workspace) -> tuple[BlockFacts | None, _Compared]:
        statistics = t.form.look(x, start, work) if t.form.needs_first_pass else None
        measured = Measurement(stats=statistics.stats if statistics else BlockStats(), side=side)
        return statistics, _compare(t.form, x, start, output, measured, None, work)

    total, looked = _Compared(), list[BlockFacts]()
    for block, (first_pass, compared) in workers.apply(t, look):
        total = total + compared
        looked += [] if first_pass is None else [first_pass]
        progress.advance(block.source_bytes)
    implied = workers.conclude(t, looked) if t.form.needs_first_pass else Measurement()
    same_side = _same_bytes(side.values(), (implied.side[n] for n in side))

    def compare(x: Tensor, start: int, work: Workspace) -> _Compared:
        measured = replace(implied, side=side)
        return _compare(t.form, x, start, output, measured, None if same_side else implied, work)

    if not (same_side and implied.stats.is_finite):
        total = sum((compared for _, compared in workers.apply(t, compare)), _Compared())
    record = output.records[t.name]
    if t.format is None:
        return record, total.right and planned_record(t) == record, None
    stats = implied.stats if t.form.needs_first_pass else total.stats
    measured = tensor_record(t, t.form.scale(side), stats, total.error, implied)
    right = total.right and (measured == record or _is_close(measured, record))
    if right and not same_side:
        right = tensor_record(t, t.form.scale(implied.side), stats, total.implied, implied) != record
    is_fine = t.form.rounding is None or t.format.bits <= 2  # with feedback, 2 bits may keep outputs but not weights
    if right and not is_fine and measured.sqnr_db is not None and measured.sqnr_db <= LOST_DB:
        right = _is_lost(replace(t, form=t.form.nearest), workers)
    return measured, right, total.left


def _is_lost(t: PlannedTensor, workers: Workers) -> bool:
    """Whether rounding a tensor to nearest loses its signal."""
    implied = workers.measure(t)
    errors = workers.apply(t, lambda x, start, work: t.form.encode(x, start, implied, work).error or BlockError())
    error = sum((e for _, e in errors), BlockError())
    return sqnr_db(implied.stats.sum_squares, error.sum_squares) <= LOST_DB


def _compare_pieces(t: PlannedTensor, output: OutputReader, workers: Workers) -> tuple[int, bool]:
    """(number of elements, whether they are right) for the first, a middle and the last piece of a tensor."""
    side = _stored_side(t, output)
    count, right = 0, t.format is None or t.form.scale(side) == output.records[t.name].scale
    for start, stop in _sample_ranges(t.info.num_elements):
        first, last = t.form.widened(start, stop)
        with workers.borrow() as work:
            x = workers.read(TensorBlock(tensor=t, start=first, stop=last), work)
            measured = Measurement(stats=block_stats(x, work) if t.format else BlockStats(), side=side)
            compared = _compare(t.form, x, first, output, measured, None, work)
            right = right and compared.right and not any(_wrong_tensors(filter(None, [compared.left])))
        count += last - first
    return count, right


def _stored_side(t: PlannedTensor, output: OutputReader) -> Side:
    """The stored side tensors of the planned form; the form that the reader assumes may have fewer."""
    held = output.side(t.name)
    return held if held.keys() >= {c.name for c in t.form.side} else output.read_side(t.form)


def _sample_ranges(num_elements: int) -> Iterator[tuple[int, int]]:
    """Up to three ranges (first, middle, last piece), at even offsets that packed formats can start at."""
    if num_elements <= 3 * _PIECE:
        if num_elements:
            yield 0, num_elements
        return
    last = (num_elements - _PIECE) // 8 * 8
    middle = last // 16 * 8
    yield from ((0, _PIECE), (middle, middle + _PIECE), (last, num_elements))


def _compare(
    form: Form,
    x: Tensor,
    start: int,
    output: OutputReader,
    measured: Measurement,
    implied: Measurement | None,
    work: Workspace,
) -> _Compared:
    """Compare a stored block with `x`, the source's block at `start`.

    `measured` has the stored side tensors; `implied` has those that the source implies, if they differ.
    """
    stop = start + len(x)
    stored = output.read(form, start, stop, measured.side)
    again = form.encode(x, start, measured, work)
    right = _same_bytes(stored, again.data)
    if form.format is None:
        return _Compared(right=right)
    stats = again.stats or BlockStats()
    if right and implied is None:  # equal codes have equal errors
        error = again.error or BlockError()
        if stop <= _SMALL and stop == form.num_elements and form.rows_of_scales(measured.side) is not None:
            value, got = x.to(torch.float32, copy=True), form.decode(stored, start, stop, measured.side)
            left = _Small(form=form, value=value, got=got, side=measured.side)
            return _Compared(stats=stats, error=error, implied=error, left=left)
        right = form.confirms(x, stored, start, measured.side, work)
        return _Compared(right=right, stats=stats, error=error, implied=error)
    value, got = as_float32(x, work), form.decode(stored, start, stop, measured.side)
    right = right and form.is_right(value, got, start, measured.side)
    if torch.isnan(got).any():
        got = torch.where(torch.isnan(got) & torch.isfinite(value), math.inf, got)  # NaN for a number: infinite error
    error = block_error(value, got)
    wanted = (again if implied is None else form.encode(x, start, implied, work)).error or BlockError()
    right = right and error.sum_squares <= wanted.sum_squares * (1 + _SHARE)
    return _Compared(right=right, stats=stats, error=error, implied=wanted)


def _is_close(measured: TensorRecord, record: TensorRecord) -> bool:
    """Whether a record equals the measured one up to what another order of summing may change."""
    figures = ("scale", "rms", "absmax", "max_rel_error")
    pairs = [(getattr(measured, n), getattr(record, n)) for n in figures]
    alike = all(a == b or (a and b and math.isclose(a, b, rel_tol=_SHARE)) for a, b in pairs)
    a, b = measured.sqnr_db, record.sqnr_db
    alike = alike and (a == b or (a is not None and b is not None and abs(a - b) <= _DB))
    loose = {n: getattr(record, n) for n in (*figures, "sqnr_db", "num_flushed")}
    return alike and replace(measured, **loose) == record


def _same_bytes(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    raw = ((x.reshape(-1).view(torch.uint8).numpy(), y.reshape(-1).view(torch.uint8).numpy()) for x, y in pairs)
    return all(np.array_equal(x, y) for x, y in raw)
