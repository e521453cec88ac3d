"""Time and memory of error feedback at the size of large models, against the forecast of `--dry-run --measure`.

    python -m benchmarks.speed.calibrated --work FOLDER --out FILE.json [--model M ...] [--rounding R ...] [--layers N]

`7B` and `30B-A3B` are the first layers of Llama-2-7B's shape and of Qwen3-30B-A3B's (128 experts, 8 per token) in bf16
with random weights and SmolLM2's tokenizer; the other models are whole. Seconds are of the whole command, with
verification of the weights; those of each layer are from the forecast, which rounds the first one. Peak memory includes
code.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import common
from benchmarks.models import model_folder
from benchmarks.quality.peers import measured

OPTIONS = ["--scheme", "W4A16", "--granularity", "group:32", "--scale", "search"]
OPTIONS += ["--calibrate", "demo", "--verify", "weights"]
SHAPES: dict[str, Any] = {
    "7B": transformers.LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32),
    "30B-A3B": transformers.Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32, head_dim=128,
        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    ),
}  # fmt: skip


def model_of(name: str, layers: int, work: Path) -> Path:
    """The folder of a model, made if it does not exist."""
    if name not in SHAPES:
        return model_folder(name, work)
    folder, tokenizer = work / f"{name}-{layers}", model_folder("smollm2", work)
    if not folder.exists():
        config = SHAPES[name]
        config.num_hidden_layers, config.max_position_embeddings = layers, 4096
        config.vocab_size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(work / "partial")
        transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(work / "partial")
        (work / "partial").rename(folder)
    return folder


def run(model: Path, rounding: str, work: Path) -> dict[str, Any]:
    """Forecast, seconds and peak memory of one conversion."""
    command = [sys.executable, "-m", "lpconv", "convert", str(model), *OPTIONS, "--rounding", rounding]
    command += ["-o", str(work / "output"), "--force"]
    asked = subprocess.run([*command, "--dry-run", "--measure", "--json"], check=True, capture_output=True, text=True)
    forecast = json.loads(asked.stdout)
    found = measured(command, work / "log", threads=torch.get_num_threads())
    shutil.rmtree(work / "output", ignore_errors=True)
    return {
        "forecast": forecast["measured"],
        "forecast_seconds": forecast["seconds"],
        "planned_bytes": forecast["memory_bytes"],
        **found,
    }


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", nargs="+", default=[*SHAPES, "smollm2", "gemma3"])
    parser.add_argument("--rounding", nargs="+", default=["gptq", "gptaq"])
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    head = {"machine": common.machine(), "command": common.command()}
    rows = common.Rows(args.out, ("model", "rounding", "threads"), lambda: head)
    for name in args.model:
        for rounding in args.rounding:
            row = run(model_of(name, args.layers, args.work), rounding, args.work)
            rows.put({"model": name, "rounding": rounding, "threads": torch.get_num_threads(), **row})


if __name__ == "__main__":
    main()
