"""Jobs on an executor: what runs when, what is done again, and that results and lock are those of one process."""

import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lpconv
from lpconv.batch.lock import read_lock, update_lock
from lpconv.batch.manifest import Manifest, load_manifest
from lpconv.batch.options import BatchOptions
from lpconv.batch.run import JobsFailedError, run_batch
from lpconv.batch.runners import RUNNERS
from lpconv.batch.task import Answer, JobTask, LocalExecutor, MachineLostError, Needs
from lpconv.cli.main import app
from lpconv.errors import LpconvError, OutputExistsError, UnsupportedError, UsageError
from lpconv.results.batch import NOT_RUN, UP_TO_DATE, BatchResult
from tests.helpers.checkpoints import files_of, write_checkpoint

Stub = Callable[[JobTask], Answer]


def typed(task: JobTask) -> Answer:
    """What somebody gets who types the command of a task."""
    done = CliRunner().invoke(app, ["batch", *task.arguments, "-q"])
    return Answer(code=done.exit_code, document=json.loads(done.stdout), seconds=1.0)


class Executor:
    """Runs tasks by `run`, where there is room for `places`; the oldest ends when somebody waits."""

    machines = (Needs(cpus=4, gpus=1, memory=10**10), Needs(cpus=8, memory=10**9))
    share = Needs(cpus=1, memory=10**6)

    def __init__(self, run: Stub = typed, places: int = 100) -> None:
        self.run, self.places, self.log, self.is_stopped = run, places, list[str](), False
        self.under_way: list[_Pending] = []
        self.is_closed = False
        self.most = 0

    def submit(self, task: JobTask) -> Future[Answer] | None:
        self.under_way = [pending for pending in self.under_way if not pending.done()]
        if len(self.under_way) == self.places:
            return None
        self.log.append(task.name)
        self.under_way.append(_Pending(functools.partial(self.run, task)))
        self.most = max(self.most, len(self.under_way))
        return self.under_way[-1]

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None:
        self.is_closed = True


class _Pending(Future[Answer]):
    """What is under way, and ends in this thread when it is waited for."""

    def __init__(self, run: Callable[[], Answer]) -> None:
        super().__init__()
        self._run = run

    def end(self) -> None:
        try:
            self.set_result(self._run())
        except Exception as e:
            self.set_exception(e)

    def result(self, timeout: float | None = None) -> Answer:
        if not self.done():
            self.end()
        return super().result(timeout)


