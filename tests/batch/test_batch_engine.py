"""A batch with the real converter: what is published is up to date, and the same bytes come out again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lpconv.batch.manifest import Manifest, load_manifest
from lpconv.batch.run import run_batch
from lpconv.batch.runners import RUNNERS
from lpconv.errors import VerificationError


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    model = tmp_path / "model"
    model.mkdir()
    torch.manual_seed(0)
    save_file({"a.weight": torch.randn(64, 32), "a.bias": torch.randn(64)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    jobs = [
        {"id": "fp8", "model": "./model", "format": "e4m3fn", "gates": "sqnr>=25"},
        {"id": "pair", "model": "./model", "method": "collage", "verify": "weights"},
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"version": 1, "defaults": {"workers": 1}, "jobs": jobs}))
    return load_manifest(path)


def test_a_batch_runs_resumes_and_repeats_itself(manifest: Manifest) -> None:
    first = run_batch(manifest, RUNNERS)
    assert [job.status for job in first.jobs] == ["converted"] * 2
    again = run_batch(manifest, RUNNERS, resume=True)
    assert [job.status for job in again.jobs] == ["up to date"] * 2
    (manifest.folder / "out").rename(manifest.folder / "elsewhere")
    locked = run_batch(manifest, RUNNERS, locked=True)
    assert [job.status for job in locked.jobs] == ["converted"] * 2


def test_a_dry_run_tells_what_the_real_one_writes(manifest: Manifest) -> None:
    planned = run_batch(manifest, RUNNERS, dry_run=True)
    done = run_batch(manifest, RUNNERS)
    assert [job.bytes for job in planned.jobs] == [job.bytes for job in done.jobs]


def test_a_gate_that_fails_publishes_nothing(manifest: Manifest) -> None:
    text = manifest.path.read_text().replace("sqnr>=25", "sqnr>=99")
    manifest.path.write_text(text)
    with pytest.raises(VerificationError, match="sqnr>=99"):
        run_batch(load_manifest(manifest.path), RUNNERS)
    assert not (manifest.folder / "out/fp8").exists()
