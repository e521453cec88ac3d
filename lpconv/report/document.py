"""A record as the text of a JSON document: keys sorted, two spaces, one final newline, plain ASCII."""

import json
from typing import Any

from lpconv.results import to_json

__all__ = ["json_text"]


def json_text(record: Any) -> str:
    """The document of any record. Equal records give equal text; option values JSON has no form for become strings.

    Infinite and NaN figures are the strings that `to_json` makes of them, never bare tokens that no parser accepts.
    """
    return json.dumps(to_json(record), indent=2, sort_keys=True, allow_nan=False, default=str) + "\n"
