"""Command lines of lpconv in processes forked from one that has imported everything, which takes seconds."""

import fcntl
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Begun", "Ended", "begin", "command_line", "forked", "import_everything", "killed"]

_IMPORTED = ("datasets", "onnxruntime", "onnxscript", "lpconv.batch.run", "lpconv.batch.runners", "lpconv.bench.run",
             "lpconv.convert.restore", "lpconv.convert.verify_output", "lpconv.doctor.examine", "lpconv.export.run",
             "lpconv.probe.checkpoint", "lpconv.report.convert.html", "lpconv.report.convert.terminal",
             "lpconv.train.run")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its exit code, or minus a signal, and what it wrote."""

    code: int
    out: str
    err: str


def import_everything() -> None:
    """What every command would import, imported before the first fork."""
    for name in _IMPORTED:
        importlib.import_module(name)


def command_line(arguments: Sequence[str], folder: Path) -> None:
    """`lpconv ARGUMENTS…` in this process, in a folder."""
    from lpconv.cli.main import run

    os.chdir(folder)
    sys.argv = ["lpconv", *arguments]
    run()


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A process that runs, and the ends of its pipes to read and to write."""

    pid: int
    pipes: tuple[tuple[int, int], ...]

    def end(self) -> Ended:
        """Wait for it."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = []
        for end, into in self.pipes:
            os.close(into)
            with open(end, encoding="utf-8", errors="replace") as f:
                said.append(f.read())
        return Ended(code=code, out=said[0], err=said[1])


def begin(action: Callable[[], object], *, file_bytes: int | None = None, patience_s: int = 120) -> Begun:
    """Begin something in a process of its own.

    None of its files may become larger than `file_bytes`. It ends by SIGALRM after `patience_s`.
    """
    pipes = (os.pipe(), os.pipe())
    for _, into in pipes:  # nobody reads before the process has ended
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 2**20)
    pid = os.fork()
    if pid == 0:
        for stream, (_, into) in zip((1, 2), pipes, strict=True):
            os.dup2(into, stream)
        signal.alarm(patience_s)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        os._exit(_exit_code(action))
    return Begun(pid=pid, pipes=pipes)


def forked(action: Callable[[], object], *, file_bytes: int | None = None, patience_s: int = 120) -> Ended:
    """`begin` something, and wait for it."""
    return begin(action, file_bytes=file_bytes, patience_s=patience_s).end()


def killed(action: Callable[[], object], *, after_s: float) -> Ended:
    """`begin` something, and end it by SIGKILL after so many seconds, unless it has ended before."""
    begun = begin(action)
    time.sleep(after_s)
    os.kill(begun.pid, signal.SIGKILL)  # one that has ended waits for us, and keeps its exit code
    return begun.end()


def _exit_code(action: Callable[[], object]) -> int:
    """What Python would end with."""
    code = 0
    try:
        action()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code
