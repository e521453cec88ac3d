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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lpconv.checkpoint.partfile import PartFile
from lpconv.checkpoint.source import TORCH_DTYPES, Source
from lpconv.convert.encode import BlockError, BlockStats, block_stats, encode_pair, encode_points, encode_scaled
from lpconv.convert.measure import Measured, measure
from lpconv.convert.plan import OutputFile, Plan, PlannedShard, PlannedTensor
from lpconv.convert.tensor_records import tensor_record
from lpconv.convert.workers import Block, Slot, Workers, blocks_of
from lpconv.mcf.split import RESIDUALS
from lpconv.progress import Progress
from lpconv.results import FileRecord, TensorRecord

__all__ = ["Engine"]


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

    def write(self, block: Block, data: Tensor, offset: int | None) -> None:
        """Put the bytes of a block in their place, from any thread."""
        if offset is None:
            offset = block.start * data.numel() // (block.stop - block.start)
        self.part.write(self._begins[block.tensor.name] + offset, data.numpy().data)


class Engine:
    """Runs plans. `source` is read from `workers` threads; `progress` hears of source bytes in both passes."""

    def __init__(self, source: Source, *, workers: int, progress: Progress) -> None:
        self._workers, self._progress = Workers(source, workers), progress
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="lpconv-flush")

    def close(self) -> None:
        """Stop the threads; blocks in flight are finished and dropped."""
        self._workers.close()
        self._flusher.shutdown(wait=True, cancel_futures=True)

    def write_shard(
        self, plan: Plan, shard: PlannedShard, directory: Path
    ) -> tuple[list[FileRecord], list[TensorRecord]]:
        """Write one shard's files below `directory`; returns the finished files and what happened to each tensor."""
        measured = {t.name: measure(plan, t, self._workers, self._progress) for t in shard.scaled}
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

    def _write_tensors(
        self, plan: Plan, shard: PlannedShard, files: Sequence[_Output], measured: Mapping[str, Measured]
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
        self, plan: Plan, tensors: Sequence[PlannedTensor], files: Sequence[_Output], measured: Mapping[str, Measured]
    ) -> list[TensorRecord]:
        errors: dict[str, BlockError] = {}
        sums: dict[str, BlockStats] = {name: m.stats for name, m in measured.items()}

        def encode(block: Block) -> tuple[Slot, _Encoded]:
            slot = self._workers.take()
            try:
                encoded = self._encode_block(plan, block, slot, measured.get(block.tensor.name))
                for file, data in zip(files, encoded.parts, strict=False):  # a kept tensor has no residual
                    file.write(block, data, encoded.offset)
                return slot, encoded
            except BaseException:
                self._workers.give(slot)
                raise

        with closing(self._workers.in_order(blocks_of(tensors), encode)) as results:
            for block, (slot, encoded) in results:
                for file, data in zip(files, encoded.parts, strict=False):
                    file.part.digest(data.numpy().data)
                self._workers.give(slot)
                name = block.tensor.name
                if encoded.error is not None:
                    errors[name] = errors.get(name, BlockError()) + encoded.error
                if encoded.stats is not None:
                    sums[name] = sums.get(name, BlockStats()) + encoded.stats
                self._progress.advance(block.source_bytes)
        scales = {name: m.scale for name, m in measured.items()}
        return [tensor_record(plan, t, scales.get(t.name), sums.get(t.name), errors.get(t.name)) for t in tensors]

    def _encode_block(self, plan: Plan, block: Block, slot: Slot, found: Measured | None) -> _Encoded:
        t, count = block.tensor, block.stop - block.start
        x = self._workers.read(block, slot.work)
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


def _view(buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The first `count` elements of a byte buffer as `dtype`."""
    return buffer[: count * dtype.itemsize].view(dtype)
