"""The parent's end of a child process."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from lpconv.errors import InputError, LpconvError, ResourceError, UnsupportedError, UsageError

__all__ = ["Child", "Subject", "result_of"]

_KILLED = -9
# torchrun's words to the process that measures are not meant for its children, who are numbered otherwise.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# glibc gives large blocks back to the system when they are freed, and every step faults them in again.
_KEEP_THE_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
_ERRORS: dict[str, type[LpconvError]] = {e.kind: e for e in (UsageError, InputError, UnsupportedError, ResourceError)}


class Subject(Protocol):
    """What interleaving needs of the thing it measures."""

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a command."""


class Child:
    """A process that measures one case. A context manager: leaving it ends the process."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # lives with the process
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lpconv.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=_KEEP_THE_HEAP | inherited | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # an interrupt at the keyboard is the parent's to handle
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def fileno(self) -> int:
        """What a selector watches: readable when there is an answer, or never will be one."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, do: str, **arguments: Any) -> None:
        """Begin a command, to be answered by `receive`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` says what became of it
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """The answer; raises the error that the child met, ResourceError where the system killed it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        return result_of(json.loads(line))

    def ask(self, do: str, **arguments: Any) -> Any:
        """`send` and `receive`."""
        self.send(do, **arguments)
        return self.receive()

    def _death(self) -> LpconvError:
        code = self._process.wait()
        if code == _KILLED:
            return ResourceError(
                "the system ended the process, as it does where memory runs out",
                hint="take a smaller --batch or --seq, or fewer --layers",
            )
        self._stderr.seek(0)
        last = self._stderr.read().strip().splitlines()[-1:] or ["it said nothing"]
        return LpconvError(f"the measuring process ended with code {code}: {last[0]}")

    def close(self) -> None:
        """End the process."""
        if self._process.returncode is not None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def result_of(answer: dict[str, Any]) -> Any:
    """The result in an answer; raises the error in it."""
    if "error" not in answer:
        return answer["result"]
    error = answer["error"]
    kind = _ERRORS.get(error["kind"], LpconvError)
    raise kind(error["message"], hint=error["hint"], details=error["details"])
