"""Batches with what really does the work: what is done is up to date, and the same bytes come out again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lpconv.batch.lock import read_lock
from lpconv.batch.manifest import Manifest, load_manifest
from lpconv.batch.options import BatchOptions
from lpconv.batch.run import run_batch
from lpconv.batch.runners import RUNNERS
from lpconv.bench.options import BenchOptions
from lpconv.bench.outcome import read_bench
from lpconv.convert.run import convert
from lpconv.errors import OutputExistsError, VerificationError
from lpconv.plan.options import ConvertOptions
from lpconv.results import BenchResult
from lpconv.results.batch import UP_TO_DATE
from lpconv.storage.contents import read_json
from tests.helpers.checkpoints import files_of


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    torch.manual_seed(0)
    for name, dtype in (("model", torch.float32), ("narrow", torch.bfloat16)):
        (tmp_path / name).mkdir()
        weights = {"a.weight": torch.randn(64, 32, dtype=dtype), "a.bias": torch.randn(64, dtype=dtype)}
        save_file(weights, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    jobs = [
        {"id": "fp8", "model": "./model", "format": "e4m3fn", "gates": "sqnr>=25"},
        {"id": "pair", "model": "./model", "method": "collage", "verify": "weights"},
        {"id": "usual", "model": "./narrow"},
        {"id": "groups", "model": "./narrow", "format": "int4"},
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"version": 1, "defaults": {"workers": 1}, "jobs": jobs}))
    return load_manifest(path)


def test_a_batch_runs_resumes_and_repeats_itself(manifest: Manifest) -> None:
    first = run_batch(manifest, RUNNERS)
    assert [job.status for job in first.jobs] == ["converted"] * 4
    again = run_batch(manifest, RUNNERS, BatchOptions(resume=True))
    assert [job.status for job in again.jobs] == [UP_TO_DATE] * 4
    for name, options in (("usual", ConvertOptions()), ("groups", ConvertOptions(format="int4"))):
        convert(str(manifest.folder / "narrow"), manifest.folder / name, options)
        ours, theirs = (read_json(manifest.folder / f / "lpconv.json") for f in (f"out/{name}", name))
        assert [ours[key] for key in ("options", "files")] == [theirs[key] for key in ("options", "files")]
    (manifest.folder / "out").rename(manifest.folder / "elsewhere")
    locked = run_batch(manifest, RUNNERS, BatchOptions(locked=True))
    assert [job.status for job in locked.jobs] == ["converted"] * 4


def test_an_output_without_an_entry_is_taken_over(manifest: Manifest) -> None:
    """Of a run that was killed after publishing. What another command made is refused, and named."""
    run_batch(manifest, RUNNERS)
    known, written = read_lock(manifest.lock_path), files_of(manifest.folder / "out")
    manifest.lock_path.unlink()
    assert [job.status for job in run_batch(manifest, RUNNERS, BatchOptions(resume=True)).jobs] == ["converted"] * 4
    assert read_lock(manifest.lock_path) == known
    assert files_of(manifest.folder / "out") == written

    manifest.lock_path.unlink()
    manifest.path.write_text(manifest.path.read_text().replace("e4m3fn", "e5m2"))
    with pytest.raises(OutputExistsError, match=r"`.*options"):
        run_batch(load_manifest(manifest.path), RUNNERS, BatchOptions(resume=True))


def write(folder: Path, *jobs: dict[str, Any]) -> Manifest:
    path = folder / "mixed.json"
    path.write_text(json.dumps({"version": 1, "jobs": list(jobs)}))
    return load_manifest(path)


def test_a_fine_tuning_of_a_conversion_is_gated_and_judged_again_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    converted = {"id": "fp8", "model": "demo", "format": "e4m3fn", "verify": "none"}
    tuned = {"id": "tuned", "kind": "finetune", "model": "job:fp8", "recipe": "fp32", "twin": "none", "steps": 1,
             "batch_size": 2, "seq_len": 32, "eval_batches": 1}  # fmt: skip
    with pytest.raises(VerificationError, match="loss<=0"):
        run_batch(write(tmp_path, converted, tuned | {"gates": "loss<=0"}), RUNNERS)
    rows = (tmp_path / "out/tuned/metrics.jsonl").stat().st_mtime_ns
    result = run_batch(write(tmp_path, converted, tuned | {"gates": "loss<=9"}), RUNNERS, BatchOptions(resume=True))
    assert [job.status for job in result.jobs] == [UP_TO_DATE, "trained"]
    assert 0 < result.jobs[1].figures["loss"] < 9
    assert (tmp_path / "out/tuned/metrics.jsonl").stat().st_mtime_ns == rows
    again = run_batch(write(tmp_path, converted, tuned | {"gates": "loss<=9"}), RUNNERS, BatchOptions(resume=True))
    assert [job.status for job in again.jobs] == [UP_TO_DATE] * 2


def test_a_bench_writes_its_rows_and_does_not_replace_them_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BenchOptions] = []

    def measure(options: BenchOptions, **kwargs: object) -> BenchResult:
        asked.append(options)
        return BenchResult(rows=())

    monkeypatch.setattr("lpconv.batch.runners.bench", measure)
    manifest = write(tmp_path, {"id": "speed", "kind": "bench", "model": "bert-base", "batch": [1, 8], "rounds": 2})
    assert [job.status for job in run_batch(manifest, RUNNERS).jobs] == ["measured"]
    assert (asked[0].model, asked[0].batches, asked[0].effort.rounds) == ("bert-base", (1, 8), 2)
    assert read_bench(tmp_path / "out/speed/bench.json").rows == ()
    with pytest.raises(OutputExistsError, match=r"bench\.json` exists"):
        run_batch(manifest, RUNNERS)
