"""Whether `lpconv -v` was given: a line for each phase of a run, and with errors where they came from."""

from contextvars import ContextVar

__all__ = ["VERBOSE"]

VERBOSE: ContextVar[bool] = ContextVar("verbose", default=False)
