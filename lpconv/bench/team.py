"""Child processes that measure one case each, controlled by the parent, and teams of them.

Usually one process runs a case; of several that take every step together, the slowest counts. Under torchrun only the
first process measures, with as many children as torchrun started processes.
"""

import contextlib
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpconv.bench.options import Case
from lpconv.errors import LpconvError, PeerLostError, ResourceError, UnsupportedError, UsageError

_KILLED = -9
# torchrun's variables for the measuring process do not apply to its children, which have their own ranks.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# By default glibc returns large freed blocks to the system, and every step would fault them in again.
_KEEP_THE_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
_PATIENCE_S = 5.0  # wait for a missing process to end, so that its exit is known


class Child(contextlib.AbstractContextManager["Child"]):
    """A process that measures one case. A context manager that ends the process on exit."""

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
            env=_KEEP_THE_HEAP | inherited | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # the parent handles keyboard interrupts
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fileno(self) -> int:
        """File descriptor for a selector: readable once there is an answer or the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, do: str, **arguments: Any) -> None:
        """Start a command; `receive` returns its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` reports the reason
            pickle.dump((do, arguments), self._process.stdin)
            self._process.stdin.flush()

    def receive(self) -> Any:
        """The answer to the last command. Raises the child's error, or ResourceError if the system killed the child."""
        assert self._process.stdout is not None
        try:
            answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None
        if isinstance(answer, LpconvError):
            raise answer
        return answer

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call `send`, then `receive`."""
        self.send(do, **arguments)
        return self.receive()

    def _death(self) -> LpconvError:
        code = self._process.wait()
        if code == _KILLED:
            return ResourceError(
                "the system killed the measuring process, probably because memory ran out",
                hint="take a smaller --batch-size or --seq-len, or fewer --layers",
            )
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        if not lines and code > 0:
            return ResourceError(
                f"the measuring process ended with code {code}, and its output could not be saved",
                hint="free some space for temporary files, or set TMPDIR to another folder",
            )
        return LpconvError(f"the measuring process ended with code {code}: {lines[-1] if lines else 'it said nothing'}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # no effect on a process that has ended
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __exit__(self, *error: object) -> None:
        self.close()


class Team(contextlib.AbstractContextManager["Team"]):
    """Children that run every command together and give one answer. A context manager that ends them on exit.

    If one of them fails, the command fails and all are ended, because the others may wait for it for ever.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = tuple(children)
        self._folder = tempfile.TemporaryDirectory(prefix="lpconv-bench-")
        self._command = ""  # the last one, which determines how answers are merged
        self._failure: LpconvError | None = None

    @property
    def pids(self) -> set[int]:
        """The process ids."""
        return {child.pid for child in self._children}

    def prepare(self, case: Case, memory_share: float) -> None:
        """Start building a case; `receive` returns its description. Processes on one CPU also share the memory."""
        share = memory_share / (len(self._children) if case.device == "cpu" else 1)
        meeting = str(Path(self._folder.name) / "meeting")
        self._command = "prepare"
        for rank, child in enumerate(self._children):
            child.send("prepare", case=case, memory_share=share, rank=rank, meeting=meeting)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run a command on all children and return the merged answer. Raises the first error."""
        for child in self._children:
            child.send(do, **arguments)
        self._command = do
        return self.receive()

    def receive(self) -> Any:
        """The merged answer to the last command."""
        if self._failure is not None:
            raise self._failure
        try:
            answers = self._answers()
            return _MERGES[self._command](answers) if self._command in _MERGES else answers[0]
        except LpconvError as e:
            self._failure = e
            self.close()
            raise

    def _answers(self) -> list[Any]:
        """The answers of all processes in order of rank, read as they arrive.

        If some report a lost peer, the lost process's own error is raised, if it is known soon.
        """
        answers: dict[int, Any] = {}
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
                        answers[key.data] = self._children[key.data].receive()
                    except PeerLostError as e:
                        lost = e
        if lost is not None:
            raise lost
        return [answers[rank] for rank in range(len(self._children))]

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()
        self._folder.cleanup()

    def __exit__(self, *error: object) -> None:
        self.close()


def _slowest(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge timings of a common step: a step is done when the last process has finished it."""
    return {
        "seconds": [max(step) for step in zip(*(a["seconds"] for a in answers), strict=True)],
        "wall": max(a["wall"] for a in answers),
        "recompiles": max(a["recompiles"] for a in answers),
    }


# How to merge the answers to a command; other commands get the first process's answer.
_MERGES: dict[str, Callable[[list[Any]], Any]] = {
    "measure": _slowest,
    "memory": lambda answers: max(answers, key=lambda a: a.peak_bytes),
}


def processes_of(asked: int | None, environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of measuring processes; None in torchrun's processes of nonzero rank, which do nothing.

    Rank 0 starts as many children as torchrun started processes, because baseline and variant need a set each to take
    turns.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return asked or 1
    if asked not in (None, world):
        raise UsageError(
            f"--processes {asked} does not match torchrun's {world}", hint="leave --processes out under torchrun"
        )
    if int(environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise UnsupportedError(
            "torchrun started processes on several machines",
            hint="`lpconv bench` measures one machine: pass --nnodes 1 to torchrun",
        )
    return world if environ.get("RANK") == "0" else None
