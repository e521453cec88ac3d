"""Inspect a checkpoint: its contents and its defects, from headers alone or with statistics of the values."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.inspect.headers import inspect as inspect
    from lpconv.inspect.values import inspect_with_statistics as inspect_with_statistics

__all__ = lazily(__name__)
