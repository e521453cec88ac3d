"""`--log-to`: what Trainer can report a run to."""

from collections.abc import Sequence

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from lpconv.errors import UnsupportedError
from lpconv.lookup import find

__all__ = ["check_loggers"]


def check_loggers(names: Sequence[str]) -> None:
    """Raises UsageError for a name that transformers does not know, UnsupportedError where its package is missing."""
    for name in names:
        find("place to log to", name, INTEGRATION_TO_CALLBACK)
        if name not in get_available_reporting_integrations():
            raise UnsupportedError(f"--log-to {name}: its package is not installed", hint=f"pip install {name}")
