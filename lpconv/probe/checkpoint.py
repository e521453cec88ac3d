"""Probe a checkpoint: from a model's name or path to a record of its tensors."""

import dataclasses
import importlib.metadata
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpconv.data import demo_text
from lpconv.errors import UsageError
from lpconv.kernels.histogram import prepare
from lpconv.layers import weighted_modules
from lpconv.models.empty import check_memory, num_parameters
from lpconv.models.inputs import random_ids, sequence_length, vocabulary_size
from lpconv.models.objective import find_objective, next_tokens
from lpconv.models.opening import Opened, open_to_run, read_text_config
from lpconv.models.tasks import CLM, MLM, NONE, Task
from lpconv.models.tokenizer import Tokens, read_tokenizer, tokenize
from lpconv.models.whole import check_complete
from lpconv.options import fields_of_run
from lpconv.probe.noise import NOISE_RECIPES, gradient_noise
from lpconv.probe.options import OWN_LOOP, ProbeOptions
from lpconv.probe.record import ProbeResult
from lpconv.probe.track import model_loss, probe, target_loss
from lpconv.progress import Progress, Silent, counted, quiet_transformers
from lpconv.report.numbers import name_list, plural
from lpconv.scaled import EdgeFactors, calibrate, scaled
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.version import __version__

MASK_RATE = 0.15  # share of the tokens that the mask token replaces, as in BERT (arXiv 1810.04805 §3.1)
RANDOM_IDS = "random token ids, because the checkpoint has no tokenizer"

