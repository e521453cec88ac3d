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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lpconv.errors import InputError, typed_line
from lpconv.formats.grains import Grain
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import BlockFacts, BlockStats, Component, EncodedBlock, FormSettings, Headers, Measurement
from lpconv.forms.form import Form, Over, Side, Stored, not_finite_error
from lpconv.gguf import BLOCKS, GGUF
from lpconv.gguf.view import is_entry
from lpconv.mcf.point_layout import MAX_COLS
from lpconv.storage.header import DTYPE_BITS

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace
    from lpconv.forms.tile_scales import Parts, ScaleSearch, TileScales

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


@dataclass(frozen=True, kw_only=True)
class GgufForm(Form):
    """A tensor of the GGUF type `type`, as bytes."""

    quantised_by: ClassVar[str | None] = GGUF

    format: Format

    @property
    def type(self) -> str:
        """The name of the type in GGUF."""
        raise NotImplementedError

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        *lead, cols = self.shape
        return (Component(name=self.name, dtype="U8", shape=(*lead, _place(self.type, 0, cols)[1])),)

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        return _place(self.type, start, stop)


@dataclass(frozen=True, kw_only=True)
class GgufNumbers(GgufForm):
    """Plain numbers as bytes."""

    kind: ClassVar[str] = "gguf numbers"

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        return cls(name=name, shape=shape, format=format)

    @property
    def type(self) -> str:
        return _PLAIN[self.format.name]

    @property
    def words(self) -> str:
        return f"{self.type} numbers"

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        import torch

        from lpconv.forms.blocks import as_float32, block_error, block_stats
        from lpconv.storage.dtypes import TORCH_DTYPES

        value = as_float32(x, work)
        numbers = value.to(TORCH_DTYPES[self.type])
        error = block_error(value, numbers.to(torch.float32, copy=True))
        return EncodedBlock(data=(numbers.view(torch.uint8),), stats=block_stats(x, work), error=error)

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        from lpconv.storage.dtypes import TORCH_DTYPES

        return data[0].view(TORCH_DTYPES[self.type]).float()

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        from lpconv.forms.blocks import same_numbers
        from lpconv.forms.codes import reference_values

        return same_numbers(got, reference_values(value, 1.0, self.format))


