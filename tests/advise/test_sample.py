"""The noise of a sample of the weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lpconv.convert import apply
from lpconv.plan.job import open_model, prepare
from lpconv.plan.options import ConvertOptions
from lpconv.plan.settings import fill_options
from lpconv.storage.source import Source, read_range


def folder_of(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def noise(model: str, **settings: Any) -> float:
    options = fill_options(ConvertOptions(**({"format": "e4m3fn"} | settings), verify="none"))
    job = prepare(open_model(model, "out", options), "out", options, headers_only=True)
    try:
        return apply.noise_of_sample(job, elements=2**13)
    finally:
        job.source.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "multipoint", "format": "int4", "budget_bits": 6.0},
        {"method": "multipoint", "format": "int8", "budget_bits": 8.5},
        {"method": "unit", "format": "int4", "granularity": "group:128"},
        {"method": "unit", "format": "e4m3fn", "granularity": "128x128"},
    ],
)
def test_the_sample_is_within_1_db_of_all_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of rows that differ, with outliers, as long as those of BERT's MLP, of which 2**13 elements are two."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 3072, generator=generator) * torch.randn(256, 1, generator=generator).mul(0.4).exp()
    x.view(-1)[torch.randint(x.numel(), (40,), generator=generator)] *= 8
    model = folder_of(tmp_path / "model", {"a.weight": x})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "_MIN_ROWS", 256)
        exact = noise(model, **settings)
    assert 10 * abs(math.log10(noise(model, **settings) / exact)) < 1


def test_two_tensors_stand_for_all_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    many = {f"layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(8)}
    other = {"wide.weight": torch.randn(64, 128, generator=generator)}
    looked_at: list[str] = []

    def read(source: Source, name: str, start: int, stop: int) -> torch.Tensor:
        looked_at.append(name)
        return read_range(source, name, start, stop)

    monkeypatch.setattr(apply, "read_range", read)
    both = noise(folder_of(tmp_path / "both", many | other))
    assert sorted(looked_at) == ["layers.2.weight", "layers.6.weight", "wide.weight"]
    alone = [
        noise(folder_of(tmp_path / str(i), {"a.weight": x})) for i, x in enumerate([*many.values(), *other.values()])
    ]
    assert both == pytest.approx((4096 * sum(alone[:8]) + 8192 * alone[8]) / (8 * 4096 + 8192), rel=0.02)
