"""The safetensors header, read with suspicion: what is refused, and that what is written comes back."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lpconv.errors import InputError, UnsupportedError
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.header import (
    DTYPE_BITS,
    MAX_DIMENSIONS,
    Header,
    TensorInfo,
    encode_header,
    read_header,
    unique_keys,
)
from tests.helpers.checkpoints import bits_of, raw_safetensors

Table = Mapping[str, Any]


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def read(path: Path, data: bytes) -> Header:
    path.write_bytes(data)
    return read_header(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_file_of_the_safetensors_library(path: Path) -> None:
    save_file({"a": torch.ones(2, 3), "b": torch.zeros((), dtype=torch.int64)}, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == {"a": ("F32", (2, 3)), "b": ("I64", ())}
    assert header.metadata == {"format": "pt"}
    assert header.data_start + max(t.end for t in header.tensors.values()) == path.stat().st_size


def test_tensors_stand_in_the_order_of_their_bytes(path: Path) -> None:
    header = read(path, raw_safetensors({"z": entry(0, 2), "a": entry(2, 3), "m": entry(3, 3)}, b"abc"))
    assert list(header.tensors) == ["z", "a", "m"]


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_every_dtype_reads_as_safetensors_wrote_it(path: Path, dtype: str) -> None:
    x = torch.zeros(4, dtype=TORCH_DTYPES[dtype])
    save_file({"x": x}, path)
    assert read_header(path).tensors["x"].dtype == dtype
    assert x.element_size() * 8 == DTYPE_BITS[dtype]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "few"),
        (b"\x10\0\0\0", "few"),
        (raw_safetensors({}, length=2**63), "claims 9223372036854775808 bytes"),
        (raw_safetensors({}, length=2**64 - 1), "claims"),
        (raw_safetensors({}, length=100_000_001), "claims"),
        (raw_safetensors({}, length=3), "claims"),
        (raw_safetensors(b""), "not JSON"),
        (raw_safetensors(b"{"), "not JSON"),
        (raw_safetensors(b"[]"), "object"),
        (raw_safetensors(b'"x"'), "object"),
        (raw_safetensors(b"[" * 100_000), "not JSON"),
        (raw_safetensors(b'{"a": ' * 50_000), "not JSON"),
        (raw_safetensors(b'{"\xff": 1}'), "not UTF-8"),
        (raw_safetensors(b'{"a": %s}' % (b"9" * 5000)), "not JSON"),
    ],
    ids=["empty", "4 bytes", "2^63", "2^64-1", "over the limit", "past the end", "no JSON", "cut", "list", "string",
         "nested lists", "nested tables", "not UTF-8", "huge number"],
)  # fmt: skip
def test_no_header(path: Path, data: bytes, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read(path, data)


@pytest.mark.parametrize(
    ("table", "payload", "says"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "overlaps"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "overlaps"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "hole"),
        ({"a": entry(2, 4)}, 4, "hole"),
        ({"a": entry(0, 4)}, 3, "short"),
        ({"a": entry(0, 2**62)}, 4, "short"),
        ({"a": entry(0, 4)}, 5, "longer"),
        ({}, 1, "longer"),
        ({"a": entry(-4, 0, [4])}, 4, "data_offsets"),
        ({"a": entry(0, -4, [4])}, 4, "data_offsets"),
        ({"a": entry(4, 0, [4])}, 4, "fit"),
        ({"a": entry(0, 2**64, [2**64])}, 4, "shape"),
        ({"a": entry(0, 4, [-4])}, 4, "shape"),
        ({"a": entry(0, 4, [2.0, 2])}, 4, "shape"),  # type: ignore[list-item]  # the point of the case
        ({"a": entry(0, 4, [True, 4])}, 4, "shape"),
        ({"a": entry(0, 4, [5])}, 4, "fit"),
        ({"a": entry(0, 4, [2**40, 2**40])}, 4, "fit"),
        ({"a": entry(0, 1, [3], "F4")}, 1, "fit"),
        ({"a": entry(0, 4) | {"shape": "4"}}, 4, "shape"),
        ({"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}}, 4, "data_offsets"),
        ({"a": entry(0, 4) | {"data_offsets": "04"}}, 4, "data_offsets"),
        ({"a": entry(0, 4) | {"extra": 1}}, 4, "dtype"),
        ({"a": {"dtype": "U8", "shape": [4]}}, 4, "dtype"),
        ({"a": None}, 0, "dtype"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
        ({"__metadata__": []}, 0, "__metadata__"),
    ],
    ids=str,
)
def test_tables_that_do_not_describe_the_file(path: Path, table: Table, payload: int, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read(path, raw_safetensors(table, bytes(payload)))
    assert caught.value.hint


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
        b'{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    ],
    ids=["tensor", "field", "metadata"],
)
def test_duplicate_names(path: Path, raw: bytes) -> None:
    with pytest.raises(InputError, match="twice"):
        read(path, raw_safetensors(raw, bytes(2)))


def test_the_search_for_a_duplicate_name_is_linear() -> None:
    num_compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    with pytest.raises(ValueError, match="`999`"):
        unique_keys([(Name(i), None) for i in (*range(1000), 999)])
    assert num_compared < 2000


def test_limits_of_what_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"a": entry(0, 1, [1] * MAX_DIMENSIONS), "b": entry(1, 1)}
    assert len(read(path, raw_safetensors(table, b"x")).tensors) == 2
    monkeypatch.setattr("lpconv.storage.header.MAX_TENSORS", 1)
    with pytest.raises(InputError, match=r"2 .* 1"):
        read(path, raw_safetensors(table, b"x"))
    with pytest.raises(InputError, match=r"65 .* 64"):
        read(path, raw_safetensors({"a": entry(0, 1, [1] * 65)}, b"x"))


@pytest.mark.parametrize("dtype", ["F128", "f32", "", None, 8, ["F32"]])
def test_unknown_dtypes_are_not_supported(path: Path, dtype: Any) -> None:
    with pytest.raises(UnsupportedError, match="dtype"):
        read(path, raw_safetensors({"a": entry(0, 4) | {"dtype": dtype}}, bytes(4)))


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "a\0", "\u202eabc", "\ud800", "a\u00a0b", "\x7f"])
def test_names_no_terminal_should_be_sent(path: Path, name: str) -> None:
    with pytest.raises(InputError, match="unprintable") as caught:
        read(path, raw_safetensors({name: entry(0, 1)}, b"x"))
    assert caught.value.message.isprintable()


def test_a_broken_entry_does_not_put_its_name_on_the_terminal(path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(path, raw_safetensors({"\x1b]0;owned\x07": None}))
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs", 'q"uo\\te', "émoji😀", "", " ", "x" * 5000])
def test_names_that_are_only_odd(path: Path, name: str) -> None:
    assert list(read(path, raw_safetensors({name: entry(0, 1)}, b"x")).tensors) == [name]


def test_a_missing_file(path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(str(path))):
        read_header(path)


def test_a_directory_in_place_of_a_file(path: Path) -> None:
    path.mkdir()
    with pytest.raises(InputError, match=re.escape(str(path))):
        read_header(path)


def test_what_is_written_opens_in_safetensors_and_here(path: Path) -> None:
    x = torch.arange(6, dtype=torch.int16)
    info = TensorInfo(name="ünï.wéight", dtype="I16", shape=(2, 3), begin=0, end=12)
    head = encode_header([info], {"format": "pt"})
    assert len(head) % 8 == 0
    path.write_bytes(head + bits_of(x))
    assert read_header(path).tensors == {info.name: info}
    with safe_open(path, framework="pt") as f:
        assert torch.equal(f.get_tensor(info.name), x.view(2, 3))


def test_metadata_is_written_in_one_order(path: Path) -> None:
    one, two = (dict.fromkeys(order, "x") for order in ("ab", "ba"))
    assert encode_header([], one) == encode_header([], two)
    assert json.loads(encode_header([], one)[8:]) == {"__metadata__": {"a": "x", "b": "x"}}
