"""Ranged reads of an object in a store.

A conversion reads blocks of half a megabyte from front to back. So whole pieces are fetched, some ahead of the reader,
and cached while the reader is near.
"""

import functools
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

from lpconv.errors import InputError
from lpconv.extras.remote import fetch

_PIECE = 4 * 2**20  # bytes per request
_HELD, _AHEAD = 24, 8  # pieces in the cache, and pieces fetched ahead
# Cached pieces, and answers in flight, which obstore holds first in chunks and then in one piece.
WINDOW_BYTES = (_HELD + 2 * _AHEAD) * _PIECE
_LITTLE, _FEW = 2**18, 2  # a few small reads, such as a header and its length, do not fetch a piece


class RemoteFile:
    """An object that any thread can read by ranges. `store` is a URL, `name` is relative to it."""

    def __init__(self, *, store: str, name: str, e_tag: str | None, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fetch = functools.partial(fetch, store, name, e_tag)
        self._pieces = -(-size_bytes // _PIECE)
        self._little = Counter[int]()

    def read_into(self, start: int, out: memoryview) -> None:
        if not len(out):
            return
        stop = start + len(out)
        if stop > self.size_bytes:
            raise InputError("a remote file is shorter than its header says", hint="upload the checkpoint again")
        first, last = start // _PIECE, (stop - 1) // _PIECE
        if len(out) <= _LITTLE and self._little[first] < _FEW and not _window().holds(self, first):
            self._little[first] += 1
            out[:] = memoryview(self._fetch(span=(start, stop)))
            return
        for index in range(first, last + 1):
            piece = memoryview(_window().piece(self, index).result())
            begin = index * _PIECE
            low, high = max(start, begin), min(stop, begin + len(piece))
            out[low - start : high - start] = piece[low - begin : high - begin]

    def fetch_piece(self, index: int) -> Any:
        """Fetch the bytes of a piece."""
        return self._fetch(span=(index * _PIECE, min((index + 1) * _PIECE, self.size_bytes)))

    @property
    def num_pieces(self) -> int:
        return self._pieces

    def close(self) -> None:
        _window().forget(self)


class _Window:
    """Cache of recently read pieces of all files, and of pieces in flight."""

    def __init__(self) -> None:
        self._lock, self._pool = Lock(), ThreadPoolExecutor(_AHEAD, thread_name_prefix="lpconv-fetch")
        self._held: OrderedDict[tuple[RemoteFile, int], Future[Any]] = OrderedDict()

    def holds(self, file: RemoteFile, index: int) -> bool:
        """Whether a piece is cached or in flight."""
        with self._lock:
            return (file, index) in self._held

    def piece(self, file: RemoteFile, index: int) -> "Future[Any]":
        """Future of a piece. After the piece before it (a sequential read), the following ones are prefetched."""
        with self._lock:
            is_going_on = (file, index - 1) in self._held
            last = min(index + (_AHEAD if is_going_on else 1), file.num_pieces)
            for n in range(index, last):
                held = self._held.get((file, n))
                if held is None or (held.done() and held.exception() is not None):
                    self._held[file, n] = self._pool.submit(file.fetch_piece, n)
                self._held.move_to_end((file, n))
            self._held.move_to_end((file, index))
            future = self._held[file, index]
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
            return future

    def forget(self, file: RemoteFile) -> None:
        """Drop the pieces of a file."""
        with self._lock:
            for key in [k for k in self._held if k[0] is file]:
                self._held.pop(key).cancel()


@functools.cache
def _window() -> _Window:
    return _Window()
