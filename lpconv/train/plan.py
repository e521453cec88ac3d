"""What a step needs of each rank that shares a model by FSDP2, found on a model without memory.

One of a few moments is the peak, and each is added up from what FSDP2 and autograd then hold:

- when the loss is taken and hands back its gradient, all activations are there, what lies outside of blocks is
  gathered, and so is a block: the last one in the forward pass, whose buffer is let go of when the model returns, and
  the same one in the backward pass, ahead;
- in the backward pass of a block, the block and the one ahead are gathered, the head has its gradient, and the widest
  layer makes temporary tensors. The sums of the block before are still on their way, and its rows are kept;
- when the last block's gradients are whole, they stand beside the buffer in which they are summed;
- at the end, the tables have theirs; those are summed in turn, and the rows of all blocks are there.

One rank alone shares nothing: it gathers nothing, keeps 16-bit weights beside the optimizer's copy, and its gradients
are whole at the end. Left out are the optimizer's own temporary tensors, as in what a run measures
(`lpconv.train.memory`), and copies that a backend makes to exchange: NCCL makes none, gloo one of what it sums.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from lpconv.errors import UnsupportedError
from lpconv.layers import blocks_of
from lpconv.models.inputs import sequence_length
from lpconv.models.opening import model_errors
from lpconv.models.presets import PRESETS
from lpconv.models.quiet import quiet_transformers
from lpconv.models.tasks import find_task, resolve_auto_class
from lpconv.results import MemoryPlan, RecipeMemory
from lpconv.scaled.choices import NATIVE_MARK
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import check_config, read_json
from lpconv.train.options import FinetuneOptions, check_start
from lpconv.train.passes import Passes, passes_of
from lpconv.train.recipes import RECIPES, TRAINING_OPTIMIZERS, Arithmetic

# Of GPUs that a step is fitted into: bytes by their data sheets.
GPU_MEMORY = {"a100": 80 * 10**9, "l40s": 48 * 10**9, "h100": 80 * 10**9, "h200": 141 * 10**9, "b200": 180 * 10**9}
_REDUCED = 4  # bytes: gradients are summed in fp32
_LOGIT_BYTES = 4  # losses are taken in fp32
_PARTS = dict.fromkeys(("gathered", "activations", "gradients", "logits", "temporary"), 0)
_WORLDS = tuple(2**n for n in range(11))
_HINT = "lpconv counts the models of language that this release of transformers builds"


def memory_plan(model: str, options: FinetuneOptions) -> MemoryPlan:
    """What a step of a model needs of each rank, under every recipe that it can have and on up to 1024 ranks.

    `model` is a preset, a config file, a directory with one, or whatever `resolve` takes; no weights are read. A rank
    has its share of the batch, and one sequence at least. Raises UnsupportedError for models that are no models of
    language, and as `check_start` does.
    """
    settings = _settings(model, options.revision)
    check_start(options, settings)
    task = find_task(settings, options.task, has_labels=False)
    if task.name not in ("mlm", "clm"):
        raise UnsupportedError(f"what {task.name} needs cannot be counted without its data", hint=_HINT)
    with quiet_transformers(), model_errors("config.json builds no model", hint=_HINT), torch.device("meta"):
        config = transformers.AutoConfig.for_model(**settings)
        empty = resolve_auto_class(task.auto, config)(config)
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
    rooms = dict(GPU_MEMORY)
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
    return Checkpoint.open(model, revision=revision).config


@dataclass(frozen=True, kw_only=True)
class _ModelSizes:
    """Of a model, in numbers: the largest block, what lies outside of blocks, the head's matrix, the table of ids (0
    where the head has the same one), the largest parameter of a block and its longest side. `in_blocks` are the
    parameters of all blocks."""

    block: int
    rest: int
    head: int
    table: int
    largest: int
    widest: int
    in_blocks: tuple[nn.Parameter, ...]


def _sizes(empty: Any) -> _ModelSizes:
    blocks = [b for b in blocks_of(empty) if b is not empty]
    in_blocks = {id(p): p for block in blocks for p in block.parameters()}
    matrices = [p for p in in_blocks.values() if p.ndim > 1]
    head, table = (getattr(m, "weight", None) for m in (empty.get_output_embeddings(), empty.get_input_embeddings()))
    return _ModelSizes(
        block=max((sum(p.numel() for p in b.parameters()) for b in blocks), default=0),
        rest=sum(p.numel() for p in empty.parameters() if id(p) not in in_blocks),
        head=0 if head is None else head.numel(),
        table=0 if table is None or table is head else table.numel(),
        largest=max((p.numel() for p in matrices), default=0),
        widest=max((max(p.shape[-2:]) for p in matrices), default=0),
        in_blocks=tuple(in_blocks.values()),
    )


def recipe_memory(empty: nn.Module, arithmetic: Arithmetic, *, num_ranks: int, passes: Passes) -> RecipeMemory:
    """The parts of a step's peak under an arithmetic on rank 0, whose rows are the most, in bytes."""
    if num_ranks == 1:
        return _alone(empty, arithmetic, passes)
    weight, crossing = _weight_bytes(arithmetic), _crossing_bytes(arithmetic)
    rows = _own_elements(empty.parameters(), num_ranks)
    kept = {"weights": weight * rows, "optimizer": _state_bytes(arithmetic) * rows}
    sizes = _sizes(empty)
    block, rest = sizes.block, sizes.rest
    head = crossing * sizes.head
    own = math.ceil(block / num_ranks)
    on_the_way = _REDUCED * block
    rows_of_blocks = weight * _own_elements(sizes.in_blocks, num_ranks)
    activations = max(passes.activations - _LOGIT_BYTES * passes.num_logits, 0)
    fewer = max(activations - passes.block_activations, 0)
    loss = _PARTS | {
        "gathered": crossing * (rest + block),
        "activations": passes.activations,
        "logits": _loss_bytes(arithmetic) * passes.num_logits,
    }
    inside = _PARTS | {
        "gathered": crossing * (rest + 2 * block),
        "temporary": crossing * sizes.largest + _wide_bytes(arithmetic) * passes.num_tokens * sizes.widest,
    }
    last = {"activations": activations, "gradients": head}
    next_to_last = {"activations": fewer, "gradients": head + weight * own + on_the_way}
    others = max(rows_of_blocks - weight * own, 0)
    first = {"activations": passes.block_activations, "gradients": head + others + on_the_way}
    summed = _PARTS | {
        "gathered": crossing * (rest + block),
        "activations": fewer,
        "gradients": head + crossing * block + on_the_way + _REDUCED * own,
    }
    tables = _PARTS | {
        "gathered": crossing * rest,
        "gradients": rows_of_blocks + on_the_way + _table_bytes(arithmetic, sizes),
    }
    end = _PARTS | {"gradients": rows_of_blocks + (crossing + _REDUCED) * rest + _REDUCED * math.ceil(rest / num_ranks)}
    moments = (loss, inside | last, inside | next_to_last, inside | first, summed, tables, end)
    return RecipeMemory(recipe=arithmetic.name, num_ranks=num_ranks, parts=kept | _most(moments))


