"""One architecture for each family of ops that BERT, GPT-2 and Llama lack has the plain model's gradients, bit for bit.

`benchmarks/reproduce/architectures.py` asks the same of every class that transformers builds small.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.checkpoints import cli_environment

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


# Prints the verdicts by class and method, for attention without fused kernels.
SCRIPT = """
import copy, json, sys
from benchmarks.reproduce.architectures import build, classes, compare, repeatable, step
from lpconv.scaled import scaled
verdicts = {}
for name in sys.argv[1:]:
    plain = build(name, classes()[name], "eager")
    batch, reference = repeatable(plain)
    for method in ("unit", "scalify"):
        result = compare(reference, step(scaled(copy.deepcopy(plain), method=method), batch))
        verdicts[f"{name} {method}"] = result["verdict"]
print(json.dumps(verdicts))
"""


def test_architectures_of_other_ops_have_the_gradients_of_the_plain_model() -> None:
    command = [sys.executable, "-c", SCRIPT, *CLASSES.values()]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=cli_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout.splitlines()[-1])
    assert verdicts == {f"{name} {method}": "bitwise" for name in CLASSES.values() for method in ("unit", "scalify")}
