"""A tensor that keeps its own bits."""

from __future__ import annotations  # tensors are named below and not imported

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from lpconv.formats.spec import Format
from lpconv.forms.facts import Component, EncodedBlock, FormSettings, Headers, Measurement
from lpconv.forms.form import Form, Side
from lpconv.storage.header import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace


@dataclass(frozen=True, kw_only=True)
class Kept(Form):
    """A tensor that keeps its own bits.

    `dtype` is the source's, as safetensors names it; it may be one that is not a number format of lpconv.
    """

    kind: ClassVar[str] = "kept"
    quantised_by: ClassVar[str | None] = None

    dtype: str
    format: Format | None = None

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Kept:
        return cls(name=name, shape=shape, dtype=format.safetensors or "U8")

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        return cls.unchanged(headers.root[name])

    @classmethod
    def unchanged(cls, info: TensorInfo) -> Self:
        """The form of a tensor that is stored as in its source."""
        return cls(name=info.name, shape=info.shape, dtype=info.dtype)

    @property
    def words(self) -> str:
        return f"unchanged {self.dtype}"

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        return (Component(name=self.name, dtype=self.dtype, shape=self.shape),)

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        return EncodedBlock(data=(x,))

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        return data[0]

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        import torch

        return torch.equal(got.view(torch.uint8), value.view(torch.uint8))
