"""Carry out a plan: read blocks, encode them on worker threads, hash and write them in order.

Scales stand before the codes in the file, and everything is written, and hashed, front to back. So they have to be
known before the first code: tensors whose form stores scales are read twice, from the page cache where the shard fits.
The first pass finds the scales, the second encodes. Where a sample leaves no doubt of a scale, one pass does both, and
what it saw of all blocks confirms the scale. Where each block says its own scales, one pass does both as well, and the
scales stand behind the codes. A shard in which one was wrong is written again, with those that were found.

Workers read, encode and write; the plan says where every block goes. The calling thread hashes what they wrote, in the
order of the file, whatever order they finish in. So the output does not depend on the number of workers. Hashing is the
longest step that cannot be shared, which is why that thread does nothing else.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from lpconv.forms.blocks import Workspace, finite_absmax
from lpconv.forms.facts import BlockError, BlockStats, Encoded, Looked, Measured
from lpconv.forms.form import Over
from lpconv.plan.plan import OutputFile, PlannedShard, PlannedTensor
from lpconv.plan.tensor_records import tensor_record
from lpconv.plan.workers import TensorBlock, Workers, blocks_of
from lpconv.progress import Progress
from lpconv.results import FileRecord, TensorRecord
from lpconv.storage.header import DTYPE_BITS
from lpconv.storage.partfile import PartFile
from lpconv.storage.source import Source

T = TypeVar("T")
Create = Callable[[str, int, ThreadPoolExecutor], PartFile]  # of `Staging`


class _Output:
    """A file that is being written, and where in it each tensor begins."""

    def __init__(self, create: Create, file: OutputFile, flusher: ThreadPoolExecutor) -> None:
        self.part = create(file.name, file.size_bytes, flusher)
        self._places = {i.name: (len(file.header) + i.begin, DTYPE_BITS[i.dtype]) for i in file.tensors}

    def write(self, name: str, first: int, data: Tensor) -> None:
        """Put data from element `first` of a tensor on in its place, from any thread."""
        begin, bits = self._places[name]
        self.part.write(begin + first * bits // 8, _bytes(data))


class Engine:
    """Runs plans. `source` is read from `workers` threads; `progress` hears of source bytes in both passes.

    With `guesses` scales are guessed by samples, many small pieces of a tensor.
    """

    def __init__(self, source: Source, *, workers: int, progress: Progress, guesses: bool) -> None:
        self._workers, self._progress, self._guesses = Workers(source, workers), progress, guesses
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="lpconv-flush")
        self._magnitudes: dict[str, float] = {}

    def close(self) -> None:
        """Stop the threads; blocks in flight are finished and dropped."""
        self._workers.close()
        self._flusher.shutdown(wait=True, cancel_futures=True)

    def write_shard(self, shard: PlannedShard, create: Create) -> tuple[list[FileRecord], list[TensorRecord]]:
        """Write one shard's files, made by `create`; returns the finished files and what happened to each tensor."""
        measured = {t.name: self._measured(t) for t in shard.tensors if t.form.needs_first_pass}
        while True:
            written = self._written(shard, create, measured)
            if written is not None:
                return written

    def _written(
        self, shard: PlannedShard, create: Create, measured: dict[str, Measured]
    ) -> tuple[list[FileRecord], list[TensorRecord]] | None:
        """As `write_shard`; None where a guess was wrong. What was found takes the place of guesses in `measured`."""
        assumed = dict(measured)
        files: list[_Output] = []
        try:
            for planned in shard.files:
                files.append(_Output(create, planned, self._flusher))
                files[-1].part.append(planned.header)
            records = self._write_tensors(shard, files, measured)
            if all(_is_confirmed(a, measured[n]) for n, a in assumed.items()):
                return [f.part.finish() for f in files], records
            for f in files:
                f.part.abandon()
            return None
        except BaseException:
            for f in files:
                f.part.abandon()
            raise

    def _measured(self, t: PlannedTensor) -> Measured:
        """What the first pass over a tensor finds, or a guess of it."""
        if t.form.late:
            return t.form.begin(max(map(self._largest, (t, *t.fused))) if t.form.shares else 0.0)
        guess = self._workers.guess(t) if self._guesses else None
        if guess is None:
            return t.form.measure(self._over(t), [*map(self._over, t.fused)])
        self._progress.advance(t.info.num_bytes)
        return guess

    def _largest(self, t: PlannedTensor) -> float:
        """The largest magnitude of a tensor, which is read once, however many share a scale with it."""
        if t.name not in self._magnitudes:
            self._magnitudes[t.name] = max(self._over(t)(lambda x, _, work: finite_absmax(x, work)), default=0.0)
        return self._magnitudes[t.name]

    def _over(self, t: PlannedTensor) -> Over:
        """What gives a form the blocks of a tensor. Only the first reading counts as progress."""
        readings = itertools.count()

        def over(job: Callable[[Tensor, int, Workspace], T], /) -> Iterator[T]:
            is_first = next(readings) == 0
            for block, found in self._workers.apply(t, job):
                if is_first:
                    self._progress.advance(block.source_bytes)
                yield found

        return over

    def _write_tensors(
        self, shard: PlannedShard, files: Sequence[_Output], measured: dict[str, Measured]
    ) -> list[TensorRecord]:
        """Everything in the order of the root file, where scales and counts of points stand between other tensors: by
        the time that theirs are encoded they are in `measured`."""
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
        self, tensors: Sequence[PlannedTensor], files: Sequence[_Output], measured: dict[str, Measured]
    ) -> list[TensorRecord]:
        sums = {t.name: _Sums(stats=measured[t.name].stats if t.name in measured else None) for t in tensors}
        encode = functools.partial(self._encode_block, files=files, measured=measured)
        with closing(self._workers.in_order(blocks_of(tensors), encode)) as results:
            for block, (work, seen, encoded) in results:
                for file, data in zip(files, encoded.data, strict=False):
                    file.part.digest(_bytes(data))
                self._workers.give(work)
                sums[block.tensor.name].add(seen, encoded)
                self._progress.advance(block.source_bytes)
        return [self._record(t, sums[t.name], measured) for t in tensors]

    def _encode_block(
        self, block: TensorBlock, *, files: Sequence[_Output], measured: dict[str, Measured]
    ) -> tuple[Workspace, Looked | None, Encoded]:
        """Read, encode and write a block. The workspace holds what was encoded, and is given back by who hashes it."""
        work, form = self._workers.take(), block.tensor.form
        try:
            found, seen = measured.get(form.name, Measured()), None
            x = self._workers.read(block, work)
            if found.is_guess:
                seen, encoded = form.look_and_encode(x, block.start, found, work)
            else:
                encoded = form.encode(x, block.start, found, work)
            first, _ = form.place(block.start, block.stop, found.side)
            for file, part, data in zip(files, form.data, encoded.data, strict=False):  # only pairs have a residual
                file.write(part.name, first, data)
            return work, seen, encoded
        except BaseException:
            self._workers.give(work)
            raise

    def _record(self, t: PlannedTensor, sums: "_Sums", measured: dict[str, Measured]) -> TensorRecord:
        """What happened to a tensor. What all blocks say takes the place of a guess in `measured`."""
        if sums.looked:
            measured[t.name] = self._workers.conclude(t, sums.looked)
            sums.stats = measured[t.name].stats
        found = measured.get(t.name, Measured())
        return tensor_record(t, t.form.scale(found.side), sums.stats, sums.error, found)


@dataclass(kw_only=True)
class _Sums:
    """Of the blocks of a tensor so far; None is what nobody measured. `looked` is what a guess will be judged by."""

    stats: BlockStats | None
    error: BlockError | None = None
    looked: list[Looked] = field(default_factory=list)

    def add(self, seen: Looked | None, encoded: Encoded) -> None:
        """One more block."""
        if encoded.error is not None:
            self.error = (self.error or BlockError()) + encoded.error
        if encoded.stats is not None:
            self.stats = (self.stats or BlockStats()) + encoded.stats
        if seen is not None:
            self.looked.append(seen)


def _is_confirmed(assumed: Measured, found: Measured) -> bool:
    """Whether what was written by a guess is what would have been written without one."""
    if not assumed.is_guess:
        return True
    return (
        found.stats.is_finite
        and not found.is_other
        and all(data is found.side[n] or torch.equal(data, found.side[n]) for n, data in assumed.side.items())
    )


def _bytes(data: Tensor) -> memoryview:
    return data.view(torch.uint8).numpy().data
