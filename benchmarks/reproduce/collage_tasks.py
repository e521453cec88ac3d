"""What the Collage reproduction trains: models, texts, and the starting point that all arms of a seed share.

Losses are cross-entropies in fp32, in nats: bf16 losses move in steps of 2^-7.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks import wordnet
from benchmarks.models import minilm
from benchmarks.reproduce.byte_models import MASK, batch_of, corpus, windows
from lpconv.convert.run import convert
from lpconv.data import demo_text
from lpconv.optim import LowPrecisionAdamW, start_from_checkpoint, start_from_fp32
from lpconv.plan.options import ConvertOptions

Batch: TypeAlias = tuple[Tensor, Tensor]  # input ids, labels; -100 marks positions without a label
MakeOptimizer: TypeAlias = Callable[[nn.Module], LowPrecisionAdamW]
Start: TypeAlias = Callable[[int, MakeOptimizer], tuple[nn.Module, LowPrecisionAdamW]]

PADDING = 0  # of MiniLM's tokenizer
FIRST_NOUN_FILE, NUM_NOUN_FILES = 3, 26  # WordNet's lexicographer files 03 noun.Tops to 28 noun.time
NUM_GLOSSES, GLOSS_TOKENS = 20_000, 24
LOGIT_SCALE = 20.0  # for cosines, as in sentence-transformers' training of this model


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task. `start(seed, make_optimizer)` returns the bf16 model and its optimizer, both at the fp32 starting point.

    `sample(generator)` returns a training batch and `loss(model, batch)` its mean loss.
    """

    name: str
    steps: int
    lr: float
    start: Start
    sample: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    held_out: Batch
    num_evaluations: int = 10


