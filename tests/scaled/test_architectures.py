"""One architecture for each family of ops that BERT, GPT-2 and Llama lack has the plain model's gradients, bit for bit.

`benchmarks/reproduce/architectures.py` asks the same of every class that transformers builds small.
"""

import copy

import pytest

from benchmarks.reproduce.architectures import build, classes, compare, repeatable, step
from lpconv.scaled import scaled

CLASSES = {
    "views written in a loop": "RwkvForCausalLM",
    "views of padded windows": "LongformerForMaskedLM",
    "gathered relative positions": "DebertaForMaskedLM",
    "pooled queries": "FunnelForMaskedLM",
    "delta rule and grouped products of experts": "Qwen3NextForCausalLM",
    "a recurrence whose scale grows": "KimiLinearForCausalLM",
    "rotations of complex numbers": "DeepseekV2ForCausalLM",
    "a state space": "Mamba2ForCausalLM",
    "a router that scatters": "DeepseekV3ForCausalLM",
    "batch norm": "ResNetForImageClassification",
    "shifted windows and pooling": "SwinForImageClassification",
    "group norm and weight norm": "Wav2Vec2ForCTC",
    "Fourier transforms": "FNetForMaskedLM",
}


@pytest.mark.parametrize("name", CLASSES)
def test_architectures_of_other_ops_have_the_gradients_of_the_plain_model(name: str) -> None:
    class_name = CLASSES[name]
    plain = build(class_name, classes()[class_name], "eager")
    batch, reference = repeatable(plain)
    for method in ("unit", "scalify"):
        assert compare(reference, step(scaled(copy.deepcopy(plain), method=method), batch))["verdict"] == "bitwise"
