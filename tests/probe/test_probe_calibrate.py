"""`lpconv probe --calibrate`: scales from data, kept beside a checkpoint and used when it is opened again."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.formats.scale import rms
from lpconv.plan.options import ConvertOptions
from lpconv.scaled import apply_factors, read_factors, scaled


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")


def test_calibrated_scales_of_a_checkpoint_give_unit_data_at_every_edge(tmp_path: Path) -> None:
    words = ["probe", "demo", "--calibrate", "--steps", "2", "--batch-size", "2", "--seq-len", "32"]
    result = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "calibration.json" in result.output

    model = transformers.AutoModelForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32)
    ids = torch.randint(32, 120, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids).logits
    ours = scaled(model)
    apply_factors(ours, read_factors(tmp_path / "out"))
    sizes: dict[str, float] = {}
    for name, module in ours.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, __, out, n=name: sizes.__setitem__(n, float(rms(out.data_part))))

    assert torch.equal(ours(input_ids=ids).logits, expected)
    assert len(sizes) == 29  # seven in each of four layers, and the head
    assert all(0.2 < size < 5 for size in sizes.values()), sizes


def test_a_conversion_takes_the_calibration_of_its_source_along(tmp_path: Path) -> None:
    source = shutil.copytree(demo_checkpoint(), tmp_path / "source")
    (source / "calibration.json").write_text('{"kind": "calibration", "exponents": {"lm_head": [1, -2]}}')

    convert(str(source), tmp_path / "out", ConvertOptions(verify="none"))

    assert read_factors(tmp_path / "out") == read_factors(source)
