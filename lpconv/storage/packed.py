"""Losslessly coded weight files, readable in ranges like the files that they stand for. No torch.

A packed file has the name of its original. It begins with a fixed safetensors header of an unknown dtype, so that other
readers refuse it and show that dtype. Then come blocks that decode alone, of at most 2^17 bytes of the original's
header or of one tensor; a table with the length, coding, coded size and CRC-32 of each; and the original's SHA-256.
Numbers are coded by their values alone, in Pco's format (github.com/pcodec/pcodec, docs/format.md), since neighbours
in a weight have nothing in common. docs/pack.md has the measurements.
"""

from __future__ import annotations  # arrays are named below and not imported

import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lpconv.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REFUSED = b'{"packed by lpconv":{"dtype":"packed by lpconv: run `lpconv restore`","shape":[0],"data_offsets":[0,0]}}'
PACKED_HEAD = struct.pack("<Q", len(_REFUSED)) + _REFUSED  # a change of the format changes these bytes
BLOCK_BYTES = 2**17
Blocks: TypeAlias = "list[tuple[bytes, bytes]]"  # coded blocks, each with its row of the table
_RAW, _ZLIB = 0, 1
# Other codings: elements of so many bytes, of which so many parts are coded apart. Half bytes are parts of one.
_PARTS = {2: (1, 1), 3: (1, 2), 4: (2, 1), 5: (4, 2), 6: (4, 4), 7: (8, 8)}
_TRIED = {1: (_ZLIB, 2, 3), 2: (_ZLIB, 4), 4: (_ZLIB, 2, 3, 5, 6), 8: (_ZLIB, 7)}  # by bytes of a dtype
_ROW, _END = struct.Struct("<4I"), struct.Struct("<32s2I")  # the latter: SHA-256, number of blocks, CRC-32


class _StoredFile(Protocol):
    size_bytes: int

    def read_into(self, start: int, out: memoryview) -> None: ...
    def close(self) -> None: ...


class PackedFile:
    """The original of a packed file. Raises InputError for damage, on opening or once a damaged block is read."""

    def __init__(self, file: _StoredFile, path: Path) -> None:
        import numpy as np

        self._file, self._path, self.close = file, path, file.close
        end = self._stored(file.size_bytes - _END.size, _END.size)
        digest, num, crc = _END.unpack(end)
        table = self._stored(file.size_bytes - _END.size - num * _ROW.size, num * _ROW.size)
        self.sha256: str = digest.hex()
        self._rows = np.frombuffer(table, "<u4").astype(np.int64).reshape(-1, 4)
        self._starts, self._places = (np.append(0, self._rows[:, column].cumsum()) for column in (0, 2))
        self._places += len(PACKED_HEAD)
        is_whole = self._places[-1] + len(table) + _END.size == file.size_bytes
        is_large = self._rows[:, 0].max(initial=0) > BLOCK_BYTES
        if zlib.crc32(end[:-4], zlib.crc32(table)) != crc or not is_whole or is_large:
            raise self._damaged()
        self.size_bytes = int(self._starts[-1])

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of the original from `start` on."""
        index = int(self._starts.searchsorted(start, side="right")) - 1
        while len(out):
            length, coding, size, crc = map(int, self._rows[index])
            coded = self._stored(int(self._places[index]), size)
            block = _decoded(coded, coding, length) if zlib.crc32(coded, coding) == crc else b""
            if len(block) != length:
                raise self._damaged()
            part = block[start - int(self._starts[index]) :][: len(out)]
            out[: len(part)] = part
            out, start, index = out[len(part) :], start + len(part), index + 1

    def _stored(self, start: int, size: int) -> bytes:
        if start < len(PACKED_HEAD):
            raise self._damaged()
        stored = bytearray(size)
        self._file.read_into(start, memoryview(stored))
        return bytes(stored)

    def _damaged(self) -> InputError:
        return InputError(f"the packed file `{self._path}` is damaged", hint="download it again")


def packed_blocks(data: bytes, itemsize: int) -> Blocks:
    """Some bytes of one tensor, coded as makes the first block smallest; blocks that this enlarges stay raw."""
    best = min(_TRIED[itemsize], key=lambda coding: len(_coded(data[:BLOCK_BYTES], coding)))
    blocks = []
    for start in range(0, len(data), BLOCK_BYTES):
        block, coding = data[start : start + BLOCK_BYTES], best
        coded = _coded(block, coding)
        if len(coded) >= len(block) or _decoded(coded, coding, len(block)) != block:
            coded, coding = block, _RAW
        blocks.append((coded, _ROW.pack(len(block), coding, len(coded), zlib.crc32(coded, coding))))
    return blocks


def packed_end(rows: list[bytes], sha256: bytes) -> bytes:
    """The end of a packed file, from the rows of its blocks and the SHA-256 of its original."""
    end = sha256 + struct.pack("<I", len(rows))
    return b"".join((*rows, end, struct.pack("<I", zlib.crc32(end, zlib.crc32(b"".join(rows))))))


def _coded(block: bytes, coding: int) -> bytes:
    import numpy as np

    if coding == _ZLIB:
        return zlib.compress(block, 1)
    itemsize, parts = _PARTS[coding]
    if len(block) % itemsize:
        return block
    raw = np.frombuffer(block, f"<u{itemsize // parts or 1}")
    planes = np.stack([raw & 15, raw >> 4]) if parts > itemsize else np.ascontiguousarray(raw.reshape(-1, parts).T)
    # Of 16 bits, level 12 saves 0.8 % in three times as long.
    return coded_numbers(planes.reshape(-1), level=8 if raw.itemsize == 2 else 12, parts=parts)


def _decoded(coded: bytes, coding: int, length: int) -> bytes:
    """The block of so many bytes. Any other number of bytes means damage."""
    import numpy as np

    if coding == _RAW:
        return coded
    if coding == _ZLIB:
        try:
            return zlib.decompressobj().decompress(coded, length + 1)
        except zlib.error:
            return b""
    itemsize, parts = _PARTS.get(coding, (1, 1))
    planes: NDArray[Any] = np.empty((parts, length // itemsize), f"<u{itemsize // parts or 1}")
    if not decode_numbers(coded, planes.reshape(-1)):
        return b""
    return (planes[0] | planes[1] << 4 if parts > itemsize else planes.T).tobytes()


def coded_numbers(numbers: NDArray[Any], *, level: int, parts: int = 1) -> bytes:
    """Numbers in Pco's format, as values without order; `parts` of nearly equal length are coded apart."""
    import numpy as np
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec, standalone

    as_they_are = ChunkConfig(
        compression_level=level,
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes([x.size for x in np.array_split(numbers.reshape(-1), parts)]),
        enable_8_bit=True,
    )
    return bytes(standalone.simple_compress(numbers, as_they_are))


def decode_numbers(coded: bytes, out: NDArray[Any]) -> bool:
    """Decode numbers into `out`. False if they are damaged."""
    from pcodec import standalone

    try:
        progress = standalone.simple_decompress_into(coded, out)
    except (RuntimeError, TypeError):
        return False
    return progress.n_processed == len(out) and bool(progress.finished)
