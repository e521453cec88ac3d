"""Checkpoints on disk: resolving names, reading headers and blocks, writing, journals, side files."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.storage.aliases import ALIASES as ALIASES
    from lpconv.storage.checkpoint import Checkpoint as Checkpoint, read_residual as read_residual
    from lpconv.storage.resolve import Resolved as Resolved, resolve as resolve
    from lpconv.storage.source import Source as Source, open_source as open_source, read_tensor as read_tensor
    from lpconv.storage.staging import Staging as Staging

__all__ = lazily(__name__)
