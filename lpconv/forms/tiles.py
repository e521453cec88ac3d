"""Codes with a scale per tile (a row, part of a row, or block of rows and columns): value = scale_tile · code.

Rows run along the last axis; tiles divide the matrix of all rows, for any leading axes. The codes are [1, *shape] as
with one scale, e2m1 and integers packed as `PACKED` says, and `NAME_scale` has a number per tile: [tiles along rows,
tiles along columns]. So an outlier costs no other tile its precision. A `Grain` defines the dtype of scales and the
size of tiles; `tile_scales.py` computes scales from weights.

Decoding uses the arithmetic of `grid.py`, which also reads these layouts from other tools.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from lpconv.formats.grains import Grain, find_grain
from lpconv.formats.spec import CODED, FORMATS, OF_DTYPE, Format
from lpconv.forms.coded import CodedForm
from lpconv.forms.entropy import EntropyCoded
from lpconv.forms.facts import BlockFacts, Component, EncodedBlock, FormSettings, Headers, Measurement
from lpconv.forms.form import Form, Over, Side, Summand, not_finite_error
from lpconv.forms.grid import Grid, is_positive
from lpconv.forms.planes import PACKED, Plane, PlaneNames, one_by_one, stored_numbers
from lpconv.forms.scaled import ScaledCodes
from lpconv.mcf.point_layout import MAX_COLS
from lpconv.storage.header import DTYPE_BITS

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace
    from lpconv.forms.on_grid import OnGrid
    from lpconv.forms.tile_scales import Parts, ScaleSearch, TileScales


FACTOR_SUFFIX = "_global_scale"
_SEARCHED_PER_SECOND = 1.2e7  # like `Form.encoded_per_second`


@dataclass(frozen=True, kw_only=True)
class _TileFacts:
    """Tile statistics of a block from `look`; or the scales that it was encoded with, if it was."""

    first: tuple[bool, str | None] | None
    parts: Parts = field(default_factory=dict)
    scales: Tensor | None = None
    factor: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Tiles(CodedForm):
    """Codes with a scale per tile.

    With `searches`, each scale is the one of several with the least squared error, in which columns are weighted by
    `importance` (None: equally); see `tile_scales.py`.
    """

    kind: ClassVar[str] = "tiles"
    encoded_per_second: ClassVar[float] = 8e7
    names: ClassVar[PlaneNames] = PlaneNames(axis=(1,), factor=FACTOR_SUFFIX, scale_dtypes=("F32",))
    suffixes: ClassVar[tuple[str, ...]] = names.suffixes

    grain: Grain
    scale_dtype: str = ""  # if it is not the one that is written
    searches: bool = False
    importance: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        grain = settings.grain
        if format is CODED:
            return EntropyCoded.of(name, shape, format, settings)
        if grain is None or not _holds(grain, format):
            return cls.whole.of(name, shape, format, settings)
        is_search = settings.scale == "search"
        return cls(
            name=name,
            shape=shape,
            format=format,
            has_pow2_scale=settings.scale == "pow2" or (is_search and not format.twos_complement),
            grain=grain,
            searches=is_search and grain.is_searched(format),
        )

    # The form for one scale per tensor: if the granularity is the tensor, or does not support the format.
    whole: ClassVar[type[Form]] = ScaledCodes

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        return grain is None or not grain.has_factor

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        grain, cols = settings.grain, shape[-1] if shape else 1
        if format is CODED:
            return EntropyCoded.refusal(shape, format, settings)
        if grain is None or not _holds(grain, format):
            return cls.whole.refusal(shape, format, settings)
        if not cls.holds(format, grain):
            return f"{grain.name} is a third-party layout"
        if cols > MAX_COLS:
            return f"rows of {cols} elements are too long for {grain.words}"
        if grain.formats and cols % grain.tile[1]:
            return f"rows of {cols} elements are not a multiple of {grain.tile[1]}"
        if format.name in PACKED and cols * format.storage_bits % DTYPE_BITS[PACKED[format.name][2]]:
            return f"rows of {cols} {format.name} codes do not fill whole words"
        return None

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        grain = find_grain(str(headers.quantization.get("granularity", "row")))
        if headers.quantised_by != cls.quantised_by or grain is None:
            return None
        return cls._of_codes(name, name, grain, headers.exceptions.get(name, headers.format), headers)

    @classmethod
    def _of_codes(cls, name: str, stored: str, grain: Grain, packed: str, headers: Headers) -> Self | None:
        """The form of the codes `stored`; `packed` is their format if the dtype does not tell it."""
        codes = headers.root[stored]
        fmt = OF_DTYPE.get(codes.dtype) or (FORMATS[packed] if packed in PACKED else None)
        shape = codes.shape[len(cls.names.axis) :]
        if fmt is None or not shape or not _holds(grain, fmt):
            return None
        cols = shape[-1] * DTYPE_BITS[codes.dtype] // fmt.storage_bits
        form = cls(name=name, shape=(*shape[:-1], cols), format=fmt, grain=grain)
        scales = headers.root.get(form.scales.name)
        if grain.scale_dtype == "F32" and scales is not None and scales.dtype in cls.names.scale_dtypes:
            form = replace(form, scale_dtype=scales.dtype)
        return form if all(map(headers.holds, form.components)) else None

    @property
    def words(self) -> str:
        return f"{self.format.name} codes with {self.grain.words}"

    @functools.cached_property
    def matrix(self) -> tuple[int, int]:
        """Number of rows of the tensor, and their length."""
        return math.prod(self.shape[:-1]), self.cols

    @functools.cached_property
    def codes(self) -> Component:
        """The codes as an encoder makes them, for the component `data`."""
        dtype, suffix = self.format.safetensors, ""
        if self.packed:
            dtype, suffix = PACKED[self.format.name][2], self.names.packed
        assert dtype is not None, self.format.name
        cols = self.cols * self.format.storage_bits // DTYPE_BITS[dtype]
        lead = self.shape[:-1] if self.shape else ()
        shape = (*self.names.axis, *lead, *([cols] if self.shape else []))
        return Component(name=self.name + suffix, dtype=dtype, shape=shape)

    @property
    def packed(self) -> str:
        return self.format.name if self.format.name in PACKED else ""

    @functools.cached_property
    def scales(self) -> Component:
        """The component with a scale per tile."""
        written = self.names.integer_scale if self.format.twos_complement else self.grain.scale_dtype
        return Component(
            name=self.names.part(self.name, self.names.scale),
            dtype=self.scale_dtype or written,
            shape=self.grain.grid(*self.matrix),
        )

    @property
    def whole_scale(self) -> Component | None:
        """The component with one more scale for the tensor, which divides; None if there is none."""
        has_factor = self.grain.has_factor
        return Component(name=self.name + FACTOR_SUFFIX, dtype="F32", shape=(1,)) if has_factor else None

    @property
    def size(self) -> Component | None:
        """The component that repeats the size of the matrix; None if there is none."""
        has_size = bool(self.names.size) and self.format.twos_complement
        return Component(name=self.name + self.names.size, dtype="I64", shape=(2,)) if has_size else None

    @property
    def bias(self) -> Component | None:
        """The component with the value of code 0 of each tile of integers; None if there is none."""
        has_bias = bool(self.names.bias) and self.format.twos_complement
        return replace(self.scales, name=self.names.part(self.name, self.names.bias)) if has_bias else None

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        return (*self.side, *self.data)

    @functools.cached_property
    def data(self) -> tuple[Component, ...]:
        if not self.names.word:
            return (self.codes,)
        cols = self.cols * self.format.storage_bits // DTYPE_BITS[self.names.word]
        return (replace(self.codes, dtype=self.names.word, shape=(*self.shape[:-1], cols)),)

    @functools.cached_property
    def side(self) -> tuple[Component, ...]:
        return tuple(c for c in (self.scales, self.bias, self.whole_scale, self.size) if c is not None)

    @functools.cached_property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @functools.cached_property
    def grid(self) -> Grid:
        kind, plus, _ = PACKED.get(self.format.name, ("", 0, ""))
        rows = self.matrix[0]
        flat = replace(self.codes, shape=(rows, math.prod(self.codes.shape) // max(rows, 1)))
        return Grid(
            name=self.name,
            shape=self.matrix,
            format=self.format,
            codes=Plane(component=flat, kind=kind, plus=plus) if kind else one_by_one(flat),
            scales=one_by_one(self.scales, self.grain.sizes(*self.matrix)),
            factor=self.whole_scale,
            divides=self.grain.has_factor,
            size=self.size,
        )

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        bits, word = self.format.storage_bits, DTYPE_BITS[self.data[0].dtype]
        return start * bits // word, stop * bits // word

    @functools.cached_property
    def late_side(self) -> tuple[Component, ...]:
        """The scales and biases, if tiles are within rows and the scales are aligned behind the codes.

        Blocks are whole rows, so each block determines its own scales.
        """
        is_aligned = self.codes.num_bytes * 8 % DTYPE_BITS[self.scales.dtype] == 0
        is_late = self.grain.tile[0] == 1 and is_aligned
        return tuple(c for c in self.side if c in (self.scales, self.bias)) if is_late else ()

    @property
    def shares_scale(self) -> bool:
        return self.grain.has_factor and self.chosen is None

    @property
    def _seconds_to_search(self) -> float:
        return self.num_elements / _SEARCHED_PER_SECOND if self.searches and self.chosen is None else 0.0

    def with_importance(self, importance: Tensor) -> Self:
        return replace(self, importance=importance)

    @property
    def fine_scales(self) -> Component | None:
        is_fine = self.whole_scale is None and self.scales.dtype in ("F32", "F16", "BF16")
        return self.scales if is_fine and self.scales in self.side else None

    def with_scales(self, side: Side, scales: Tensor) -> Side:
        if self.bias is None:
            return {**side, self.scales.name: scales}
        least = -(2.0 ** (self.format.storage_bits - 1))
        return {**side, self.scales.name: scales, self.bias.name: scales * least}

    def is_valid_side(self, side: Side) -> bool:
        if self.scales not in self.side:
            return True
        if not self.grid.is_valid_side(side) or not is_positive(self.tile_scales(side)):
            return False
        wanted = self.with_scales(side, side[self.scales.name])
        return self.bias is None or wanted[self.bias.name].equal(side[self.bias.name])

    def code_scale(self, side: Side, start: int, stop: int) -> Tensor:
        """The factors of codes: [rows, tiles, 1], or [rows, cols] if tiles do not divide rows."""
        cols = self.cols
        height, width = self.grain.sizes(*self.matrix)
        top, bottom = (start // cols, stop // cols) if cols else (0, 0)
        first, last = top // height, -(-bottom // height)
        factors = self.tile_scales(side, slice(first, last))
        if height > 1:
            factors = factors.repeat_interleave(height, 0)[top - first * height : bottom - first * height]
        return factors.repeat_interleave(width, 1)[:, :cols] if width and cols % width else factors.unsqueeze(2)

    def tile_scales(self, side: Side, rows: slice = slice(None)) -> Tensor:
        """The factors of tiles, with all that belongs to the tensor, fp32."""
        return self.grid.with_factor(stored_numbers(side[self.scales.name][rows], self.grid.scales.kind, 1), side)

    def summands(self, data: Sequence[Tensor], side: Side) -> tuple[Summand, ...]:
        if self.packed or len(self.shape) != 2 or self.grain.sizes(*self.matrix) != (1, self.cols):
            return super().summands(data, side)
        return ((self.codes_in(data), self.code_scale(side, 0, self.num_elements).view(-1)),)

    def as_stored(self, codes: Tensor, start: int, side: Side, work: Workspace) -> Tensor:
        if not self.packed and not self.names.word:
            return codes
        from lpconv.formats.codes import pack
        from lpconv.storage.dtypes import TORCH_DTYPES

        codes = pack(codes, self.format.storage_bits, work.residual) if self.packed else codes
        return codes.view(TORCH_DTYPES[self.data[0].dtype])

    def codes_in(self, data: Sequence[Tensor]) -> Tensor:
        from lpconv.storage.dtypes import TORCH_DTYPES

        return data[0].view(TORCH_DTYPES[self.codes.dtype]) if self.names.word else data[0]

    def begin(self, largest: float) -> Measurement:
        side = self.chosen.side if self.chosen is not None else self._tensor_side(self._rule.factor(largest))
        return Measurement(side=side, is_guess=True)

    def _tensor_side(self, factor: Tensor | None) -> dict[str, Tensor]:
        """The side tensors that belong to the whole tensor, by name."""
        import torch

        side = {} if self.whole_scale is None or factor is None else {self.whole_scale.name: factor}
        return side if self.size is None else {**side, self.size.name: torch.tensor(self.matrix)}

    def look(self, x: Tensor, start: int, work: Workspace) -> BlockFacts:
        """Tile statistics of a block. Raises InputError for NaN or Inf in a format without them."""
        from lpconv.forms.blocks import as_float32, block_stats
        from lpconv.forms.on_grid import first_look

        if self.chosen is not None:
            return super().look(x, start, work)
        value = as_float32(x, work)
        parts, largest = self._rule.parts(value.view(-1, self.cols), work.scratch.coded)
        stats = block_stats(value, work, largest)
        if not (stats.is_finite or self.format.has_nan):
            raise not_finite_error(self.name, self.format)
        first = first_look(x, self._on_grid) if start == 0 else None
        return BlockFacts(stats=stats, more=_TileFacts(parts=parts, first=first))

    def look_and_encode(
        self, x: Tensor, start: int, measured: Measurement, work: Workspace
    ) -> tuple[BlockFacts, EncodedBlock]:
        if self.chosen is not None:
            return super().look_and_encode(x, start, measured, work)
        block = self.look(x, start, work)
        factor = measured.side.get(self.name + FACTOR_SUFFIX)
        scales = self._usual_scales(block.more.parts, factor)
        scales = self._search(measured.side).in_rows(x, scales, work) if self.searches else scales
        more = _TileFacts(first=block.more.first, scales=scales, factor=factor)  # parts need more memory than scales
        mine = Measurement(stats=block.stats, side={**measured.side, self.scales.name: scales})
        return BlockFacts(stats=block.stats, more=more), self.encode(x, 0, mine, work)

    def _combine(self, looked: BlockFacts, over: Over, fused: Sequence[Over]) -> Measurement:
        """Combine all blocks. Reads fused weights only if blocks have not been encoded yet."""
        import torch

        from lpconv.forms.blocks import finite_absmax

        rule, stats, seen = self._rule, looked.stats, looked.more
        is_encoded = bool(seen) and seen[0].scales is not None
        if is_encoded:
            factor, scales = seen[0].factor, torch.cat([s.scales for s in seen])
        else:
            others = (absmax for each in fused for absmax in each(lambda x, _, work: finite_absmax(x, work)))
            factor = rule.factor(max([stats.absmax, *others]))
            scales = self._usual_scales(rule.join([s.parts for s in seen]), factor)
        looks_so, grid = seen[0].first if seen and stats.is_finite else (False, None)
        grid_scales, common = None, self._tensor_side(factor)
        if looks_so and self._on_grid is not None:
            every = [each.more for each in over(self.look)] if is_encoded else seen
            parts = rule.join([s.parts for s in every])
            grid_scales = self._on_grid.scales(over, parts["absmax"], self._usual_scales(parts, factor))
        if grid_scales is None and self.searches and not is_encoded:
            scales = self._search(common).over_blocks(over, scales)
        side = self.with_scales(common, scales if grid_scales is None else grid_scales)
        is_other = is_encoded and grid_scales is not None and not torch.equal(grid_scales, scales)
        return Measurement(stats=stats, side=side, on_grid=grid_scales is not None, grid=grid, is_other=is_other)

    @functools.cached_property
    def _rule(self) -> TileScales:
        """The rule for the usual scales."""
        from lpconv.forms.tile_scales import TileScales

        return TileScales(grain=self.grain, format=self.format, matrix=self.matrix, has_pow2_scale=self.has_pow2_scale)

    def _usual_scales(self, parts: Parts, factor: Tensor | None) -> Tensor:
        """The usual scales in the dtype of the file."""
        from lpconv.storage.dtypes import TORCH_DTYPES

        return self._rule.stored_scales(parts, factor).to(TORCH_DTYPES[self.scales.dtype])

    def _search(self, common: Side) -> ScaleSearch:
        """The search for the scales of tiles; `common` are the other side tensors."""
        from lpconv.forms.tile_scales import ScaleSearch

        return ScaleSearch(
            rule=self._rule,
            factor_of=lambda scales, start, stop: self.code_scale({**common, self.scales.name: scales}, start, stop),
            importance=self.importance,
        )

    @functools.cached_property
    def _on_grid(self) -> OnGrid | None:
        """The grid search for tiles, if scales may be any numbers.

        MX needs none: the smallest scale without clipping keeps all that others keep.
        """
        from lpconv.forms.on_grid import OnGrid

        if self.scales.dtype not in ("F32", "BF16"):
            return None
        return OnGrid(
            format=self.format,
            has_pow2_scale=self.has_pow2_scale and not self.searches,
            tile=self.grain.tile,
            cols=self.cols,
            has_short_scales=self.names.integer_scale == "BF16" and self.grain.fits(self.format),
        )


def _holds(grain: Grain, format: Format) -> bool:
    return not grain.formats or format.name in grain.formats
