"""One rule for σ: what a conversion stores is the data part and the scale that the scaled engine trains on."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.plan.options import ConvertOptions
from lpconv.scaled import ScaledTensor, scaled


@pytest.mark.parametrize("method", ["unit", "scalify"])
def test_codes_are_the_data_part_of_a_scaled_model(method: str, tmp_path: Path) -> None:
    convert("demo", tmp_path / "out", ConvertOptions(method=method, format="fp32", verify="none"))
    stored = load_file(tmp_path / "out/model.safetensors")
    model = scaled(AutoModelForCausalLM.from_pretrained(demo_checkpoint()), method=method)
    matrices = {n: p for n, p in model.named_parameters() if n + "_scale" in stored}
    assert len(matrices) == 29
    for name, p in matrices.items():
        assert isinstance(p, ScaledTensor)
        assert float(stored[name + "_scale"]) == float(p.scale), name
        assert torch.equal(stored[name][0], p.data_part), name
