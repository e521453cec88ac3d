"""Other decoders read what lpconv wrote, on small models; `benchmarks/serving/bits.py` has the trained ones."""

from pathlib import Path

import pytest
import torch

from benchmarks.serving.bits import CASES, has_same_bits, measure
from benchmarks.serving.vllm import random_experts
from lpconv.data import demo_checkpoint
from tests.helpers.gguf_files import demo_with_merges


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        ("compressed-tensors", "FP8_DYNAMIC"),
        ("compressed-tensors", "W4A16, groups of 64"),
        ("compressed-tensors", "NVFP4A16"),
        ("onnx", "int4, groups of 32"),
    ],
)
def test_decoders_read_the_weights_of_experts(layout: str, case: str, tmp_path: Path) -> None:
    found = measure(random_experts(tmp_path / "experts", demo_checkpoint()), layout, case, tmp_path)
    assert found["weights"] == 56
    assert found["equal"] == found["read"] == (8 if layout == "onnx" else 56)


@pytest.mark.parametrize("case", ["GGUF_F16", "GGUF_Q4_0", "GGUF_MXFP4"])
def test_decoders_read_a_file_for_llama_cpp(case: str, tmp_path: Path) -> None:
    found = measure(demo_with_merges(tmp_path / "source"), "gguf", case, tmp_path)
    assert found["equal"] == found["weights"] > 0


def test_a_refusal_is_a_result(tmp_path: Path) -> None:
    found = measure(random_experts(tmp_path / "experts", demo_checkpoint()), "gguf", "GGUF_F16", tmp_path)
    assert "Qwen3MoeForCausalLM" in found["refused"]


def test_bits_are_those_of_the_other_dtype() -> None:
    x = torch.tensor([1 + 2**-10, 0.0])
    assert has_same_bits(x, torch.tensor([1.0, 0.0], dtype=torch.bfloat16))
    assert not has_same_bits(x, torch.tensor([1.0, -0.0], dtype=torch.bfloat16))
    assert not has_same_bits(x, torch.tensor([1.0, 0.0]))


def test_every_layout_for_other_tools_has_cases() -> None:
    from lpconv.methods import METHODS

    assert set(METHODS["unit"].forms) - {"lpconv", "transformers"} <= set(CASES)
