"""The tensors of GGUF files: rows of blocks that contain a scale and codes, and plain numbers.

`StoredBlocks` reads all types, which the package gguf decodes. Changes that transformers makes to some values (undo
llama.cpp's row order of q and k, subtract 1 from norms) are made by its own processors, on the whole tensor.

lpconv writes `GgufBlocks` of 32 numbers, and `GgufNumbers`. Elements are in the order of the file (`arranged.py`).
Block j of a row is its scale and its codes; 4-bit codes j and j + 16 share a byte, the first in the lower half. Q4_0
and Q8_0 have fp16 scales, those of Q4_0 with the sign that makes the number of largest magnitude code -8; MXFP4 has
powers of two. Sources: ggml-org/ggml, docs/gguf.md and `ggml-common.h`, `quantize_row_q4_0_ref`; gguf 0.19,
`quants.py`; transformers 5.23, `modeling_gguf_pytorch_utils.py`.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lpconv.errors import InputError, typed_line
from lpconv.formats.grains import Grain
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import Component, EncodedBlock, FormSettings, Headers, Measurement
from lpconv.forms.form import Form, Side, Stored
from lpconv.forms.planes import PlaneNames
from lpconv.forms.tiles import Tiles
from lpconv.gguf import BLOCKS, GGUF
from lpconv.gguf.view import is_entry
from lpconv.storage.header import DTYPE_BITS

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace
    from lpconv.forms.tile_scales import Parts

# The format of the numbers of a type; of all others, 8-bit integers come nearest.
_FORMATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "Q4_0": "int4", "Q4_1": "int4", "Q4_K": "int4",
            "MXFP4": "e2m1"}  # fmt: skip
# The types that lpconv writes, by format and granularity, and those of plain numbers.
_TYPES = {("int8", "group:32"): "Q8_0", ("int4", "group:32"): "Q4_0", ("e2m1", "mx"): "MXFP4"}
_PLAIN = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def _place(type: str, start: int, stop: int) -> tuple[int, int]:
    """The bytes that hold the numbers `start` to `stop`."""
    size, num_bytes = BLOCKS[type]
    return start // size * num_bytes, stop // size * num_bytes


@dataclass(frozen=True, kw_only=True)
class StoredBlocks(Stored):
    """Rows of blocks of type `type`, called `original` in the file, with elements in an `order` that lpconv chose.

    `processed_by` is the architecture whose processor changes decoded values, with its settings as JSON; None without
    one.
    """

    type: str
    original: str
    rows: int
    codes: Component
    processed_by: tuple[str, str] | None = None
    order: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the stored bytes match the shape."""
        return self.codes.dtype == "U8" and self.codes.num_bytes == _place(self.type, 0, self.num_elements)[1]

    @property
    def words(self) -> str:
        return f"{self.type} of GGUF"

    @property
    def components(self) -> tuple[Component, ...]:
        return (self.codes,)

    @property
    def is_coded(self) -> bool:
        return self.type not in DTYPE_BITS  # F32, F16 and BF16 equal those of safetensors

    @property
    def cols(self) -> int:
        return self.num_elements // (1 if self.processed_by or self.order else self.rows)

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        return _place(self.type, start, stop)

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        import torch
        from gguf import GGMLQuantizationType, dequantize

        from lpconv.gguf.arranged import TRANSPOSED, arranged

        raw = data[0].numpy().reshape(-1, self.codes.shape[-1])
        values = dequantize(raw, GGMLQuantizationType[self.type])
        if self.processed_by is not None:
            stored = values if len(self.codes.shape) > 1 else values.reshape(-1)
            try:
                processor = _processor(*self.processed_by)
                made = processor.process(weights=stored, name=self.original, parsed_parameters={"tensors": {}})
            except Exception as e:  # its settings come from the file
                what = f"the settings in config.json do not fit `{self.original}`: {typed_line(e)}"
                raise InputError(what, hint="download the checkpoint again") from e
            values = made.weights
        numbers = torch.tensor(values, dtype=torch.float32)
        if self.order:
            shape = self.shape[::-1] if self.order == TRANSPOSED else self.shape
            numbers = arranged(numbers.view(shape), self.order, back=True)
        return numbers.reshape(-1)


