"""Carry out a plan: read blocks, encode them on worker threads, hash and write them in order.

A shard with scaled tensors is read twice. The first pass gathers each tensor's statistics, from which its scale
follows, or fits the scales of its rows; the second encodes. Between the two the scales are known, so they can stand
before the codes in the file, and everything is written, and hashed, front to back. The second pass comes from the page
cache where the shard fits.

Workers read, encode and write; the plan says where every block goes. The calling thread hashes what they wrote, in the
order of the file, whatever order they finish in. So the output does not depend on the number of workers. Hashing is the
longest step that cannot be shared, which is why that thread does nothing else.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from lpconv.checkpoint.header import DTYPE_BITS
from lpconv.checkpoint.partfile import PartFile
from lpconv.checkpoint.source import TORCH_DTYPES, Source, read_range
from lpconv.convert.encode import (
    BLOCK_ELEMENTS,
    BlockError,
    BlockStats,
    Workspace,
    block_ranges,
    block_stats,
    encode_pair,
    encode_points,
    encode_scaled,
    fit_points,
    fits_exactly,
    scale_for,
)
from lpconv.convert.plan import POINTS_SUFFIX, SCALE_SUFFIX, OutputFile, Plan, PlannedShard, PlannedTensor
from lpconv.convert.records import tensor_record
from lpconv.errors import InputError
from lpconv.mcf.multipoint import Fit, Points
from lpconv.mcf.split import RESIDUALS
from lpconv.progress import Progress
from lpconv.results import FileRecord, TensorRecord

__all__ = ["Engine", "SingleThreadedTorch", "buffer_bytes"]

T = TypeVar("T")
_SPARE_SLOTS = 2  # blocks that wait for the writer while every worker is busy


class _Slot:
    """One block in flight: a workspace, and room for the bytes that go to the root and the residual file."""

    def __init__(self) -> None:
        self.work = Workspace()
        self.root, self.residual = (torch.empty(BLOCK_ELEMENTS * 8, dtype=torch.uint8) for _ in range(2))

    @property
    def num_bytes(self) -> int:
        return self.work.num_bytes + self.root.numel() + self.residual.numel()


def buffer_bytes(workers: int) -> int:
    """Memory that the engine's buffers take."""
    return (workers + _SPARE_SLOTS) * _Slot().num_bytes


