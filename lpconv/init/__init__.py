"""Fresh checkpoints: an architecture with untrained weights."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.init.options import InitOptions as InitOptions
    from lpconv.init.run import init as init

__all__ = lazily(__name__)
