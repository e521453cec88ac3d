"""What can go wrong, as one tree. Each leaf carries the exit code that the command line ends with.

    LpconvError
    ├── UsageError           2   the request itself is wrong: an option, a pattern, a manifest
    ├── InputError           3   an input is missing, unreadable, corrupt or not what its hash says
    │   └── UnreadError      3   disk or network failed while it was read, so nobody can say what it holds
    ├── UnsupportedError     4   understood, but this format, architecture, extra or device is not there
    ├── VerificationError    5   the output failed its verification or a gate; nothing was published
    ├── BatchError           6   a batch ran to its end and some jobs failed
    ├── ResourceError        7   not enough memory, disk or GPU memory
    ├── OutputExistsError    8   the output is there and neither resume nor force was asked for
    ├── PeerLostError        9   another process of the same run has gone
    └── InterruptedRunError  130 or 143, by the signal

Anything else that reaches the command line is a bug of ours and ends with exit code 1.
"""

import errno
import os
import re
from collections.abc import Mapping
from typing import ClassVar

# What a disk has no room for, or does not let anybody write.
_UNNAMED = 0  # the reason that torch.save keeps to itself
_NOT_WRITTEN = (_UNNAMED, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# What torch says of ranks that it cannot talk to: by the type of the error, or, of gloo, by the file that raised it.
_PEER_LOST = ("DistBackendError", "DistNetworkError", "DistStoreError")
_NO_TEMPORARY = "No usable temporary directory"  # Python's own, which names no file
_NOT_WRITTEN_BY_TORCH = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")


class LpconvError(Exception):
    """A failure that is not a bug: what happened, where, and what to do next.

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
        """The error as the JSON object that ``--json`` prints."""
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
    """Disk or network failed while an input was read: what it holds is not known, and it is not judged."""


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
    """Not enough memory, disk or GPU memory; found before the work where that is possible."""

    exit_code = 7
    kind = "resources"


class OutputExistsError(LpconvError):
    """The output is already there, or a partial one is, and the caller did not say what to do with it."""

    exit_code = 8
    kind = "output-exists"


class PeerLostError(LpconvError):
    """Another process of the same run has gone, and this one cannot go on without it."""

    exit_code = 9
    kind = "peer-lost"


class InterruptedRunError(LpconvError):
    """A signal ended the run; the journal is valid, so the run can be resumed."""

    kind = "interrupted"

    def __init__(self, signal_number: int, *, hint: str | None = None) -> None:
        super().__init__(f"interrupted by signal {signal_number}", hint=hint, details={"signal": signal_number})
        self.exit_code = 128 + signal_number  # type: ignore[misc]  # the one error whose code depends on its cause


def finding(error: LpconvError) -> str:
    """What an error says of what was being judged, in words. Raises an UnreadError again, which says nothing of it."""
    if isinstance(error, UnreadError):
        raise error
    return error.message


def peer_lost(error: BaseException) -> PeerLostError | None:
    """What torch says where another process has gone, as an error of ours; None for any other error."""
    if type(error).__name__ not in _PEER_LOST and "/gloo/transport/" not in str(error):
        return None
    return PeerLostError(
        "another process of the run has gone, or cannot be reached",
        hint="its messages say why; under `torchrun --max-restarts N`, with --resume, all go on by themselves",
        details={"library": str(error)[:300]},
    )


def os_error(error: BaseException) -> OSError | None:
    """The operating system's refusal that an exception reports, or None.

    Libraries in Rust and C++ report it in exceptions of their own.
    """
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    is_unwritten = any(words in str(error) for words in _NOT_WRITTEN_BY_TORCH)
    return OSError(_UNNAMED, f"{error!s:.120}") if is_unwritten else None


def from_system(error: BaseException) -> LpconvError | None:
    """What the operating system refused, as an error of ours; None where it names neither a reason nor a file."""
    refused = os_error(error)
    if refused is None:
        return peer_lost(error)
    where = f"`{refused.filename}`" if refused.filename else "a file"
    if refused.errno in _NOT_WRITTEN:
        return ResourceError(f"cannot write {where}: {refused.strerror}", hint="free some space, or write elsewhere")
    if _NO_TEMPORARY in str(refused):
        return ResourceError(
            "no folder for temporary files can be written", hint="free some space, or name another one in TMPDIR"
        )
    if refused.errno == errno.EIO:
        return InputError(f"cannot read or write {where}: {refused.strerror}", hint="check the disk")
    if refused.errno is None or not refused.filename:
        return None
    return InputError(f"cannot use {where}: {refused.strerror}", hint="check the path and its permissions")
