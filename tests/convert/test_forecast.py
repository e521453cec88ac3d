"""`convert --dry-run --measure`: time and memory of error feedback, from its first layers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lpconv.convert.run import plan
from lpconv.plan.options import ConvertOptions
from tests.helpers.checkpoints import run_cli
from tests.helpers.models import with_demo_tokenizer

OPTIONS = ConvertOptions(
    format="int4", granularity="group:32", rounding="gptq", calibrate="demo", calibration_tokens=1024, verify="weights"
)


def test_a_measured_layer_tells_time_and_memory_of_the_run(tmp_path: Path) -> None:
    wanted = "--format int4 --granularity group:32 --rounding gptq --calibrate demo --calibration-tokens 1024"
    asked = ("convert", "demo", *wanted.split(), "--verify", "weights", "--json", "-q")
    dry, measured = (
        json.loads(run_cli(*asked, "--dry-run", *more, cwd=tmp_path).stdout) for more in ([], ["--measure"])
    )
    assert (dry["seconds"], dry["measured"]) == (None, None)
    assert list(tmp_path.iterdir()) == []
    layers = measured["measured"]["layer_seconds"]
    assert (len(layers), len(set(layers)), measured["measured"]["num_measured"]) == (4, 1, 1)
    assert sum(layers) < measured["seconds"] - measured["measured"]["opening_seconds"] < sum(layers) + 5
    done = json.loads(run_cli(*asked, cwd=tmp_path).stdout)
    assert done["peak_rss_bytes"] == pytest.approx(measured["measured"]["peak_rss_bytes"], rel=0.1)


@pytest.mark.parametrize(("dense", "num_measured"), [((0,), 2), ((2,), 1)])
def test_layers_of_another_shape_are_measured_or_scaled(
    tmp_path: Path, dense: tuple[int, ...], num_measured: int
) -> None:
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32, vocab_size=257,
        mlp_only_layers=[*dense],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "plain")
    with_demo_tokenizer(tmp_path / "plain")
    found = plan(str(tmp_path / "plain"), tmp_path / "out", OPTIONS, measure=True).measured
    assert found is not None
    assert found.num_measured == num_measured
    first, second, third = found.layer_seconds
    if num_measured == 2:
        assert second == third != first
    else:
        assert first == second
        assert third / first == pytest.approx(_operations(tmp_path / "plain", 2) / _operations(tmp_path / "plain", 0))


def _operations(model: Path, layer: int) -> int:
    """Multiplications of the factors (columns³) and of the corrected columns (rows · columns²)."""
    tensors = load_file(model / "model.safetensors")
    shapes = [x.shape for n, x in tensors.items() if f".layers.{layer}." in n and x.dim() == 2 and "gate.w" not in n]
    return sum(cols**2 * (rows + cols) for rows, cols in shapes)
