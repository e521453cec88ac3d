"""The GitHub Action and the pre-commit hook run `lpconv inspect --strict`; the citation names this version."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lpconv
from lpconv.data import demo_checkpoint

ROOT = Path(__file__).parent.parent
ACTION = ROOT / ".github" / "actions" / "inspect"


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint whose last bytes are missing."""
    shutil.copytree(demo_checkpoint(), tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    return tmp_path / "damaged"


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in which `lpconv` is the one under test."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_action_inspects_each_model(damaged: Path) -> None:
    action = parsed(ACTION / "action.yml")
    install, inspect = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" for step in (install, inspect))
    given = set(re.findall(r"inputs\.(\w+)", str(action["runs"])))
    assert given == set(action["inputs"])
    (folder,) = re.findall(r'"\$GITHUB_ACTION_PATH/(.*)"', install["run"])
    assert (ACTION / folder).resolve() == ROOT

    def step(models: str, options: str = "") -> subprocess.CompletedProcess[str]:
        return run(["bash", "-e", "-c", inspect["run"]], MODELS=models, OPTIONS=options)

    good = step(f"{demo_checkpoint()}\n\n", "--all")
    assert good.returncode == 0, good.stderr
    assert "lm_head" in good.stdout or "embed_tokens" in good.stdout
    bad = step(f"{damaged}\n{demo_checkpoint()}\n")
    assert bad.returncode in (3, 5)
    assert "damaged" in bad.stderr
    assert "demo" in bad.stdout  # the second one is inspected all the same


def test_the_hook_inspects_the_checkpoint_of_its_arguments(damaged: Path) -> None:
    (hook,) = parsed(ROOT / ".pre-commit-hooks.yaml")
    assert (hook["language"], hook["pass_filenames"]) == ("python", False)
    for folder, codes in ((demo_checkpoint(), (0,)), (damaged, (3, 5))):
        done = run([*shlex.split(hook["entry"]), str(folder)])
        assert done.returncode in codes, done.stderr
    names = ("m/model.safetensors", "m/model.safetensors.index.json", "config.json", "a/config.json", "m.gguf")
    assert all(re.search(hook["files"], name) for name in names)
    assert not re.search(hook["files"], "docs/myconfig.json")


def test_the_citation_names_this_version_and_every_paper() -> None:
    citation = parsed(ROOT / ".github" / "CITATION.cff")
    assert citation["version"] == lpconv.__version__
    assert all(r["authors"] and r["title"] and r["year"] for r in citation["references"])
    cited = {i["value"].removeprefix("arXiv:") for r in citation["references"] for i in r["identifiers"]}
    headings = re.findall(r"^## .*arXiv ([\d.]+)\)", (ROOT / "docs" / "seeds.md").read_text(), flags=re.MULTILINE)
    assert set(headings) <= cited


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / ".github" / name).read_text(encoding="utf-8"))
    assert links
    assert all((ROOT / ".github" / link).exists() for link in links)
