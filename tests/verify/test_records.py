"""Records are claims: what verification cannot compute again it bounds, or lists."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.errors import InputError
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.results import VerifyResult
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import check_hashes, verify_output
from tests.helpers.checkpoints import files_of
from tests.helpers.models import tiny

GATE = "model.layers.0.mlp.gate_proj.weight"


def verified(output: Path, source: Path | str, **options: Any) -> VerifyResult:
    return verify_output(output, VerifyOptions(against=str(source), **options), progress=Silent())


@pytest.fixture
def faint(tmp_path: Path) -> Path:
    """A Llama whose gate is far smaller than the weight that NVFP4 shares a scale with."""
    source = tiny("llama", tmp_path / "source", hidden_size=64, intermediate_size=192)
    tensors = load_file(source / "model.safetensors")
    tensors[GATE] *= 1e-20
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_a_tensor_of_zeros_is_named(faint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = convert(str(faint), output, ConvertOptions(scheme="NVFP4A16", verify="weights"))
    codes = load_file(output / "model.safetensors")[f"{GATE}_packed"]
    assert not (codes & 0x77).any()  # two signs and eight bits of zero
    for warnings in (result.warnings, verified(output, faint).warnings, verified(output, faint, level="hash").warnings):
        assert [w for w in warnings if f"`{GATE}`" in w and "became 0" in w]
    said = CliRunner().invoke(app, ["verify", str(output), "--against", str(faint), "--level", "weights"])
    assert said.exit_code == 0
    assert "with 1 warning" in said.stdout
    assert GATE in "".join(said.stdout.split())
    for page in ("README.md", "report.html"):
        assert "signal" in (output / page).read_text()
    assert not verified(output, faint, gates=("sqnr>=10",)).passed


def test_files_that_are_not_listed_are_found_but_for_those_of_the_hub(tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert("demo", output, ConvertOptions(verify="none"))
    (output / ".cache").mkdir()
    (output / ".cache" / "lock").write_text("of the hub")
    assert not check_hashes(output, Silent()).mismatched
    (output / "notes.txt").write_text("x")
    (output / "custom_generate").symlink_to(tmp_path)
    assert check_hashes(output, Silent()).mismatched == ("custom_generate", "notes.txt")


def test_recorded_weights_that_are_neither_there_nor_listed(tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert("demo", output, ConvertOptions(verify="none"))
    (output / "model.safetensors").unlink()
    sums = (output / "SHA256SUMS").read_text().splitlines(keepends=True)
    (output / "SHA256SUMS").write_text("".join(line for line in sums if "model.safetensors" not in line))
    with pytest.raises(InputError, match="weights"):
        verify_output(output, VerifyOptions(), progress=Silent())


@pytest.mark.parametrize("change", ["gone", "another text"])
def test_figures_of_a_text_that_is_not_here_are_listed(tmp_path: Path, change: str) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("To be, or not to be, that is the question. " * 4)
    options = ConvertOptions(format="e4m3fn", layout="compressed-tensors", calibrate=str(text), verify="weights")
    convert("demo", output, options)
    before = files_of(output)
    found = verified(output, "demo")
    assert found.feedback is not None
    assert (found.feedback.num_scales, found.warnings) == (28, ())
    text.unlink() if change == "gone" else text.write_text("Another text. " * 16)
    found = verified(output, "demo")
    assert found.passed
    (warning,) = found.warnings
    assert "`text.txt`" in warning
    assert files_of(output) == before


def test_a_restored_or_resumed_output_has_no_files_of_others(tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert("demo", output, ConvertOptions(verify="none"))
    shutil.copyfile(output / "config.json", output / "adapter_config.json")
    said = CliRunner().invoke(app, ["restore", str(output), "-o", str(tmp_path / "plain")])
    assert said.exit_code == 3
    assert "adapter_config.json" in said.stderr
