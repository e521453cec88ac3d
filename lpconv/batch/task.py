"""A task: one command of a batch in its own process, with its resources and answer; and the executor on this machine.

Executors only decide where a task runs. The command is the public `lpconv batch MANIFEST --only ID --json`; it writes
its own entry of the lock file.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Protocol

from lpconv.machine import available_memory, usable_cores
from lpconv.report.numbers import size_text

GRACE_S = 30.0  # time for a run to write its journal after SIGTERM
_OWN_COUNT = "[1/1] "  # prefix of progress lines in a batch of one job, replaced by the outer batch's count

# Starts a task as a new process that dies with the thread waiting for it (PR_SET_PDEATHSIG of <linux/prctl.h>, which
# survives `execv`), so that a repeated task finds no lock held. A thread or fork of this process could not do that.
_BEGIN = """
import ctypes, os, signal, sys
if sys.platform == "linux":  # macOS has neither call
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.sched_setaffinity(0, map(int, sys.argv[2].split(",")) if sys.argv[2] else os.sched_getaffinity(0))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execv(sys.executable, [sys.executable, "-m", "lpconv", "batch", *sys.argv[3:]])
"""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Cores, GPUs and bytes of memory that a task needs or a machine has."""

    cpus: int = 1
    gpus: int = 0
    memory: int = 0

    def fits(self, machine: "Needs") -> bool:
        """Whether a machine has enough of everything."""
        return self.cpus <= machine.cpus and self.gpus <= machine.gpus and self.memory <= machine.memory

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else ""
        memory = f", {size_text(self.memory)} of memory" if self.memory else ""
        return f"{self.cpus} core{'s' * (self.cpus > 1)}{gpus}{memory}"


@dataclass(frozen=True, kw_only=True)
class JobTask:
    """The command `lpconv batch` with `arguments`. `name` is the prefix of its output lines."""

    name: str
    arguments: tuple[str, ...]
    needs: Needs


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a task ended: exit code (or minus the signal), time, the JSON document that it printed, and its last line."""

    code: int
    seconds: float = 0.0
    document: dict[str, Any] | None = None
    last: str = ""


class MachineLostError(Exception):
    """The machine that ran a task, or its worker process, died, so the task's state is unknown."""


class Executor(Protocol):
    """Where tasks run. `machines` are the available resources; `share` is for tasks without needs of their own."""

    machines: tuple[Needs, ...]
    share: Needs

    def submit(self, task: JobTask) -> Future[Answer] | None:
        """Start a task; None if others have to end first. The future raises MachineLostError for a task to repeat."""

    def stop(self) -> None:
        """Stop all tasks so that they can be resumed; their futures finish soon."""

    def close(self) -> None:
        """Release resources once no task is running."""


def run_task(
    task: JobTask,
    say: Callable[[str], None],
    *,
    cores: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
    stopping: threading.Event | None = None,
) -> Answer:
    """Run a task on this machine and wait for it. `stopping`, or an exception in this thread, ends the task.

    The task is pinned to `cores`, if given, and is killed if this thread dies.
    """

    started = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-ISc", _BEGIN, str(os.getpid()), ",".join(map(str, cores)), *task.arguments],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.PIPE,
            env=dict(os.environ) | dict(environment or {}),
            start_new_session=True,  # Ctrl-C goes only to the waiting process
        )
        lines: list[str] = [""]
        assert process.stderr is not None
        reader = threading.Thread(target=_forward_lines, args=(process.stderr, task.name, say, lines), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)  # cancellations arrive between two system calls
                if stopping is not None and stopping.is_set():
                    _end(process)
        except BaseException:
            _end(process)
            raise
        reader.join(5)  # child processes of the task may keep its stderr open
        printed.seek(0)
        seconds = time.monotonic() - started
        return Answer(code=process.returncode, seconds=seconds, document=_document(printed.read()), last=lines[-1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with SIGTERM, or with SIGKILL if it does not exit in time."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _forward_lines(stream: IO[bytes], name: str, say: Callable[[str], None], lines: list[str]) -> None:
    with stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            if line and not line.startswith(_OWN_COUNT):
                lines[:] = [line]
                say(f"{name}: {line}")


def _document(printed: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(printed)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


class LocalExecutor:
    """Executor for up to `parallel` tasks on this machine; `say` receives their lines of output.

    A task without needs of its own gets an equal share of cores and memory. GPUs are counted only if `wants_gpus`,
    because that imports torch (seconds).
    """

    def __init__(self, parallel: int, say: Callable[[str], None], *, wants_gpus: bool = False) -> None:
        self._say, self._lock = say, threading.Lock()
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="lpconv-batch")
        self._stopping = threading.Event()
        self._places = parallel
        self._cores = usable_cores()
        self._gpus = _gpu_names() if wants_gpus else []
        self._memory = available_memory()
        self.machines: tuple[Needs, ...] = (Needs(cpus=len(self._cores), gpus=len(self._gpus), memory=self._memory),)
        self.share = Needs(cpus=max(1, len(self._cores) // parallel), memory=self._memory // parallel)

    def submit(self, task: JobTask) -> Future[Answer] | None:
        with self._lock:
            needs, left = task.needs, Needs(cpus=len(self._cores), gpus=len(self._gpus), memory=self._memory)
            if not (self._places and needs.fits(left)):
                return None
            self._places -= 1
            self._memory -= needs.memory
            cores = [self._cores.pop(0) for _ in range(needs.cpus)]
            gpus = [self._gpus.pop(0) for _ in range(needs.gpus)]
        return self._pool.submit(self._run, task, cores, gpus)

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        self._pool.shutdown()

    def _run(self, task: JobTask, cores: list[int], gpus: list[str]) -> Answer:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        try:
            return run_task(task, self._say, cores=cores, environment=environment, stopping=self._stopping)
        finally:
            with self._lock:
                self._places += 1
                self._memory += task.needs.memory
                self._cores += cores
                self._gpus += gpus


def _gpu_names() -> list[str]:
    """CUDA's names of the GPUs that this process may use."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
