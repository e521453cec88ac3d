"""Number formats as values, rounding, scales and exponent histograms."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.formats.cast import (
        Overflow as Overflow,
        Rounding as Rounding,
        cast as cast,
        straight_through as straight_through,
    )
    from lpconv.formats.codes import decode as decode, encode as encode
    from lpconv.formats.histogram import ExponentHistogram as ExponentHistogram
    from lpconv.formats.scale import (
        amax as amax,
        pow2_ceil as pow2_ceil,
        pow2_floor as pow2_floor,
        pow2_nearest as pow2_nearest,
        rms as rms,
    )
    from lpconv.formats.spec import (
        BLOCK_FORMATS as BLOCK_FORMATS,
        FORMATS as FORMATS,
        BlockFormat as BlockFormat,
        Format as Format,
        get_format as get_format,
    )

__all__ = lazily(__name__)