def find_gguf(name: str, headers: Headers) -> StoredBlocks | None:
    """The weight whose blocks are `name`; None for plain numbers."""
    codes, table = headers.component(name), headers.quantization.get("tensors")
    t = table.get(name) if isinstance(table, dict) else None
    if codes is None or codes.dtype != "U8" or not is_entry(t):
        return None
    settings = json.dumps(headers.quantization.get("settings"))
    return StoredBlocks(
        name=name,
        shape=tuple(t["shape"]),
        format=FORMATS[_FORMATS.get(t["type"], "int8")],
        type=t["type"],
        original=t["name"],
        rows=math.prod(t["stored"][:-1]),
        codes=codes,
        processed_by=(str(headers.quantization.get("architecture")), settings) if t["processed"] else None,
        order=t.get("order", ""),
    )


@functools.lru_cache(maxsize=4)
def _processor(architecture: str, settings: str) -> Any:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

    return TENSOR_PROCESSORS[architecture](config=json.loads(settings))


def _rows_of(name: str, shape: tuple[int, ...], type: str) -> Component:
    """A tensor as bytes of a type."""
    *lead, cols = shape
    return Component(name=name, dtype="U8", shape=(*lead, _place(type, 0, cols)[1]))


@dataclass(frozen=True, kw_only=True)
class GgufNumbers(Form):
    """Plain numbers as bytes."""

    kind: ClassVar[str] = "gguf numbers"
    quantised_by: ClassVar[str | None] = GGUF

    format: Format

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        return cls(name=name, shape=shape, format=format)

    @property
    def block_type(self) -> str:
        return _PLAIN[self.format.name]

    @property
    def words(self) -> str:
        return f"{self.block_type} numbers"

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        return (_rows_of(self.name, self.shape, self.block_type),)

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        return _place(self.block_type, start, stop)

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        import torch

        from lpconv.forms.blocks import as_float32, block_error, block_stats
        from lpconv.storage.dtypes import TORCH_DTYPES

        value = as_float32(x, work)
        numbers = value.to(TORCH_DTYPES[self.block_type])
        error = block_error(value, numbers.to(torch.float32, copy=True))
        return EncodedBlock(data=(numbers.view(torch.uint8),), stats=block_stats(x, work), error=error)

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        from lpconv.storage.dtypes import TORCH_DTYPES

        return data[0].view(TORCH_DTYPES[self.block_type]).float()

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        from lpconv.forms.blocks import same_numbers
        from lpconv.forms.codes import reference_values

        return same_numbers(got, reference_values(value, 1.0, self.format))


