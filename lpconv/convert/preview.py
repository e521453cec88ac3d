"""What a conversion would store, decoded in memory: nothing is written."""

import dataclasses
import statistics
from contextlib import closing

import torch
from torch import Tensor

from lpconv.checkpoint.source import read_range, read_tensor
from lpconv.convert.job import Job
from lpconv.convert.plan import PlannedTensor
from lpconv.convert.policy import settings_for
from lpconv.convert.tensor_records import planned_record, tensor_record
from lpconv.convert.workers import Block, SingleThreadedTorch, Workers, blocks_of
from lpconv.errors import InputError
from lpconv.forms.blocks import Workspace
from lpconv.forms.facts import BlockError, BlockStats, Encoded, Measured
from lpconv.progress import Progress
from lpconv.results import TensorRecord

__all__ = ["decoded_tensors", "noise_of_sample"]


def decoded_tensors(job: Job, progress: Progress) -> tuple[dict[str, Tensor], tuple[TensorRecord, ...]]:
    """The tensors that opening the output of `job` would give, by name, and what happened to each.

    Converted ones are in fp32, others as they are in the source; tied ones are left out, as they are in an output.
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
    """One tensor encoded and decoded again, block by block."""
    assert not t.form.turned, "no layout that can be advised stores transposes"
    found = workers.measured(t)
    values = torch.empty(t.info.num_elements)

    def convert(block: Block) -> Encoded:
        with workers.borrowed() as work:
            encoded = t.form.encode(workers.read(block, work), block.start, found, work)
            values[block.start : block.stop] = t.form.decode(encoded.data, block.start, block.stop, found.side)
            return dataclasses.replace(encoded, data=())

    error, stats = BlockError(), found.stats
    for _, encoded in workers.in_order(blocks_of([t]), convert):
        error = error + (encoded.error or BlockError())
        stats = stats + (encoded.stats or BlockStats())
    return values.view(t.info.shape), tensor_record(t, t.form.scale(found.side), stats, error)


def noise_of_sample(job: Job, *, elements: int) -> float:
    """The mean over all weights of noise over signal, of the first rows of a few converted tensors.

    Of those with one shape and format, two stand for all. `elements` bounds the rows of one tensor; at least one is
    taken. What is kept has no noise. Raises InputError for values that the form cannot hold.
    """
    work, noise = Workspace(), 0.0
    stored = [t for t in job.plan.tensors if t.action != "tie" and t.info.num_elements]
    alike: dict[object, list[PlannedTensor]] = {}
    for t in stored:
        if t.action == "convert":
            alike.setdefault((t.info.shape, t.info.dtype, t.format), []).append(t)
    with SingleThreadedTorch():
        for group in alike.values():
            size, cols = group[0].info.num_elements, (group[0].info.shape or (1,))[-1]
            shape = (max(1, min(size, elements) // cols), cols)
            two = group[len(group) // 4 :: (len(group) + 1) // 2]
            noise += len(group) * size * statistics.fmean(_noise(job, t, shape, work) for t in two)
    return noise / max(sum(t.info.num_elements for t in stored), 1)


def _noise(job: Job, t: PlannedTensor, shape: tuple[int, int], work: Workspace) -> float:
    x = read_range(job.source, t.name, 0, shape[0] * shape[1])
    assert t.format is not None
    form = job.plan.form.of(t.name, shape, t.format, settings_for(job.plan.options, job.plan.linears, t.name))
    if x.numel() > work.scratch.value.numel():
        raise InputError(f"rows of `{t.name}` are longer than a block", hint="exclude it")
    found = form.measure(lambda each: [each(x, 0, work)]) if form.needs_first_pass else Measured()
    encoded = form.encode(x, 0, found, work)
    stats = found.stats + (encoded.stats or BlockStats())
    error = encoded.error or BlockError()
    return error.sum_squares / stats.sum_squares if stats.sum_squares else 0.0
