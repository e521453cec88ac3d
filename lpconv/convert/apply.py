"""Run a plan: read blocks, encode them on worker threads, and write and hash them in file order; or only in memory.

Scales come before the codes in the file, which is written and hashed front to back. So they must be known before the
first code: tensors whose form stores scales are read twice (from the page cache if the shard fits), once for the scales
and once to encode. If a sample predicts the scale with near certainty, one pass does both, and its statistics over all
blocks confirm the scale. If each block has its own scales, one pass does both as well, and the scales follow the codes.
A shard with a wrong prediction is written again with the correct scales.

Workers read, encode and write; the plan fixes the position of every block. The calling thread hashes the blocks in file
order, whatever order they finish in, so the output does not depend on the number of workers. Hashing is the longest
step that cannot be parallelised, so that thread does nothing else.
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import torch
from torch import Tensor

from lpconv.errors import InputError
from lpconv.forms.blocks import Workspace, finite_absmax
from lpconv.forms.facts import BlockError, BlockFacts, BlockStats, EncodedBlock, Measurement, block_ranges
from lpconv.forms.form import Over
from lpconv.plan.job import Job
from lpconv.plan.plan import OutputFile, PlannedShard, PlannedTensor
from lpconv.plan.policy import settings_for
from lpconv.plan.provenance import planned_record, tensor_record
from lpconv.progress import Progress
from lpconv.results import FileRecord, TensorRecord, WrittenShard, from_json, to_json
from lpconv.storage.header import DTYPE_BITS
from lpconv.storage.place import any_indirect
from lpconv.storage.source import read_range, read_tensor
from lpconv.storage.staging import Staging
from lpconv.workers import SingleThreadedTorch, TensorBlock, Workers, tensor_blocks

T = TypeVar("T")
_PLACES, _MIN_ROWS = 4, 64  # positions of a sample in a tensor, and least number of rows


class _Output:
    """A file that is being written, and the position of each tensor in it."""

    def __init__(self, staging: Staging, file: OutputFile, flusher: ThreadPoolExecutor) -> None:
        self.part = staging.create(file.name, file.size_bytes, flusher)
        self._places = {i.name: (len(file.header) + i.begin, DTYPE_BITS[i.dtype]) for i in file.tensors}
        self.gaps = {name: bytes(gap) for name, gap in file.gaps.items()}

    def write(self, name: str, first: int, data: Tensor) -> None:
        """Write data at element `first` of a tensor. May be called from any thread."""
        begin, bits = self._places[name]
        self.part.write(begin + first * bits // 8, _bytes(data))


class Engine:
    """Writes the shards of a job's plan into a working folder; `progress` counts source bytes in both passes."""

    def __init__(self, job: Job, staging: Staging, progress: Progress) -> None:
        # Scales are predicted from many small pieces, and those of a remote or packed file take longer than all.
        self._guesses = not any_indirect(job.checkpoint.directory, job.checkpoint.weight_files)
        self._workers, self._staging, self._progress = Workers(job.source, job.memory.workers), staging, progress
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="lpconv-flush")
        self._magnitudes: dict[str, float] = {}

    def close(self) -> None:
        """Stop the threads; blocks in flight are finished and dropped."""
        self._workers.close()
        self._flusher.shutdown(wait=True, cancel_futures=True)

    def write_shard(self, shard: PlannedShard) -> tuple[list[FileRecord], list[TensorRecord]]:
        """Write the files of one shard. Returns the finished files and the record of each tensor."""
        measured = {t.name: self._measure(t) for t in shard.tensors if t.form.needs_first_pass}
        while True:
            written = self._try_shard(shard, measured)
            if written is not None:
                return written

    def _try_shard(
        self, shard: PlannedShard, measured: dict[str, Measurement]
    ) -> tuple[list[FileRecord], list[TensorRecord]] | None:
        """Like `write_shard`, but None if a prediction was wrong. `measured` then holds the correct statistics."""
        assumed = dict(measured)
        files: list[_Output] = []
        with contextlib.ExitStack() as opened:
            for planned in shard.files:
                files.append(_Output(self._staging, planned, self._flusher))
                opened.callback(files[-1].part.abandon)  # unless it is finished
                files[-1].part.append(planned.header)
            records = self._write_tensors(shard, files, measured)
            if all(_is_confirmed(a, measured[n]) for n, a in assumed.items()):
                return [f.part.finish() for f in files], records
        return None

    def _measure(self, t: PlannedTensor) -> Measurement:
        """Statistics of the first pass over a tensor, or a prediction of them."""
        if t.form.late_side:
            return t.form.begin(max(map(self._largest_magnitude, (t, *t.fused))) if t.form.shares_scale else 0.0)
        guess = self._workers.guess(t) if self._guesses else None
        if guess is None:
            return t.form.measure(self._block_reader(t), [*map(self._block_reader, t.fused)])
        self._progress.advance(t.info.num_bytes)
        return guess

    def _largest_magnitude(self, t: PlannedTensor) -> float:
        """The largest magnitude of a tensor. It is read only once, even if several tensors share its scale."""
        if t.name not in self._magnitudes:
            self._magnitudes[t.name] = max(
                self._block_reader(t)(lambda x, _, work: finite_absmax(x, work)), default=0.0
            )
        return self._magnitudes[t.name]

    def _block_reader(self, t: PlannedTensor) -> Over:
        """A function that maps a form's job over the blocks of a tensor. Only the first pass counts as progress."""
        readings = itertools.count()

        def over(job: Callable[[Tensor, int, Workspace], T], /) -> Iterator[T]:
            is_first = next(readings) == 0
            for block, result in self._workers.apply(t, job):
                if is_first:
                    self._progress.advance(block.source_bytes)
                yield result

        return over

    def _write_tensors(
        self, shard: PlannedShard, files: Sequence[_Output], measured: dict[str, Measurement]
    ) -> list[TensorRecord]:
        """Write all tensors in the order of the root file.

        Scales and counts of points are between other tensors; they are in `measured` by the time they are written.
        """
        owners = {c.name: t.name for t in shard.tensors for c in t.form.side}
        by_name = {t.form.data[0].name: t for t in shard.tensors}
        records: list[TensorRecord] = []
        for is_side, infos in itertools.groupby(shard.root.tensors, lambda i: i.name in owners):
            if is_side:
                files[0].part.append(b"".join(_bytes(measured[owners[i.name]].side[i.name]) for i in infos))
            else:
                records += self._encode([by_name[i.name] for i in infos], files, measured)
        return records

    def _encode(
        self, tensors: Sequence[PlannedTensor], files: Sequence[_Output], measured: dict[str, Measurement]
    ) -> list[TensorRecord]:
        done: dict[str, list[tuple[BlockFacts | None, EncodedBlock]]] = {t.name: [] for t in tensors}
        encode = functools.partial(self._encode_block, files=files, measured=measured)
        with closing(self._workers.in_order(tensor_blocks(tensors), encode)) as results:
            for block, (work, statistics, encoded) in results:
                for file, part, data in zip(files, block.tensor.form.data, encoded.data, strict=False):
                    file.part.digest(_bytes(data))
                    if part.name in file.gaps and block.stop == block.tensor.info.num_elements:
                        file.part.append(file.gaps[part.name])
                self._workers.give(work)
                done[block.tensor.name].append((statistics, dataclasses.replace(encoded, data=())))
                self._progress.advance(block.source_bytes)
        return [self._record(t, done[t.name], measured) for t in tensors]

    def _encode_block(
        self, block: TensorBlock, *, files: Sequence[_Output], measured: dict[str, Measurement]
    ) -> tuple[Workspace, BlockFacts | None, EncodedBlock]:
        """Read, encode and write a block. The workspace holds the encoded data, and the hashing thread returns it."""
        work, form = self._workers.take(), block.tensor.form
        try:
            assumed, statistics = measured.get(form.name, Measurement()), None
            x = self._workers.read(block, work)
            if assumed.is_guess:
                statistics, encoded = form.look_and_encode(x, block.start, assumed, work)
            else:
                encoded = form.encode(x, block.start, assumed, work)
            first, _ = form.place(block.start, block.stop, assumed.side)
            for file, part, data in zip(files, form.data, encoded.data, strict=False):  # pairs also have a residual
                file.write(part.name, first, data)
            return work, statistics, encoded
        except BaseException:
            self._workers.give(work)
            raise

    def _record(
        self, t: PlannedTensor, blocks: list[tuple[BlockFacts | None, EncodedBlock]], measured: dict[str, Measurement]
    ) -> TensorRecord:
        """The record of a written tensor. Replaces a prediction in `measured` by the statistics of all blocks."""
        if looked := [facts for facts, _ in blocks if facts is not None]:
            measured[t.name] = self._workers.conclude(t, looked)
        stats = [encoded.stats for _, encoded in blocks if encoded.stats is not None]
        errors = [encoded.error for _, encoded in blocks if encoded.error is not None]
        error = sum(errors, BlockError()) if errors else None
        if t.name not in measured:
            return tensor_record(t, None, sum(stats, BlockStats()) if stats else None, error, Measurement())
        statistics = measured[t.name]
        return tensor_record(t, t.form.scale(statistics.side), statistics.stats, error, statistics)


