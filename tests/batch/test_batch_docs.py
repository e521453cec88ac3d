"""The page about batches says what the code does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lpconv
from lpconv.batch.kinds import KINDS
from lpconv.batch.manifest import load_manifest
from lpconv.batch.reading import manifest_schema

PAGE = Path(lpconv.__file__).parent.parent / "docs" / "batch.md"


@pytest.fixture(scope="module")
def page() -> str:
    if not PAGE.exists():
        pytest.skip("an installed lpconv has no docs")
    return PAGE.read_text(encoding="utf-8")


def test_both_manifests_load_and_are_the_same(page: str, tmp_path: Path) -> None:
    manifests = []
    for language in ("yaml", "toml"):
        found = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
        assert found is not None
        path = tmp_path / f"jobs.{language}"
        path.write_text(found[1], encoding="utf-8")
        manifests.append(load_manifest(path))
    assert manifests[0].jobs == manifests[1].jobs
    assert [job.id for job in manifests[0].jobs] == ["bert-fp8", "llama-collage"]


def test_the_manifest_of_all_kinds_loads(page: str, tmp_path: Path) -> None:
    found = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    path = tmp_path / "jobs.yaml"
    path.write_text(found, encoding="utf-8")
    jobs = load_manifest(path).jobs
    assert {job.kind for job in jobs} == KINDS.keys()
    assert jobs[2].model == str(jobs[0].output)


def test_the_schema_command_runs(page: str) -> None:
    assert "`lpconv batch --schema`" in page
    command = [sys.executable, "-m", "lpconv", "batch", "--schema"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == manifest_schema()
