"""`--calibrate self`: text that the model writes, next to the output."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert, plan
from lpconv.data import demo_checkpoint
from lpconv.errors import OutputExistsError, UnsupportedError
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.models import minilm

OPTIONS = ConvertOptions(
    format="int4", granularity="group:32", rounding="gptq", calibrate="self", calibration_tokens=256, verify="weights"
)


class Counted(Silent):
    def __init__(self) -> None:
        self.phases: dict[str, list[int]] = {}

    def start(self, phase: str, total: int, **_: Any) -> None:
        self.counts = self.phases[phase] = [total, 0]

    def advance(self, amount: int, figures: str = "") -> None:
        self.counts[1] += amount


def test_the_text_is_kept_and_another_run_writes_the_same(tmp_path: Path) -> None:
    outputs, progress = [tmp_path / name for name in "ab"], Counted()
    for output in outputs:
        convert("demo", output, OPTIONS, progress=progress)
    text, again = (output.with_name(f"{output.name}.calibration.txt").read_text() for output in outputs)
    assert text == again
    assert len(text.encode()) > 256
    assert len(set(text)) > 20
    weights = [(output / "model.safetensors").read_bytes() for output in outputs]
    assert weights[0] == weights[1]
    assert next(iter(progress.phases.values())) == [512, 512]  # tokens
    result = verify_output(
        outputs[0], VerifyOptions(level="weights", against=str(demo_checkpoint())), progress=Silent()
    )
    assert result.passed


def test_another_seed_writes_another_text(tmp_path: Path) -> None:
    for seed in (0, 1):
        convert("demo", tmp_path / str(seed), replace(OPTIONS, calibration_seed=seed))
    assert (tmp_path / "0.calibration.txt").read_text() != (tmp_path / "1.calibration.txt").read_text()


def test_a_file_of_that_name_is_used_with_resume_and_replaced_with_force(tmp_path: Path) -> None:
    text, words = tmp_path / "out.calibration.txt", "\n".join(map(str, range(500)))
    text.write_text(words)
    with pytest.raises(OutputExistsError, match=r"out\.calibration\.txt"):
        convert("demo", tmp_path / "out", OPTIONS)
    convert("demo", tmp_path / "out", replace(OPTIONS, resume=True))
    assert text.read_text() == words
    convert("demo", tmp_path / "out", replace(OPTIONS, force=True))
    assert text.read_text() != words


def test_a_finished_run_is_resumed_without_writing(tmp_path: Path) -> None:
    convert("demo", tmp_path / "out", OPTIONS)
    written = (tmp_path / "out.calibration.txt").stat().st_mtime_ns
    convert("demo", tmp_path / "out", replace(OPTIONS, resume=True))
    assert (tmp_path / "out.calibration.txt").stat().st_mtime_ns == written


def test_an_encoder_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="BertModel"):
        convert(str(minilm()), tmp_path / "out", OPTIONS)
    assert not [*tmp_path.iterdir()]


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    plan("demo", tmp_path / "out", OPTIONS)
    assert not [*tmp_path.iterdir()]


def test_the_command_names_the_text_that_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["convert", "demo", "--scheme", "NVFP4", "--calibrate", "self", "--calibration-tokens", "256",
             "--rounding", "gptq", "-o", "out"]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "out.calibration.txt" in result.output + result.stderr
