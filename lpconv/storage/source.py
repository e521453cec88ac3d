"""Tensors of a checkpoint directory, readable block by block.

A `Source` knows every tensor's name, dtype and shape from headers alone and reads byte ranges on demand, from any
thread. Safetensors files are read with `pread`, or by ranges from a store; `.bin` files are opened with
`torch.load(weights_only=True, mmap=True)`, which refuses pickles that run code and reads storage lazily. torch is
imported only when tensors are created: reading safetensors headers does not need it.
"""

from __future__ import annotations  # Tensor is imported for type checking only

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lpconv.errors import InputError, UnsupportedError
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.header import DTYPE_BITS, Header, TensorInfo, check_name
from lpconv.storage.place import OpenFile, open_file, reading
from lpconv.storage.remote import shorter_error

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a source. `alias_of` names an earlier tensor of the same file with the same memory."""

    info: TensorInfo
    file: str
    alias_of: str | None = None


class Source(Protocol):
    """A reader of tensors. `entries` are in file order."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read_bytes(self, name: str, start: int, out: memoryview) -> None:
        """Fill the writable buffer `out` with the tensor's bytes from offset `start` on."""

    def close(self) -> None: ...


class SafetensorsSource:
    """The weight files of one checkpoint, except pickles; headers are checked on opening."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files: dict[str, tuple[OpenFile, Header]] = {}
        self.entries: dict[str, TensorEntry] = {}
        try:
            for name in checkpoint.weight_files:
                self._files[name] = open_file(checkpoint.directory / name), checkpoint.headers[name]
                for info in checkpoint.headers[name].tensors.values():
                    _add(self.entries, TensorEntry(info=info, file=name))
        except BaseException:
            self.close()
            raise
        _check_index(checkpoint, self.entries)

    def read_bytes(self, name: str, start: int, out: memoryview) -> None:
        entry = self.entries[name]
        file, header = self._files[entry.file]
        file.read_into(header.data_start + entry.info.begin + start, out)

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()
        self._files = {}


class TorchSource:
    """`pytorch_model*.bin` files of one checkpoint, opened without running code from them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._tensors: dict[str, Tensor] = {}
        self._sizes: dict[str, tuple[Path, int]] = {}
        for name in checkpoint.weight_files:
            self._open(checkpoint.directory / name, name)
        _check_index(checkpoint, self.entries)

    def _open(self, path: Path, file: str) -> None:
        import torch
        from torch import Tensor

        from lpconv.storage.dtypes import SAFETENSORS_DTYPES

        position, file_size = 0, path.stat().st_size
        self._sizes[file] = path, file_size
        first_names: dict[tuple[object, ...], str] = {}
        for name, tensor in _load_bin(path).items():
            check_name(name, path)
            if not isinstance(tensor, Tensor):
                raise InputError(
                    f"`{path}`: entry `{name}` is not a tensor", hint="check that it is a model checkpoint"
                )
            dtype = SAFETENSORS_DTYPES.get(tensor.dtype)
            if dtype is None or tensor.layout != torch.strided or tensor.device.type != "cpu":
                raise UnsupportedError(
                    f"`{path}`: tensor `{name}` is {tensor.dtype}, {tensor.layout}, on {tensor.device}",
                    hint="lpconv reads dense tensors of the dtypes that safetensors knows",
                )
            size = tensor.numel() * tensor.element_size()
            if size > file_size:  # a tensor of stride 0 can claim any size, which would be allocated
                raise InputError(
                    f"`{path}`: tensor `{name}` claims {size} bytes, but the file has {file_size}",
                    hint="save the tensor with .contiguous()",
                )
            info = TensorInfo(name=name, dtype=dtype, shape=tuple(tensor.shape), begin=position, end=position + size)
            position += size
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg(), tensor.is_conj())
            alias = first_names.setdefault(key, name) if tensor.numel() else name
            _add(self.entries, TensorEntry(info=info, file=file, alias_of=None if alias == name else alias))
            self._tensors[name] = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)

    def read_bytes(self, name: str, start: int, out: memoryview) -> None:
        import torch

        path, size = self._sizes[self.entries[name].file]
        with reading(path):
            left = path.stat().st_size
        if left < size:  # reading beyond the end of a mapped file kills the process
            raise shorter_error(path.name)
        raw = self._tensors[name].view(torch.uint8)[start : start + len(out)]
        out[:] = raw.numpy().data

    def close(self) -> None:
        self._tensors = {}


def read_range(source: Source, name: str, start: int, stop: int, *, buffer: Tensor | None = None) -> Tensor:
    """Elements `start` to `stop` of a tensor, 1-D in its own dtype; 4- and 6-bit dtypes as bytes.

    With `buffer`, uint8 and large enough, the result is a view of it and nothing is allocated.
    """
    import torch

    from lpconv.storage.dtypes import TORCH_DTYPES

    dtype = source.entries[name].info.dtype
    first, last = (n * DTYPE_BITS[dtype] // 8 for n in (start, stop))
    raw = torch.empty(last - first, dtype=torch.uint8) if buffer is None else buffer[: last - first]
    source.read_bytes(name, first, raw.numpy().data)
    return raw.view(TORCH_DTYPES.get(dtype, torch.uint8))


def read_tensor(source: Source, name: str) -> Tensor:
    """A whole tensor, in its own dtype and shape."""
    info = source.entries[name].info
    return read_range(source, name, 0, info.num_elements).view(info.shape)


def open_source(checkpoint: Checkpoint) -> Source:
    """Open the checkpoint's tensors. Raises InputError for damaged headers, indices or pickles."""
    return SafetensorsSource(checkpoint) if checkpoint.kind != "torch" else TorchSource(checkpoint)


def _add(entries: dict[str, TensorEntry], entry: TensorEntry) -> None:
    name = entry.info.name
    if name in entries:
        raise InputError(
            f"tensor `{name}` occurs in both `{entries[name].file}` and `{entry.file}`",
            hint="download the checkpoint again",
        )
    entries[name] = entry


def _check_index(checkpoint: Checkpoint, entries: Mapping[str, TensorEntry]) -> None:
    if checkpoint.weight_map is None:
        return
    for name, file in checkpoint.weight_map.items():
        if name not in entries:
            raise InputError(
                f"the index names tensor `{name}`, but no file contains it", hint="download the checkpoint again"
            )
        if entries[name].file != file:
            raise InputError(
                f"the index places tensor `{name}` in `{file}`, but it is in `{entries[name].file}`",
                hint="the index is stale; download the checkpoint again",
            )


def _load_bin(path: Path) -> dict[str, object]:
    import torch

    hint = "lpconv opens pickles with weights_only=True and never runs code from them; convert the file to safetensors"
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as e:
            if "mmap" not in str(e):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as e:
        # torch's own message also tells how to run the code.
        match = re.search(r"GLOBAL ([\w.]+)", str(e))
        what = f"opening it would run `{match[1]}`" if match else "it is not a plain pickle of tensors"
        raise InputError(f"refusing to read `{path}`: {what}", hint=hint) from e
    except Exception as e:  # broken pickles raise any exception: IndexError, AssertionError, struct.error
        text = " ".join(str(e).split()) or type(e).__name__
        raise InputError(f"`{path}` cannot be read: {text[:200]}", hint="download the file again") from e
    if not isinstance(loaded, dict):
        raise InputError(
            f"`{path}` does not contain a dictionary of tensors", hint="check that it is a model checkpoint"
        )
    return loaded
