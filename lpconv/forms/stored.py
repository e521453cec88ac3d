"""What lies in a file of one tensor, for who reads it: names, shapes, and how numbers come back.

`Stored` is all that a reader asks. The forms that lpconv also writes are `Form`, in `form.py`, which tells how the two
belong together; those that others write, and that are only read, lie in `foreign/`.
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
    """Elements `start` to `stop` of a stored tensor, 1-D in its own dtype."""

    def __call__(self, component: Component, start: int, stop: int, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Stored(ABC):
    """How the tensor `name` of `shape` is stored. `format` is that of its numbers, None where it keeps its own bits."""

    name: str
    shape: tuple[int, ...]
    format: Format | None

    @property
    @abstractmethod
    def words(self) -> str:
        """What is stored, for people: "e4m3fn codes with one scale"."""

    @property
    @abstractmethod
    def components(self) -> tuple[Component, ...]:
        """Every tensor that is stored."""

    @functools.cached_property
    def data(self) -> tuple[Component, ...]:
        """The components that are stored block by block, the root's first."""
        return tuple(c for c in self.components if c.name == self.name)

    @functools.cached_property
    def side(self) -> tuple[Component, ...]:
        """The components that are held whole."""
        return tuple(c for c in self.components if c.name != self.name)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of everything that is stored."""
        return sum(c.num_bytes for c in self.components)

    @functools.cached_property
    def num_elements(self) -> int:
        """Numbers that the tensor has."""
        return math.prod(self.shape)

    @property
    def cols(self) -> int:
        """Blocks are whole multiples of so many elements."""
        return 1

    @property
    def num_points(self) -> int | None:
        """The rows of codes that stand for all the tensor's own, None where each row is its own."""
        return None

    def widened(self, start: int, stop: int) -> tuple[int, int]:
        """A range of elements, widened to the rows that it touches where rows are stored whole."""
        return start // self.cols * self.cols, min(-(-stop // self.cols) * self.cols, self.num_elements)

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        """Where the numbers `start` to `stop` lie in the stored data, in its elements."""
        return start, stop

    def read(self, fetch: Fetch, start: int, stop: int, side: Side) -> tuple[Tensor, ...]:
        """What `decode` needs of the data for the numbers `start` to `stop`."""
        first, last = self.place(start, stop, side)
        return tuple(fetch(c, first, last) for c in self.data)

    @abstractmethod
    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        """The numbers `start` to `stop` in fp32 from what was `read` of them, 1-D; what is kept in its own dtype."""

    def decode_to(self, out: Tensor, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        """`decode` rounded to the dtype of `out`, 1-D, which is filled: bit for bit the same, and at times faster."""
        return out.copy_(self.decode(data, start, stop, side))

    def has_sound(self, side: Side) -> bool:
        """Whether side tensors that were read make sense: scales are numbers, counts add up."""
        return True

    def scale(self, side: Side) -> float | None:
        """The one factor of all codes, None where there is none or more than one."""
        return None

    def summands(self, data: Sequence[Tensor], side: Side) -> tuple[Summand, ...]:
        """The whole tensor as a sum of floating-point numbers (1-D) times factors, one each or one a row.

        Forms whose components are no such numbers give the decoded ones.
        """
        return ((self.decode(data, 0, self.num_elements, side), 1.0),)
