"""Results of runs as plain frozen records. Reports turn records into text; nothing here handles tensors.

Every record converts to JSON by `to_json` and back by `from_json`; documents carry `schema_version`. Sizes are bytes,
times are seconds, and errors are relative to the source's elements unless a name says otherwise.
"""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

# ruff: noqa: F403  # every record is public
if TYPE_CHECKING:
    from lpconv.results.advise import *
    from lpconv.results.batch import *
    from lpconv.results.bench import *
    from lpconv.results.checkpoint import *
    from lpconv.results.doctor import *
    from lpconv.results.documents import (
        SCHEMA_VERSION as SCHEMA_VERSION,
        from_json as from_json,
        json_line as json_line,
        json_text as json_text,
        ordered_json_text as ordered_json_text,
        to_json as to_json,
    )
    from lpconv.results.training import *
    from lpconv.results.verify import *

__all__ = lazily(__name__)
