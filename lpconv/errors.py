"""Exceptions of lpconv, with the exit code of the command line for each.

    LpconvError
    ├── UsageError           2   the request itself is wrong: an option, a pattern, a manifest
    ├── InputError           3   an input is missing, unreadable, corrupt or does not match its hash
    │   └── UnreadError      3   disk or network failed during a read, so the content of the input is unknown
    ├── UnsupportedError     4   a valid request for a format, architecture, extra or device that is not available
    ├── VerificationError    5   the output failed its verification or a gate; nothing was published
    ├── BatchError           6   the batch finished and some jobs failed
    ├── ResourceError        7   not enough memory, disk or GPU memory
    ├── OutputExistsError    8   the output exists, and neither resume nor force was requested
    ├── PeerLostError        9   another process of the same run has ended
    └── InterruptedRunError  130 or 143, by the signal

Any other exception is a bug in lpconv and ends with exit code 1.
"""

import errno
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import ClassVar

# Reasons why a file cannot be written: no space, a read-only disk, or the unnamed reason of torch.save.
_UNNAMED = 0  # stands for the reason, because torch.save does not report it
_NOT_WRITTEN = (_UNNAMED, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# How torch reports ranks that it cannot reach: by the type of the error, or for gloo by the source file in the message.
_PEER_LOST = ("DistBackendError", "DistNetworkError", "DistStoreError")
_NO_TEMPORARY = "No usable temporary directory"  # Python's own message, which names no file
_NOT_WRITTEN_BY_TORCH = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")


class LpconvError(Exception):
    """Base class of all failures that are not bugs: what happened, where, and what to do next.

    `hint` is one sentence that the command line prints after ``hint:``; `details` are JSON-able facts for scripts.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str | None = None, details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = dict(details or {})

    def to_dict(self) -> dict[str, object]:
        """Return the error as the JSON object that ``--json`` prints."""
        return {
            "code": self.exit_code,
            "kind": self.kind,
            "message": self.message,
            "hint": self.hint,
            "details": self.details,
        }


class UsageError(LpconvError):
    """The request is wrong: an option value, a pattern, a manifest key."""

    exit_code = 2
    kind = "usage"


class InputError(LpconvError):
    """An input is missing, unreadable, corrupt, or does not match its recorded hash."""

    exit_code = 3
    kind = "input"


class UnreadError(InputError):
    """Disk or network failed while an input was read, so its content is unknown and gets no verdict."""


class UnsupportedError(LpconvError):
    """The request is understood, but not supported here: format, architecture, missing extra, device."""

    exit_code = 4
    kind = "unsupported"


class VerificationError(LpconvError):
    """The output failed its verification or a gate, so nothing was published."""

    exit_code = 5
    kind = "verification"


class BatchError(LpconvError):
    """A batch finished, and some of its jobs failed."""

    exit_code = 6
    kind = "batch"


class ResourceError(LpconvError):
    """Not enough memory, disk or GPU memory; raised before the work starts if possible."""

    exit_code = 7
    kind = "resources"


class OutputExistsError(LpconvError):
    """The output, or a partial one, already exists and the caller did not say whether to resume or replace it."""

    exit_code = 8
    kind = "output-exists"


class PeerLostError(LpconvError):
    """Another process of the same run has ended, and this one cannot continue without it."""

    exit_code = 9
    kind = "peer-lost"


class InterruptedRunError(LpconvError):
    """A signal ended the run; the journal is valid, so the run can be resumed."""

    kind = "interrupted"

    def __init__(self, signal_number: int, *, hint: str | None = None) -> None:
        super().__init__(f"interrupted by signal {signal_number}", hint=hint, details={"signal": signal_number})
        self.exit_code = 128 + signal_number  # type: ignore[misc]  # the one error whose code depends on its cause


def check_installed(what: str, *packages: str, extra: str) -> None:
    """Raise UnsupportedError if a package that `what` needs is not installed; `pip install 'lpconv[extra]'` adds it."""
    missing = [p for p in packages if importlib.util.find_spec(p.replace("-", "_")) is None]
    if missing:
        text = f"{what} needs the package{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        raise UnsupportedError(text, hint=f"install it with `pip install 'lpconv[{extra}]'`")


def first_line(error: BaseException) -> str:
    """First line of an exception's text, or the name of its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def typed_line(error: BaseException) -> str:
    """Type of an exception, followed by the first line of its text if it has one."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def problem_text(error: LpconvError) -> str:
    """Message of an error that is a verdict on the input. An UnreadError is no verdict and is raised again."""
    if isinstance(error, UnreadError):
        raise error
    return error.message


def peer_lost(error: BaseException) -> PeerLostError | None:
    """Convert torch's error about an unreachable process to a PeerLostError; None for any other error."""
    if type(error).__name__ not in _PEER_LOST and "/gloo/transport/" not in str(error):
        return None
    return PeerLostError(
        "another process of this run has ended, or cannot be reached",
        hint="its output says why; with `torchrun --max-restarts N` and --resume, all processes continue by themselves",
        details={"library": str(error)[:300]},
    )


def os_error(error: BaseException) -> OSError | None:
    """Return the operating system's error behind an exception, or None.

    Libraries in Rust and C++ wrap such errors in exceptions of their own.
    """
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    is_unwritten = any(words in str(error) for words in _NOT_WRITTEN_BY_TORCH)
    return OSError(_UNNAMED, f"{error!s:.120}") if is_unwritten else None


def from_system(error: BaseException) -> LpconvError | None:
    """Convert an OSError or a lost peer to an lpconv error; None if the error names no reason and no file."""
    refused = os_error(error)
    if refused is None:
        return peer_lost(error)
    where = f"`{refused.filename}`" if refused.filename else "a file"
    if refused.errno in _NOT_WRITTEN:
        return ResourceError(
            f"cannot write {where}: {refused.strerror}", hint="free some space, or choose another place"
        )
    if _NO_TEMPORARY in str(refused):
        return ResourceError(
            "no folder for temporary files is writable", hint="free some space, or set TMPDIR to another folder"
        )
    if refused.errno == errno.EIO:
        return InputError(f"cannot read or write {where}: {refused.strerror}", hint="check the disk")
    if refused.errno is None or not refused.filename:
        return None
    return InputError(f"cannot use {where}: {refused.strerror}", hint="check the path and its permissions")
