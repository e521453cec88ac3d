"""Does llama.cpp compute with the weights that lpconv wrote with `--layout gguf`, and tokenise text the same way?

Installs the prebuilt llama.cpp of the npm package node-llama-cpp, converts the model to each scheme, and compares the
tokens of the prompts, greedy tokens, and the log-probability of every token of lpconv's text with `lpconv.load` in
fp32. Neither side may generate a special token, so neither ends a text. llama.cpp keeps keys and values first in fp32
without flash attention (which would read them in fp16), then in fp16 with it, its default. It rounds the inputs of
products with coded blocks to 8-bit integers in blocks of 32; `with_rounded_inputs` is the difference, with keys and
values in fp32, if lpconv rounds its inputs the same way (those of other products to the dtype of their weights). Then
the same with fp16 weights for small random models of all other decoder families and of all ways to scale rotary
embeddings; the Mistral has a SentencePiece tokenizer from the package mistral-common. Existing results are extended.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Rows, command, machine, parser, work_folder
from benchmarks.serving.answers import (
    NUM_TOKENS,
    PROMPTS,
    converted,
    difference,
    equal_first,
    greedy,
    logs_of,
    prompts_of,
)

CACHES = ("F32", "F16")
PACKAGE = "node-llama-cpp@3.22.1"
SCHEMES = ("GGUF_F16", "GGUF_Q8_0", "GGUF_Q4_0", "GGUF_MXFP4")
CHILD = """
import {getLlama, LlamaLogLevel} from "node-llama-cpp";
const [path, given] = process.argv.slice(2);
const {prompts, texts, count, never, cache} = JSON.parse(given);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.warn, maxThreads: 2});
const model = await llama.loadModel({modelPath: path});
const types = {experimentalKvCacheKeyType: cache, experimentalKvCacheValueType: cache};
const attention = {...types, flashAttention: cache == "F32" ? false : "auto"};
const sequence = (await model.createContext({contextSize: 256, ...attention})).getSequence();
for (const token of model.iterateAllTokens())
  if (model.isEogToken(token) && !never.includes(token)) throw new Error(`token ${token} ends a text`);
const asked = token => [token, {generateNext: {logits: true}}];
const answers = [];
for (const {text, ids} of prompts) {
  const tokens = [], whole = texts[answers.length];
  await sequence.clearHistory();
  let input = [...ids.slice(0, -1), asked(ids.at(-1))];
  while (tokens.length < count) {
    const {logits} = (await sequence.controlledEvaluate(input)).at(-1).next;  // the likeliest comes first
    tokens.push([...logits.keys()].find(token => !never.includes(token)));
    input = [asked(tokens.at(-1))];
  }
  await sequence.clearHistory();
  const logs = (await sequence.controlledEvaluate(whole.slice(0, -1).map(asked))).map(({next}, i) => {
    const values = [...next.logits.values()], largest = values[0];
    const total = values.reduce((sum, x) => sum + Math.exp(x - largest), 0);
    return next.logits.get(whole[i + 1]) - largest - Math.log(total);
  });
  answers.push({ids: model.tokenize(text), tokens, logs});
}
console.log(JSON.stringify({release: llama.llamaCppRelease.release, answers}));
process.exit(0);
"""


def environment(folder: Path) -> Path:
    """A folder with the npm package, created unless it exists."""
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", PACKAGE], cwd=folder, check=True)
    (folder / "child.mjs").write_text(CHILD)
    return folder


def measure(node: Path, model: str, scheme: str, folder: Path, caches: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Convert to one scheme and compare both runtimes, for each type of llama.cpp's cache."""
    import torch

    import lpconv

    output, prompts = converted(model, ("--scheme", scheme), folder / f"{Path(model).name}-{scheme}"), prompts_of(model)
    ours, never = lpconv.load(output, dtype=torch.float32), special_tokens(model)
    tokens = greedy(ours, prompts, NUM_TOKENS, never)
    texts = [p + t for p, t in zip(prompts, tokens, strict=True)]
    logs = logs_of(ours, texts)
    round_inputs(ours, output / "model.gguf")
    rounded = logs_of(ours, texts)
    asked = [{"text": text, "ids": ids} for text, ids in zip(PROMPTS, prompts, strict=True)]
    for cache in caches:
        given = {"prompts": asked, "texts": texts, "count": NUM_TOKENS, "never": never, "cache": cache}
        words = ["node", "child.mjs", str(output / "model.gguf"), json.dumps(given)]
        facts = {"model": Path(model).name, "scheme": scheme, "cache": cache}
        run = subprocess.run(words, cwd=node, capture_output=True, text=True)
        if run.returncode:
            yield {**facts, "failed": (run.stderr or run.stdout).strip().splitlines()[-1]}
            continue
        theirs = json.loads(run.stdout.splitlines()[-1])
        row = {
            **facts,
            "release": theirs["release"],
            "same_prompt_tokens": all(ids == f["ids"] for ids, f in zip(prompts, theirs["answers"], strict=True)),
            "tokens": NUM_TOKENS * len(prompts),
            "equal_first_tokens": equal_first(tokens, [f["tokens"] for f in theirs["answers"]]),
            "difference": difference(logs, [f["logs"] for f in theirs["answers"]]),
        }
        if cache == "F32":
            row["with_rounded_inputs"] = difference(rounded, [f["logs"] for f in theirs["answers"]])
        yield row


