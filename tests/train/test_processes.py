"""Two processes train what one does."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from lpconv.errors import InputError, UsageError
from lpconv.results import RunRecord, from_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import read_json
from lpconv.train.job import training_job
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune
from tests.helpers.ranks import on_ranks
from tests.train.processes_worker import CASES, FAMILIES, model_of, options, train_each
from tests.train.test_tasks import write_model


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes trained, by case, and the gradients that each of them averaged."""
    out = tmp_path_factory.mktemp("two")
    for kind in sorted({kind for kind, _, _ in FAMILIES.values()}):
        _write_without_dropout(out / "models", kind)
    on_ranks(2, train_each, out, has_group=False)
    return out


def _write_without_dropout(folder: Path, kind: str) -> None:
    """A model, which without dropout computes alike on any number of processes, and its data."""
    config = write_model(folder / kind, kind) / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({k: 0.0 if "drop" in k else v for k, v in settings.items()}))
    table = [
        {"text": f"say {i} " * (i % 5 + 1), "label": "ab"[i % 2] * (1 if kind == "bert" else i % 7 + 1)}
        for i in range(80)
    ]
    (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))


@pytest.mark.parametrize("case", FAMILIES)
def test_families_have_one_objective_on_one_process_and_on_two(
    case: str, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many classes return a mean where Trainer expects a part of the sum over processes, and lengths differ."""
    monkeypatch.chdir(two)
    one = finetune(model_of(case), tmp_path / "one", options(case, is_alone=True)).runs[0]
    run = from_json(RunRecord, read_json(two / case / "report.json")["runs"][0])
    assert run.losses.values == pytest.approx(one.losses.values, rel=5e-6)
    assert len(run.evaluations) >= 2
    for ours, theirs in zip(run.evaluations, one.evaluations, strict=True):
        assert ours.name == theirs.name
        assert ours.values == pytest.approx(theirs.values, rel=5e-6)
    assert [sum(e.sizes) for e in run.held_out] == [sum(e.sizes) for e in one.held_out]
    rows = [(folder / "metrics.jsonl").read_text().splitlines()[1:] for folder in (two / case, tmp_path / "one")]
    norms = [[json.loads(row)["grad_norm"] for row in part] for part in rows]
    assert norms[0] == pytest.approx(norms[1], rel=5e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_losses_of_one(case: str, two: Path, tmp_path: Path) -> None:
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