_COPIES_IN_MEMORY = 2  # the weights, and either the gradients or, before those, the tensors being loaded
_COPIES_FOR_NOISE = 2  # exact gradients, and those of a first rounded pass


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Endless batches of arguments for a model; windows repeat. `shifted`: the labels of clm are the next tokens."""

    tokens: Tokens
    task: Task
    batch_size: int
    vocab_size: int
    seed: int
    shifted: bool = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        windows = itertools.cycle(self.tokens.windows)
        while True:
            ids_BL = torch.stack(list(itertools.islice(windows, self.batch_size)))
            yield self._batch(ids_BL, generator)

    def _batch(self, ids_BL: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        if self.task is CLM:
            return {"input_ids": ids_BL, "labels": next_tokens(ids_BL) if self.shifted else ids_BL}
        if self.task is MLM:
            return self._masked(ids_BL, generator)
        return {"input_ids": ids_BL}

    def _masked(self, ids_BL: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        chosen_BL = torch.rand(ids_BL.shape, generator=generator) < MASK_RATE
        chosen_BL[:, self.tokens.num_prefix] = True  # without any label a batch has no loss
        chosen_BL[:, : self.tokens.num_prefix] = False
        chosen_BL[:, ids_BL.shape[1] - self.tokens.num_suffix :] = False
        if self.tokens.mask_id is None:
            covered_BL = torch.randint(self.vocab_size, ids_BL.shape, generator=generator)
        else:
            covered_BL = torch.full_like(ids_BL, self.tokens.mask_id)
        return {"input_ids": torch.where(chosen_BL, covered_BL, ids_BL), "labels": torch.where(chosen_BL, ids_BL, -100)}


@dataclass(frozen=True, kw_only=True)
class ProbeSetup:
    """A model, the batches to run it on, and the origin of both."""

    checkpoint: Checkpoint
    opened: Opened
    task: Task
    batches: Batches
    seq_len: int
    data_words: str
    notes: tuple[str, ...]

    def loss(self, output: Any) -> Tensor:
        return target_loss(output, seed=0) if self.task is NONE else model_loss(output)


def prepare_run(model: Openable, options: ProbeOptions, progress: Progress, *, hint: str = OWN_LOOP) -> ProbeSetup:
    """Open `model` and cut its text into batches. `hint` is the hint of the error for models that do not read text."""
    checkpoint = Checkpoint.open(model, revision=options.revision)
    checkpoint.check_promised()
    progress.start("opening the model", 0)
    read_text_config(checkpoint, hint=hint)
    check_complete(checkpoint, allow_missing=options.allow_missing)
    check_memory(
        num_parameters(checkpoint), copies=_COPIES_IN_MEMORY + _COPIES_FOR_NOISE * options.noise, what="probing"
    )
    opened = open_to_run(checkpoint)
    task = opened.task if opened.task in (CLM, MLM) else NONE
    seq_len = sequence_length(opened.model.config, options.seq_len)
    tokens, data_words = _tokens(checkpoint.directory, opened, options, seq_len)
    batches = Batches(
        tokens=tokens,
        task=task,
        batch_size=options.batch_size,
        vocab_size=vocabulary_size(opened.model.config),
        seed=options.seed,
    )
    objective = find_objective(opened.model, task, next(iter(batches)))
    batches = dataclasses.replace(batches, shifted=objective.shifted)
    return ProbeSetup(
        checkpoint=checkpoint, opened=opened, task=task, batches=batches, seq_len=seq_len, data_words=data_words,
        notes=objective.notes,
    )  # fmt: skip


def probe_checkpoint(model: Openable, options: ProbeOptions, *, progress: Progress | None = None) -> ProbeResult:
    """Run `model` forward and backward in fp32 on the CPU and record its tensors.

    In the record's options, `facts` describe the run, and `warnings` list doubts about it.
    """
    progress = progress or Silent()
    prepared = prepare_run(model, options, progress)
    opened, seq_len, origin = prepared.opened, prepared.seq_len, prepared.checkpoint.origin
    progress.start("compiling", 0)
    prepare(opened.model.parameters())
    with quiet_transformers():
        with counted_layers(opened.model, options.steps, progress):
            result = probe(opened.model, prepared.batches, steps=options.steps, every=options.every, loss=prepared.loss)
        if options.noise:
            progress.start("passes with rounded products", options.steps * (1 + 2 * len(NOISE_RECIPES)), unit="passes")
            opened.model.register_forward_hook(lambda *_: progress.advance(1))  # also in the copies that round
            noise = gradient_noise(
                opened.model, prepared.batches, steps=options.steps, loss=prepared.loss, seed=options.seed
            )
            result = dataclasses.replace(result, noise=noise)
    warnings = _warnings(prepared)
    if options.noise and (left_out := NOISE_RECIPES.keys() - {x.name for x in result.noise}):
        warnings.append(f"no noise of gradients with Inf or NaN: {', '.join(sorted(left_out))}")
    shape = f"{options.steps} of {options.batch_size} x {seq_len} tokens"
    masks = f", {MASK_RATE:.0%} masked".replace("%", " %") if prepared.task is MLM else ""
    facts = {
        "Model": f"{type(opened.model).__name__}, {prepared.task.words}, in fp32",
        "Text": prepared.data_words,
        "Steps": f"{shape}{masks}, seed {options.seed}",
        "Loss": prepared.task.loss,
    }
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in fields_of_run(ProbeOptions)}
    settings |= {"data": str(options.data) if options.data else None, "seq_len": seq_len}
    return dataclasses.replace(
        result,
        options={
            **settings,
            "model": origin.name,
            "resolved": origin.resolved,
            "revision": origin.revision,
            "facts": facts,
            "warnings": warnings,
            "versions": {"lpconv": __version__} | {n: importlib.metadata.version(n) for n in ("torch", "transformers")},
        },
    )


def _tokens(directory: Path, opened: Opened, options: ProbeOptions, seq_len: int) -> tuple[Tokens, str]:
    tokenizer, vocab_size = read_tokenizer(directory), vocabulary_size(opened.model.config)
    if tokenizer is not None:
        path = options.data or demo_text("heldout")
        words = options.data.name if options.data else "the held-out sample text"
        tokens = tokenize(path, tokenizer, seq_len=seq_len, vocab_size=vocab_size)
        repeated = ", repeated" if len(tokens.windows) < options.steps * options.batch_size else ""
        return tokens, words + repeated
    if options.data is not None:
        raise UsageError(
            f"`{directory.name}` has no tokenizer to read `{options.data}` with",
            hint="copy the tokenizer files next to the weights, or leave --data out to probe with random token ids",
        )
    ids = random_ids((options.steps * options.batch_size, seq_len), vocab_size, seed=options.seed)
    return Tokens(windows=ids), RANDOM_IDS


@contextmanager
def counted_layers(model: Any, steps: int, progress: Progress) -> Iterator[None]:
    """Context manager for a phase that advances with each layer of each forward and backward pass."""

    def count(module: Any, args: Any, output: Any) -> None:
        progress.advance(1)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: progress.advance(1))  # type: ignore[no-untyped-call]  # untyped in torch

    layers = dict(weighted_modules(model)).values()
    progress.start(f"{plural(steps, 'step')} forward and backward", 2 * steps * len(layers), unit="passes")
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(count))
        yield


def _warnings(prepared: ProbeSetup) -> list[str]:
    notes, opened = [], prepared.opened
    named = next(iter(prepared.checkpoint.config.get("architectures") or []), None)
    if prepared.task is NONE and named and named != type(opened.model).__name__:
        notes.append(f"the checkpoint lacks weights of `{named}`, so {type(opened.model).__name__} was probed instead")
    if opened.missing:
        notes.append(f"not in the checkpoint, so filled with random numbers: {name_list(opened.missing)}")
    return [*notes, *prepared.notes, *prepared.batches.tokens.doubts]


def calibrate_checkpoint(
    model: Openable, options: ProbeOptions, *, progress: Progress | None = None
) -> dict[str, EdgeFactors]:
    """Measure the unit-scaling factors of `model` in fp32, on the batches that a probe with `options` runs."""
    progress = progress or Silent()
    prepared = prepare_run(model, options, progress)
    with quiet_transformers():
        under_scaling = scaled(prepared.opened.model, method="unit")
        batches = list(itertools.islice(prepared.batches, options.steps))
        return calibrate(under_scaling, counted(batches, "calibrating", "batches", progress), loss=prepared.loss)
