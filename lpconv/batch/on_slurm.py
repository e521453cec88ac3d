"""Tasks of a batch as Slurm jobs, by submitit, which writes the scripts, brings the answers back and knows the states.

Each task is a Slurm job that runs the same command in a process of its own. Partition, account and time limit are those
that `sbatch` reads from SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT. submitit has a cluster called ``local``
too, processes on this machine, by which all of this is tested.
"""

import functools
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpconv.batch.task import Answer, MachineLostError, Needs, Task, run_task
from lpconv.errors import UnsupportedError

__all__ = ["SlurmExecutor"]

_LOOK_S = 1.0
_TIME_LIMIT_MIN = 24 * 60  # where SBATCH_TIMELIMIT says nothing
# Words of Slurm for a job that no fault of its own ended.
_LOST = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED", "REQUEUED")
_ENDLESS = 2**40


@dataclass(eq=False)
class _Submitted:
    """A Slurm job, and how much of what it says has been told."""

    task: Task
    job: Any
    future: Future[Answer]
    told: int = 0


class SlurmExecutor:
    """Slurm jobs, with their scripts and logs in `folder`; up to `parallel` at a time, None for no bound of ours.

    What Slurm has is asked by nobody: it refuses itself what it can never run. Raises UnsupportedError without submitit
    or Slurm.
    """

    machines: tuple[Needs, ...] = (Needs(cpus=_ENDLESS, gpus=_ENDLESS, memory=_ENDLESS**2),)
    share = Needs()

    def __init__(self, folder: Path, *, cluster: str, parallel: int | None, say: Callable[[str], None]) -> None:
        self._submitit, self._parallel, self._say = _submitit(cluster), parallel, say
        self._executor = self._submitit.AutoExecutor(folder=folder, cluster=cluster)
        self._lock = threading.Lock()
        self._submitted: list[_Submitted] = []
        self._watch: threading.Thread | None = None

    def has_room(self, needs: Needs) -> bool:
        return self._parallel is None or len(self._submitted) < self._parallel

    def submit(self, task: Task) -> Future[Answer]:
        needs = task.needs
        memory = {"mem_gb": max(1, -(-needs.memory // 2**30))} if needs.memory else {}
        self._executor.update_parameters(
            name=task.name.replace(" ", "-").replace("/", "-of-"),
            cpus_per_task=needs.cpus,
            gpus_per_node=needs.gpus,
            timeout_min=_TIME_LIMIT_MIN,
            **memory,
        )
        submitted = _Submitted(task=task, job=self._executor.submit(_run, task), future=Future())
        with self._lock:
            self._submitted.append(submitted)
            if self._watch is None or not self._watch.is_alive():
                self._watch = threading.Thread(target=self._look_on, daemon=True)
                self._watch.start()
        return submitted.future

    def stop(self) -> None:
        with self._lock:
            for submitted in self._submitted:
                submitted.job.cancel()

    def close(self) -> None:
        """Nothing: Slurm's jobs have ended."""

    def _look_on(self) -> None:
        """Until all have ended, tell what they say and what became of them."""
        while True:
            with self._lock:
                there = list(self._submitted)
                if not there:
                    self._watch = None
                    return
            for submitted in there:
                try:
                    is_done = submitted.job.done()
                    self._tell(submitted)
                    if not is_done:
                        continue
                    result: Callable[[], Any] = functools.partial(self._answer, submitted)
                except Exception as e:
                    result = functools.partial(submitted.future.set_exception, e)
                with self._lock:
                    self._submitted.remove(submitted)
                result()
            time.sleep(_LOOK_S)

    def _tell(self, submitted: _Submitted) -> None:
        path = submitted.job.paths.stderr
        if not path.exists():
            return
        with path.open("rb") as f:
            f.seek(submitted.told)
            lines, end, _ = f.read().rpartition(b"\n")
        submitted.told += len(lines) + len(end)
        for line in lines.decode(errors="replace").splitlines():
            if line.startswith(f"{submitted.task.name}: "):  # the rest is submitit's
                self._say(line)

    def _answer(self, submitted: _Submitted) -> None:
        try:
            submitted.future.set_result(submitted.job.result())
        except self._submitit.core.utils.UncompletedJobError as e:
            state = submitted.job.state
            if any(state.startswith(word) for word in _LOST):
                submitted.future.set_exception(MachineLostError(f"Slurm says {state}"))
            else:
                last = next((line for line in str(e).splitlines() if line.strip()), "")
                submitted.future.set_result(Answer(code=-9, last=f"Slurm says {state}; {last}"))
        except Exception as e:
            submitted.future.set_exception(e)


def _submitit(cluster: str) -> Any:
    try:
        import submitit
    except ImportError as e:
        raise UnsupportedError(f"--executor slurm needs submitit: {e}", hint="pip install 'lpconv[slurm]'") from e
    if cluster == "slurm" and shutil.which("sbatch") is None:
        raise UnsupportedError("there is no Slurm here: no command `sbatch`", hint="run it where jobs are submitted")
    return submitit


def _run(task: Task) -> Answer:
    """In a Slurm job: a task, whose lines go to the job's stderr."""
    return run_task(task, lambda line: print(line, file=sys.stderr, flush=True))
