"""Child processes with a case each, as their parent holds them, and teams of them.

Usually one process holds a case; of several, which take every step together, the slowest counts. torchrun may say how
many: its first process measures, with as many children as torchrun was asked for.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from lpconv.bench.cases import Case
from lpconv.errors import InputError, LpconvError, PeerLostError, ResourceError, UnsupportedError, UsageError

_KILLED = -9
# torchrun's words to the process that measures are not meant for its children, who are numbered otherwise.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# glibc gives large blocks back to the system when they are freed, and every step faults them in again.
_KEEP_THE_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
_ERRORS: dict[str, type[LpconvError]] = {
    e.kind: e for e in (UsageError, InputError, UnsupportedError, ResourceError, PeerLostError)
}
_PATIENCE_S = 5.0  # in which a process that others miss has ended, so that its end is known


class MeasuredProcess(Protocol):
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
        said = self._stderr.read().strip().splitlines()
        if not said and code > 0:
            return ResourceError(
                f"the measuring process ended with code {code}, and what it said could not be written",
                hint="free some space for temporary files, or name another folder for them in TMPDIR",
            )
        return LpconvError(f"the measuring process ended with code {code}: {said[-1] if said else 'it said nothing'}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # does nothing to one that has ended
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


class Team:
    """Children that get every command at once and give one answer. A context manager: leaving it ends them.

    What one of them fails at, all fail at: the others may be waiting for it for ever, so they are ended.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = tuple(children)
        self._folder = tempfile.TemporaryDirectory(prefix="lpconv-bench-")
        self._merge: Callable[[list[Any]], Any] = _first
        self._failure: LpconvError | None = None

    @property
    def pids(self) -> set[int]:
        """The processes' ids."""
        return {child.pid for child in self._children}

    def prepare(self, case: Case, memory_share: float) -> None:
        """Begin to build a case; `receive` gives its description. Processes on one CPU share the memory too."""
        share = memory_share / (len(self._children) if case.device == "cpu" else 1)
        meeting = str(Path(self._folder.name) / "meeting")
        self._merge = _first
        for rank, child in enumerate(self._children):
            child.send("prepare", case=dataclasses.asdict(case), memory_share=share, rank=rank, meeting=meeting)

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer of all; raises the first error."""
        for child in self._children:
            child.send(do, **arguments)
        self._merge = _MERGES.get(do, _first)
        return self.receive()

    def receive(self) -> Any:
        """The answer to what was begun."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._merge(self._answers())
        except LpconvError as e:
            self._failure = e
            self.close()
            raise

    def _answers(self) -> list[Any]:
        """Of every process, in their order, but read as they come.

        Where some miss another one, what became of that is raised, if it is known soon.
        """
        found: dict[int, Any] = {}
        lost: PeerLostError | None = None
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(self._children):
                selector.register(child, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(None if lost is None else _PATIENCE_S)
                if not ready:
                    break
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    try:
                        found[key.data] = self._children[key.data].receive()
                    except PeerLostError as e:
                        lost = e
        if lost is not None:
            raise lost
        return [found[rank] for rank in range(len(self._children))]

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _slowest(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """They took the same steps, each of which is done when the last process has done it."""
    return {
        "seconds": [max(step) for step in zip(*(a["seconds"] for a in answers), strict=True)],
        "wall": max(a["wall"] for a in answers),
        "recompiles": max(a["recompiles"] for a in answers),
    }


def _largest(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return max(answers, key=lambda a: a["peak_bytes"])


_MERGES: dict[str, Callable[[list[Any]], Any]] = {"measure": _slowest, "memory": _largest}


def processes_of(asked: int | None, environ: Mapping[str, str] = os.environ) -> int | None:
    """With how many processes this one measures; None for those of torchrun's that have nothing to do.

    The children are our own, in torchrun's number: baseline and variant need a set each, to take turns.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return asked or 1
    if asked not in (None, world):
        raise UsageError(f"--processes {asked} under torchrun with {world}", hint="leave --processes to torchrun")
    if int(environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise UnsupportedError("torchrun started this on several machines", hint="bench on one of them: --nnodes 1")
    return world if environ.get("RANK") == "0" else None
