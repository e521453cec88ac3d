"""Codes with a scale for every row: value of a row = scale_r · codes_r.

Rows run along the last axis, whatever the leading ones are. The codes are [1, *shape] as of a tensor with one scale,
and `NAME_scale` is [rows, 1] in fp32. A row with an outlier then costs no other row its precision, for 32 bits a row.
"""

from __future__ import annotations  # tensors are named below and not imported

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from lpconv.formats.spec import Format
from lpconv.forms.facts import BlockStats, Component, Measured, Settings
from lpconv.forms.form import Over
from lpconv.forms.scaled import SCALE_SUFFIX, Scaled
from lpconv.forms.stored import Side
from lpconv.mcf.point_layout import MAX_COLS

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace

__all__ = ["Rows"]


@dataclass(frozen=True, kw_only=True)
class Rows(Scaled):
    """As `Scaled`, of every row alone: each follows its rule for a scale."""

    kind: ClassVar[str] = "rows"

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: Settings) -> str | None:
        cols = shape[-1] if shape else 1
        return f"rows of {cols} numbers are too long for a scale each" if cols > MAX_COLS else None

    @property
    def words(self) -> str:
        return f"{self.format.name} codes with a scale per row"

    @property
    def components(self) -> tuple[Component, ...]:
        scale, codes = super().components
        return replace(scale, shape=(self.num_elements // self.cols, 1)), codes

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    def scale(self, side: Side) -> None:
        return None

    def has_sound(self, side: Side) -> bool:
        scales = side[self.name + SCALE_SUFFIX]
        return bool(((scales > 0) & (scales < math.inf)).all())

    def measure(self, over: Over) -> Measured:
        import torch

        from lpconv.forms.blocks import block_stats

        found = list(over(lambda x, work: (block_stats(x, work), self._scales(x, work))))
        scales = torch.cat([s for _, s in found])
        return Measured(stats=sum((s for s, _ in found), BlockStats()), side={self.name + SCALE_SUFFIX: scales})

    def factor(self, side: Side, start: int, stop: int) -> float | Tensor:
        return side[self.name + SCALE_SUFFIX][start // self.cols : stop // self.cols]

    def _scales(self, x: Tensor, work: Workspace) -> Tensor:
        """The scale of each row of a block, [rows, 1]."""
        import torch

        from lpconv.formats.scale import pow2_ceil, pow2_floor
        from lpconv.forms.blocks import as_float32

        value = as_float32(x, work).view(-1, self.cols)
        finite = torch.isfinite(value)
        counts = finite.sum(1, keepdim=True).clamp_min(1)
        known = value if bool(finite.all()) else value.masked_fill(~finite, 0.0)
        norms = torch.linalg.vector_norm(known, dim=1, keepdim=True, dtype=torch.float64)
        rms, absmax = norms / counts.sqrt(), torch.maximum(known.amax(1, keepdim=True), -known.amin(1, keepdim=True))
        floor = (absmax.double() / self.format.max).clamp_min(2.0**-126)
        if self.has_pow2_scale:
            scales = torch.maximum(pow2_floor(rms), pow2_ceil(floor)).float()
        else:
            scales = torch.maximum(rms, floor).clamp_max(2.0**127).float()
        scales = torch.where(rms == 0, 1.0, scales)
        if self.format.name == "fp32" and self.has_pow2_scale:  # its codes promise the source's bits back
            survives = (known / scales * scales).view(torch.int32) == known.view(torch.int32)
            scales = torch.where(survives.all(1, keepdim=True), scales, 1.0)
        return scales
