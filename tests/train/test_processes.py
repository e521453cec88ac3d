"""Two processes that torchrun starts train what one does."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import cli_environment
from processes_worker import CASES, options

from lpconv.errors import InputError, UsageError
from lpconv.results import RunRecord, from_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import read_json
from lpconv.train.job import training_job
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes trained, by case, and the gradients that each of them averaged."""
    out = tmp_path_factory.mktemp("two")
    worker = str(Path(__file__).with_name("processes_worker.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker, str(out)]
    environment = cli_environment(LPCONV_COMPILE="never")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_losses_of_one(
    case: str, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    torch.set_num_threads(1)
    one = finetune("demo", tmp_path / "one", options(case)).runs[0]
    run = from_json(RunRecord, read_json(two / case / "report.json")["runs"][0])
    tolerance = CASES[case][1]
    assert run.losses.values == pytest.approx(one.losses.values, rel=tolerance)
    assert run.evaluations[0].values == pytest.approx(one.evaluations[0].values, rel=tolerance)
    assert len((two / case / "metrics.jsonl").read_text().splitlines()) == 3  # before training, and two steps


def test_gradients_are_averaged_in_fp32_and_at_the_larger_scale(two: Path) -> None:
    first, second = (torch.load(two / f"averaged{rank}.pt") for rank in (0, 1))
    for (data, scale), (other, other_scale) in zip(first, second, strict=True):
        assert torch.equal(data, other)
        assert scale == other_scale
    (plain, _), (half, _), (scaled, scale), (static, static_scale) = first
    assert plain.tolist() == [1.5, 4.5]
    assert half.tolist() == [128.0]  # 128.5 in bf16, rounded once
    assert scale == 2.0**20
    assert scaled.tolist() == [0.5, 1.0]  # what 2^-40 of them adds is lost in fp16
    assert (static * static_scale).tolist() == [2.5, 5.0]


def test_a_step_must_divide_among_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.train.job.num_processes", lambda: 2)
    with pytest.raises(UsageError, match=r"--batch-size 3 .* 2 "):
        finetune("demo", tmp_path / "run", FinetuneOptions(arithmetic=arithmetic(recipe="fp32"), batch_size=3))


def test_no_held_out_example_counts_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last batch that processes do not share evenly would be filled with examples of the first."""
    asked = FinetuneOptions(arithmetic=arithmetic(recipe="fp32"), seq_len=256, eval_batches=1000, batch_size=4)
    checkpoint = Checkpoint.open("demo")
    assert len(training_job(checkpoint, asked).stream(0, held_out=True)) == 375
    monkeypatch.setattr("lpconv.train.job.num_processes", lambda: 2)
    assert len(training_job(checkpoint, asked).stream(0, held_out=True)) == 372
    (tmp_path / "short.txt").write_text("To be, or not to be. " * 100)
    with pytest.raises(InputError, match=r" 4 .* 2 "):
        training_job(checkpoint, dataclasses.replace(asked, data=str(tmp_path / "short.txt"), seq_len=128))
