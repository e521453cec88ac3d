"""The options and the plan of a conversion: every tensor, file and byte of the output, from headers alone."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.plan.options import ConvertOptions as ConvertOptions, FormatRule as FormatRule, parse_rule as parse_rule
    from lpconv.plan.settings import fill_options as fill_options

__all__ = lazily(__name__)