@dataclass(frozen=True, kw_only=True)
class GgufBlocks(Tiles):
    """Tiles of 32 numbers of a row, stored as blocks with their scale, so that there are no side tensors.

    In memory, `NAME_scale` holds the scales: [rows, blocks].
    """

    kind: ClassVar[str] = "gguf"
    names: ClassVar[PlaneNames] = PlaneNames(integer_scale="F16")
    suffixes: ClassVar[tuple[str, ...]] = ()
    quantised_by: ClassVar[str | None] = GGUF
    whole: ClassVar[type[Form]] = GgufNumbers

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        if format.name in _PLAIN:
            return grain is None or grain.name in {g for _, g in _TYPES}
        return grain is not None and (format.name, grain.name) in _TYPES

    @property
    def block_type(self) -> str:
        return _TYPES[self.format.name, self.grain.name]

    @property
    def words(self) -> str:
        return f"{self.block_type} of GGUF"

    @functools.cached_property
    def data(self) -> tuple[Component, ...]:
        return (_rows_of(self.name, self.shape, self.block_type),)

    @property
    def side(self) -> tuple[Component, ...]:
        return ()

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        return _place(self.block_type, start, stop)

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        """Encode a block with the scales in `measured`, or with its own."""
        if self.chosen is not None or self.scales.name in measured.side:
            return super().encode(x, start, measured, work)
        block, encoded = self.look_and_encode(x, start, measured, work)
        return replace(encoded, stats=block.stats)

    def as_stored(self, codes: Tensor, start: int, side: Side, work: Workspace) -> Tensor:
        import torch

        size, num_bytes = BLOCKS[self.block_type]
        blocks = torch.empty(codes.numel() // size, num_bytes, dtype=torch.uint8)
        codes, rows = codes.view(-1, size), slice(start // self.cols, (start + codes.numel()) // self.cols)
        scales = side[self.scales.name][rows].contiguous().view(-1, 1).view(torch.uint8)
        blocks[:, : scales.shape[1]] = scales
        if self.format.storage_bits == 8:
            torch.bitwise_xor(codes, 0x80, out=blocks[:, scales.shape[1] :])  # two's complement
        else:
            torch.bitwise_or(codes[:, : size // 2], codes[:, size // 2 :] << 4, out=blocks[:, scales.shape[1] :])
        return blocks.view(-1)

    def codes_in(self, data: Sequence[Tensor]) -> Tensor:
        import torch

        from lpconv.storage.dtypes import TORCH_DTYPES

        size, num_bytes = BLOCKS[self.block_type]
        raw = data[0].view(-1, num_bytes)[:, num_bytes - size * self.format.storage_bits // 8 :]
        if self.format.storage_bits == 8:
            codes = raw ^ 0x80
        else:
            pairs = torch.cat((raw & 15, raw >> 4), 1).view(-1, 2)
            codes = pairs[:, 0] | pairs[:, 1] << 4
        return codes.view(-1).view(TORCH_DTYPES[self.codes.dtype])

    def _side_in(self, data: Sequence[Tensor]) -> Side:
        """The scales between the codes."""
        from lpconv.storage.dtypes import TORCH_DTYPES

        dtype = TORCH_DTYPES[self.scales.dtype]
        raw = data[0].view(-1, BLOCKS[self.block_type][1])[:, : dtype.itemsize].contiguous()
        return {self.scales.name: raw.view(dtype).view(-1, self.scales.shape[1])}

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        return super().decode(data, 0, stop - start, self._side_in(data))

    def decode_to(self, out: Tensor, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        return super().decode_to(out, data, 0, stop - start, self._side_in(data))

    def confirms(self, x: Tensor, data: Sequence[Tensor], start: int, side: Side, work: Workspace) -> bool:
        return super().confirms(x, data, 0, self._side_in(data), work)

    def _usual_scales(self, parts: Parts, factor: Tensor | None) -> Tensor:
        """The usual scales as stored: fp16 of integers, otherwise exponents.

        The number of largest magnitude becomes 127 or -127, or -8 of four bits. So scales of 4-bit codes are negative
        if that number is positive.
        """
        if not self.format.twos_complement:
            return super()._usual_scales(parts, factor)
        import torch

        from lpconv.formats.scale import normal_pow2_ceil

        half = FORMATS["fp16"]
        positive, negative = parts["positive"].double(), parts["negative"].double()
        is_short = self.format.storage_bits == 4
        size = torch.maximum(positive, negative) / (self.format.max + is_short)
        if self.has_pow2_scale:
            size = torch.from_numpy(normal_pow2_ceil(size.float().clamp_min(half.min_subnormal).numpy()))
        size = size.clamp(half.min_subnormal, half.max)
        signed = torch.where((positive >= negative) & is_short, -size, size)
        return torch.where(parts["absmax"] == 0, 1.0, signed).float().half()
