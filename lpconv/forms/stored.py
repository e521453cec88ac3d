"""The stored form of one tensor for readers: names, shapes, and decoding.

Readers need only `Stored`. The forms that lpconv also writes are `Form`, in `form.py`, which explains both; third-party
forms, which are only read, are in `foreign/`.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lpconv.formats.spec import Format
from lpconv.forms.facts import Component

if TYPE_CHECKING:
    from torch import Tensor


Side = Mapping[str, "Tensor"]
Summand = tuple["Tensor", "float | Tensor"]


class Fetch(Protocol):
    """Reads elements `start` to `stop` of a stored tensor, 1-D in its own dtype."""

    def __call__(self, component: Component, start: int, stop: int, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Stored(ABC):
    """How the tensor `name` of `shape` is stored. `format` is its number format, None if it keeps its own bits."""

    name: str
    shape: tuple[int, ...]
    format: Format | None

    @property
    @abstractmethod
    def words(self) -> str:
        """A description for reports, such as "e4m3fn codes with one scale"."""

    @property
    @abstractmethod
    def components(self) -> tuple[Component, ...]:
        """Every stored tensor of the form."""

    @functools.cached_property
    def data(self) -> tuple[Component, ...]:
        """The components that are stored block by block, the root's first."""
        return tuple(c for c in self.components if c.name == self.name)

    @functools.cached_property
    def side(self) -> tuple[Component, ...]:
        """The components that are held in memory."""
        return tuple(c for c in self.components if c.name != self.name)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Total stored bytes."""
        return sum(c.num_bytes for c in self.components)

    @functools.cached_property
    def num_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def cols(self) -> int:
        """Blocks are multiples of this number of elements."""
        return 1

    @property
    def num_points(self) -> int | None:
        """Number of points (rows of codes) of the tensor, None if each row has one."""
        return None

    def widened(self, start: int, stop: int) -> tuple[int, int]:
        """A range of elements, extended to whole rows if rows are stored whole."""
        return start // self.cols * self.cols, min(-(-stop // self.cols) * self.cols, self.num_elements)

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        """The range of stored elements that holds the numbers `start` to `stop`."""
        return start, stop

    def read(self, fetch: Fetch, start: int, stop: int, side: Side) -> tuple[Tensor, ...]:
        """Fetch the data that `decode` needs for the numbers `start` to `stop`."""
        first, last = self.place(start, stop, side)
        return tuple(fetch(c, first, last) for c in self.data)

    @abstractmethod
    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        """Decode data from `read` to the numbers `start` to `stop` in fp32, 1-D; kept tensors keep their dtype."""

    def decode_to(self, out: Tensor, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        """`decode` into `out`, 1-D, rounded to its dtype: bitwise the same, but sometimes faster."""
        return out.copy_(self.decode(data, start, stop, side))

    def is_valid_side(self, side: Side) -> bool:
        """Whether side tensors are valid: scales are positive numbers, counts add up."""
        return True

    def scale(self, side: Side) -> float | None:
        """The common factor of all codes, None if there is none or more than one."""
        return None

    def summands(self, data: Sequence[Tensor], side: Side) -> tuple[Summand, ...]:
        """The whole tensor as a sum of floating-point numbers (1-D) with factors, one each or one per row.

        Forms with other components return the decoded numbers.
        """
        return ((self.decode(data, 0, self.num_elements, side), 1.0),)
