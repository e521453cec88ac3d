"""Run the tasks of a batch in parallel on this machine, each on its own cores, within the available memory."""

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lpconv.batch.task import GRACE_S, Answer, JobTask, Needs, run_task
from lpconv.machine import available_memory


class LocalExecutor:
    """Executor for up to `parallel` tasks on this machine; `say` receives their lines of output.

    A task without needs of its own gets an equal share of cores and memory. GPUs are counted only if `wants_gpus`,
    because that imports torch (seconds).
    """

    def __init__(self, parallel: int, say: Callable[[str], None], *, wants_gpus: bool = False) -> None:
        self._say, self._lock = say, threading.Lock()
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="lpconv-batch")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_stopped = False
        self._places = parallel
        self._cores = sorted(os.sched_getaffinity(0))
        self._gpus = _gpu_names() if wants_gpus else []
        self._memory = available_memory()
        self.machines: tuple[Needs, ...] = (Needs(cpus=len(self._cores), gpus=len(self._gpus), memory=self._memory),)
        self.share = Needs(cpus=max(1, len(self._cores) // parallel), memory=self._memory // parallel)

    def has_room(self, needs: Needs) -> bool:
        with self._lock:
            left = Needs(cpus=len(self._cores), gpus=len(self._gpus), memory=self._memory)
            return self._places > 0 and needs.fits(left)

    def submit(self, task: JobTask) -> Future[Answer]:
        with self._lock:
            needs = task.needs
            self._places -= 1
            self._memory -= needs.memory
            cores = [self._cores.pop(0) for _ in range(needs.cpus)]
            gpus = [self._gpus.pop(0) for _ in range(needs.gpus)]
        return self._pool.submit(self._run, task, cores, gpus)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            for process in self._processes:
                process.terminate()
        late = threading.Timer(GRACE_S, self._kill)
        late.daemon = True
        late.start()

    def close(self) -> None:
        self._pool.shutdown()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _run(self, task: JobTask, cores: list[int], gpus: list[str]) -> Answer:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        try:
            return run_task(task, self._say, cores=cores, environment=environment, begun=self._track_process)
        finally:
            with self._lock:
                self._places += 1
                self._memory += task.needs.memory
                self._cores += cores
                self._gpus += gpus

    def _track_process(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._processes.append(process)
            if self._is_stopped:
                process.terminate()


def _gpu_names() -> list[str]:
    """CUDA's names of the GPUs that this process may use."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
