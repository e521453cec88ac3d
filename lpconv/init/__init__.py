"""A fresh checkpoint: an architecture with weights that nothing has trained."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.init.options import InitOptions as InitOptions
    from lpconv.init.run import init as init

__all__ = lazily(__name__)
