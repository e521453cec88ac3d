"""Codes with one scale: value = scale · code.

The codes have a leading component axis, [1, *shape], so that plain transformers refuses them instead of loading them as
weights. `NAME_scale` [1] is fp32.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from lpconv.errors import InputError
from lpconv.formats.spec import OF_DTYPE, Format
from lpconv.forms.coded import CodedForm
from lpconv.forms.facts import BlockFacts, BlockStats, Component, FormSettings, Headers, Measurement
from lpconv.forms.form import Form, Over, Side, Summand
from lpconv.forms.planes import PlaneNames

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace
    from lpconv.forms.on_grid import OnGrid


SCALE_SUFFIX = "_scale"
_SCALE_EXPONENTS = (-126, 127)
_SURE = 5.0  # standard errors between the mean square of a sample and the next power of four


@dataclass(frozen=True, kw_only=True)
class ScaledCodes(CodedForm):
    """Codes with one scale, a power of two if it `has_pow2_scale`, see `scale_for`."""

    kind: ClassVar[str] = "scaled"
    suffixes: ClassVar[tuple[str, ...]] = (SCALE_SUFFIX,)
    names: ClassVar[PlaneNames] = PlaneNames(axis=(1,))

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        return cls(name=name, shape=shape, format=format, has_pow2_scale=settings.scale != "exact")

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        codes = headers.root[name]
        if headers.quantised_by != cls.quantised_by or codes.dtype not in OF_DTYPE:
            return None
        form = cls(name=name, shape=codes.shape[len(cls.names.axis) :], format=OF_DTYPE[codes.dtype])
        return form if all(map(headers.holds, form.components)) else None

    @property
    def words(self) -> str:
        return f"{self.format.name} codes with one scale"

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        dtype = self.format.safetensors
        assert dtype is not None, self.format.name
        return (
            Component(name=self.name + SCALE_SUFFIX, dtype="F32", shape=(1,)),
            Component(name=self.name, dtype=dtype, shape=(*self.names.axis, *self.shape)),
        )

    def scale(self, side: Side) -> float:
        return float(side[self.name + SCALE_SUFFIX])

    def code_scale(self, side: Side, start: int, stop: int) -> float | Tensor:
        return self.scale(side)

    def is_valid_side(self, side: Side) -> bool:
        return 0 < self.scale(side) < math.inf

    def look(self, x: Tensor, start: int, work: Workspace) -> BlockFacts:
        from lpconv.forms.blocks import block_stats
        from lpconv.forms.on_grid import first_look

        return BlockFacts(stats=block_stats(x, work), more=first_look(x, self._on_grid()) if start == 0 else None)

    def _combine(self, looked: BlockFacts, over: Over, fused: Sequence[Over]) -> Measurement:
        import torch

        stats, seen = looked.stats, looked.more
        scale = scale_for(stats, self.format, pow2=self.has_pow2_scale)
        # fp32 codes must restore the source's bits; dividing tiny elements by a large scale could lose some.
        exact = self.format.name == "fp32" and self.has_pow2_scale
        if exact and scale > 1 and not all(over(lambda x, _, work: _fits_exactly(x, scale, work))):
            scale = 1.0
        side = torch.tensor([scale], dtype=torch.float32)
        looks_so, grid = seen[0] if seen else (False, None)
        grid_scale = None
        if looks_so and stats.is_finite:
            grid_scale = self._on_grid().scales(over, torch.tensor([[stats.absmax]]), side.view(1, 1))
        side = side if grid_scale is None else grid_scale.view(1)
        return Measurement(
            stats=stats, side={self.name + SCALE_SUFFIX: side}, on_grid=grid_scale is not None, grid=grid
        )

    def guess(self, sample: Callable[[], Tensor]) -> Measurement | None:
        """The power of two below the RMS, if the sample's RMS is well between two of them."""
        import torch

        if not self.has_pow2_scale or self.chosen is not None:
            return None
        squares = sample().double().square().mean(1)
        mean, slack = float(squares.mean()), _SURE * float(squares.std()) / math.sqrt(len(squares))
        if not 0 < mean < math.inf or mean <= slack:
            return None
        low, high = (math.frexp(math.sqrt(s))[1] - 1 for s in (mean - slack, mean + slack))
        if low != high or not _SCALE_EXPONENTS[0] <= low <= _SCALE_EXPONENTS[1]:
            return None
        scale = torch.tensor([math.ldexp(1.0, low)], dtype=torch.float32)
        return Measurement(side={self.name + SCALE_SUFFIX: scale}, is_guess=True)

    def _on_grid(self) -> OnGrid:
        from lpconv.forms.on_grid import OnGrid

        return OnGrid(format=self.format, has_pow2_scale=self.has_pow2_scale)

    def summands(self, data: Sequence[Tensor], side: Side) -> tuple[Summand, ...]:
        return ((data[0], self.scale(side)),)


def pack_scaled(name: str, codes: Tensor, scale: float | Tensor) -> dict[str, Tensor]:
    """The stored tensors of codes and their scale, by name."""
    import torch

    stored = torch.as_tensor(scale, dtype=torch.float32).reshape(1).clone()
    return {name: codes.unsqueeze(0).contiguous(), name + SCALE_SUFFIX: stored}


def unpack_scaled(name: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """The codes and the scale of a tensor from `pack_scaled`; a tensor without a scale is returned with 1.

    Raises InputError if it has more than one scale.
    """
    scale = tensors.get(name + SCALE_SUFFIX)
    if scale is None:
        return tensors[name], 1.0
    if scale.numel() != 1:
        raise InputError(
            f"`{name}` has {scale.numel()} scales, but a scaled tensor has one", hint="convert without --granularity"
        )
    return tensors[name][0], float(scale)


def scale_for(stats: BlockStats, fmt: Format, *, pow2: bool) -> float:
    """The scale σ of a tensor, so that x / σ has unit RMS: arXiv 2303.11257 §5.3 step 1, 2407.17353 §2.

    With `pow2` it is rounded down to a power of two (2407.17353 §3.2), which keeps the second moment of the codes in
    [1, 4), and the codes are exactly the data that a scaled model trains on; otherwise it is an fp32 number. Departure
    from both papers: σ grows to the next power of two that keeps the largest element inside the format, because a
    saturated outlier costs more than a binade of everything else. An all-zero tensor has scale 1.
    """
    import torch

    rms = stats.rms
    if rms == 0:
        return 1.0
    floor = max(stats.absmax / fmt.max, 2.0 ** _SCALE_EXPONENTS[0])
    if not pow2:
        return float(torch.tensor(min(max(rms, floor), 2.0 ** _SCALE_EXPONENTS[1]), dtype=torch.float32))
    mantissa, needed = math.frexp(floor)
    exponent = max(math.frexp(rms)[1] - 1, needed - 1 if mantissa == 0.5 else needed)
    return math.ldexp(1.0, min(max(exponent, _SCALE_EXPONENTS[0]), _SCALE_EXPONENTS[1]))


def _fits_exactly(x: Tensor, scale: float, work: Workspace) -> bool:
    """Whether every element of a block survives x / scale · scale in fp32; false only if x / scale is subnormal."""
    import torch

    from lpconv.forms.blocks import as_float32, same_numbers

    value = as_float32(x, work)
    coded = torch.mul(value, 1 / scale, out=work.scratch.coded[: x.numel()])
    return same_numbers(torch.mul(coded, scale, out=work.scratch.error[: x.numel()]), value)
