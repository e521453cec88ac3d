"""`lpconv probe` as a library call: from a model's name to a record of its tensors."""

import dataclasses
import importlib.metadata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lpconv.checkpoint.contents import Contents, read_contents
from lpconv.checkpoint.resolve import Resolved, resolve
from lpconv.data import demo_text
from lpconv.errors import UsageError
from lpconv.hf.quiet import quiet_transformers
from lpconv.kernels.histogram import prepare
from lpconv.probe.batches import MASK_RATE, Batches, Tokens, random_tokens, read_tokenizer, tokenize
from lpconv.probe.histograms import ProbeResult
from lpconv.probe.options import ProbeOptions
from lpconv.probe.run import probe
from lpconv.probe.task import HIDDEN, MASKED, OpenedModel, open_model
from lpconv.progress import Progress, Silent
from lpconv.version import __version__

__all__ = ["Prepared", "prepare_run", "probe_checkpoint", "sequence_length", "vocabulary_size"]

_SEQ_LEN = 128


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model and the batches to run it on, and where both come from."""

    source: Resolved
    contents: Contents
    opened: OpenedModel
    batches: Batches
    seq_len: int
    data_words: str


def prepare_run(name: str, options: ProbeOptions, told: Progress) -> Prepared:
    """Open the model called `name` and cut its text into batches."""
    source = resolve(name, revision=options.revision)
    contents = read_contents(source.directory)
    told.start("opening the model", 0)
    opened = open_model(source.directory)
    seq_len = sequence_length(opened.model.config, options.seq_len)
    tokens, data_words = _tokens(source.directory, opened, options, seq_len)
    batches = Batches(
        tokens=tokens,
        task=opened.task,
        batch_size=options.batch_size,
        vocab_size=vocabulary_size(opened.model.config),
        seed=options.seed,
    )
    return Prepared(
        source=source, contents=contents, opened=opened, batches=batches, seq_len=seq_len, data_words=data_words
    )


def probe_checkpoint(name: str, options: ProbeOptions, *, progress: Progress | None = None) -> ProbeResult:
    """Run the model called `name` forward and backward in fp32 on the CPU and record its tensors.

    The record's options say what was run, in `facts`, and what to be careful about, in `warnings`.
    """
    told = progress or Silent()
    prepared = prepare_run(name, options, told)
    opened, seq_len, source = prepared.opened, prepared.seq_len, prepared.source
    told.start("compiling", 0)
    prepare(opened.model.parameters())
    with quiet_transformers():
        result = probe(
            opened.model, _told(prepared.batches, told), steps=options.steps, every=options.every, loss=opened.loss
        )
    shape = f"{options.steps} of {options.batch_size} x {seq_len} tokens"
    masks = f", {MASK_RATE:.0%} masked".replace("%", " %") if opened.task == MASKED else ""
    facts = {
        "Model": f"{type(opened.model).__name__}, {opened.task}, in fp32",
        "Text": prepared.data_words,
        "Steps": f"{shape}{masks}, seed {options.seed}",
        "Loss": opened.loss_words,
    }
    settings = dataclasses.asdict(options) | {"data": str(options.data) if options.data else None, "seq_len": seq_len}
    return dataclasses.replace(
        result,
        options={
            **settings,
            "model": name,
            "resolved": source.resolved,
            "revision": source.revision,
            "facts": facts,
            "warnings": _warnings(opened, prepared.contents.config),
            "versions": _versions(),
        },
    )


def sequence_length(config: Any, wanted: int | None) -> int:
    """`wanted` tokens, by default 128 or the model's most; UsageError for more than the model has positions."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or _SEQ_LEN
    # RoBERTa and its kin count positions from the padding id on, so two of them are no tokens.
    limit -= 2 if config.model_type in ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet") else 0
    if wanted is not None and wanted > limit:
        raise UsageError(f"--seq-len {wanted} is more than the model's {limit} positions", hint=f"pass at most {limit}")
    return wanted or min(_SEQ_LEN, limit)


def vocabulary_size(config: Any) -> int:
    """How many ids the model embeds."""
    return int(config.get_text_config().vocab_size)


def _tokens(directory: Path, opened: OpenedModel, options: ProbeOptions, seq_len: int) -> tuple[Tokens, str]:
    """The windows to run, and what they are in words."""
    tokenizer, vocab_size = read_tokenizer(directory), vocabulary_size(opened.model.config)
    if tokenizer is not None:
        path, words = (options.data, options.data.name) if options.data else _embedded_text()
        tokens = tokenize(path, tokenizer, seq_len=seq_len, vocab_size=vocab_size)
        repeated = ", repeated" if len(tokens.windows) < options.steps * options.batch_size else ""
        return tokens, words + repeated
    if options.data is not None:
        raise UsageError(
            f"`{directory.name}` has no tokenizer to read `{options.data}` with",
            hint="copy the tokenizer's files beside the weights, or leave --data out to probe with random ids",
        )
    tokens = random_tokens(
        windows=options.steps * options.batch_size, seq_len=seq_len, vocab_size=vocab_size, seed=options.seed
    )
    return tokens, "random ids, because the checkpoint has no tokenizer"


def _embedded_text() -> tuple[Path, str]:
    return demo_text("heldout"), "held-out plays that ship with lpconv"


def _told(batches: Iterable[dict[str, Tensor]], progress: Progress) -> Iterator[dict[str, Tensor]]:
    for i, batch in enumerate(batches):
        progress.start(f"step {i + 1} forward and backward", 0)
        yield batch


def _warnings(opened: OpenedModel, config: dict[str, Any]) -> list[str]:
    found = []
    named = next(iter(config.get("architectures") or []), None)
    if opened.task == HIDDEN and named and named != type(opened.model).__name__:
        found.append(f"the checkpoint does not hold all of `{named}`; {type(opened.model).__name__} was probed instead")
    if opened.missing:
        shown = ", ".join(opened.missing[:3]) + (" and more" if len(opened.missing) > 3 else "")
        found.append(f"not in the checkpoint, so random here: {shown}")
    return found


def _versions() -> dict[str, str]:
    return {"lpconv": __version__, **{n: importlib.metadata.version(n) for n in ("torch", "transformers")}}
