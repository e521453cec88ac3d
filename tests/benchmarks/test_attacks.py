"""`benchmarks/attack/fuzz.py` and `limits.py` by a slice of what they try, and what they take for a fault."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.attack.edits import edit_all
from benchmarks.attack.forked import Ended
from benchmarks.attack.fuzz import fault_of, is_finished
from benchmarks.attack.fuzz_inputs import damaged_checkpoint
from benchmarks.attack.fuzz_material import make_llama
from benchmarks.attack.limits import run_in
from benchmarks.attack.planted_faults import FAULTS, ROOT, place_of
from benchmarks.attack.publishing import kill_at_publishing
from lpconv.cli.main import app

ERROR = json.dumps({"error": {"code": 3}})


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_llama(folder / "llama")
    return folder


@pytest.mark.parametrize("files", [["config.json"], ["*.safetensors"]], ids=str)
def test_a_slice_of_the_fuzz(files: list[str], material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = damaged_checkpoint("llama", files=files, only=["convert", "inspect"])
    for number in range(15):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        trial = attack(random.Random(number), material, folder)
        done = CliRunner().invoke(app, list(trial.arguments))
        ended = Ended(code=done.exit_code, out=done.stdout, err=done.stderr)
        assert fault_of(trial.arguments, ended) is None, (trial, ended)
        assert ended.code == 0 or not any(map(is_finished, trial.outputs)), trial


@pytest.mark.parametrize(
    ("arguments", "ended", "fault"),
    [
        ((), Ended(code=0, out="", err=""), None),
        ((), Ended(code=3, out="", err="error: a\nhint: b\n"), None),
        (("doctor", "--json"), Ended(code=3, out=ERROR, err="error: a\nhint: b\n"), None),
        (("doctor", "--require", "--json"), Ended(code=2, out="", err="error: a\nhint: b\n"), None),
        ((), Ended(code=1, out="", err="error: a\nhint: b\n"), "exit 1"),
        ((), Ended(code=3, out="", err="Traceback (most recent call last)\nerror: a\nhint: b\n"), "traceback"),
        ((), Ended(code=3, out="", err="error: a\n"), "hint"),
        ((), Ended(code=-11, out="", err=""), "signal 11"),
        ((), Ended(code=-14, out="", err=""), "slow"),
        (("doctor", "--json"), Ended(code=3, out="", err="error: a\nhint: b\n"), "no JSON"),
        (("doctor", "--json"), Ended(code=4, out=ERROR, err="error: a\nhint: b\n"), "code"),
    ],
)
def test_what_is_a_fault(arguments: tuple[str, ...], ended: Ended, fault: str | None) -> None:
    found = fault_of(arguments, ended)
    assert found == fault or (fault is not None and fault in str(found))


@pytest.mark.parametrize("command", ["probe", "finetune", "export onnx", "bench"])
def test_a_small_container_is_refused_before_anything_is_imported(command: str, tmp_path: Path) -> None:
    more = () if command == "bench" else ("-o", "out")
    run = run_in(250_000_000, (*command.split(), "demo", *more), cwd=tmp_path)
    assert (run.outcome, run.code) == ("refused", 7), run
    assert not (tmp_path / "out").exists()


def test_a_slice_of_the_edits_is_seen(tmp_path: Path) -> None:
    found = edit_all(range(4), 1, tmp_path)
    assert {e.outcome for e in found} <= {"refused", "reported"}, found


def test_publishing_kills_each_case_at_least_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.attack.publishing.forked", lambda run: Ended(code=0, out="", err=""))
    monkeypatch.setattr("benchmarks.attack.publishing._state", lambda command, folder: [])
    (tmp_path / "material" / "nvfp4").mkdir(parents=True)
    moments = kill_at_publishing("decode", 1, tmp_path / "material", tmp_path)
    assert [m.is_replaced for m in moments] == [False, True]


def test_every_fault_has_a_place_and_tests() -> None:
    for fault in FAULTS.values():
        assert place_of(fault, ROOT).is_file()
        assert all((ROOT / test).exists() for test in fault.tests), fault
