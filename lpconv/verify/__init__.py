"""Verification: an output against its hashes, against what its source implies, and by what both models compute."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.verify.reader import OutputReader as OutputReader
    from lpconv.verify.run import verify_output as verify_output

__all__ = lazily(__name__)
