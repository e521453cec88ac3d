"""Verify an output against its hashes, against its source, and by comparing the outputs of both models."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.verify.options import VerifyOptions as VerifyOptions
    from lpconv.verify.reader import OutputReader as OutputReader
    from lpconv.verify.run import verify as verify, verify_output as verify_output

__all__ = lazily(__name__)
