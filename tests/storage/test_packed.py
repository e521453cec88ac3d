"""Packed weight files: every dtype byte for byte, ranges, other readers, and damage."""

import contextlib
import hashlib
import os
import random
import struct
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import safetensors

from lpconv.convert.pack import pack, unpack
from lpconv.errors import InputError
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.storage.header import DTYPE_BITS, read_header
from lpconv.storage.packed import BLOCK_BYTES, packed_blocks
from lpconv.storage.place import open_file
from tests.helpers.checkpoints import raw_safetensors

FILE = "model.safetensors"


def random_bytes(size: int, seed: int = 0) -> bytes:
    """Bytes of low entropy, so that every coding helps."""
    return np.random.default_rng(seed).binomial(40, 0.5, size).astype(np.uint8).tobytes()


def folder_with(folder: Path, header: dict[str, object], payload: bytes) -> Path:
    folder.mkdir()
    (folder / FILE).write_bytes(raw_safetensors(header, payload))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Tensors of every dtype, in odd shapes, of no elements and of no dimensions."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "note": "é"}}
    payload = b""
    for dtype, bits in DTYPE_BITS.items():
        for shape in ([3, 7, 11, 8], [0, 5], *([] if bits < 8 else [[]])):
            data = random_bytes(int(np.prod(shape)) * bits // 8, seed=len(payload))
            where = [len(payload), len(payload) + len(data)]
            header[f"{dtype} {shape}"] = {"dtype": dtype, "shape": shape, "data_offsets": where}
            payload += data
    large = random_bytes(3 * BLOCK_BYTES + 4) + os.urandom(BLOCK_BYTES)
    header["large"] = {"dtype": "I32", "shape": [len(large) // 4], "data_offsets": [len(payload), len(payload + large)]}
    return folder_with(tmp_path / "source", header, payload + large)


@pytest.fixture
def packed(source: Path, tmp_path: Path) -> Path:
    pack(str(source), tmp_path / "packed", ConvertOptions())
    return tmp_path / "packed" / FILE


def test_every_dtype_comes_back_byte_for_byte(source: Path, packed: Path, tmp_path: Path) -> None:
    before = (source / FILE).read_bytes()
    unpack(packed.parent, tmp_path / "again", force=False, progress=Silent())
    assert (tmp_path / "again" / FILE).read_bytes() == before
    assert packed.stat().st_size < 0.9 * len(before)
    assert read_header(packed) == read_header(source / FILE)


def test_any_range_is_that_of_the_original(source: Path, packed: Path) -> None:
    before, draw = (source / FILE).read_bytes(), random.Random(0)
    with closing(open_file(packed)) as file:
        assert file.size_bytes == len(before)
        for _ in range(50):
            start, stop = sorted(draw.sample(range(len(before) + 1), 2))
            part = bytearray(stop - start)
            file.read_into(start, memoryview(part))
            assert part == before[start:stop]


def test_other_readers_refuse_a_packed_file_and_say_what_it_is(packed: Path) -> None:
    with pytest.raises(safetensors.SafetensorError, match="lpconv restore"):
        safetensors.safe_open(packed, "np")


def test_numbers_cost_little_more_than_their_entropy() -> None:
    codes = np.random.default_rng(0).binomial(15, 0.5, 2 * BLOCK_BYTES).astype(np.uint8)
    counts = np.bincount(codes) / len(codes)
    bits = -(counts[counts > 0] * np.log2(counts[counts > 0])).sum()
    halves = (codes[::2] | codes[1::2] << 4).tobytes()
    floats = (np.random.default_rng(0).standard_normal(BLOCK_BYTES // 4).astype("<f4").view("<u4") >> 16).astype("<u2")
    of_floats = np.unique(floats, return_counts=True)[1] / len(floats)
    assert 8 * len(packed_blocks(halves, 1)[0][0]) / len(codes) == pytest.approx(bits, rel=0.01)
    assert 8 * len(packed_blocks(halves, 4)[0][0]) / len(codes) == pytest.approx(bits, rel=0.01)
    coded = 8 * len(packed_blocks(floats.tobytes(), 2)[0][0]) / len(floats)
    assert coded == pytest.approx(-(of_floats * np.log2(of_floats)).sum(), rel=0.04)


def read_all(path: Path) -> str:
    read_header(path)
    with closing(open_file(path)) as file:
        data = bytearray(file.size_bytes)
        file.read_into(0, memoryview(data))
    return hashlib.sha256(data).hexdigest()


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_is_found_when_it_is_read(packed: Path) -> None:
    whole, draw = packed.read_bytes(), random.Random(0)
    for position in [*draw.sample(range(160, len(whole)), 30), *range(len(whole) - 60, len(whole), 4)]:
        flip(packed, position, draw.randrange(8))
        with pytest.raises(InputError):
            read_all(packed)
        packed.write_bytes(whole)


@pytest.mark.parametrize("size", [0, 7, 100, 160, -1, -40, -1000])
def test_a_truncated_file_is_refused(packed: Path, size: int) -> None:
    packed.write_bytes(packed.read_bytes()[:size])
    with pytest.raises(InputError):
        read_all(packed)


def test_wrong_bytes_with_the_right_checksums_neither_crash_nor_hang(packed: Path, source: Path) -> None:
    whole, draw = packed.read_bytes(), random.Random(1)
    num = struct.unpack("<I", whole[-8:-4])[0]
    rows = [list(row) for row in struct.iter_unpack("<4I", whole[-40 - 16 * num : -40])]
    starts = np.cumsum([len(whole) - 40 - 16 * num - sum(r[2] for r in rows), *(r[2] for r in rows)])
    for _ in range(100):
        data, changed = bytearray(whole), [list(row) for row in rows]
        which = draw.randrange(num)
        for _ in range(draw.randint(1, 3)):
            data[int(starts[which]) + draw.randrange(min(rows[which][2], 40))] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            changed[which][draw.choice((0, 1, 2))] = draw.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 2**17, 2**32 - 1))
        _, coding, size, _ = changed[which]
        changed[which][3] = zlib.crc32(bytes(data[starts[which] : starts[which] + size]), coding)
        table = b"".join(struct.pack("<4I", *row) for row in changed) + whole[-40:-4]
        packed.write_bytes(data[: -40 - 16 * num] + table + struct.pack("<I", zlib.crc32(table)))
        with contextlib.suppress(InputError):
            assert len(read_all(packed)) == 64
