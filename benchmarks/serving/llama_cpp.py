"""Does llama.cpp compute with the weights that lpconv wrote with `--layout gguf`, and read text as the same tokens?

Installs the prebuilt llama.cpp of the npm package node-llama-cpp, converts the model to each scheme, and compares the
tokens of the prompts, the first greedy tokens, and the log-probabilities of the 20 likeliest next tokens with
`lpconv.load` in fp32. llama.cpp rounds the inputs of products with blocks of codes to 8-bit integers in blocks of 32;
`with_rounded_inputs` is the difference if lpconv's inputs are rounded so, too. Then the same, with fp16 weights, for a
small random model of every other family of decoders.
"""

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common import command, machine, parser, save, work_folder
from benchmarks.serving.answers import PROMPTS, converted, equal_first, greedy, prompts_of

NUM_TOKENS = 8
PACKAGE = "node-llama-cpp@3.22.1"
SCHEMES = ("GGUF_F16", "GGUF_Q8_0", "GGUF_Q4_0", "GGUF_MXFP4")
CHILD = """
import {getLlama, LlamaLogLevel} from "node-llama-cpp";
const [path, prompts, count] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.warn, maxThreads: 2});
const model = await llama.loadModel({modelPath: path});
const sequence = (await model.createContext({contextSize: 256})).getSequence();
const found = [];
for (const {text, ids} of JSON.parse(prompts)) {
  const tokens = [];
  await sequence.clearHistory();
  for await (const token of sequence.evaluate(ids, {temperature: 0})) {
    tokens.push(token);
    if (tokens.length == Number(count)) break;
  }
  await sequence.clearHistory();
  const asked = [...ids.slice(0, -1), [ids.at(-1), {generateNext: {probabilities: true}}]];
  const next = (await sequence.controlledEvaluate(asked)).at(-1).next;
  found.push({ids: model.tokenize(text), tokens, likeliest: [...next.probabilities].slice(0, 20)});
}
console.log(JSON.stringify({release: llama.llamaCppRelease.release, found}));
process.exit(0);
"""


def environment(folder: Path) -> Path:
    """A folder with the package, made if it is not there."""
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", PACKAGE], cwd=folder, check=True)
    (folder / "child.mjs").write_text(CHILD)
    return folder


def measure(node: Path, model: str, scheme: str, folder: Path) -> dict[str, Any]:
    """Convert to one scheme and compare both runtimes."""
    import torch

    import lpconv

    output, prompts = converted(model, ("--scheme", scheme), folder / f"{Path(model).name}-{scheme}"), prompts_of(model)
    asked = json.dumps([{"text": text, "ids": ids} for text, ids in zip(PROMPTS, prompts, strict=True)])
    words = ["node", "child.mjs", str(output / "model.gguf"), asked, str(NUM_TOKENS)]
    run = subprocess.run(words, cwd=node, check=True, capture_output=True, text=True)
    theirs = json.loads(run.stdout.splitlines()[-1])
    ours = lpconv.load(output, dtype=torch.float32)
    difference = largest_difference(ours, prompts, theirs["found"])
    tokens = [f["tokens"] for f in theirs["found"]]
    row = {
        "model": Path(model).name,
        "scheme": scheme,
        "same_prompt_tokens": all(ids == f["ids"] for ids, f in zip(prompts, theirs["found"], strict=True)),
        "tokens": NUM_TOKENS * len(prompts),
        "equal_first_tokens": equal_first(greedy(ours, prompts, NUM_TOKENS), tokens),
        "largest_log_probability_difference": difference,
        "release": theirs["release"],
    }
    if scheme != "GGUF_F16":
        for name, module in ours.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(lambda _, inputs: (in_blocks(inputs[0]),))
        row["with_rounded_inputs"] = largest_difference(ours, prompts, theirs["found"])
    return row


def largest_difference(model: Any, prompts: list[list[int]], found: list[dict[str, Any]]) -> float:
    """The largest difference of log-probabilities of the tokens that llama.cpp finds likeliest."""
    import torch

    differences = []
    for ids, theirs in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        differences += [abs(float(logs[i]) - math.log(p)) for i, p in theirs["likeliest"] if p > 1e-6]
    return round(max(differences), 4)


def in_blocks(x: Any) -> Any:
    """Inputs rounded to 8-bit integers with an fp16 scale for 32, as in llama.cpp's products."""
    blocks = x.reshape(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scales.clamp_min(1e-30)).round() * scales.half().float()).view(x.shape)


def family_models(folder: Path, tokenizer: Path) -> list[Path]:
    """Small random models with a copy of the tokenizer, made if they are not there."""
    import torch
    import transformers as t

    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": vocabulary, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
    gpt2 = t.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=vocabulary, n_positions=256, eos_token_id=0)
    made = {
        "gpt2": lambda: t.GPT2LMHeadModel(gpt2),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**sizes)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=128)),
        "llama-bias": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)),
    }
    for name, build in made.items():
        if not (folder / name).exists():
            torch.manual_seed(0)
            model = build()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
            model.save_pretrained(folder / name)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tokenizer / file, folder / name)
    return [folder / name for name in made]


def main() -> None:
    made = parser(__doc__, work="where the package and the converted models are kept")
    made.add_argument("model", help="a model with a tokenizer, such as SmolLM2-135M")
    made.add_argument("--schemes", nargs="+", default=SCHEMES)
    options = made.parse_args()
    with work_folder(options.work) as folder:
        node = environment(folder / "node")
        rows = []
        others = family_models(folder, Path(options.model))
        for model, scheme in [*((options.model, s) for s in options.schemes), *((str(m), "GGUF_F16") for m in others)]:
            rows.append(measure(node, model, scheme, folder))
            print(rows[-1], flush=True)
            save(
                {"command": command().replace(options.model, "MODEL"), "machine": machine("gguf"), "rows": rows},
                options.out,
            )


if __name__ == "__main__":
    main()