def _is_confirmed(assumed: Measurement, measured: Measurement) -> bool:
    """Whether the file written with a prediction equals the one written without."""
    if not assumed.is_guess:
        return True
    return (
        measured.stats.is_finite
        and not measured.is_other
        and all(data is measured.side[n] or torch.equal(data, measured.side[n]) for n, data in assumed.side.items())
    )


def _bytes(data: Tensor) -> memoryview:
    return data.view(torch.uint8).numpy().data


def write_shards(
    job: Job, shards: Sequence[PlannedShard], staging: Staging, progress: Progress
) -> tuple[WrittenShard, ...]:
    """Write those of `shards` that are not in the journal yet. Returns the records of all `shards`, in order."""
    written = {line["shard"]: from_json(WrittenShard, line) for line in staging.done if "tensors" in line}
    progress.start("converting", sum(s.bytes_read for s in shards))
    with SingleThreadedTorch(), closing(Engine(job, staging, progress)) as engine:
        for shard in shards:
            name = shard.root.name
            if name in written:
                progress.advance(shard.bytes_read)
                continue
            files, tensors = engine.write_shard(shard)
            written[name] = WrittenShard(shard=name, files=tuple(files), tensors=tuple(tensors))
            staging.append(to_json(written[name]))
    return tuple(written[s.root.name] for s in shards)