@pytest.fixture(autouse=True)
def _waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest task ends, and no other one, so that tests do not depend on time."""

    def wait_for_the_oldest(futures: Iterable[Future[Answer]], return_when: str) -> object:
        oldest = next(iter(futures))
        if isinstance(oldest, _Pending):
            oldest.end()
        return wait(futures, return_when=return_when)

    monkeypatch.setattr("lpconv.batch.placed.wait", wait_for_the_oldest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    shards = [{f"layer.{i}.weight": torch.randn(32, 16, generator=generator)} for i in range(5)]
    write_checkpoint(tmp_path / "model", shards)
    return tmp_path


def manifest(folder: Path, *jobs: dict[str, Any], name: str = "jobs", **defaults: object) -> Manifest:
    path = folder / f"{name}.json"
    given = {"model": "./model", "verify": "weights", "workers": 1} | defaults
    path.write_text(json.dumps({"version": 1, "defaults": given, "jobs": list(jobs)}))
    return load_manifest(path)


def statuses(result: BatchResult) -> dict[str, str]:
    return {job.id: job.status for job in result.jobs}


def test_results_and_lock_are_those_of_one_process(folder: Path) -> None:
    jobs = [{"id": "fp8", "format": "e4m3fn"}, {"id": "split", "method": "collage", "split": 3},
            {"id": "again", "model": "job:fp8", "format": "bf16"}]  # fmt: skip
    alone = run_batch(manifest(folder, *jobs), RUNNERS)
    files, lock = files_of(folder / "out"), (folder / "jobs.lock.json").read_bytes()
    (folder / "out").rename(folder / "earlier")
    (folder / "jobs.lock.json").unlink()

    executor = Executor()
    placed = run_batch(manifest(folder, *jobs), RUNNERS, executor=executor)
    assert executor.log == ["fp8", "split 1/3", "split 2/3", "split 3/3", "again", "split"]
    assert [(j.id, j.status, j.source, j.bytes, j.verify) for j in placed.jobs] == [
        (j.id, j.status, j.source, j.bytes, j.verify) for j in alone.jobs
    ]
    reports = {name for name in files if name.endswith(("report.json", "report.html"))}
    assert {n: b for n, b in files_of(folder / "out").items() if n not in reports} == {
        n: b for n, b in files.items() if n not in reports
    }
    assert (folder / "jobs.lock.json").read_bytes() == lock
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["again", "fp8", "split"]

    again = Executor()
    result = run_batch(manifest(folder, *jobs), RUNNERS, BatchOptions(resume=True), executor=again)
    assert set(statuses(result).values()) == {UP_TO_DATE}
    assert again.log == []
    (folder / "out").rename(folder / "placed")
    locked = run_batch(manifest(folder, *jobs), RUNNERS, BatchOptions(locked=True), executor=Executor())
    assert set(statuses(locked).values()) == {"converted"}


def test_a_failure_is_the_jobs_own_error(folder: Path) -> None:
    jobs = manifest(folder, {"id": "a", "gates": "sqnr>=200"}, {"id": "b", "model": "job:a"}, {"id": "c"})
    with pytest.raises(LpconvError, match=r"^a: .*sqnr>=200") as caught:
        run_batch(jobs, RUNNERS, executor=Executor(places=1))
    assert (caught.value.exit_code, caught.value.kind) == (5, "verification")
    with pytest.raises(JobsFailedError) as failed:
        run_batch(jobs, RUNNERS, BatchOptions(keep_going=True), executor=Executor(places=1))
    assert statuses(failed.value.result) == {"a": "failed", "b": NOT_RUN, "c": "converted"}
    (waits,) = [job.warnings for job in failed.value.result.jobs][1]
    assert waits.endswith(" a")


def said(job_id: str) -> dict[str, Any]:
    """What a job prints that is done."""
    job = {"id": job_id, "kind": "convert", "model": "m", "output": "o", "what": "w", "status": "converted"}
    return {"schema_version": 1, "jobs": [job]}


def done(task: JobTask) -> Answer:
    return Answer(code=0, document=said(task.name) if "--shard" not in task.arguments else {"kind": "part"})


def test_no_more_run_than_there_is_room_for(folder: Path) -> None:
    executor = Executor(done, places=2)
    run_batch(manifest(folder, *({"id": f"j{i}"} for i in range(7))), RUNNERS, executor=executor)
    assert executor.most == 2
    assert executor.log == [f"j{i}" for i in range(7)]


def test_a_task_whose_machine_dies_goes_on_elsewhere(folder: Path) -> None:
    seen: list[tuple[str, ...]] = []

    def dying(task: JobTask) -> Answer:
        seen.append(task.arguments)
        if len(seen) < 3:
            raise MachineLostError("the machine died")
        return done(task)

    result = run_batch(manifest(folder, {"id": "a"}), RUNNERS, executor=Executor(dying))
    assert statuses(result) == {"a": "converted"}
    assert ["--resume" in arguments for arguments in seen] == [False, True, True]


def test_a_task_that_kills_machines_is_given_up(folder: Path) -> None:
    executor = Executor(lambda task: (_ for _ in ()).throw(MachineLostError("the machine died")))
    with pytest.raises(LpconvError, match=r"^a: .*died"):
        run_batch(manifest(folder, {"id": "a"}), RUNNERS, executor=executor)
    assert executor.log == ["a"] * 4


def test_a_failed_part_fails_its_job_once(folder: Path) -> None:
    def second_fails(task: JobTask) -> Answer:
        return Answer(code=-9, last="Killed") if task.name == "a 2/3" else done(task)

    executor = Executor(second_fails, places=1)
    with pytest.raises(JobsFailedError) as failed:
        run_batch(
            manifest(folder, {"id": "a", "split": 3}, {"id": "b"}),
            RUNNERS,
            BatchOptions(keep_going=True),
            executor=executor,
        )
    assert executor.log == ["a 1/3", "a 2/3", "b"]
    (error,) = [job.error for job in failed.value.result.jobs if job.error is not None]
    assert error.code == 137
    assert "signal 9" in error.message


def test_what_no_machine_has_is_refused_before_anything_starts(folder: Path) -> None:
    for needs in ({"cpus": 9}, {"gpus": 2}, {"memory": "20GB"}, {"cpus": 8, "gpus": 1}):
        executor = Executor(done)
        with pytest.raises(UnsupportedError, match=r"^big "):
            run_batch(manifest(folder, {"id": "a"}, {"id": "big", **needs}), RUNNERS, executor=executor)
        assert executor.log == []
        assert executor.is_closed


def test_what_jobs_take(folder: Path) -> None:
    taken: dict[str, Needs] = {}

    def note(task: JobTask) -> Answer:
        taken[task.name] = task.needs
        return done(task)

    jobs = [{"id": "share"}, {"id": "own", "cpus": 3, "gpus": 1, "memory": "2GB"}, {"id": "bound", "max_memory": "1GB"},
            {"id": "bench", "kind": "bench", "model": "bert-base"}]  # fmt: skip
    run_batch(manifest(folder, *jobs), RUNNERS, executor=Executor(note))
    assert taken == {
        "share": Needs(cpus=1, memory=10**6),
        "own": Needs(cpus=3, gpus=1, memory=2 * 10**9),
        "bound": Needs(cpus=1, memory=10**9),
        "bench": Needs(cpus=8, memory=10**6),  # times mean nothing beside others
    }


def test_an_interruption_stops_what_runs(folder: Path) -> None:
    class Interrupted(Executor):
        def submit(self, task: JobTask) -> Future[Answer] | None:
            if len(self.log) == 1:
                raise KeyboardInterrupt
            return super().submit(task)

    executor = Interrupted(lambda task: Answer(code=143, last="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        run_batch(manifest(folder, {"id": "a"}, {"id": "b"}), RUNNERS, BatchOptions(keep_going=True), executor=executor)
    assert executor.is_stopped


def test_an_interruption_before_any_failure_says_one_document(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Executor):
        def submit(self, task: JobTask) -> Future[Answer] | None:
            raise KeyboardInterrupt

    monkeypatch.setattr("lpconv.cli.batch._executor", lambda *_, **__: Interrupted())
    said = CliRunner().invoke(app, ["batch", str(manifest(folder, {"id": "a"}).path), "--json"])
    assert said.exit_code == 130
    assert json.loads(said.stdout)["error"]["kind"] == "interrupted"


def test_only_conversions_are_split(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"jobs\[0\]\.split: .*probe"):
        manifest(folder, {"id": "a", "kind": "probe", "split": 2})


@pytest.mark.parametrize("arguments", [["--shard", "1/2"], ["--finish"], ["--shard", "1/2", "--finish", "--only", "a"]])
def test_parts_are_of_one_conversion(folder: Path, arguments: list[str]) -> None:
    path = manifest(folder, {"id": "a"}, {"id": "b"}).path
    assert CliRunner().invoke(app, ["batch", str(path), *arguments]).exit_code == 2


def test_two_batches_at_once_lose_no_entry_of_the_lock(folder: Path) -> None:
    jobs = manifest(folder, *({"id": f"j{i}"} for i in range(8)))
    run_batch(jobs, RUNNERS, BatchOptions(only=("j0",)))
    entry = read_lock(jobs.lock_path).entries[0]
    jobs.lock_path.unlink()

    def enter_some(number: int) -> None:
        update_lock(jobs.lock_path)
        update_lock(jobs.lock_path, lambda lock: lock.with_entry(replace(entry, id=f"j{number}"), jobs.jobs))

    threads = [threading.Thread(target=enter_some, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e.id for e in read_lock(jobs.lock_path).entries] == [f"j{i}" for i in range(8)]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for lpconv in the processes of tasks: a program that tests write."""
    path = tmp_path / "programs" / "lpconv" / "__main__.py"
    path.parent.mkdir(parents=True)
    (path.parent / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "programs"))
    monkeypatch.chdir(tmp_path)  # what lies in the current folder goes first
    return path


