"""Processes that hold one case together, and who starts them."""

import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from lpconv.bench import team as team_module
from lpconv.bench.options import BenchOptions
from lpconv.bench.run import parallel_of
from lpconv.bench.team import Child, Team, processes_of
from lpconv.bench.worker import Worker
from lpconv.errors import LpconvError, PeerLostError, ResourceError, UnsupportedError, UsageError
from lpconv.results import MemoryParts, MemoryRecord
from tests.helpers.bench_records import CPU_PEAKS


class Scripted(Child):
    """A child that answers a command with what it was given, raises it where it is an error, and hangs on None."""

    def __init__(self, answer: dict[str, Any] | MemoryRecord | LpconvError | None) -> None:
        self.answer, self.closed = answer, False
        self.readable, self.writable = os.pipe()

    @property
    def pid(self) -> int:
        return self.readable

    def fileno(self) -> int:
        return self.readable

    def send(self, do: str, **arguments: Any) -> None:
        if self.answer is not None:
            os.write(self.writable, b".")

    def receive(self) -> Any:
        os.read(self.readable, 1)
        if isinstance(self.answer, LpconvError):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


class Ended(Child):
    """A process that ran a line of Python, where no file may grow beyond some bytes."""

    def __init__(self, line: str, most_bytes: int) -> None:
        self._stderr = tempfile.TemporaryFile(mode="w+", encoding="utf-8")  # noqa: SIM115  # as its own
        code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {most_bytes})); {line}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
        )  # fmt: skip


def measured(*seconds: float, wall: float = 0.1, recompiles: int = 0) -> dict[str, Any]:
    return {"seconds": list(seconds), "wall": wall, "recompiles": recompiles}


def test_a_step_takes_as_long_as_the_slowest_process() -> None:
    with Team([Scripted(measured(1, 4, wall=2)), Scripted(measured(3, 2, wall=3, recompiles=1))]) as team:
        assert team.ask("measure", iterations=2, seconds=0) == measured(3, 4, wall=3, recompiles=1)


def test_memory_is_that_of_the_process_that_needs_most() -> None:
    parts = MemoryParts(weights=1, gradients=0, optimizer=0, activations=0, other=0)
    small, large = (MemoryRecord(peak_bytes=n, saved_bytes=9 - n, parts=parts) for n in (1, 2))
    with Team([Scripted(small), Scripted(large)]) as team:
        assert team.ask("memory") == large


def test_several_processes_are_ddp_by_default() -> None:
    found = [parallel_of(BenchOptions(processes=n, modes=("train",))) for n in (1, 2)]
    assert found == [None, "ddp"]


def test_what_one_process_fails_at_ends_the_others_who_would_wait_for_ever() -> None:
    children = [Scripted(None), Scripted(LpconvError("luck"))]
    team = Team(children)

    for _ in range(2):
        with pytest.raises(LpconvError, match="luck"):
            team.ask("measure", iterations=1, seconds=0)
    assert all(child.closed for child in children)


@pytest.mark.parametrize("first", [0, 1])
def test_what_became_of_a_lost_process_is_said(first: int) -> None:
    """One process reports that the other is gone, and the error says that it was killed."""
    answers = [PeerLostError("another process has gone"), ResourceError("the system killed")]
    with Team([Scripted(answers[first]), Scripted(answers[1 - first])]) as team, pytest.raises(ResourceError):
        team.ask("measure")


def test_a_lost_process_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "_PATIENCE_S", 0.05)
    children = [Scripted(PeerLostError("another process has gone")), Scripted(None)]
    with Team(children) as team, pytest.raises(PeerLostError):
        team.ask("measure")


def test_the_cores_are_shared_among_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("lpconv.bench.worker._ALL_THREADS", 8)
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setattr("lpconv.bench.worker.measure_peaks", lambda device: CPU_PEAKS)
    worker = Worker()

    for processes, threads in ((2, None), (2, None), (16, None), (2, 3)):
        worker.peaks("cpu", threads, processes)

    assert chosen == [4, 4, 1, 3]


@pytest.mark.parametrize(
    ("environ", "asked", "found"),
    [
        ({}, None, 1),
        ({}, 3, 3),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}, None, 2),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}, None, None),
    ],
)
def test_the_first_process_of_torchrun_measures_with_as_many(
    environ: dict[str, str], asked: int | None, found: int | None
) -> None:
    assert processes_of(asked, environ) == found


def test_torchrun_on_several_machines_and_other_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="machines"):
        processes_of(None, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "0"})
    with pytest.raises(UsageError, match="--processes 3"):
        processes_of(3, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"})


@pytest.mark.parametrize(
    ("processes", "name", "mode", "compiled"),
    [(1, "ddp", "train", "off"), (2, "fsdp2", "infer", "off"), (2, None, "train", "graphs")],
)
def test_what_processes_cannot_do_is_refused(processes: int, name: str | None, mode: str, compiled: str) -> None:
    with pytest.raises(UsageError) as refused:
        parallel_of(BenchOptions(processes=processes, parallel=name, modes=(mode,), compiled=compiled))
    assert refused.value.hint


@pytest.mark.parametrize(("most_bytes", "kind", "said"), [(0, ResourceError, "temporary"), (999, LpconvError, "odd")])
def test_what_became_of_a_process_is_said_where_it_could_not_say_it(
    most_bytes: int, kind: type[LpconvError], said: str
) -> None:
    with Ended("raise ValueError('odd')", most_bytes) as child, pytest.raises(LpconvError) as caught:
        child.receive()
    assert type(caught.value) is kind
    assert said in f"{caught.value} {caught.value.hint}"
