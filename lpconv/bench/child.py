"""The parent's end of a child process that holds one case."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import lpconv
from lpconv.bench.cases import Case
from lpconv.errors import InputError, LpconvError, ResourceError, UnsupportedError, UsageError

__all__ = ["Child", "Subject"]

_KILLED = -9
_ERRORS: dict[str, type[LpconvError]] = {e.kind: e for e in (UsageError, InputError, UnsupportedError, ResourceError)}


class Subject(Protocol):
    """What interleaving needs of the thing it measures."""

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a command."""


class Child:
    """A process that measures one case. A context manager: leaving it ends the process."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # lives with the process
        root = str(Path(lpconv.__file__).parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lpconv.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # an interrupt at the keyboard is the parent's to handle
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

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
        answer = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            kind = _ERRORS.get(error["kind"], LpconvError)
            raise kind(error["message"], hint=error["hint"], details=error["details"])
        return answer["result"]

    def ask(self, do: str, **arguments: Any) -> Any:
        """`send` and `receive`."""
        self.send(do, **arguments)
        return self.receive()

    def prepare(self, case: Case, memory_share: float) -> None:
        """Begin to build a case; `receive` gives its description."""
        self.send("prepare", case=dataclasses.asdict(case), memory_share=memory_share)

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
