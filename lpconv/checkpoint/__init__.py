"""Checkpoints on disk: resolve a name, read headers and blocks, write, journal, side files."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.checkpoint.aliases import ALIASES as ALIASES
    from lpconv.checkpoint.checkpoint import Checkpoint as Checkpoint
    from lpconv.checkpoint.residual import read_residual as read_residual
    from lpconv.checkpoint.resolve import Resolved as Resolved, resolve as resolve
    from lpconv.checkpoint.source import Source as Source, open_source as open_source, read_tensor as read_tensor
    from lpconv.checkpoint.staging import Staging as Staging

__all__ = lazily(__name__)
