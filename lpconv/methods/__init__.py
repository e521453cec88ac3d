"""The conversion methods: one file each, listed in `METHODS`."""

from lpconv.methods.collage import COLLAGE
from lpconv.methods.method import Method
from lpconv.methods.multipoint import MULTIPOINT
from lpconv.methods.scalify import SCALIFY
from lpconv.methods.unit import UNIT

__all__ = ["METHODS", "Method"]

METHODS: dict[str, Method] = {m.name: m for m in (UNIT, SCALIFY, COLLAGE, MULTIPOINT)}
