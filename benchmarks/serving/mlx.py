"""Does mlx-lm compute with exactly the weights that lpconv wrote with `--layout mlx`?

Creates a virtual environment with mlx, converts the model to each scheme, and compares every weight that mlx decodes
bit for bit, and greedy tokens and log-probabilities of both runtimes in fp32.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common import Rows, command, environment, machine, parser, work_folder
from benchmarks.serving.answers import NUM_TOKENS, converted, difference, equal_first, greedy, logs_of, prompts_of

PACKAGES = ("mlx", "mlx-cpu", "mlx-lm")
SCHEMES = ("MLX_MXFP4", "MLX_MXFP8", *(f"MLX_INT{bits}" for bits in (2, 3, 4, 5, 6, 8)))
# Prints the SHA-256 of each decoded weight in fp32, the tokens after each prompt, and the log-probability of every
# token of the texts except the first.
CHILD = """
import hashlib, importlib.metadata, json, sys
import mlx.core as mx, mlx.nn as nn, numpy as np
from pathlib import Path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
model, _ = load_model(Path(sys.argv[1]))
model.set_dtype(mx.float32)  # leaves codes and exponents, which are integers
hashes = {}
for name, m in model.named_modules():
    if isinstance(m, nn.QuantizedLinear):
        w = mx.dequantize(m.weight, m.scales, m.get("biases"), m.group_size, m.bits, m.mode, dtype=mx.float32)
        hashes[name] = hashlib.sha256(np.array(w).tobytes()).hexdigest()
prompts, texts, count, ends = map(json.loads, sys.argv[2:])
tokens, logs = [], []
for prompt in prompts:
    cache, ids, new = make_prompt_cache(model), prompt, []
    for _ in range(count):
        logits = model(mx.array([ids]), cache=cache)[0, -1]
        logits[mx.array(ends)] = -mx.inf
        new.append(int(mx.argmax(logits)))
        ids = new[-1:]
    tokens.append(new)
for ids in texts:
    logits = model(mx.array([ids]))[0]
    logits -= mx.logsumexp(logits, axis=-1, keepdims=True)
    logs.append([float(logits[i, t]) for i, t in enumerate(ids[1:])])
versions = {n: importlib.metadata.version(n) for n in ("mlx", "mlx-lm")}
print(json.dumps({"hashes": hashes, "tokens": tokens, "logs": logs, "versions": versions}))
"""


def measure(python: Path, model: str, scheme: str, folder: Path) -> dict[str, Any]:
    """Convert to one scheme and compare both runtimes."""
    import hashlib

    import torch

    import lpconv
    from lpconv.forms import Kept
    from lpconv.layouts.reader import StoredTensors

    output, prompts = converted(model, ("--scheme", scheme), folder / scheme), prompts_of(model)
    ours = lpconv.load(output, dtype=torch.float32)
    tokens = greedy(ours, prompts)
    texts = [p + t for p, t in zip(prompts, tokens, strict=True)]
    asked = map(json.dumps, (prompts, texts, NUM_TOKENS, [ours.config.eos_token_id]))
    run = subprocess.run([python, "-c", CHILD, output, *asked], check=True, capture_output=True, text=True)
    theirs = json.loads(run.stdout.splitlines()[-1])
    with StoredTensors.open(output) as stored:
        coded = [n for n, form in stored.forms.items() if not isinstance(form, Kept)]
        hashes = {n: hashlib.sha256(stored.tensor(n).numpy().tobytes()).hexdigest() for n in coded}
    return {
        "scheme": scheme,
        "weights": len(hashes),
        "equal_weights": sum(theirs["hashes"].get(n.removesuffix(".weight")) == h for n, h in hashes.items()),
        "others_quantized": len(theirs["hashes"]) - len(hashes),
        "tokens": NUM_TOKENS * len(prompts),
        "equal_first_tokens": equal_first(tokens, theirs["tokens"]),
        "difference": difference(logs_of(ours, texts), theirs["logs"]),
        "versions": theirs["versions"],
    }


def main() -> None:
    made = parser(__doc__, work="where the environment and the converted models are kept")
    made.add_argument("model", help="a Llama with a tokenizer, such as SmolLM2-135M")
    made.add_argument("--schemes", nargs="+", default=SCHEMES)
    options = made.parse_args()
    run = {"command": command().replace(options.model, "MODEL"), "model": Path(options.model).name}
    rows = Rows(options.out, ("scheme",), lambda: {**run, "machine": machine()})
    with work_folder(options.work) as folder:
        python = environment(folder / "mlx-env", PACKAGES)
        for scheme in options.schemes:
            rows.put(measure(python, options.model, scheme, folder))


if __name__ == "__main__":
    main()
