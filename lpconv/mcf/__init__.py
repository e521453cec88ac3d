"""Multi-component floats: a number stored as an unevaluated sum of low-precision numbers."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.mcf.expansion import (
        add as add,
        fast_two_sum as fast_two_sum,
        grow as grow,
        mul as mul,
        two_prod as two_prod,
        two_sum as two_sum,
    )
    from lpconv.mcf.multipoint import decode as decode, encode as encode, fit as fit
    from lpconv.mcf.pairs import join as join, split as split
    from lpconv.mcf.point_layout import PointLayout as PointLayout, point_layout as point_layout
    from lpconv.mcf.split import RESIDUALS as RESIDUALS

__all__ = lazily(__name__)
