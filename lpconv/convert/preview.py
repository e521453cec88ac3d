"""Encode and decode a conversion in memory; nothing is written."""

import dataclasses
import statistics
from contextlib import closing

import torch
from torch import Tensor

from lpconv.errors import InputError
from lpconv.forms.blocks import Workspace
from lpconv.forms.facts import BlockError, BlockStats, EncodedBlock, Measurement, block_ranges
from lpconv.plan.job import Job
from lpconv.plan.plan import PlannedTensor
from lpconv.plan.policy import settings_for
from lpconv.plan.provenance import planned_record, tensor_record
from lpconv.progress import Progress
from lpconv.results import TensorRecord
from lpconv.storage.source import read_range, read_tensor
from lpconv.workers import SingleThreadedTorch, TensorBlock, Workers, tensor_blocks

_PLACES, _MIN_ROWS = 4, 64  # positions of a sample in a tensor, and least number of rows


def decoded_tensors(job: Job, progress: Progress) -> tuple[dict[str, Tensor], tuple[TensorRecord, ...]]:
    """The tensors that opening the output of `job` would give, by name, and the record of each.

    Converted tensors are in fp32, others as in the source; tied ones are left out, as in an output.
    """
    state: dict[str, Tensor] = {}
    records: list[TensorRecord] = []
    progress.start("encoding", sum(t.info.num_bytes for t in job.plan.tensors))
    with SingleThreadedTorch(), closing(Workers(job.source, job.memory.workers)) as workers:
        for t in job.plan.tensors:
            if t.action == "convert":
                state[t.name], record = _decoded(t, workers)
            else:
                record = planned_record(t)
                if t.action == "keep":
                    state[t.name] = read_tensor(job.source, t.name)
            records.append(record)
            progress.advance(t.info.num_bytes)
    return state, tuple(records)


def _decoded(t: PlannedTensor, workers: Workers) -> tuple[Tensor, TensorRecord]:
    """Encode and decode one tensor, block by block."""
    measured = workers.measure(t)
    values = torch.empty(t.info.num_elements)

    def convert(block: TensorBlock) -> EncodedBlock:
        with workers.borrow() as work:
            encoded = t.form.encode(workers.read(block, work), block.start, measured, work)
            values[block.start : block.stop] = t.form.decode(encoded.data, block.start, block.stop, measured.side)
            return dataclasses.replace(encoded, data=())

    error, stats = BlockError(), measured.stats
    for _, encoded in workers.in_order(tensor_blocks([t]), convert):
        error = error + (encoded.error or BlockError())
        stats = stats + (encoded.stats or BlockStats())
    return values.view(t.info.shape), tensor_record(t, t.form.scale(measured.side), stats, error)


def noise_of_sample(job: Job, *, elements: int) -> float:
    """Estimated noise-to-signal ratio, averaged over all weights, from rows of a few converted tensors.

    Rows come from four positions of two tensors per shape and format. `elements` determines the number of rows, at
    least 64: with fewer, the rows that share a budget of points would get too few. The estimate is within 1 dB
    (tested). Kept tensors have no noise. Raises InputError for values that the form cannot represent.
    """
    work, noise = Workspace(), 0.0
    stored = [t for t in job.plan.tensors if t.action != "tie" and t.info.num_elements]
    alike: dict[object, list[PlannedTensor]] = {}
    for t in stored:
        if t.action == "convert":
            alike.setdefault((t.info.shape, t.info.dtype, t.format), []).append(t)
    with SingleThreadedTorch():
        for group in alike.values():
            cols = (group[0].info.shape or (1,))[-1]
            rows = max(_MIN_ROWS, elements // cols // _PLACES * _PLACES)
            two = group[len(group) // 4 :: (len(group) + 1) // 2]
            of_group = statistics.fmean(_noise(job, t, rows, cols, work) for t in two)
            noise += len(group) * group[0].info.num_elements * of_group
    return noise / max(sum(t.info.num_elements for t in stored), 1)


def _noise(job: Job, t: PlannedTensor, rows: int, cols: int, work: Workspace) -> float:
    total = t.info.num_elements // cols
    each, starts = total, [0]
    if rows < total:
        each = rows // _PLACES
        starts = [i * (total - each) // (_PLACES - 1) for i in range(_PLACES)]
    x = torch.cat([read_range(job.source, t.name, cols * s, cols * (s + each)) for s in starts])
    assert t.format is not None
    settings = settings_for(job.plan.options, job.plan.linears, t.name)
    form = job.plan.form.of(t.name, (len(x) // cols, cols), t.format, settings)
    blocks = [(start, x[start:stop]) for start, stop in block_ranges(len(x), form.cols)]
    if max(len(block) for _, block in blocks) > work.scratch.value.numel():
        raise InputError(
            f"rows of `{t.name}` are too long to read in blocks", hint=f"leave it unconverted with --exclude '{t.name}'"
        )
    measured = Measurement()
    if form.needs_first_pass:
        measured = form.measure(lambda look: [look(block, start, work) for start, block in blocks])
    encoded = [form.encode(block, start, measured, work) for start, block in blocks]
    stats = sum((e.stats or BlockStats() for e in encoded), measured.stats)
    error = sum((e.error or BlockError() for e in encoded), BlockError())
    return error.sum_squares / stats.sum_squares if stats.sum_squares else 0.0
