"""What a step needs of each rank that shares a model by FSDP2, found on a model without memory.

One of three moments is the peak. When the loss hands back its gradient, all activations are there, what the loss makes
of logits beside them, and what lies outside of blocks is gathered. When the last block hands back its own, logits are
gone, two blocks are gathered, one of them ahead, and the block's gradients are whole. At the end activations are gone,
and all gradients are there, those of what lies outside of blocks whole once more, and the sums of the last block on
their way. One rank alone shares nothing: it gathers nothing, keeps 16-bit weights beside the optimizer's copy, and
its gradients are whole at the end. The optimizer's own temporary tensors are left out, as in what a run measures
(`lpconv.train.memory`).
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from lpconv.checkpoint.contents import check_config, read_contents, read_json
from lpconv.checkpoint.resolve import resolve
from lpconv.devices import DEVICES
from lpconv.errors import UnsupportedError
from lpconv.layers import blocks_of
from lpconv.models.inputs import sequence_length
from lpconv.models.opening import model_errors
from lpconv.models.presets import PRESETS
from lpconv.models.quiet import quiet_transformers
from lpconv.models.tasks import concrete, find_task
from lpconv.results import MemoryPlan, RecipeMemory
from lpconv.scaled.choices import NATIVE_MARK
from lpconv.train.options import FinetuneOptions, check_options, check_start
from lpconv.train.passes import Passes, passes_of
from lpconv.train.recipes import RECIPES, TRAINING_OPTIMIZERS, Arithmetic

__all__ = ["plan", "recipe_memory", "smallest_world"]

_REDUCED = 4  # bytes: gradients are summed in fp32
_LOGIT_BYTES = 4  # losses are taken in fp32
_WORLDS = tuple(2**n for n in range(11))
_HINT = "lpconv counts the models of language that this release of transformers builds"


def plan(model: str, options: FinetuneOptions) -> MemoryPlan:
    """What a step of a model needs of each rank, under every recipe that it can have and on up to 1024 ranks.

    `model` is a preset, a config file, a directory with one, or whatever `resolve` takes; no weights are read. A rank
    has its share of the batch, and one sequence at least. Raises UnsupportedError for models that are no models of
    language, and as `check_start` does.
    """
    check_options(options)
    settings = _settings(model, options.revision)
    check_start(options, settings)
    task = find_task(settings, options.task, has_labels=False)
    if task.name not in ("mlm", "clm"):
        raise UnsupportedError(f"what {task.name} needs cannot be counted without its data", hint=_HINT)
    with quiet_transformers(), model_errors("config.json builds no model", hint=_HINT), torch.device("meta"):
        config = transformers.AutoConfig.for_model(**settings)
        empty = concrete(task.auto, config)(config)
    shape = (1, sequence_length(config, options.seq_len))
    asked = options.arithmetic
    usable = {n: r.arithmetic for n, r in RECIPES.items() if NATIVE_MARK in settings or not r.arithmetic.is_native}
    arithmetics = {asked.name: asked} | usable
    rows = []
    for arithmetic in arithmetics.values():
        with quiet_transformers(), model_errors("the model does not run", hint=_HINT):
            one = passes_of(empty, arithmetic, shape)
        for ranks in _WORLDS:
            passes = one.times(max(1, options.batch_size // ranks))
            rows.append(recipe_memory(empty, arithmetic, num_ranks=ranks, passes=passes))
    rooms = {name: d.memory_bytes for name, d in DEVICES.items()}
    if options.max_memory is not None:
        rooms["--max-memory"] = options.max_memory
    count = sum(p.numel() for p in empty.parameters())
    return MemoryPlan(
        name=model,
        recipe=asked.name,
        num_parameters=count,
        batch_size=options.batch_size,
        seq_len=shape[1],
        memory=tuple(rows),
        gpus={name: smallest_world([r for r in rows if r.recipe == name], rooms) for name in arithmetics},
    )


def _settings(model: str, revision: str | None) -> dict[str, Any]:
    """What config.json says of a model, wherever that is."""
    path = Path(os.path.expanduser(model))
    if model in PRESETS and not path.is_dir():
        settings: dict[str, Any] = PRESETS[model].config().to_dict()
        return settings
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file() and path.suffix == ".json":
        settings = read_json(path)
        check_config(settings, path)
        return settings
    return read_contents(resolve(model, revision=revision, headers_only=True).directory).config


def recipe_memory(empty: nn.Module, arithmetic: Arithmetic, *, num_ranks: int, passes: Passes) -> RecipeMemory:
    """The parts of a step's peak under an arithmetic on rank 0, whose rows are the most, in bytes."""
    if num_ranks == 1:
        return _alone(empty, arithmetic, passes)
    weight, crossing = _weight_bytes(arithmetic), _crossing_bytes(arithmetic)
    rows = _own_elements(empty.parameters(), num_ranks)
    block, rest = _sizes(empty)
    logits = _LOGIT_BYTES * passes.num_logits
    whole = crossing + _REDUCED  # of a gradient: as it is found, and where it is summed
    own = math.ceil(block / num_ranks)  # of a block, on their way: rows to gather, and rows of sums
    moments = (
        {
            "gathered": crossing * rest,
            "activations": passes.activations,
            "gradients": 0,
            "logits": _loss_bytes(arithmetic) * passes.num_logits,
        },
        {
            "gathered": crossing * (rest + 2 * block + own),
            "activations": max(passes.activations - logits, 0),
            "gradients": whole * block + _REDUCED * own,
            "logits": 0,
        },
        {
            "gathered": crossing * rest,
            "activations": 0,
            "gradients": weight * rows + whole * rest + _REDUCED * (block + math.ceil(rest / num_ranks)),
            "logits": 0,
        },
    )
    kept = {"weights": weight * rows, "optimizer": _state_bytes(arithmetic) * rows}
    return RecipeMemory(recipe=arithmetic.name, num_ranks=num_ranks, parts=kept | _most(moments))


