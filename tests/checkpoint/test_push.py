"""Outputs are sent to a hub whole, in one commit, and only if they were verified and still are what they were."""

import json
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, serving
from huggingface_hub import constants
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert

REPO = "me/demo-fp8"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("push") / "out"
    convert("demo", output, ConvertOptions(format="e4m3fn", verify="weights"))
    return output


@pytest.fixture
def output(made: Path, tmp_path: Path) -> Path:
    """The files of an output, to be changed."""
    copy = tmp_path / "out"
    copy.mkdir()
    for path in made.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def pushed(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["push", *arguments])


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # how the hub's client uploads
def test_all_that_is_listed_goes_in_one_commit(made: Path, online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(REPO, {}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        said = pushed(str(made), REPO, "--json", "-q")
    assert said.exit_code == 0, said.stderr
    (commit,) = hub.commits
    message = commit.pop("")
    assert message == b"Add demo in e4m3fn, by lpconv unit"
    sums = (made / "SHA256SUMS").read_text().split()[1::2]
    assert commit == {name: (made / name).read_bytes() for name in (*sums, "SHA256SUMS")}
    assert "README.md" in commit
    assert not {"report.json", "report.html"} & commit.keys()
    result = json.loads(said.stdout)
    assert (result["commit"], result["level"]) == (COMMIT, "weights")
    assert "hf_of_a_test" not in said.stdout + said.stderr


def test_a_dry_run_asks_nobody(made: Path) -> None:
    said = pushed(str(made), REPO, "--dry-run")
    assert said.exit_code == 0, said.stderr
    assert "model.safetensors" in said.stdout
    assert "a dry run" in said.stdout


def test_weights_of_another_checkpoint_stop_it(made: Path, online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(REPO, {"model-00001-of-00002.safetensors": b"x", "model.safetensors": b"y"}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        said = pushed(str(made), REPO)
    assert said.exit_code == 8
    assert "model-00001-of-00002.safetensors" in said.stderr
    assert not hub.commits


def test_a_hub_that_refuses_is_said_to(made: Path, online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(REPO, {}, commit="gated") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        said = pushed(str(made), REPO)
    assert said.exit_code == 3
    assert "nothing was committed" in said.stderr
    assert "hf auth login" in said.stderr
    assert not hub.commits


def changed(output: Path, damage: str) -> Path:
    if damage == "weights":
        data = bytearray((output / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (output / "model.safetensors").write_bytes(data)
    elif damage == "outside":
        (output.parent / "secret").write_text("x")
        sums = (output / "SHA256SUMS").read_text()
        digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of x
        (output / "SHA256SUMS").write_text(f"{sums}{digest}  ../secret\n")
    elif damage == "failed":
        return output.rename(output.with_name("out.failed"))
    elif damage == "unverified":
        path = output / "lpconv.json"
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, "verify": {"level": "none", "passed": True}}))
    elif damage == "plain":
        (output / "lpconv.json").unlink()
    return output


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        ("weights", 5, "do not match"), ("outside", 3, "lies elsewhere"), ("failed", 4, "was not published"),
        ("unverified", 5, "was not verified"), ("plain", 3, "lpconv.json"),
    ],
)  # fmt: skip
def test_what_is_not_sent(output: Path, damage: str, code: int, words: str) -> None:
    said = pushed(str(changed(output, damage)), REPO, "--dry-run")
    assert said.exit_code == code, said.stderr
    assert words in said.stderr


@pytest.mark.parametrize("name", ["demo-fp8", "a/b/c", "me/de mo"])
def test_names_that_no_repository_has(made: Path, name: str) -> None:
    assert pushed(str(made), name, "--dry-run").exit_code == 2


def test_offline_nothing_is_sent(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = pushed(str(made), REPO)
    assert said.exit_code == 3
    assert "--dry-run" in said.stderr


def test_the_list_is_read_once(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is what was hashed, even if the list changes meanwhile."""
    read, count = Path.read_bytes, []

    def watched(path: Path) -> bytes:
        count.append(path.name == "SHA256SUMS")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", watched)
    assert pushed(str(made), REPO, "--dry-run").exit_code == 0
    assert sum(count) == 1
