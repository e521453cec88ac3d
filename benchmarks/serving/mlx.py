"""Does mlx-lm compute with exactly the weights that lpconv wrote with `--layout mlx`?

Makes a virtual environment with mlx, converts the model to each scheme, and compares every weight that mlx decodes, bit
for bit, and the first greedy tokens of both runtimes in fp32.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import command, environment, machine, parser, save, work_folder

PACKAGES = ("mlx", "mlx-cpu", "mlx-lm")
SCHEMES = ("MLX_MXFP4", "MLX_MXFP8", "MLX_INT4", "MLX_INT8")
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at", "Once upon a time,")
NUM_TOKENS = 16
# Runs in the new environment. Prints the SHA-256 of each decoded weight in fp32, and the tokens after each prompt.
CHILD = """
import hashlib, importlib.metadata, json, sys
import mlx.core as mx, mlx.nn as nn, numpy as np
from pathlib import Path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
model, _ = load_model(Path(sys.argv[1]))
model.set_dtype(mx.float32)  # not of codes and exponents, which are integers
hashes = {}
for name, m in model.named_modules():
    if isinstance(m, nn.QuantizedLinear):
        w = mx.dequantize(m.weight, m.scales, m.get("biases"), m.group_size, m.bits, m.mode, dtype=mx.float32)
        hashes[name] = hashlib.sha256(np.array(w).tobytes()).hexdigest()
tokens = []
for prompt in json.loads(sys.argv[2]):
    cache, ids, new = make_prompt_cache(model), prompt, []
    for _ in range(int(sys.argv[3])):
        new.append(int(mx.argmax(model(mx.array([ids]), cache=cache)[0, -1])))
        ids = new[-1:]
    tokens.append(new)
versions = {n: importlib.metadata.version(n) for n in ("mlx", "mlx-lm")}
print(json.dumps({"hashes": hashes, "tokens": tokens, "versions": versions}))
"""


def prompts_of(model: str) -> list[list[int]]:
    """The prompts as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [list(tokenizer(p).input_ids) for p in PROMPTS]


def greedy(model: Any, prompts: list[list[int]], count: int = NUM_TOKENS) -> list[list[int]]:
    """The most likely continuation of each prompt, in lpconv."""
    import torch

    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many first tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def measure(python: Path, model: str, scheme: str, folder: Path) -> dict[str, Any]:
    """Convert to one scheme and compare both runtimes."""
    import hashlib

    import torch

    import lpconv
    from lpconv.forms import Kept
    from lpconv.forms.reader import StoredTensors

    output, prompts = folder / scheme, prompts_of(model)
    if not output.exists():
        words = ["convert", model, "-o", str(output), "--scheme", scheme, "--verify", "weights", "-q"]
        subprocess.run([sys.executable, "-m", "lpconv", *words], check=True)
    run = subprocess.run(
        [python, "-c", CHILD, output, json.dumps(prompts), str(NUM_TOKENS)], check=True, capture_output=True, text=True
    )
    theirs = json.loads(run.stdout.splitlines()[-1])
    with StoredTensors.open(output) as stored:
        coded = [n for n, form in stored.forms.items() if not isinstance(form, Kept)]
        ours = {
            n.removesuffix(".weight"): hashlib.sha256(stored.tensor(n).numpy().tobytes()).hexdigest() for n in coded
        }
    tokens = greedy(lpconv.load(output, dtype=torch.float32), prompts)
    equal = [common_prefix(a, b) for a, b in zip(tokens, theirs["tokens"], strict=True)]
    return {
        "scheme": scheme,
        "weights": len(ours),
        "equal_weights": sum(theirs["hashes"].get(n) == h for n, h in ours.items()),
        "others_quantized": len(theirs["hashes"].keys() - ours.keys()),
        "tokens": NUM_TOKENS * len(prompts),
        "equal_first_tokens": sum(equal),
        "versions": theirs["versions"],
    }


def main() -> None:
    made = parser(__doc__, work="where the environment and the converted models are kept")
    made.add_argument("model", help="a Llama with a tokenizer, such as SmolLM2-135M")
    made.add_argument("--schemes", nargs="+", default=SCHEMES)
    options = made.parse_args()
    with work_folder(options.work) as folder:
        python = environment(folder / "mlx-env", PACKAGES)
        rows = []
        for scheme in options.schemes:
            rows.append(measure(python, options.model, scheme, folder))
            print(rows[-1], flush=True)
    run = {"command": command().replace(options.model, "MODEL"), "model": Path(options.model).name}
    save({**run, "machine": machine(), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
