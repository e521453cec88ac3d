"""Runs that are killed, interrupted or started twice: what they leave behind, and that resuming makes the same bytes.

Killed runs are forked from a server process that has imported lpconv once, because importing torch takes seconds.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from lpconv.cli.main import run as run_command_line
from lpconv.convert.run import convert
from lpconv.plan.options import ConvertOptions
from tests.helpers.checkpoints import REPORTS, cli_environment, files_of, published, write_checkpoint

NUM_SHARDS = 12
IO_CALLS = ("open", "mkdir", "posix_fallocate", "pwrite", "ftruncate", "fsync", "fdatasync", "rename", "unlink")

Start = Callable[..., ForkServerProcess]


def command_line(arguments: list[str], said: Path | None = None) -> None:
    """`lpconv ARGUMENTS…` in this process, which says nothing, or what it says in `said`.out and `said`.err."""
    os.nice(10)  # the test watches it work, and must not be too late
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(f"{said}{suffix}" if said else os.devnull, os.O_WRONLY | os.O_CREAT, 0o644), stream)
    sys.argv = ["lpconv", *arguments]
    run_command_line()


def conversion(source: Path, output: Path, options: ConvertOptions, die_at: int | None) -> None:
    """`convert` in this process, which is killed at its I/O call number `die_at`."""
    if die_at is not None:
        die_at_call(die_at)
    convert(str(source), output, options)


def die_at_call(number: int) -> None:
    """From here on, the call `number` to any of IO_CALLS kills this process, a write when half of it is done."""
    left = [number]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name == "pwrite":
                    fd, data, offset = args
                    call(fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counting

    for name in IO_CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServerContext]:
    """A process that has imported lpconv, and forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.faults.warm"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", cli_environment()["PYTHONPATH"])
        patch.setenv("OMP_NUM_THREADS", "1")
        yield context


