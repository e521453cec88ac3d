"""Conversion: plan, apply, verify, restore."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.convert.options import ConvertOptions as ConvertOptions
    from lpconv.convert.parts import convert_part as convert_part
    from lpconv.convert.patterns import FormatRule as FormatRule, parse_rule as parse_rule
    from lpconv.convert.reader import OutputReader as OutputReader
    from lpconv.convert.restore import restore as restore
    from lpconv.convert.run import convert as convert, finish as finish, plan as plan
    from lpconv.convert.settings import ConvertSettings as ConvertSettings, settings_of as settings_of
    from lpconv.convert.shares import Part as Part
    from lpconv.convert.statistics import inspect_with_statistics as inspect_with_statistics
    from lpconv.convert.verify_output import verify_output as verify_output

__all__ = lazily(__name__)
