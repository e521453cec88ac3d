"""Two components (Collage): an ordinary 16-bit checkpoint, and its rounding errors next to it.

The root is a plain checkpoint that any tool opens. The residual has the same name and shape in files of a separate
folder; `lpconv.mcf.split.RESIDUALS` defines how it is computed and added back.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lpconv.errors import InputError
from lpconv.formats.spec import FORMATS, OF_DTYPE, Format
from lpconv.forms.facts import (
    Component,
    ConvertedFacts,
    EncodedBlock,
    FormSettings,
    Headers,
    Measurement,
    checked_ranges,
)
from lpconv.forms.form import Form, Side, Summand
from lpconv.lookup import find

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace
    from lpconv.mcf.split import Residual


# The dtypes of the residuals in `RESIDUALS`, which imports torch.
RESIDUAL_DTYPES = {"bf16": "BF16", "exact16": "I16", "int8": "I8", "fp16": "F16"}


@dataclass(frozen=True, kw_only=True)
class Pair(Form):
    """A 16-bit tensor with a residual; `residual` is a key of `RESIDUALS`."""

    kind: ClassVar[str] = "pair"
    encoded_per_second: ClassVar[float] = 2.5e8
    quantised_by: ClassVar[str | None] = None
    holds_anything: ClassVar[bool] = True
    holds_one_format: ClassVar[bool] = True

    format: Format
    residual: str

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        return cls(name=name, shape=shape, format=format, residual=settings.residual)

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        root = headers.root[name]
        if name not in headers.low or root.dtype not in ("BF16", "F16"):
            return None
        find("residual", headers.residual, RESIDUAL_DTYPES, error=InputError)
        form = cls(name=name, shape=root.shape, format=OF_DTYPE[root.dtype], residual=headers.residual)
        return form if all(map(headers.holds, form.components)) else None

    @property
    def is_coded(self) -> bool:
        return False  # any tool reads the root

    @property
    def words(self) -> str:
        return f"{self.format.name} and {self.residual} residual"

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        low = RESIDUAL_DTYPES[self.residual]
        return (
            Component(name=self.name, dtype=self.format.safetensors or "", shape=self.shape),
            Component(name=self.name, dtype=low, shape=self.shape, in_residual=True),
        )

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        from lpconv.forms.blocks import as_float32, block_error, block_stats, buffer_view

        rule = self._rule()
        high, low = buffer_view(work.root, x.numel(), rule.hi_dtype), buffer_view(work.residual, x.numel(), rule.dtype)
        stats = block_stats(x, work)
        value = as_float32(x, work)
        rule.split(value, out=(high, low), scratch=work.scratch.split)
        merged = rule.merge(high, low, out=work.scratch.error[: x.numel()], scratch=work.scratch.split)
        return EncodedBlock(data=(high, low), stats=stats, error=block_error(value, merged))

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        return self._rule().merge(*data)

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        return all(self._is_close(value[a:b], got[a:b]) for a, b in checked_ranges(value.numel()))

    def _is_close(self, value: Tensor, got: Tensor) -> bool:
        """Whether the error is within the residual's bound; infinite exactly if the source is or rounds to it."""
        import torch

        from lpconv.forms.blocks import same_numbers

        rule = self._rule()
        expected = torch.where(value.abs() < rule.overflow, value, value * math.inf)  # NaN stays NaN
        finite = torch.isfinite(expected)
        bound = (value.abs().double() * rule.relative_bound).clamp_min(rule.absolute_bound)
        close = (value.double() - got.double()).abs() <= bound
        return bool((close | ~finite).all()) and same_numbers(got[~finite], expected[~finite])

    def summands(self, data: Sequence[Tensor], side: Side) -> tuple[Summand, ...]:
        """Both parts for float residuals; the merged value for integer residuals, which are bit patterns."""
        from lpconv.mcf.split import FP16_RESIDUAL_SCALE

        factor = {"bf16": 1.0, "fp16": 1 / FP16_RESIDUAL_SCALE}.get(self.residual)
        if factor is None:
            return super().summands(data, side)
        high, low = data
        return (high, 1.0), (low, factor)

    def _rule(self) -> Residual:
        from lpconv.mcf.split import RESIDUALS

        return RESIDUALS[self.residual]

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> dict[str, Any]:
        # Every release of transformers reads the old name.
        key = "dtype" if "dtype" in converted.config else "torch_dtype"
        return {key: FORMATS[converted.settings["format"]].torch}
