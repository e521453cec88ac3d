"""Run the tasks of a batch on a Ray cluster.

Ray reserves resources and picks a machine; it neither retries nor limits tasks.

A worker runs the same command as this machine would, in its own process, and returns a small record. Output of the
process goes through Ray's logs. Paths must be valid on all machines; every machine is asked before anything starts.
Access control is left to Ray: its token is never read here.
"""

import hashlib
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lpconv.batch.task import Answer, JobTask, MachineLostError, Needs, run_task
from lpconv.errors import InputError, UnsupportedError, check_installed, first_line
from lpconv.version import __version__

_LOOK_S = 60.0  # time limit for all machines to answer
_CANCELLED = 143
# Ray's errors for tasks that ended through no fault of their own.
_LOST = ("WorkerCrashedError", "LocalRayletDiedError", "NodeDiedError", "ObjectLostError", "RaySystemError")


class RayExecutor:
    """Executor on the Ray cluster at `address`, at RAY_ADDRESS, or on a local one that lives as long as the batch.

    Runs up to `parallel` tasks at a time, or with None as many as fit. Raises UnsupportedError if Ray is not installed
    or a machine has another version of lpconv, and InputError if a machine does not see the manifest.
    """

    share = Needs()

    def __init__(self, manifest: Path, *, address: str | None, parallel: int | None, quiet: bool) -> None:
        self._quiet, self._parallel = quiet, parallel
        self._refs: dict[Future[Answer], Any] = {}
        self._stdout = sys.stdout
        sys.stdout = sys.stderr  # Ray prints there, and stdout must contain nothing but the result
        try:
            self._ray = _connect(address, quiet)
            nodes = {n["NodeID"]: n["Resources"] for n in self._ray.nodes() if n["Alive"]}
            self.machines: tuple[Needs, ...] = tuple(map(_needs, nodes.values()))
            self._look(manifest, list(nodes))
        except BaseException:
            sys.stdout = self._stdout
            raise

    def submit(self, task: JobTask) -> Future[Answer] | None:
        if self._parallel is not None and sum(not f.done() for f in self._refs) >= self._parallel:
            return None
        options = {"num_cpus": task.needs.cpus, "num_gpus": task.needs.gpus, "max_retries": 0, "name": task.name}
        if task.needs.memory:
            options["memory"] = task.needs.memory
        ref = self._ray.remote(_run).options(**options).remote(task, self._quiet)
        future: Future[Answer] = Future()
        self._refs[future] = ref
        ref.future().add_done_callback(lambda ended: self._pass_on(ended, future))
        return future

    def stop(self) -> None:
        for future, ref in self._refs.items():
            if not future.done():
                self._ray.cancel(ref, force=False)

    def close(self) -> None:
        self._ray.shutdown()
        sys.stdout = self._stdout

    def _pass_on(self, ended: Future[Answer], future: Future[Answer]) -> None:
        """Set the result of `future` from a task that Ray has ended, or its exception as one of lpconv's."""
        errors = self._ray.exceptions
        try:
            future.set_result(ended.result())
        except errors.TaskCancelledError:
            future.set_result(Answer(code=_CANCELLED, last="cancelled"))
        except errors.OutOfMemoryError as e:
            future.set_result(Answer(code=-9, last=first_line(e)))
        except tuple(getattr(errors, name) for name in _LOST) as e:
            future.set_exception(MachineLostError(f"its machine or Ray worker died ({type(e).__name__})"))
        except BaseException as e:
            future.set_exception(e)

    def _look(self, manifest: Path, nodes: list[str]) -> None:
        """Check on every machine that it sees the same manifest and has the same version of lpconv."""
        pinned = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        look = self._ray.remote(_describe_worker)
        refs = [
            look.options(num_cpus=0, scheduling_strategy=pinned(node_id=n, soft=False)).remote(manifest) for n in nodes
        ]
        try:
            answers = self._ray.get(refs, timeout=_LOOK_S)
        except self._ray.exceptions.RayError as e:
            raise UnsupportedError(
                f"a machine of the cluster cannot run lpconv: {str(e).strip().splitlines()[-1]}",
                hint="install the same version of lpconv on all machines",
            ) from e
        here = hashlib.sha256(manifest.read_bytes()).hexdigest()
        for machine, version, digest in answers:
            if version != __version__:
                raise UnsupportedError(
                    f"{machine} has lpconv {version}, this machine has {__version__}",
                    hint="install the same version on all machines",
                )
            if digest != here:
                raise InputError(
                    f"{machine} cannot read `{manifest}`",
                    hint="put manifest, models and outputs into a shared folder",
                )


def _connect(address: str | None, quiet: bool) -> Any:
    """Connect to Ray and return its module. Raises UnsupportedError if it is not installed or does not answer."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # two jobs may print equal lines
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    check_installed("--executor ray", "ray", extra="ray")
    import ray
    import ray.util.scheduling_strategies

    place = address or os.environ.get("RAY_ADDRESS") or "local"
    own = {"include_dashboard": False} if place == "local" else {}
    try:
        ray.init(address=place, log_to_driver=not quiet, logging_level="ERROR", **own)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise UnsupportedError(
            f"cannot connect to a Ray cluster at `{place}`: {first_line(e)}",
            hint="check that it is running and that RAY_AUTH_TOKEN is the cluster's token",
        ) from e
    return ray


def _needs(resources: dict[str, float]) -> Needs:
    return Needs(
        cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)), memory=int(resources.get("memory", 0))
    )


def _describe_worker(manifest: Path) -> tuple[str, str, str | None]:
    """On a worker: its machine name, lpconv version, and the hash of the manifest as it sees it."""
    try:
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    except OSError:
        digest = None
    return os.uname().nodename, __version__, digest


def _run(task: JobTask, quiet: bool) -> Answer:
    """On a worker: run a task. Ray forwards its lines to the waiting process."""
    return run_task(task, lambda line: None if quiet else print(line, file=sys.stderr, flush=True))