@pytest.fixture
def fork(server: ForkServerContext) -> Iterator[Callable[..., ForkServerProcess]]:
    """Call a function in a forked process; what still runs when the test ends is killed."""
    started: list[ForkServerProcess] = []

    def fork(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
        process = server.Process(target=target, args=arguments)
        process.start()
        started.append(process)
        return process

    yield fork
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def start(fork: Callable[..., ForkServerProcess]) -> Start:
    """Start `lpconv ARGUMENTS…`."""
    return lambda *arguments: fork(command_line, list(map(str, arguments)))


@pytest.fixture
def convert_until(fork: Callable[..., ForkServerProcess]) -> Callable[..., int]:
    """Convert, up to the I/O call number `die_at` if one is given; the exit code."""

    def convert_until(source: Path, output: Path, die_at: int | None = None, **options: Any) -> int:
        options = {"verify": "weights", "workers": 1, **options}
        return exit_code(fork(conversion, source, output, ConvertOptions(**options), die_at))

    return convert_until


def exit_code(process: ForkServerProcess) -> int:
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 3 MB, three blocks each; side files too."""
    generator = torch.Generator().manual_seed(0)
    shards = [
        {f"layer.{i}.weight": torch.randn(768, 1024, generator=generator), f"layer.{i}.bias": torch.zeros(768)}
        for i in range(NUM_SHARDS)
    ]
    folder = write_checkpoint(tmp_path_factory.mktemp("interrupted") / "source", shards)
    (folder / "tokenizer.json").write_text("[]" * 1000)
    return folder


def arguments(source: Path, output: Path, *more: str) -> list[str]:
    return ["convert", str(source), "-o", str(output), "--verify", "weights", "--workers", "2", "-q", *more]


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory, server: ForkServerContext) -> dict[str, bytes]:
    """The files of a run that nothing interrupts."""
    output = tmp_path_factory.mktemp("uninterrupted") / "output"
    process = server.Process(target=command_line, args=(arguments(source, output),))
    process.start()
    assert exit_code(process) == 0
    return files_of(output)


def journal_lines(output: Path) -> int:
    """Complete lines in the journal of a run, 0 before there is one."""
    try:
        return (output.with_name(output.name + ".partial") / "journal.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for_lines(output: Path, number: int, is_alive: Callable[[], bool]) -> None:
    while journal_lines(output) < number and is_alive():
        time.sleep(0.0005)


def test_killed_at_random_moments_and_resumed(
    tmp_path: Path, source: Path, expected: dict[str, bytes], start: Start
) -> None:
    rng = random.Random(0)
    killed = 0
    while killed < 12:
        output = tmp_path / str(killed) / "output"
        resume: tuple[str, ...] = ()
        for _ in range(6):
            process = start(*arguments(source, output, *resume))
            # So many shards from here, and a part of the next; past the last shard comes the verification.
            wait_for_lines(output, min(journal_lines(output) + rng.randrange(6), NUM_SHARDS + 1), process.is_alive)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            if exit_code(process) == 0 or output.exists():
                break  # it was published before the kill
            killed += 1
            assert not published(output)
            resume = ("--resume",)
        else:
            assert exit_code(start(*arguments(source, output, "--resume"))) == 0
        assert files_of(output, without={*REPORTS, "journal.jsonl"}) == expected


def test_killed_at_every_other_call_that_writes(tmp_path: Path, convert_until: Callable[..., int]) -> None:
    """Collage, which writes two files for a shard, and so makes all the calls that the others make."""
    source = write_checkpoint(tmp_path / "source", [{f"{i}.weight": torch.full((4, 4), i + 1 / 3)} for i in range(2)])
    (source / "tokenizer.json").write_text("[]")
    done = tmp_path / "done"
    assert convert_until(source, done, method="collage") == 0
    expected = files_of(done)
    for number in range(1, 1000, 2):
        output = tmp_path / str(number) / "output"
        output.parent.mkdir()
        code = convert_until(source, output, number, method="collage")
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if output.exists():  # killed after the rename that publishes: only our journal is left to delete
            assert files_of(output, without={*REPORTS, "journal.jsonl"}) == expected
        assert convert_until(source, output, method="collage", resume=True) == 0
        assert files_of(output) == expected, f"killed at call {number}"
    assert number > 40, "the calls are counted"


def test_killed_while_replacing_an_output(tmp_path: Path, convert_until: Callable[..., int]) -> None:
    """At every moment one of the two outputs is there, whole: under its name, or for an instant beside it."""
    source = write_checkpoint(tmp_path / "source")
    old, new = tmp_path / "old", tmp_path / "new"
    assert convert_until(source, old, format="bf16") == 0
    assert convert_until(source, new) == 0
    whole = [files_of(old), files_of(new)]
    for number in range(1, 1000):  # all of them: only one lies between the two renames
        output = tmp_path / str(number) / "output"
        shutil.copytree(old, output)
        if convert_until(source, output, number, force=True) == 0:
            break
        kept = output if output.exists() else output.with_name("output.replaced")
        assert files_of(kept, without={*REPORTS, "journal.jsonl"}) in whole, f"killed at call {number}"
    assert number > 20, "the calls are counted"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_run_and_name_resume(
    tmp_path: Path,
    source: Path,
    expected: dict[str, bytes],
    fork: Callable[..., ForkServerProcess],
    start: Start,
    number: signal.Signals,
    code: int,
) -> None:
    output, said = tmp_path / "output", tmp_path / "said"
    process = fork(command_line, [*arguments(source, output), "--json"], said)
    wait_for_lines(output, 3, process.is_alive)
    assert process.pid is not None
    os.kill(process.pid, number)
    ended = exit_code(process)
    err = said.with_suffix(".err").read_text()
    assert ended == code, err
    assert "--resume" in err
    assert "Traceback" not in err
    assert json.loads(said.with_suffix(".out").read_text())["error"]["code"] == code
    assert not published(output)
    finished = journal_lines(output) - 1
    assert 0 < finished < NUM_SHARDS
    assert exit_code(start(*arguments(source, output, "--resume"))) == 0
    assert files_of(output) == expected


def test_two_runs_on_one_output(tmp_path: Path, source: Path, expected: dict[str, bytes], start: Start) -> None:
    output = tmp_path / "output"
    first = start(*arguments(source, output))
    wait_for_lines(output, 2, first.is_alive)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    for more in ((), ("--resume",), ("--force",)):
        assert exit_code(start(*arguments(source, output, *more))) == 8
    os.kill(first.pid, signal.SIGCONT)
    assert exit_code(first) == 0
    assert files_of(output) == expected


def test_a_finished_output_is_complete(tmp_path: Path, start: Start) -> None:
    source, output = write_checkpoint(tmp_path / "source"), tmp_path / "output"
    assert exit_code(start(*arguments(source, output))) == 0
    before = files_of(output, without=set())
    (output / "journal.jsonl").write_text("{}\n")  # killed just after the rename
    assert exit_code(start(*arguments(source, output, "--resume"))) == 0
    assert files_of(output, without=set()) == before
    assert exit_code(start(*arguments(source, output))) == 8


@pytest.mark.parametrize("change", ["weights", "config", "options"])
def test_another_source_or_other_options_do_not_resume(
    tmp_path: Path, convert_until: Callable[..., int], start: Start, change: str
) -> None:
    source = write_checkpoint(tmp_path / "source", [{f"{i}.weight": torch.ones(4, 4)} for i in range(3)])
    output = tmp_path / "output"
    assert convert_until(source, output, 44) == -signal.SIGKILL  # between the first and the second file
    assert journal_lines(output) > 1
    if change == "weights":
        write_checkpoint(source, [{f"{i}.weight": torch.zeros(4, 4)} for i in range(3)])
    elif change == "config":
        (source / "config.json").write_text('{"x": 1}')
    more = ["--format", "bf16"] if change == "options" else []
    assert exit_code(start(*arguments(source, output, *more, "--resume"))) == 8
    assert not published(output)
    assert exit_code(start(*arguments(source, output, *more, "--force"))) == 0
