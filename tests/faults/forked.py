"""Run commands of lpconv in forked processes, which need not import anything again."""

import faulthandler
import fcntl
import functools
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.material import PROBE, TUNE

# Between them they import all that any command does.
_TYPICAL = (
    ("convert", "llama", "--verify", "logits", "-q", "-o", "OUT"),
    ("probe", "bert", *PROBE, "--calibrate", "-o", "OUT"),
    ("finetune", "llama", "--recipe", "unit-fp8", *TUNE, "--data", "data/x.jsonl", "-o", "OUT"),
    ("finetune", "llama", "--recipe", "collage-bf16", *TUNE, "--data", "data/x.parquet", "-o", "OUT"),
    ("export", "onnx", "unit", "-q", "-o", "OUT"),
    ("batch", "batch/jobs.yaml", "-q"),
    ("verify", "collage", "--against", "llama", "--level", "weights", "-q"),
    ("restore", "points", "-q", "-o", "OUT"),
    ("report", "probe", "--html", "p.html"),
    ("report", "unit", "collage", "--html", "p.html"),
    ("report", "tuned", "--html", "p.html"),
    ("report", "bench.json", "--html", "p.html"),
    ("doctor",),
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Exit code of a process, or minus its signal, and its output."""

    code: int
    out: str
    err: str


def import_everything(material: Path) -> None:
    """Import everything that typical commands import, because each forked process would take seconds for it."""
    for arguments in _TYPICAL:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(material, folder, dirs_exist_ok=True)
            said = forked(functools.partial(_imports_of, arguments, Path(folder)), patience_s=300).err
        for name in said.rpartition("IMPORTED ")[2].split():
            with suppress(Exception):  # some can only be imported in their place
                importlib.import_module(name)


def _imports_of(arguments: Sequence[str], folder: Path) -> None:
    """Run a command and print the modules that are imported afterwards."""
    with suppress(SystemExit):
        command_line(arguments, folder)
    print("\nIMPORTED", *sys.modules, file=sys.stderr)


def command_line(arguments: Sequence[str], folder: Path) -> None:
    """Run `lpconv ARGUMENTS…` in this process, in a folder."""
    from lpconv.cli.main import run

    os.chdir(folder)
    sys.argv = ["lpconv", *arguments]
    run()


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A running process and both ends of its pipes."""

    pid: int
    pipes: tuple[tuple[int, int], ...]

    def end(self) -> Ended:
        """Wait for the end of the process."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = []
        for end, into in self.pipes:
            os.close(into)
            with open(end, encoding="utf-8", errors="replace") as f:
                said.append(f.read())
        return Ended(code=code, out=said[0], err=said[1])


def begin(action: Callable[[], object], *, file_bytes: int | None = None, patience_s: int = 300) -> Begun:
    """Start `action` in a process of its own.

    Its files cannot grow beyond `file_bytes`. It is ended by SIGALRM after `patience_s`.
    """
    pipes = (os.pipe(), os.pipe())
    for _, into in pipes:  # nobody reads before the process has ended
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 2**20)
    pid = os.fork()
    if pid == 0:
        for stream, (_, into) in zip((1, 2), pipes, strict=True):
            os.dup2(into, stream)
        faulthandler.enable(2)
        signal.alarm(patience_s)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        os._exit(_exit_code(action))
    return Begun(pid=pid, pipes=pipes)


def forked(action: Callable[[], object], *, file_bytes: int | None = None, patience_s: int = 300) -> Ended:
    """Run `action` in a process of its own."""
    return begin(action, file_bytes=file_bytes, patience_s=patience_s).end()


def killed(action: Callable[[], object], *, after_s: float) -> Ended:
    """Run `action` in a process of its own that is killed after some seconds, unless it has ended."""
    begun = begin(action)
    time.sleep(after_s)
    os.kill(begun.pid, signal.SIGKILL)  # one that has ended waits for us, and keeps its exit code
    return begun.end()


def _exit_code(action: Callable[[], object]) -> int:
    """Call `action` and return the exit code that Python would end with."""
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
