"""The experts of gpt-oss in MXFP4, as lpconv writes them; `foreign/mxfp4.py` reads them, whoever wrote them.

Tiles lie on the transposed matrices: the parameter is [experts, inputs, outputs], and rows in the file are outputs, of
32 inputs to a scale. So blocks, codes and scales here are those of the transpose of each expert's matrix, as which a
conversion reads its source (`turned`). Everything else of the model is kept, as its makers have it.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lpconv.errors import UnsupportedError
from lpconv.formats.grains import GRAINS, Grain
from lpconv.formats.spec import Format
from lpconv.forms.facts import Component, Converted, Headers, Looked, Measured, Settings
from lpconv.forms.foreign.mxfp4 import BLOCKS, METHODS, SCALES
from lpconv.forms.form import Over
from lpconv.forms.stored import Side
from lpconv.forms.tiles import Tiles
from lpconv.mcf.point_layout import MAX_COLS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GptOss"]

_MX, _MODEL = GRAINS["mx"], "gpt_oss"
_BYTES_OF_A_GROUP = 16


@dataclass(frozen=True, kw_only=True)
class GptOss(Tiles):
    """Never recognised: who reads such files reads them as those of others."""

    kind: ClassVar[str] = "gpt-oss"
    scale_suffix: ClassVar[str] = SCALES
    suffixes: ClassVar[tuple[str, ...]] = (BLOCKS, SCALES)
    quantised_by: ClassVar[str | None] = METHODS[0]
    axis: ClassVar[tuple[int, ...]] = ()
    turned: ClassVar[bool] = True

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        return format.name == "e2m1" and grain == _MX

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: Settings) -> str | None:
        if len(shape) != 3 or not cls.holds(format, settings.grain):
            return "no weight of experts: the layout leaves it"
        if shape[1] % _MX.tile[1]:
            return f"{shape[1]} inputs are not made of parts of {_MX.tile[1]}"
        return f"{shape[1]} inputs are too many for {_MX.words}" if shape[1] > MAX_COLS else None

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        return None

    @functools.cached_property
    def matrix(self) -> tuple[int, int]:
        return math.prod(self.shape) // self.cols, self.cols

    @property
    def cols(self) -> int:
        return self.shape[1]

    @property
    def codes(self) -> Component:
        experts, inputs, outputs = self.shape
        shape = (experts, outputs, inputs // _MX.tile[1], _BYTES_OF_A_GROUP)
        return Component(name=self.name + BLOCKS, dtype="U8", shape=shape)

    @property
    def scales(self) -> Component:
        return replace(super().scales, shape=self.codes.shape[:-1])

    def conclude(self, looked: Sequence[Looked], over: Over, fused: Sequence[Over] = ()) -> Measured:
        found, name = super().conclude(looked, over, fused), self.scales.name
        return replace(found, side={name: found.side[name].view(self.scales.shape)})

    def factor(self, side: Side, start: int, stop: int) -> Tensor:
        scales = side[self.scales.name]
        return super().factor({self.scales.name: scales.view(-1, scales.shape[-1])}, start, stop)

    @classmethod
    def configured(cls, made: Converted) -> dict[str, Any]:
        """Raises UnsupportedError for other models, and where half of a layer's experts is kept: no reader has that."""
        model_type = made.config.get("model_type")
        if model_type != _MODEL:
            raise UnsupportedError(
                f"the layout holds the experts of {_MODEL}, and the model is `{model_type}`",
                hint="use --layout compressed-tensors",
            )
        half = next((m for m in (n.rpartition(".")[0] for n in made.formats) if m in made.ignored), None)
        if half is not None:
            raise UnsupportedError(
                f"of `{half}` only one projection is converted", hint=f"--exclude '{half}.*', or convert both"
            )
        return {"quantization_config": {"quant_method": METHODS[0], "modules_to_not_convert": list(made.ignored)}}