def _alone(empty: nn.Module, arithmetic: Arithmetic, passes: Passes) -> RecipeMemory:
    """The same of a process that trains by itself."""
    count = sum(p.numel() for p in empty.parameters())
    weight = _crossing_bytes(arithmetic)
    block = _sizes(empty).block
    activations = max(passes.activations - _LOGIT_BYTES * passes.num_logits, 0)
    logits = _loss_bytes(arithmetic) * passes.num_logits
    moments = (
        _PARTS | {"activations": passes.activations, "logits": logits},
        _PARTS | {"activations": activations, "gradients": weight * block},
        _PARTS | {"gradients": weight * count},
    )
    state = TRAINING_OPTIMIZERS[arithmetic.optimizer].bytes_per_parameter - 2 * weight
    kept = {"weights": weight * count, "optimizer": state * count}
    return RecipeMemory(recipe=arithmetic.name, num_ranks=1, parts=kept | _most(moments))


def _most(moments: Iterable[dict[str, int]]) -> dict[str, int]:
    return max(moments, key=lambda parts: sum(parts.values()))


def _loss_bytes(arithmetic: Arithmetic) -> int:
    """Of what the loss makes of a logit in its backward pass: two gradients in fp32, and where it is scaled what it
    kept of it in 16 bits, in fp8 twice."""
    if not _is_narrow(arithmetic):
        return 2 * _LOGIT_BYTES
    return 2 * _LOGIT_BYTES + (4 if arithmetic.precision == "fp8" else 2)


def _wide_bytes(arithmetic: Arithmetic) -> int:
    """Of what the backward pass of a layer makes of each number that comes out of it: two gradients as they are; where
    they are scaled three in fp32 beside two of 16 bits, as an activation function takes them."""
    return 3 * 4 + 2 * 2 if _is_narrow(arithmetic) else 2 * _crossing_bytes(arithmetic)


def _table_bytes(arithmetic: Arithmetic, sizes: _ModelSizes) -> int:
    """Of the gradients of tables, when that of the ids' is made: it is added up in fp32 where it is scaled.

    One table that does both has two at a time, and then their sum, for which scales that follow the data widen them.
    """
    crossing = _crossing_bytes(arithmetic)
    widened = 4 if _is_narrow(arithmetic) else 0
    if sizes.table:
        return crossing * (sizes.head + sizes.table) + widened * sizes.table
    summed = 3 * crossing + (2 * widened if arithmetic.method == "scalify" else 0)
    return max(2 * crossing + widened, summed) * sizes.head


def _is_narrow(arithmetic: Arithmetic) -> bool:
    """Whether tensors are scaled and kept in 16 bits or fewer."""
    return arithmetic.is_scaled and arithmetic.precision != "fp32"


def smallest_world(rows: Iterable[RecipeMemory], rooms: Mapping[str, int]) -> dict[str, int | None]:
    """For each room, by name and in bytes, the smallest number of ranks of which each has it; None where none has."""
    by_size = sorted(rows, key=lambda r: r.num_ranks)
    return {name: next((r.num_ranks for r in by_size if r.total_bytes <= room), None) for name, room in rooms.items()}


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
    return 2 if arithmetic.variant is not None or _is_narrow(arithmetic) else 4


def _own_elements(parameters: Iterable[Any], num_ranks: int) -> int:
    """What the first rank has: rows are shared out, rounded up."""
    return sum(math.ceil(p.shape[0] / num_ranks) * (p.numel() // max(p.shape[0], 1)) for p in parameters)
