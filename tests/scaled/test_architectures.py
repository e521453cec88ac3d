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


def test_architectures_of_other_ops_have_the_gradients_of_the_plain_model(tmp_path: Path) -> None:
    """The script runs in a process of its own: tests do not import benchmarks."""
    script, out = "benchmarks.reproduce.architectures", tmp_path / "records.json"
    options = ["--out", str(out), "--attention", "eager", "--workers", "1", "--only", *CLASSES.values()]
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", script, *options], cwd=root, env=cli_environment(), check=False)
    assert done.returncode == 0
    records = json.loads(out.read_text())["records"]
    verdicts = {f"{r['class']} {run['method']}": run["verdict"] for r in records for run in r["runs"]}
    assert verdicts == {f"{name} {method}": "bitwise" for name in CLASSES.values() for method in ("unit", "scalify")}
