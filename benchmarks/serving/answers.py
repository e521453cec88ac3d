"""Questions to lpconv and to a runtime, and the comparison of their answers."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at", "Once upon a time,")
NUM_TOKENS = 16
Logs = list[list[float]]


def converted(model: Path | str, arguments: Sequence[str], output: Path) -> Path:
    """Convert the model unless the output exists."""
    if not output.exists():
        words = ["convert", str(model), "-o", str(output), *arguments, "--verify", "weights", "-q"]
        subprocess.run([sys.executable, "-m", "lpconv", *words], check=True, stdout=subprocess.DEVNULL)
    return output


def prompts_of(model: Path | str, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """Token ids of the prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [list(tokenizer(p).input_ids) for p in prompts]


def greedy(model: Any, prompts: list[list[int]], count: int = NUM_TOKENS, never: Sequence[int] = ()) -> list[list[int]]:
    """The likeliest continuation of each prompt in lpconv, without tokens that end the text and those in `never`."""
    import torch

    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    options["suppress_tokens"] = list(never) or None
    with torch.no_grad():
        return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of equal tokens at the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def equal_first(a: list[list[int]], b: list[list[int]]) -> int:
    """Total number of tokens before the first difference of each pair."""
    return sum(common_prefix(x, y) for x, y in zip(a, b, strict=True))


def logs_of(model: Any, texts: list[list[int]]) -> Logs:
    """Log-probability of every token of the texts except the first."""
    import torch

    with torch.inference_mode():
        logs = [model(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in texts]
    return [[float(x[i]) for x, i in zip(of, ids[1:], strict=False)] for of, ids in zip(logs, texts, strict=True)]


def difference(a: Logs, b: Logs) -> dict[str, float]:
    """Mean and largest difference of log-probabilities, in nats."""
    gaps = [abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return {"mean": round(sum(gaps) / len(gaps), 6), "largest": round(max(gaps), 5)}