class SingleThreadedTorch:
    """Torch operators run on one thread inside: blocks are the unit of parallelism, not elements."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Elements `start` to `stop` of a tensor."""

    tensor: PlannedTensor
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What the first pass finds: statistics, and either one scale or the points of every row."""

    stats: BlockStats
    scale: float | None = None
    points: Points | None = None

    def stored(self, name: str) -> dict[str, bytes]:
        """The tensors that stand before the codes of `name`, by name."""
        if self.points is None:
            return {name + SCALE_SUFFIX: torch.tensor([self.scale], dtype=torch.float32).numpy().tobytes()}
        return {
            name + SCALE_SUFFIX: self.points.scales_P.numpy().tobytes(),
            name + POINTS_SUFFIX: self.points.counts_R.numpy().tobytes(),
        }


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """What a worker made of a block: bytes for the root file and, of pairs, the residual file; statistics and error.

    `offset` is where in the tensor the bytes begin, None where all elements take as many.
    """

    parts: tuple[Tensor, ...]
    offset: int | None = None
    stats: BlockStats | None = None
    error: BlockError | None = None


class _Output:
    """A file that is being written, and where in it each tensor begins."""

    def __init__(self, directory: Path, file: OutputFile, flusher: ThreadPoolExecutor) -> None:
        self.part = PartFile(directory, file.name, file.size_bytes, flusher)
        self._begins = {i.name: len(file.header) + i.begin for i in file.tensors}

    def write(self, block: _Block, data: Tensor, offset: int | None) -> None:
        """Put the bytes of a block in their place, from any thread."""
        if offset is None:
            offset = block.start * data.numel() // (block.stop - block.start)
        self.part.write(self._begins[block.tensor.name] + offset, data.numpy().data)


class Engine:
    """Runs plans. `source` is read from `workers` threads; `progress` hears of source bytes in both passes."""

    def __init__(self, source: Source, *, workers: int, progress: Progress) -> None:
        self._source, self._progress = source, progress
        # Each worker sums on one thread, too: MKL would share the sum, and its last bits would change from run to run.
        self._pool = ThreadPoolExecutor(
            workers, thread_name_prefix="lpconv-encode", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="lpconv-flush")
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        self._window = workers + _SPARE_SLOTS
        for _ in range(self._window):
            self._slots.put(_Slot())

    def close(self) -> None:
        """Stop the threads; blocks in flight are finished and dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._flusher.shutdown(wait=True, cancel_futures=True)

    def write_shard(
        self, plan: Plan, shard: PlannedShard, directory: Path
    ) -> tuple[list[FileRecord], list[TensorRecord]]:
        """Write one shard's files below `directory`; returns the finished files and what happened to each tensor."""
        measured = {t.name: self._measure(plan, t) for t in shard.scaled}
        files: list[_Output] = []
        try:
            for planned in (shard.root, shard.residual):
                if planned is not None:
                    files.append(_Output(directory, planned, self._flusher))
                    files[-1].part.append(planned.header)
            records = self._write_tensors(plan, shard, files, measured)
            return [f.part.finish() for f in files], records
        except BaseException:
            for f in files:
                f.part.abandon()
            raise

    def _measure(self, plan: Plan, t: PlannedTensor) -> _Measured:
        if t.points is not None:
            return self._fit(plan, t)
        stats = self._statistics(t)
        return _Measured(stats=stats, scale=self._scale(plan, t, stats))

    def _fit(self, plan: Plan, t: PlannedTensor) -> _Measured:
        """Raises InputError for tensors with NaN or Inf, of which there is no sum of low-bit numbers."""
        layout, most = t.points, plan.options.points_max
        assert layout is not None
        assert most is not None

        def fit(block: _Block) -> tuple[BlockStats, Fit]:
            with self._slot() as slot:
                x = self._read(block, slot.work)
                stats = block_stats(x, slot.work)
                if stats.num_nan or stats.num_inf:
                    raise InputError(
                        f"tensor `{t.name}` has NaN or Inf, which no sum of {layout.element.name} numbers is",
                        hint=f"keep it with --exclude '{t.name}'",
                    )
                return stats, fit_points(x, layout, most, slot.work)

        total, fits = BlockStats(), []
        for block, (stats, found) in self._in_order(_blocks([t]), fit):
            total = total + stats
            fits.append(found)
            self._advance(block)
        return _Measured(stats=total, points=Fit.of_blocks(fits).allot(layout.num_points))

    def _statistics(self, t: PlannedTensor) -> BlockStats:
        total = BlockStats()
        for block, stats in self._in_order(_blocks([t]), self._block_statistics):
            total = total + stats
            self._advance(block)
        return total

    def _block_statistics(self, block: _Block) -> BlockStats:
        with self._slot() as slot:
            return block_stats(self._read(block, slot.work), slot.work)

    def _scale(self, plan: Plan, t: PlannedTensor, stats: BlockStats) -> float:
        assert t.format is not None
        rounding = plan.method.scale_rounding if plan.options.scale == "pow2" else "exact"
        scale = scale_for(stats, t.format, rounding)
        # fp32 codes promise the source's bits back; dividing tiny elements by a large scale could lose some.
        if t.format.name == "fp32" and rounding != "exact" and scale > 1 and not self._fits(t, scale):
            return 1.0
        return scale

    def _fits(self, t: PlannedTensor, scale: float) -> bool:
        def fits(block: _Block) -> bool:
            with self._slot() as slot:
                return fits_exactly(self._read(block, slot.work), scale, slot.work)

        return all(ok for _, ok in list(self._in_order(_blocks([t]), fits)))

    def _write_tensors(
        self, plan: Plan, shard: PlannedShard, files: Sequence[_Output], measured: Mapping[str, _Measured]
    ) -> list[TensorRecord]:
        """Everything in the order of the root file, where scales and counts of points stand between other tensors."""
        side = {n: data for name, m in measured.items() for n, data in m.stored(name).items()}
        by_name = {t.name: t for t in shard.tensors}
        records: list[TensorRecord] = []
        for is_side, infos in itertools.groupby(shard.root.tensors, lambda i: i.name in side):
            if is_side:
                files[0].part.append(b"".join(side[i.name] for i in infos))
            else:
                records += self._encode(plan, [by_name[i.name] for i in infos], files, measured)
        return records

    def _encode(
        self, plan: Plan, tensors: Sequence[PlannedTensor], files: Sequence[_Output], measured: Mapping[str, _Measured]
    ) -> list[TensorRecord]:
        errors: dict[str, BlockError] = {}
        sums: dict[str, BlockStats] = {name: m.stats for name, m in measured.items()}

        def encode(block: _Block) -> tuple[_Slot, _Encoded]:
            slot = self._slots.get()
            try:
                encoded = self._encode_block(plan, block, slot, measured.get(block.tensor.name))
                for file, data in zip(files, encoded.parts, strict=False):  # a kept tensor has no residual
                    file.write(block, data, encoded.offset)
                return slot, encoded
            except BaseException:
                self._slots.put(slot)
                raise

        with closing(self._in_order(_blocks(tensors), encode)) as results:
            for block, (slot, encoded) in results:
                for file, data in zip(files, encoded.parts, strict=False):
                    file.part.digest(data.numpy().data)
                self._slots.put(slot)
                name = block.tensor.name
                if encoded.error is not None:
                    errors[name] = errors.get(name, BlockError()) + encoded.error
                if encoded.stats is not None:
                    sums[name] = sums.get(name, BlockStats()) + encoded.stats
                self._advance(block)
        scales = {name: m.scale for name, m in measured.items()}
        return [tensor_record(plan, t, scales.get(t.name), sums.get(t.name), errors.get(t.name)) for t in tensors]

    def _encode_block(self, plan: Plan, block: _Block, slot: _Slot, found: _Measured | None) -> _Encoded:
        t, count = block.tensor, block.stop - block.start
        x = self._read(block, slot.work)
        if t.format is None:
            return _Encoded(parts=(x.view(torch.uint8),))
        if t.points is not None and found is not None and found.points is not None:
            cols = t.points.cols
            own = found.points.rows(block.start // cols, block.stop // cols)
            coded, error = encode_points(x, own, t.points, slot.work)
            first = int(found.points.counts_R[: block.start // cols].sum())
            return _Encoded(parts=(coded,), offset=first * t.points.row_bytes, error=error)
        high = _view(slot.root, count, TORCH_DTYPES[t.format.safetensors or ""])
        if found is not None and found.scale is not None:
            finite = not (found.stats.num_nan or found.stats.num_inf)
            error = encode_scaled(x, found.scale, t.format, high, slot.work, finite=finite)
            return _Encoded(parts=(high.view(torch.uint8),), error=error)
        form = RESIDUALS[plan.options.residual or ""]
        low = _view(slot.residual, count, form.dtype)
        block_sum = block_stats(x, slot.work)
        error = encode_pair(x, form, high, low, slot.work)
        return _Encoded(parts=(high.view(torch.uint8), low.view(torch.uint8)), stats=block_sum, error=error)

    def _read(self, block: _Block, work: Workspace) -> Tensor:
        return read_range(self._source, block.tensor.name, block.start, block.stop, buffer=work.raw)

    def _slot(self) -> "_Borrowed":
        return _Borrowed(self._slots)

    def _advance(self, block: _Block) -> None:
        self._progress.advance((block.stop - block.start) * DTYPE_BITS[block.tensor.info.dtype] // 8)

    def _in_order(self, blocks: Iterable[_Block], job: Callable[[_Block], T]) -> Generator[tuple[_Block, T]]:
        """Results of `job` in the order of `blocks`, with at most as many under way as there are slots."""
        pending: deque[tuple[_Block, Future[T]]] = deque()
        iterator = iter(blocks)
        try:
            for block in itertools.islice(iterator, self._window):
                pending.append((block, self._pool.submit(job, block)))
            while pending:
                block, future = pending.popleft()
                yield block, future.result()
                for following in itertools.islice(iterator, 1):
                    pending.append((following, self._pool.submit(job, following)))
        finally:
            # Jobs write to files that the caller is about to close: none may still run.
            wait([future for _, future in pending if not future.cancel()])


class _Borrowed:
    """A slot taken from the queue for the length of a `with` block."""

    def __init__(self, slots: "SimpleQueue[_Slot]") -> None:
        self._slots = slots

    def __enter__(self) -> _Slot:
        self._slot = self._slots.get()
        return self._slot

    def __exit__(self, *_: object) -> None:
        self._slots.put(self._slot)


def _blocks(tensors: Iterable[PlannedTensor]) -> Iterator[_Block]:
    for t in tensors:
        for start, stop in block_ranges(t.info.num_elements, t.points.cols if t.points else 1):
            yield _Block(tensor=t, start=start, stop=stop)


def _view(buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The first `count` elements of a byte buffer as `dtype`."""
    return buffer[: count * dtype.itemsize].view(dtype)