def special_tokens(model: str) -> list[int]:
    """All special tokens of the tokenizer, including those that end a text."""
    from transformers import AutoTokenizer

    added = AutoTokenizer.from_pretrained(model).added_tokens_decoder
    return [i for i, token in added.items() if token.special]


def round_inputs(model: Any, file: Path) -> None:
    """Round the inputs of all products as llama.cpp does: to 8-bit blocks, or to the dtype of the weights."""
    import gguf
    import torch
    from transformers.pytorch_utils import Conv1D

    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(file).tensors}
    head = types.get("output.weight", types["token_embd.weight"])
    layers = types.get("blk.0.attn_output.weight")
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            dtype = dtypes.get(head if name == "lm_head" else layers)
            module.register_forward_pre_hook(
                lambda _, x, d=dtype: (in_blocks(x[0]) if d is None else x[0].to(d).float(),)
            )


def in_blocks(x: Any) -> Any:
    """Round to 8-bit integers with one fp16 scale per 32 elements, as llama.cpp does for inputs of products."""
    blocks = x.reshape(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scales.clamp_min(1e-30)).round() * scales.half().float()).view(x.shape)


def family_models(folder: Path, tokenizer: Path) -> list[Path]:
    """Small random models with a copy of the tokenizer, created unless they exist."""
    import torch
    import transformers as t

    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": vocabulary, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
    short = {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    }  # so that most pairs are scaled
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **short}

    def llama(**more: Any) -> Any:
        return t.LlamaForCausalLM(t.LlamaConfig(**sizes, **more))

    gpt2 = t.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=vocabulary, n_positions=256, eos_token_id=0)
    made = {
        "gpt2": lambda: t.GPT2LMHeadModel(gpt2),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**sizes)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=128)),
        "llama-bias": lambda: llama(attention_bias=True, mlp_bias=True),
        "llama3-rope": lambda: llama(rope_parameters=llama3),
        "llama-linear": lambda: llama(rope_parameters={"rope_type": "linear", **short}),
        "qwen2-yarn": lambda: t.Qwen2ForCausalLM(
            t.Qwen2Config(**sizes, rope_parameters={"rope_type": "yarn", **short})
        ),
        "mistral": lambda: t.MistralForCausalLM(
            t.MistralConfig(**{**sizes, "vocab_size": 32768}, head_dim=96, sliding_window=None)
        ),
    }
    for name, build in made.items():
        if not (folder / name).exists():
            torch.manual_seed(0)
            model = build()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
            model.save_pretrained(folder / name)
            words = mistral_tokenizer(folder) if name == "mistral" else tokenizer
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(words / file, folder / name)
    return [folder / name for name in made]


def mistral_tokenizer(folder: Path) -> Path:
    """The tokenizer of Mistral 7B v0.3, as transformers saves it."""
    packages, output = folder / "packages", folder / "mistral-tokenizer"
    words = ["install", "--quiet", "--no-deps", "--target", packages, "sentencepiece", "protobuf", "mistral-common"]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    output.mkdir(exist_ok=True)
    model = packages / "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"
    shutil.copy(model, output / "tokenizer.model")
    code = "import sys, transformers as t; t.LlamaTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code, output], check=True, env=environment)
    return output


def main() -> None:
    made = parser(__doc__, work="where the package and the converted models are kept")
    made.add_argument("model", help="a model with a tokenizer, such as SmolLM2-135M")
    made.add_argument("--schemes", nargs="+", default=SCHEMES)
    made.add_argument("--families", nargs="*", help="only these small models, and not the model itself")
    made.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
    options = made.parse_args()
    rows = Rows(options.out, ("model", "scheme", "cache"), lambda: {"machine": machine("gguf")})
    with work_folder(options.work) as folder:
        node = environment(folder / "node")
        chosen = options.families
        others = [m for m in family_models(folder, Path(options.model)) if chosen is None or m.name in chosen]
        schemes = options.schemes if chosen is None else ()
        for model, scheme in [*((options.model, s) for s in schemes), *((str(m), "GGUF_F16") for m in others)]:
            for row in measure(node, model, scheme, folder, options.caches):
                rows.put({**row, "command": command().replace(options.model, "MODEL")})


if __name__ == "__main__":
    main()
