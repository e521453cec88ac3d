"""GGUF's blocks as lpconv writes them: a scale and the codes of 32 numbers side by side, and plain numbers.

Elements are in the order of the file (`storage/arranged.py`). Block j of a row is its scale and its codes; 4-bit codes
j and j + 16 share a byte, the first in the lower half. Q4_0 and Q8_0 have fp16 scales, those of Q4_0 with the sign that
makes the number of largest magnitude code -8; MXFP4 has powers of two. `foreign/gguf.py` reads all of them.
(ggml-org/ggml, `ggml-common.h`, `quantize_row_q4_0_ref`; gguf 0.19, `quants.py`.)
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from lpconv.formats.grains import Grain
from lpconv.formats.spec import Format
from lpconv.forms.facts import (
    BlockFacts,
    BlockStats,
    Component,
    EncodedBlock,
    FormSettings,
    Headers,
    Measurement,
    PlaneNames,
)
from lpconv.forms.form import Form, Over, Side
from lpconv.forms.scaled import ScaledCodes
from lpconv.forms.tiles import Tiles
from lpconv.gguf import BLOCKS, GGUF

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace
    from lpconv.forms.tile_scales import TileScales


# Types by format and granularity, and those of plain numbers.
_TYPES = {("int8", "group:32"): "Q8_0", ("int4", "group:32"): "Q4_0", ("e2m1", "mx"): "MXFP4"}
_PLAIN = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


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
    def type(self) -> str:
        """The name of the type in GGUF."""
        return _PLAIN[self.format.name]

    @property
    def words(self) -> str:
        return f"{self.type} numbers"

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        *lead, cols = self.shape
        return (Component(name=self.name, dtype="U8", shape=(*lead, cols * self._size)),)

    @property
    def _size(self) -> int:
        return BLOCKS[self.type][1]

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        return start * self._size, stop * self._size

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
class GgufBlocks(Tiles):
    """Tiles whose scales are stored between the codes; in memory, side tensors hold them."""

    kind: ClassVar[str] = "gguf"
    names: ClassVar[PlaneNames] = PlaneNames()
    suffixes: ClassVar[tuple[str, ...]] = ()
    quantised_by: ClassVar[str | None] = GGUF

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        if format.name in _PLAIN:
            return GgufNumbers.of(name, shape, format, settings)
        return super().of(name, shape, format, settings)

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        if format.name in _PLAIN:
            return grain is None or grain.name in {g for _, g in _TYPES}
        return grain is not None and (format.name, grain.name) in _TYPES

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        return None if format.name in _PLAIN else super().refusal(shape, format, settings)

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        return None  # `forms.foreign` reads the file, whose tensors name their types

    @property
    def type(self) -> str:
        """The name of the type in GGUF."""
        return _TYPES[self.format.name, self.grain.name]

    @property
    def words(self) -> str:
        return f"{self.type} of GGUF"

    @property
    def scales(self) -> Component:
        return replace(super().scales, dtype="F16" if self.format.twos_complement else "U8")

    @functools.cached_property
    def side(self) -> tuple[Component, ...]:
        return ()

    @functools.cached_property
    def late_side(self) -> tuple[Component, ...]:
        return ()

    @functools.cached_property
    def data(self) -> tuple[Component, ...]:
        size, num_bytes = BLOCKS[self.type]
        return (Component(name=self.name, dtype="U8", shape=(*self.shape[:-1], self.cols // size * num_bytes)),)

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        size, num_bytes = BLOCKS[self.type]
        return start // size * num_bytes, stop // size * num_bytes

    def is_valid_side(self, side: Side) -> bool:
        return True

    def rows_of_scales(self, side: Side) -> None:
        return None

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        rule = self._rule()
        scales = self._stored(rule, rule.join([each.more.parts for each in looked]), None)
        scales = self._search({}).over_blocks(over, scales) if self.searches else scales
        return Measurement(stats=sum((each.stats for each in looked), BlockStats()), side={self.scales.name: scales})

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        """Encode a block with the scales in `measured`, or with its own."""
        stats = None
        if self.scales.name not in measured.side:
            block = self.look(x, start, work)
            scales = self._stored(self._rule(x.numel() // self.cols), block.more.parts, None)
            scales = self._search({}).in_rows(x, scales, work) if self.searches else scales
            measured, stats, start = Measurement(stats=block.stats, side={self.scales.name: scales}), block.stats, 0
        encoded = ScaledCodes.encode(self, x, start, measured, work)
        rows = slice(start // self.cols, (start + x.numel()) // self.cols)
        blocks = self._as_blocks(encoded.data[0], measured.side[self.scales.name][rows])
        return replace(encoded, data=(blocks,), stats=stats)

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
        return {self.scales.name: scales.view(-1, self.matrix[1] // self.grain.tile[1])}

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        import torch

        from lpconv.forms.planes import stored_numbers

        size, num_bytes = BLOCKS[self.type]
        factors = self.code_scale(self.side_in(data), 0, stop - start).reshape(-1, 1)
        raw = data[0].view(-1, num_bytes)[:, num_bytes - size * self.format.storage_bits // 8 :]
        if self.format.storage_bits == 8:
            return raw.contiguous().view(torch.int8).float().mul_(factors).view(-1)
        halves = torch.cat((raw & 15, raw >> 4), 1)
        if self.format.twos_complement:
            return (halves.float() - 8).mul_(factors).view(-1)
        pairs = halves.view(-1, size // 2, 2)
        return stored_numbers(pairs[..., 0] | pairs[..., 1] << 4, "e2m1", 1).mul_(factors).view(-1)

    def decode_to(self, out: Tensor, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        return out.copy_(self.decode(data, start, stop, side))

    def confirms(self, x: Tensor, data: Sequence[Tensor], start: int, side: Side, work: Workspace) -> bool:
        return Form.confirms(self, x, data, start, side, work)

    def _rule(self, num_rows: int | None = None) -> TileScales:
        from lpconv.forms.tile_scales import BlockScales

        rule = super()._rule(num_rows)
        return BlockScales(**vars(rule)) if self.format.twos_complement else rule
