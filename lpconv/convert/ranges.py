"""The ranges of the number formats, as reports want them."""

from collections.abc import Mapping

from lpconv.formats.spec import FORMATS
from lpconv.report.plot import FormatRange

__all__ = ["format_ranges"]


def format_ranges() -> Mapping[str, FormatRange]:
    """Largest, smallest normal and smallest number of every format."""
    return {
        f.name: FormatRange(max=f.max, min_normal=f.min_normal, min_subnormal=f.min_subnormal) for f in FORMATS.values()
    }
