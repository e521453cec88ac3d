"""Threads that process blocks of a source's tensors, each with its own buffers.

Blocks are the unit of parallelism, not elements: torch operators of a worker use one thread. At most as many blocks are
in flight as there are workspaces, so memory is bounded whatever the sizes of the tensors.
"""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import LifoQueue
from typing import TypeVar

import torch
from torch import Tensor

from lpconv.forms.blocks import Scratch, Workspace
from lpconv.forms.facts import BlockFacts, Measurement, block_ranges
from lpconv.forms.form import Over
from lpconv.plan.memory import SPARE
from lpconv.plan.plan import PlannedTensor
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.header import DTYPE_BITS
from lpconv.storage.source import Source, read_range

T = TypeVar("T")
_PIECES, _PIECE = 64, 512  # pieces of a sample, and elements of each
_LEAST_GUESSED = 2**19
_SMALL = 2**13  # elements of a block that is not worth handing to a thread
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples are evenly spread in [0, 1) and out of step with rows


class SingleThreadedTorch:
    """Context manager that limits torch operators to one thread."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)


@dataclass(frozen=True, kw_only=True)
class TensorBlock:
    """Elements `start` to `stop` of a tensor."""

    tensor: PlannedTensor
    start: int
    stop: int

    @property
    def source_bytes(self) -> int:
        return (self.stop - self.start) * DTYPE_BITS[self.tensor.info.dtype] // 8


def tensor_blocks(tensors: Iterable[PlannedTensor]) -> Iterator[TensorBlock]:
    """The blocks of some tensors in order, in the sizes that their forms need."""
    for t in tensors:
        for start, stop in block_ranges(t.info.num_elements, t.form.cols):
            yield TensorBlock(tensor=t, start=start, stop=stop)


class Workers:
    """`count` threads that read one source, with workspaces shared with the consumer of the results."""

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        # Each worker also sums on one thread: MKL would split the sum, and its last bits would vary from run to run.
        self._pool = ThreadPoolExecutor(
            count, thread_name_prefix="lpconv-encode", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._free: LifoQueue[Workspace] = LifoQueue()  # last in, first out: the latest workspace is still in the cache
        self._window = count + SPARE
        scratch = Scratch()
        for _ in range(self._window):
            self._free.put(Workspace(scratch))

    def close(self) -> None:
        """Stop the threads; blocks in flight are finished and dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self) -> Workspace:
        """Take a free workspace, waiting until there is one. Return it with `give`."""
        return self._free.get()

    def give(self, work: Workspace) -> None:
        """Return a workspace for others to use."""
        self._free.put(work)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Workspace]:
        """Context manager that borrows a workspace."""
        work = self.take()
        try:
            yield work
        finally:
            self.give(work)

    def read(self, block: TensorBlock, work: Workspace) -> Tensor:
        """The elements of a block in the source's dtype, 1-D, stored in the workspace."""
        return read_range(self._source, block.tensor.name, block.start, block.stop, buffer=work.raw)

    def read_numbers(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a tensor in the source's dtype, 1-D."""
        return read_range(self._source, name, start, stop)

    def apply(
        self, tensor: PlannedTensor, job: Callable[[Tensor, int, Workspace], T]
    ) -> Generator[tuple[TensorBlock, T]]:
        """Apply `job` to (elements, start, workspace) of each block of a tensor; results in order.

        The elements are stored in the workspace.
        """

        def read_and_do(block: TensorBlock) -> T:
            with self.borrow() as work:
                return job(self.read(block, work), block.start, work)

        return self.in_order(tensor_blocks([tensor]), read_and_do)

    def measure(self, tensor: PlannedTensor) -> Measurement:
        """Statistics of the first pass over a tensor; empty if its form needs none."""
        return tensor.form.measure(self._reading(tensor), [self._reading(t) for t in tensor.fused])

    def guess(self, tensor: PlannedTensor) -> Measurement | None:
        """Statistics of the first pass predicted from a sample; None if the pass should be made instead."""
        if tensor.info.num_elements < _LEAST_GUESSED:
            return None
        return tensor.form.guess(lambda: self._sample(tensor))

    def _sample(self, tensor: PlannedTensor) -> Tensor:
        """Pieces from all over a tensor, one per row."""
        size = DTYPE_BITS[tensor.info.dtype] // 8
        raw = torch.empty((_PIECES, _PIECE * size), dtype=torch.uint8)
        for i, row in enumerate(raw.numpy()):
            start = int(i * _GOLDEN % 1 * (tensor.info.num_elements - _PIECE))
            self._source.read_bytes(tensor.name, start * size, row.data)
        return raw.view(TORCH_DTYPES[tensor.info.dtype])

    def conclude(self, tensor: PlannedTensor, looked: Sequence[BlockFacts]) -> Measurement:
        """Statistics of the first pass, from the statistics of all blocks."""
        return tensor.form.combine(looked, self._reading(tensor), [self._reading(t) for t in tensor.fused])

    def _reading(self, tensor: PlannedTensor) -> Over:
        return lambda job, /: (result for _, result in self.apply(tensor, job))

    def in_order(
        self, blocks: Iterable[TensorBlock], job: Callable[[TensorBlock], T]
    ) -> Generator[tuple[TensorBlock, T]]:
        """Results of `job` in the order of `blocks`, with at most as many in flight as there are workspaces.

        The calling thread processes small blocks itself when their turn comes: handing them over would take longer.
        """
        pending: deque[tuple[TensorBlock, Future[T] | None]] = deque()
        iterator = iter(blocks)

        def begin(count: int) -> None:
            for block in itertools.islice(iterator, count):
                is_small = block.stop - block.start < _SMALL
                pending.append((block, None if is_small else self._pool.submit(job, block)))

        try:
            begin(self._window)
            while pending:
                block, future = pending.popleft()
                yield block, job(block) if future is None else future.result()
                begin(1)
        finally:
            # Jobs write to files that the caller is about to close, so none may still be running.
            wait([future for _, future in pending if future is not None and not future.cancel()])