def language_model(work: Path, quick: bool) -> Task:
    """A byte-level Llama on the sample plays."""
    length, hidden = 128, 32 if quick else 128
    train, held_out = corpus("train"), corpus("heldout")

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=2,
                num_attention_heads=hidden // 32, max_position_embeddings=length, tie_word_embeddings=True,
            )
        )  # fmt: skip

    def sample(generator: torch.Generator, text: Tensor = train, count: int = 8) -> Batch:
        tokens = windows(text, count, length + 1, generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Task(
        name="byte-level LM, from scratch",
        steps=20 if quick else 600,
        lr=1e-4,
        start=from_scratch(make),
        sample=sample,
        loss=token_loss,
        held_out=sample(torch.Generator().manual_seed(0), held_out, 64),
    )


def masked_language_model(work: Path, quick: bool) -> Task:
    """A BERT that predicts 15 % of the bytes of the same plays.

    Windows are short: on long ones, a small BERT learns no more than byte frequencies in this number of steps.
    """
    length, hidden = 16, 32 if quick else 128
    train, held_out = corpus("train"), corpus("heldout")

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return BertForMaskedLM(
            BertConfig(
                vocab_size=MASK + 1, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=2,
                num_attention_heads=hidden // 32, max_position_embeddings=length,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def sample(generator: torch.Generator, text: Tensor = train, count: int = 64) -> Batch:
        batch = batch_of("bert", text, count, length, generator)
        return batch["input_ids"], batch["labels"]

    return Task(
        name="BERT-MLM, from scratch",
        steps=20 if quick else 600,
        lr=5e-4,
        start=from_scratch(make),
        sample=sample,
        loss=token_loss,
        held_out=sample(torch.Generator().manual_seed(0), held_out, 1024),
    )


def supersenses(work: Path, quick: bool) -> Task:
    """MiniLM, converted with `--method collage`, assigns definitions to WordNet's 26 noun files."""
    source, folder = minilm(), work / "minilm-collage"
    if not folder.exists():
        convert(str(source), folder, ConvertOptions(method="collage"))
    tokens, labels = glosses(source, num=500 if quick else NUM_GLOSSES)
    cut = len(tokens) - (64 if quick else 512)
    means = class_means(AutoModel.from_pretrained(source, dtype=torch.float32), tokens[: cut // 8], labels[: cut // 8])

    def start(seed: int, make_optimizer: MakeOptimizer) -> tuple[nn.Module, LowPrecisionAdamW]:
        model = SupersenseClassifier(AutoModel.from_pretrained(folder, dtype=torch.bfloat16), means)
        model.eval()  # no dropout, so that runs of a seed differ only in their arithmetic
        optimizer = make_optimizer(model)
        start_from_checkpoint(optimizer, model.encoder, folder)
        return model, optimizer

    def sample(generator: torch.Generator) -> Batch:
        chosen = torch.randint(0, cut, (16,), generator=generator)
        return tokens[chosen], labels[chosen]

    return Task(
        name="MiniLM supersenses, fine-tuning",
        steps=10 if quick else 200,
        lr=1e-5,
        start=start,
        sample=sample,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        held_out=(tokens[cut:], labels[cut:]),
    )


class SupersenseClassifier(nn.Module):
    """Scaled cosines between mean-pooled states and one vector per class, initialised with the mean of its definitions.

    With a random head, a short run would mostly train the head.
    """

    def __init__(self, encoder: nn.Module, means: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.classes = nn.Parameter(means.bfloat16())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, class) in fp32 of token ids (batch, position), padded with 0."""
        return LOGIT_SCALE * embed(self.encoder, tokens) @ F.normalize(self.classes.float(), dim=-1).T


def embed(encoder: nn.Module, tokens: Tensor) -> Tensor:
    """Unit sentence vectors in fp32, averaged over tokens, as in this model's training."""
    mask = tokens != PADDING
    states = encoder(input_ids=tokens, attention_mask=mask.long()).last_hidden_state.float()
    return F.normalize((states * mask[..., None]).sum(1), dim=-1)


@torch.no_grad()
def class_means(encoder: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    vectors = torch.cat([embed(encoder, part) for part in tokens.split(64)])
    sums = torch.zeros(NUM_NOUN_FILES, vectors.shape[1]).index_add_(0, labels, vectors)
    return F.normalize(sums, dim=-1)


def glosses(tokenizer_folder: Path, num: int) -> tuple[Tensor, Tensor]:
    """Token ids (num, GLOSS_TOKENS) of WordNet definitions without examples, and the file of each, from 0."""
    lines = list(wordnet.synsets("noun"))
    chosen = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))[:num].tolist()
    texts = [re.split(r'; "', lines[i].partition("| ")[2])[0].strip() for i in chosen]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=GLOSS_TOKENS, return_tensors="pt")
    return encoded.input_ids, torch.tensor([wordnet.lexicographer_file(lines[i]) - FIRST_NOUN_FILE for i in chosen])


def from_scratch(make: Callable[[int], nn.Module]) -> Start:
    """A bf16 model whose optimizer keeps the fp32 initial values."""

    def start(seed: int, make_optimizer: MakeOptimizer) -> tuple[nn.Module, LowPrecisionAdamW]:
        model = make(seed).bfloat16()
        optimizer = make_optimizer(model)
        start_from_fp32(optimizer, model, make(seed).state_dict())
        return model, optimizer

    return start


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(input_ids=batch[0]).logits.float().flatten(0, 1), batch[1].flatten())


def smollm2(work: Path, quick: bool) -> Task:
    """SmolLM2 continues the plays; `work` contains its fp32 checkpoint (see `benchmarks.models`)."""
    source, length = work / "smollm2", 64
    tokenizer = AutoTokenizer.from_pretrained(source)
    train, held_out = (
        torch.tensor(tokenizer(demo_text(split).read_text(encoding="utf-8")).input_ids)
        for split in ("train", "heldout")
    )

    def sample(generator: torch.Generator, text: Tensor = train, count: int = 2) -> Batch:
        tokens = windows(text, count, length + 1, generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Task(
        name="SmolLM2, fine-tuning",
        steps=20,
        lr=2e-5,
        start=from_scratch(lambda seed: AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)),
        sample=sample,
        loss=token_loss,
        held_out=sample(torch.Generator().manual_seed(0), held_out, 8),
        num_evaluations=2,
    )


TASKS: dict[str, Callable[[Path, bool], Task]] = {
    "lm": language_model,
    "mlm": masked_language_model,
    "minilm": supersenses,
    "smollm2": smollm2,
}
