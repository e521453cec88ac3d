"""The noise of a sample of the weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lpconv.checkpoint.source import Source, read_range
from lpconv.convert import preview
from lpconv.convert.job import prepare
from lpconv.convert.options import ConvertOptions


def folder_of(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def noise(model: str) -> float:
    job = prepare(model, "out", ConvertOptions(format="e4m3fn", verify="none"), headers_only=True)
    try:
        return preview.noise_of_sample(job, elements=2**13)
    finally:
        job.source.close()


def test_two_tensors_stand_for_all_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    many = {f"layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(8)}
    other = {"wide.weight": torch.randn(64, 128, generator=generator)}
    looked_at: list[str] = []

    def read(source: Source, name: str, start: int, stop: int) -> torch.Tensor:
        looked_at.append(name)
        return read_range(source, name, start, stop)

    monkeypatch.setattr(preview, "read_range", read)
    both = noise(folder_of(tmp_path / "both", many | other))
    assert sorted(looked_at) == ["layers.2.weight", "layers.6.weight", "wide.weight"]
    alone = [
        noise(folder_of(tmp_path / str(i), {"a.weight": x})) for i, x in enumerate([*many.values(), *other.values()])
    ]
    assert both == pytest.approx((4096 * sum(alone[:8]) + 8192 * alone[8]) / (8 * 4096 + 8192), rel=0.02)
