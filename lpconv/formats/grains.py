"""Granularities as values: the part of a weight that shares a scale. Plain Python, without torch.

A tile is a block of rows and columns of a weight, viewed as a matrix whose rows run along the last axis; all elements
of a tile share a scale. A granularity also defines how scales are stored: as fp32 numbers, powers of two in a byte
(e8m0: OCP MX 1.0), or e4m3fn with one more scale for the whole tensor (NVFP4).
"""

import re
from dataclasses import dataclass

from lpconv.errors import UsageError
from lpconv.formats.spec import INTEGERS, Format
from lpconv.lookup import find

TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Grain:
    """A scale granularity. `tile` is (rows, columns) that share a scale; 0 means all of them.

    `formats` lists the formats that it supports, the default first; empty means integers and any format that a method
    writes with one scale. `scale_dtype` is F32, U8 (exponents of two, biased by 127) or F8_E4M3, as safetensors names
    them.
    """

    name: str
    tile: tuple[int, int]
    formats: tuple[str, ...] = ()
    scale_dtype: str = "F32"

    @property
    def words(self) -> str:
        """A description for reports, such as "a scale per row"."""
        rows, cols = self.tile
        return f"a scale per {'row' if not cols else f'{cols} of a row' if rows == 1 else f'{rows} x {cols}'}"

    @property
    def has_factor(self) -> bool:
        """Whether the tensor has one more scale, which divides, as in compressed-tensors."""
        return self.scale_dtype == "F8_E4M3"

    def fits(self, format: Format) -> bool:
        """Whether scales map a tile's largest magnitude to the largest number, as formats with few exponents need.

        Otherwise a scale is the root mean square of its tile.
        """
        return bool(self.formats) or format.twos_complement

    def is_searched(self, format: Format) -> bool:
        """Whether other scales than the usual ones can make a difference for codes of a format: of 4 bits or integers,
        or of 8 bits with scales that may lie between two powers of two."""
        return format.storage_bits <= 8 and (self.scale_dtype != "U8" or format.storage_bits == 4)

    def sizes(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns of a tile in a matrix of `rows` by `cols`."""
        return self.tile[0] or max(rows, 1), self.tile[1] or max(cols, 1)

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Number of tiles along the rows and columns of a matrix; the last ones may be smaller."""
        height, width = self.sizes(rows, cols)
        return -(-rows // height), -(-cols // width)


# OCP Microscaling Formats (MX) 1.0; NVFP4 as in NVIDIA's recipe for Blackwell; 128 x 128 as in DeepSeek-V3.
GRAINS: dict[str, Grain] = {
    g.name: g
    for g in (
        Grain(name="row", tile=(1, 0)),
        Grain(name="128x128", tile=(128, 128)),
        Grain(name="mx", tile=(1, 32), formats=("e4m3fn", "e5m2", "e2m1"), scale_dtype="U8"),
        Grain(name="nvfp4", tile=(1, 16), formats=("e2m1",), scale_dtype="F8_E4M3"),
    )
}
_GROUP = re.compile(r"group:([1-9][0-9]{0,5})")
_WORD = 8  # integers of any width that fill whole bytes


def find_grain(name: str) -> Grain | None:
    """The granularity called `name`, or None if it is unknown. ``group:N`` means N elements of a row."""
    group = _GROUP.fullmatch(name)
    if group is None or int(group[1]) % _WORD:
        return GRAINS.get(name)
    return Grain(name=name, tile=(1, int(group[1])), formats=tuple(sorted(INTEGERS, key=lambda n: n != "int4")))


def default_grain(format_name: str) -> str | None:
    """The default granularity of a format that needs one, or None."""
    named = (g.name for g in GRAINS.values() if format_name in g.formats)
    return next(named, "group:128" if format_name in INTEGERS else None)


def get_grain(name: str) -> Grain | None:
    """The granularity called `name`, or None for ``tensor``.

    Raises UsageError, with the nearest known name, if it is unknown.
    """
    grain = find_grain(name)
    if grain is None and name.startswith("group"):
        raise UsageError(
            f"unknown granularity `{name}`", hint=f"group sizes are multiples of {_WORD}, for example group:128"
        )
    return grain if grain or name == TENSOR else find("granularity", name, {TENSOR: None, **GRAINS, "group:N": None})