TASK = JobTask(name="a", arguments=("jobs.json",), needs=Needs())


WAITING = """
import sys
from lpconv.batch.task import Needs, JobTask, run_task
task = JobTask(name="a", arguments=(), needs=Needs())
run_task(task, lambda line: print(line, flush=True), cores=[int(sys.argv[1])], environment={"PYTHONPATH": sys.argv[2]})
"""


def test_a_task_runs_on_its_cores_and_dies_with_who_waits_for_it(program: Path) -> None:
    program.write_text(
        "import os, sys, time\n"
        "print(os.getpid(), *os.sched_getaffinity(0), file=sys.stderr, flush=True)\n"
        "time.sleep(60)"
    )
    core = min(os.sched_getaffinity(0))
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(core), str(program.parents[1])],
        env=os.environ | {"PYTHONPATH": str(Path(lpconv.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    with waiting:
        assert waiting.stdout is not None
        _, pid, *cores = waiting.stdout.readline().split()
        assert cores == [str(core)]
        waiting.kill()
    wait_for(lambda: not is_alive(int(pid)))


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in itertools.takewhile(lambda _: not condition(), range(500)):
        time.sleep(0.01)
    assert condition()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody waited for yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_this_machine_shares_its_cores_and_memory_out(program: Path) -> None:
    program.write_text("import time; time.sleep(0.2)")
    executor = LocalExecutor(2, lambda line: None)
    machine = executor.machines[0]
    assert executor.share == Needs(cpus=max(1, machine.cpus // 2), memory=machine.memory // 2)
    whole = Needs(cpus=machine.cpus, memory=machine.memory)
    first = executor.submit(JobTask(name="a", arguments=(), needs=whole))
    assert executor.submit(TASK) is None
    assert first.result().code == 0
    assert executor.submit(JobTask(name="a", arguments=(), needs=Needs(cpus=machine.cpus + 1))) is None
    assert executor.submit(JobTask(name="a", arguments=(), needs=whole)).result().code == 0


def test_stopping_ends_processes_by_sigterm(program: Path) -> None:
    program.write_text(
        "import os, signal, sys, time\n"
        "def end(*_):\n"
        "    os.write(2, b'bye\\n')\n"  # the signal may come within a print, which is not for two at once
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', file=sys.stderr, flush=True)\n"
        "time.sleep(60)"
    )
    lines: list[str] = []
    executor = LocalExecutor(2, lines.append)
    future = executor.submit(TASK)
    wait_for(lambda: lines == ["a: ready"])
    executor.stop()
    assert (future.result(10).code, future.result().last) == (143, "bye")


def test_an_output_in_the_way_fails_its_job_only(folder: Path) -> None:
    jobs = manifest(folder, {"id": "a"}, {"id": "b"})
    run_batch(jobs, RUNNERS, BatchOptions(only=("a",)))
    with pytest.raises(JobsFailedError) as failed:
        run_batch(jobs, RUNNERS, BatchOptions(keep_going=True), executor=Executor())
    assert statuses(failed.value.result) == {"a": "failed", "b": "converted"}
    assert failed.value.result.jobs[0].error.code == OutputExistsError.exit_code
    said = CliRunner().invoke(app, ["batch", str(jobs.path), "--only", "a", "--keep-going", "--json"])
    document = json.loads(said.stdout)  # the jobs are where they are if none fails
    assert [(job["id"], job["status"]) for job in document["jobs"]] == [("a", "failed")]
    assert document["error"]["details"]["jobs"] == document["jobs"]