def _alone(empty: nn.Module, arithmetic: Arithmetic, passes: Passes) -> RecipeMemory:
    """The same of a process that trains by itself."""
    count = sum(p.numel() for p in empty.parameters())
    weight = _crossing_bytes(arithmetic)
    block, _ = _sizes(empty)
    activations = max(passes.activations - _LOGIT_BYTES * passes.num_logits, 0)
    logits = _loss_bytes(arithmetic) * passes.num_logits
    moments = (
        {"gathered": 0, "activations": passes.activations, "gradients": 0, "logits": logits},
        {"gathered": 0, "activations": activations, "gradients": weight * block, "logits": 0},
        {"gathered": 0, "activations": 0, "gradients": weight * count, "logits": 0},
    )
    state = TRAINING_OPTIMIZERS[arithmetic.optimizer].bytes_per_parameter - 2 * weight
    kept = {"weights": weight * count, "optimizer": state * count}
    return RecipeMemory(recipe=arithmetic.name, num_ranks=1, parts=kept | _most(moments))


def _most(moments: Iterable[dict[str, int]]) -> dict[str, int]:
    return max(moments, key=lambda parts: sum(parts.values()))


def _loss_bytes(arithmetic: Arithmetic) -> int:
    """Of what the loss makes of a logit in its backward pass: two gradients in fp32, and where it is scaled what it
    kept of it in 16 bits, in fp8 twice."""
    if not arithmetic.is_scaled or arithmetic.precision == "fp32":
        return 2 * _LOGIT_BYTES
    return 2 * _LOGIT_BYTES + (4 if arithmetic.precision == "fp8" else 2)


def smallest_world(rows: Iterable[RecipeMemory], rooms: Mapping[str, int]) -> dict[str, int | None]:
    """For each room, by name and in bytes, the smallest number of ranks of which each has it; None where none has."""
    by_size = sorted(rows, key=lambda r: r.num_ranks)
    return {name: next((r.num_ranks for r in by_size if r.total_bytes <= room), None) for name, room in rooms.items()}


def _sizes(empty: nn.Module) -> tuple[int, int]:
    """The parameters of the largest block, and of what lies outside of blocks."""
    blocks = [b for b in blocks_of(empty) if b is not empty]
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = sum(p.numel() for p in empty.parameters() if id(p) not in inside)
    return max((sum(p.numel() for p in b.parameters()) for b in blocks), default=0), rest


def _state_bytes(arithmetic: Arithmetic) -> int:
    """Of the optimizer's state: fp32 weights of 4 bytes have a gradient of 4, and 16-bit ones of 2."""
    if arithmetic.optimizer == "fp16-state":
        return 4  # two moments of 16 bits; the fp32 copy is the parameter itself
    return TRAINING_OPTIMIZERS[arithmetic.optimizer].bytes_per_parameter - 2 * _weight_bytes(arithmetic)


def _weight_bytes(arithmetic: Arithmetic) -> int:
    """Of a parameter as it is kept, and of its gradient."""
    return 4 if arithmetic.variant is None else 2


def _crossing_bytes(arithmetic: Arithmetic) -> int:
    """Of a gathered parameter, and of its gradient before it is summed."""
    return 2 if arithmetic.variant is not None or (arithmetic.is_scaled and arithmetic.precision != "fp32") else 4


def _own_elements(parameters: Iterable[Any], num_ranks: int) -> int:
    """What the first rank has: rows are shared out, rounded up."""
    return sum(math.ceil(p.shape[0] / num_ranks) * (p.numel() // max(p.shape[0], 1)) for p in parameters)
