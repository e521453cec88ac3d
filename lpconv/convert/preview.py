"""What a conversion would store, decoded in memory: nothing is written."""

import dataclasses
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


def noise_of_sample(job: Job, *, elements: int) -> tuple[float, int]:
    """The mean over all weights of noise over signal, of the first rows of each converted tensor; and their elements.

    `elements` bounds the rows of one tensor; at least one is taken. What is kept has no noise. Raises InputError for
    values that the form cannot hold.
    """
    work, noise, weights, taken = Workspace(), 0.0, 0, 0
    with SingleThreadedTorch():
        for t in job.plan.tensors:
            weights += t.info.num_elements if t.action != "tie" else 0
            if t.action == "convert" and t.info.num_elements:
                cols = t.info.shape[-1] if t.info.shape else 1
                shape = (max(1, min(t.info.num_elements, elements) // cols), cols)
                noise += t.info.num_elements * _noise(job, t, shape, work)
                taken += shape[0] * cols
    return noise / weights if weights else 0.0, taken


def _noise(job: Job, t: PlannedTensor, shape: tuple[int, int], work: Workspace) -> float:
    x = read_range(job.source, t.name, 0, shape[0] * shape[1])
    assert t.format is not None
    form = job.plan.form.of(t.name, shape, t.format, settings_for(job.plan.options))
    if x.numel() > work.scratch.value.numel():
        raise InputError(f"rows of `{t.name}` are longer than a block", hint="exclude it")
    found = form.measure(lambda each: [each(x, 0, work)]) if form.needs_first_pass else Measured()
    encoded = form.encode(x, 0, found, work)
    stats = found.stats + (encoded.stats or BlockStats())
    error = encoded.error or BlockError()
    return error.sum_squares / stats.sum_squares if stats.sum_squares else 0.0