def decoded_tensors(
    job: Job, progress: Progress, *, phase: str = "encoding"
) -> tuple[dict[str, Tensor], tuple[TensorRecord, ...]]:
    """The tensors that opening the output of `job` would give, by name, and the record of each.

    Converted tensors are in fp32, others as in the source; tied ones are left out, as in an output.
    """
    state: dict[str, Tensor] = {}
    records: list[TensorRecord] = []
    progress.start(phase, sum(t.info.num_bytes for t in job.plan.tensors))
    with SingleThreadedTorch(), closing(Workers(job.source, job.memory.workers)) as workers:
        for t in job.plan.tensors:
            if t.action == "convert":
                values, record = _decoded(t, workers)
                state[t.name] = job.plan.in_source_order(t.name, values)
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

    def convert(x: Tensor, start: int, work: Workspace) -> EncodedBlock:
        stop = start + len(x)
        encoded = t.form.encode(x, start, measured, work)
        values[start:stop] = t.form.decode(encoded.data, start, stop, measured.side)
        return dataclasses.replace(encoded, data=())

    error, stats = BlockError(), measured.stats
    for _, encoded in workers.apply(t, convert):
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
    alike: dict[object, list[PlannedTensor]] = {}
    for t in job.plan.tensors:
        if t.action == "convert" and t.info.num_elements:
            alike.setdefault((t.info.shape, t.info.dtype, t.format), []).append(t)
    with SingleThreadedTorch():
        for group in alike.values():
            cols = (group[0].info.shape or (1,))[-1]
            rows = max(_MIN_ROWS, elements // cols // _PLACES * _PLACES)
            two = group[len(group) // 4 :: (len(group) + 1) // 2]
            of_group = statistics.fmean(_noise(job, t, rows, cols, work) for t in two)
            noise += len(group) * group[0].info.num_elements * of_group
    return noise / max(job.plan.num_weights, 1)


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
