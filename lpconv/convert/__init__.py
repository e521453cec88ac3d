"""Conversion: run a plan, verify and publish the output; and restore a plain checkpoint."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.convert.pack import pack as pack
    from lpconv.convert.parts import Part as Part, convert_part as convert_part
    from lpconv.convert.restore import restore as restore
    from lpconv.convert.run import convert as convert, finish as finish, plan as plan
    from lpconv.plan.options import ConvertOptions as ConvertOptions

__all__ = lazily(__name__)
