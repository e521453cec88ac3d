"""Granularities as values: what of a weight has a scale of its own. Plain Python, as `spec.py`.

A tile is some rows by some columns of a weight, seen as rows along its last axis; all its elements share a scale. A
granularity also says in what the scales are: fp32 numbers, powers of two in a byte (e8m0: OCP MX 1.0), or e4m3fn beside
one more scale for the whole tensor (NVFP4).
"""

import re
from dataclasses import dataclass

from lpconv.errors import UsageError
from lpconv.lookup import find

TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Grain:
    """`tile` are the rows and columns that share a scale, 0 for all of them.

    `formats` are those that it is for, the first its default; none where it takes any that a method writes with one
    scale. `scale_dtype` is F32, U8 (exponents of two, biased by 127) or F8_E4M3, as safetensors names them.
    """

    name: str
    tile: tuple[int, int]
    formats: tuple[str, ...] = ()
    scale_dtype: str = "F32"

    @property
    def words(self) -> str:
        """What has a scale, for people: "a scale per row"."""
        rows, cols = self.tile
        return f"a scale per {'row' if not cols else f'{cols} of a row' if rows == 1 else f'{rows} x {cols}'}"

    @property
    def has_factor(self) -> bool:
        """Whether one more scale is the tensor's. It divides, as compressed-tensors has it."""
        return self.scale_dtype == "F8_E4M3"

    @property
    def is_fitted(self) -> bool:
        """Whether scales map the largest magnitude of a tile to the format's largest number, for formats of few
        exponents; the others are the root mean square, as those of a tensor."""
        return bool(self.formats)

    def sizes(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns of a tile in a matrix."""
        return self.tile[0] or max(rows, 1), self.tile[1] or max(cols, 1)

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """How many tiles lie below and beside each other in a matrix; the last ones may be smaller."""
        height, width = self.sizes(rows, cols)
        return -(-rows // height), -(-cols // width)


# OCP Microscaling Formats (MX) 1.0; NVFP4 as in NVIDIA's recipe for Blackwell; 128 x 128 as DeepSeek-V3 has it.
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
_INTEGERS = ("int4", "int8")
_WORD = 8  # numbers of 4 bits in a word, of which groups are whole multiples


def known_grain(name: str) -> Grain | None:
    """The granularity called so, None where there is none. ``group:N`` are N numbers of a row."""
    group = _GROUP.fullmatch(name)
    if group is None or int(group[1]) % _WORD:
        return GRAINS.get(name)
    return Grain(name=name, tile=(1, int(group[1])), formats=_INTEGERS)


def grain_for(format_name: str) -> str | None:
    """A granularity that is for a format, None where there is none."""
    named = (g.name for g in GRAINS.values() if format_name in g.formats)
    return next(named, "group:128" if format_name in _INTEGERS else None)


def grain_of(name: str) -> Grain | None:
    """The granularity called so, None for ``tensor``. Raises UsageError, with the nearest, for an unknown one."""
    found = known_grain(name)
    if found is None and name.startswith("group"):
        raise UsageError(f"unknown granularity `{name}`", hint=f"groups are of multiples of {_WORD}, such as group:128")
    return found if found or name == TENSOR else find("granularity", name, {TENSOR: None, **GRAINS, "group:N": None})
