"""Inspection: what a checkpoint holds and what is wrong with it, from headers, and with statistics of its values."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.inspect.statistics import inspect_with_statistics as inspect_with_statistics

__all__ = lazily(__name__)