@dataclass(frozen=True, kw_only=True)
class GgufBlocks(GgufForm):
    """Blocks of 32 numbers of a row, with a scale each. In memory, `NAME_scale` holds the scales: [rows, blocks].

    With `searches`, each scale is the one of several with the least squared error, in which columns are weighted by
    `importance` (None: equally); see `forms/tile_scales.py`.
    """

    kind: ClassVar[str] = "gguf"
    encoded_per_second: ClassVar[float] = 8e7

    grain: Grain
    has_pow2_scale: bool
    searches: bool
    importance: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        if format.name in _PLAIN:
            return GgufNumbers.of(name, shape, format, settings)
        grain, is_search = settings.grain, settings.scale == "search"
        assert grain is not None, format.name
        return cls(
            name=name,
            shape=shape,
            format=format,
            grain=grain,
            has_pow2_scale=settings.scale == "pow2" or (is_search and not format.twos_complement),
            searches=is_search and grain.is_searched(format),
        )

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        if format.name in _PLAIN:
            return grain is None or grain.name in {g for _, g in _TYPES}
        return grain is not None and (format.name, grain.name) in _TYPES

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        grain, cols = settings.grain, shape[-1] if shape else 1
        if format.name in _PLAIN or grain is None:
            return None
        if cols > MAX_COLS:
            return f"rows of {cols} elements are too long for {grain.words}"
        if cols % grain.tile[1]:
            return f"rows of {cols} elements are not a multiple of {grain.tile[1]}"
        return None

    @property
    def type(self) -> str:
        return _TYPES[self.format.name, self.grain.name]

    @property
    def words(self) -> str:
        return f"{self.type} of GGUF"

    @property
    def takes_codes(self) -> bool:
        return True

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def searches_scales(self) -> bool:
        return self.searches

    @property
    def _scales(self) -> str:
        """The name of the scales in memory."""
        return f"{self.name}_scale"

    def with_importance(self, importance: Tensor) -> Self:
        return replace(self, importance=importance)

    def look(self, x: Tensor, start: int, work: Workspace) -> BlockFacts:
        """Statistics of each block of numbers. Raises InputError for NaN and Inf."""
        from lpconv.forms.blocks import as_float32, block_stats

        value = as_float32(x, work)
        parts, largest = self._rule.parts(value.view(-1, self.cols), work.scratch.coded)
        stats = block_stats(value, work, largest)
        if not stats.is_finite:
            raise not_finite_error(self.name, self.format)
        return BlockFacts(stats=stats, more=parts)

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        scales = self._usual(self._rule.join([each.more for each in looked]))
        scales = self._search.over_blocks(over, scales) if self.searches else scales
        return Measurement(stats=sum((each.stats for each in looked), BlockStats()), side={self._scales: scales})

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        """Encode a block with the scales in `measured`, or with its own."""
        from lpconv.forms.codes import encode

        own = None
        if self._scales in measured.side:
            rows = slice(start // self.cols, (start + x.numel()) // self.cols)
            stats, scales = measured.stats, measured.side[self._scales][rows]
        else:
            block = self.look(x, start, work)
            stats = own = block.stats
            scales = self._usual(block.more)
            scales = self._search.in_rows(x, scales, work) if self.searches else scales
        codes, error = encode(x, self._factors(scales), self.format, work, stats)
        return EncodedBlock(data=(self._as_blocks(codes, scales),), stats=own, error=error)

    def _as_blocks(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes of `encode_narrow_`, one per byte, and the scales of their blocks as GGUF stores them."""
        import torch

        size, num_bytes = BLOCKS[self.type]
        blocks = torch.empty(codes.numel() // size, num_bytes, dtype=torch.uint8)
        codes, begin = codes.view(-1, size), scales.itemsize
        blocks[:, :begin] = scales.contiguous().view(-1).view(torch.uint8).view(-1, begin)
        if self.format.storage_bits == 8:
            torch.bitwise_xor(codes, 0x80, out=blocks[:, begin:])  # two's complement
        else:
            torch.bitwise_or(codes[:, : size // 2], codes[:, size // 2 :] << 4, out=blocks[:, begin:])
        return blocks.view(-1)

    def side_in(self, data: Sequence[Tensor]) -> Side:
        import torch

        begin = 2 if self.format.twos_complement else 1
        raw = data[0].view(-1, BLOCKS[self.type][1])[:, :begin].contiguous()
        scales = raw.view(torch.float16) if begin == 2 else raw
        return {self._scales: scales.view(-1, self.cols // self.grain.tile[1])}

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        import torch

        from lpconv.forms.planes import stored_numbers

        size, num_bytes = BLOCKS[self.type]
        factors = self._factors(self.side_in(data)[self._scales]).reshape(-1, 1)
        raw = data[0].view(-1, num_bytes)[:, num_bytes - size * self.format.storage_bits // 8 :]
        if self.format.storage_bits == 8:
            return raw.contiguous().view(torch.int8).float().mul_(factors).view(-1)
        halves = torch.cat((raw & 15, raw >> 4), 1)
        if self.format.twos_complement:
            return (halves.float() - 8).mul_(factors).view(-1)
        pairs = halves.view(-1, size // 2, 2)
        return stored_numbers(pairs[..., 0] | pairs[..., 1] << 4, "e2m1", 1).mul_(factors).view(-1)

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        from lpconv.forms.blocks import same_numbers
        from lpconv.forms.codes import reference_values

        scales = self.code_scale(side, start, start + value.numel())
        return same_numbers(got, reference_values(value, scales, self.format))

    def code_scale(self, side: Side, start: int, stop: int) -> Tensor:
        return self._factors(side[self._scales][start // self.cols : stop // self.cols])

    def _factors(self, scales: Tensor) -> Tensor:
        """Stored scales in fp32, [rows, blocks, 1]."""
        from lpconv.forms.planes import stored_numbers

        return stored_numbers(scales, "wide" if self.format.twos_complement else "e8m0", 1).unsqueeze(2)

    def _usual(self, parts: Parts) -> Tensor:
        """The usual scales as stored: fp16 of integers, otherwise exponents.

        The number of largest magnitude becomes 127 or -127, or -8 of four bits. So scales of 4-bit codes are negative
        if that number is positive.
        """
        if not self.format.twos_complement:
            return self._rule.stored_scales(parts, None)
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

    @property
    def _rule(self) -> TileScales:
        """Statistics of the parts of rows that have a scale, and the usual scales of floats."""
        from lpconv.forms.tile_scales import TileScales

        matrix = self.num_elements // max(self.cols, 1), self.cols
        return TileScales(grain=self.grain, format=self.format, matrix=matrix, has_pow2_scale=self.has_pow2_scale)

    @property
    def _search(self) -> ScaleSearch:
        from lpconv.forms.tile_scales import ScaleSearch

        return ScaleSearch(
            format=self.format,
            tile=self.grain.tile,
            num_rows=self.num_elements // max(self.cols, 1),
            cols=self.cols,
            factor_of=lambda scales, start, stop: self._factors(scales),
            importance=self.importance,
        )
