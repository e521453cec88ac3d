"""Memory of a step on each rank that shares a model by FSDP2, estimated on a model without storage.

The peak is one of several moments, each summed from what FSDP2 and autograd hold at that time:

- when the loss returns its gradient: all activations, gathered parameters outside of blocks, and one gathered block
  (the last one of the forward pass, whose buffer is freed when the model returns, or the same one prefetched for the
  backward pass);
- in the backward pass of a block: the block and the next one are gathered, the head has its gradient, and the widest
  layer makes temporary tensors. The sums of the previous block are in flight, and its rows are kept;
- when the gradients of the last block are complete: they and the buffer in which they are summed;
- at the end: gradients of embedding tables, summed one after the other, and the rows of all blocks.

With several batches per step, all gradients are kept during the passes of the next batch. With gradient checkpointing,
only the input of each block is kept, and one block is computed again.

A single rank gathers nothing, keeps 16-bit weights next to the optimizer's copy, and has complete gradients at the end.
Left out are the optimizer's temporary tensors, as in measurements (`lpconv.train.memory`), and copies that a backend
makes for communication: NCCL makes none, gloo one of what it sums.

Activations are counted on meta tensors: operators on them keep the shapes and dtypes that they save. They differ from a
real device in two ways: attention runs unfused and saves its probabilities, and autocast ignores them. So attention is
sent to the fused kernel if a device would use it, and recipes with autocast run on fake CPU tensors.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lpconv.layers import blocks_of
from lpconv.models.inputs import sequence_length
from lpconv.models.opening import config_of, model_errors
from lpconv.models.tasks import find_task, resolve_auto_class
from lpconv.progress import quiet_transformers
from lpconv.results import MemoryPlan, RecipeMemory
from lpconv.scaled import saved_bytes
from lpconv.scaled.choices import NATIVE_MARK
from lpconv.train.options import FinetuneOptions, not_planned
from lpconv.train.prepare import prepare
from lpconv.train.recipes import RECIPES, TRAINING_OPTIMIZERS, Arithmetic

# Memory of GPUs in bytes, from their data sheets. A display takes some of that of a consumer card.
GPU_MEMORY = {
    "t4/rtx4080": 16 * 10**9, "rtx3090/4090": 24 * 10**9, "l40s": 48 * 10**9, "a100": 80 * 10**9, "h100": 80 * 10**9,
    "h200": 141 * 10**9, "b200": 180 * 10**9,
}  # fmt: skip
_REDUCED = 4  # bytes: gradients are summed in fp32
_LOGIT_BYTES = 4  # losses are computed in fp32
_PARTS = dict.fromkeys(("gathered", "activations", "gradients", "logits", "temporary"), 0)
_WORLDS = tuple(2**n for n in range(11))
_HINT = "lpconv can plan the language models that the installed transformers builds"
_COUNTED = 2  # blocks; further equal blocks are extrapolated


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Bytes that a forward pass keeps for the backward pass on a rank, and its number of tokens and logits.

    `block_activations` are those of one block; `activations` includes all blocks. `recomputed` is what the backward
    pass keeps of a block that it computes again.
    """

    activations: int
    block_activations: int
    num_tokens: int
    num_logits: int
    recomputed: int = 0

    def times(self, sequences: int) -> "Passes":
        """The same for several sequences, given the counts for one."""
        return Passes(**{name: sequences * count for name, count in asdict(self).items()})


def passes_of(empty: Any, arithmetic: Arithmetic, batch_shape: tuple[int, int]) -> Passes:
    """Memory that an arithmetic keeps for a batch of token ids. Equal blocks are extrapolated from two."""
    blocks = blocks_of(empty)
    kinds = {(type(block), *(p.shape for p in block.parameters())) for block in blocks}
    if len(blocks) <= _COUNTED or len(kinds) > 1:
        activations = _saved(empty, len(blocks), arithmetic, batch_shape)
        each = activations // len(blocks)
    else:
        one, two = (_saved(empty, count, arithmetic, batch_shape) for count in (1, _COUNTED))
        each = two - one
        activations = one + (len(blocks) - 1) * each
    num_tokens = batch_shape[0] * batch_shape[1]
    return Passes(
        activations=activations,
        block_activations=each,
        num_tokens=num_tokens,
        num_logits=num_tokens * empty.config.vocab_size,
    )


def keeping_inputs(passes: Passes, empty: Any, arithmetic: Arithmetic) -> Passes:
    """The same with gradient checkpointing: each block keeps its input in place of its activations."""
    each = passes.num_tokens * empty.config.get_text_config().hidden_size * _crossing_bytes(arithmetic)
    saved = len(blocks_of(empty)) * (passes.block_activations - each)
    return replace(
        passes,
        activations=passes.activations - saved,
        block_activations=each,
        recomputed=passes.block_activations,
    )


def _saved(empty: nn.Module, num_blocks: int, arithmetic: Arithmetic, batch_shape: tuple[int, int]) -> int:
    """Bytes kept by the first blocks and the rest of the model."""
    if arithmetic.precision in ("fp8", "fp4") and not arithmetic.is_scaled:  # keeps as much as bf16
        arithmetic = replace(arithmetic, precision="bf16")
    model = _with_blocks(empty, num_blocks).train()
    has_autocast = arithmetic.variant is None and not arithmetic.is_scaled
    with FakeTensorMode(allow_non_fake_inputs=True) if has_autocast else _Fused():
        if has_autocast:
            model = model.to_empty(device="cpu")
        prepared = prepare(model, arithmetic, FinetuneOptions(arithmetic=arithmetic), seed=0)
        prepared.model.config.use_cache = True  # without a cache, masks look for packed sequences, which needs values
        ids = torch.zeros(batch_shape, dtype=torch.long, device="cpu" if has_autocast else "meta")
        with prepared.around_forward("cpu") if has_autocast else nullcontext():
            return saved_bytes(prepared.model, {"input_ids": ids, "labels": ids})


def _with_blocks(empty: nn.Module, count: int) -> nn.Module:
    blocks = blocks_of(empty)
    memo = {id(m): copy.copy(m) for m in empty.modules() if isinstance(m, nn.ModuleList) and m[0] is blocks[0]}
    for shortened in memo.values():
        shortened._modules = {str(i): copy.deepcopy(block) for i, block in enumerate(blocks[:count])}
    return copy.deepcopy(empty, dict(memo))


class _Fused(TorchFunctionMode):
    """Sends attention without dropout to the CPU's fused kernel, which also works on meta tensors."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fused = func is F.scaled_dot_product_attention and not kwargs.get("dropout_p")
        return _attention(*args, **kwargs) if is_fused else func(*args, **kwargs)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention` with the fused kernel; the mask is cast to the dtype that it accepts."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    mask = None if attn_mask is None else attn_mask.to(query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]


def memory_plan(model: str, settings: Mapping[str, Any], options: FinetuneOptions) -> MemoryPlan:
    """Memory that a step of a model needs on each rank, for every possible recipe and up to 1024 ranks.

    `settings` are the config.json of `model`, which is a name for the record. No weights are read. A rank has its share
    of the batch, at least one sequence. Raises UnsupportedError for models that are not language models.
    """
    task = find_task(settings, options.task, has_labels=False)
    if task.name not in ("mlm", "clm"):
        raise not_planned(task.name)
    with quiet_transformers(), model_errors("no model can be built from config.json", hint=_HINT), torch.device("meta"):
        config = config_of(settings)
        empty = resolve_auto_class(task.auto, config)(config)
    shape = (1, sequence_length(config, options.seq_len))
    asked = options.arithmetic
    usable = {n: r.arithmetic for n, r in RECIPES.items() if NATIVE_MARK in settings or not r.arithmetic.is_native}
    arithmetics = {asked.name: asked} | usable
    rows = []
    for arithmetic in arithmetics.values():
        with quiet_transformers(), model_errors("the model fails when it runs", hint=_HINT):
            one = passes_of(empty, arithmetic, shape)
        if options.gradient_checkpointing:
            one = keeping_inputs(one, empty, arithmetic)
        for ranks in _WORLDS:
            passes = one.times(max(1, options.batch_size // ranks))
            adds = options.grad_accum > 1
            rows.append(recipe_memory(empty, arithmetic, num_ranks=ranks, passes=passes, adds_gradients=adds))
    rooms = dict(GPU_MEMORY)
    if options.max_memory is not None:
        rooms["--max-memory"] = options.max_memory
    count = sum(p.numel() for p in empty.parameters())
    return MemoryPlan(
        name=model,
        recipe=asked.name,
        num_parameters=count,
        batch_size=options.batch_size,
        grad_accum=options.grad_accum,
        gradient_checkpointing=options.gradient_checkpointing,
        seq_len=shape[1],
        memory=tuple(rows),
        gpus={name: smallest_world([r for r in rows if r.recipe == name], rooms) for name in arithmetics},
    )


@dataclass(frozen=True, kw_only=True)
class _ModelSizes:
    """Parameter counts of a model.

    `block` is the largest block, `rest` everything outside of blocks, `head` the output matrix, `table` the embedding
    of ids (0 if tied to the head), `largest` the largest matrix of a block and `widest` its longest side. `in_blocks`
    are the parameters of all blocks.
    """

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


def recipe_memory(
    empty: nn.Module, arithmetic: Arithmetic, *, num_ranks: int, passes: Passes, adds_gradients: bool = False
) -> RecipeMemory:
    """Parts of a step's peak memory in bytes, on rank 0, which has the most rows.

    `adds_gradients`: a step has several batches, and the gradients of earlier ones are kept.
    """
    if num_ranks == 1:
        return _single_process_memory(empty, arithmetic, passes, adds_gradients)
    weight, crossing = _weight_bytes(arithmetic), _crossing_bytes(arithmetic)
    rows = _own_elements(empty.parameters(), num_ranks)
    kept = {"weights": weight * rows, "optimizer": _state_bytes(arithmetic) * rows}
    sizes = _sizes(empty)
    block, rest = sizes.block, sizes.rest
    head = crossing * sizes.head
    own = math.ceil(block / num_ranks)
    on_the_way = _REDUCED * block
    rows_of_blocks = weight * _own_elements(sizes.in_blocks, num_ranks)
    activations = max(passes.activations - _LOGIT_BYTES * passes.num_logits, 0) + passes.recomputed
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
    first = {"activations": passes.block_activations + passes.recomputed, "gradients": head + others + on_the_way}
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
    earlier = weight * rows if adds_gradients else 0
    return RecipeMemory(recipe=arithmetic.name, num_ranks=num_ranks, parts=kept | _peak_moment(moments, earlier))


def _single_process_memory(
    empty: nn.Module, arithmetic: Arithmetic, passes: Passes, adds_gradients: bool
) -> RecipeMemory:
    count = sum(p.numel() for p in empty.parameters())
    weight = _crossing_bytes(arithmetic)
    block = _sizes(empty).block
    activations = max(passes.activations - _LOGIT_BYTES * passes.num_logits, 0) + passes.recomputed
    logits = _loss_bytes(arithmetic) * passes.num_logits
    moments = (
        _PARTS | {"activations": passes.activations, "logits": logits},
        _PARTS | {"activations": activations, "gradients": weight * block},
        _PARTS | {"gradients": weight * count},
    )
    state = TRAINING_OPTIMIZERS[arithmetic.optimizer].bytes_per_parameter - 2 * weight
    kept = {"weights": weight * count, "optimizer": state * count}
    earlier = weight * count if adds_gradients else 0
    return RecipeMemory(recipe=arithmetic.name, num_ranks=1, parts=kept | _peak_moment(moments, earlier))


def _peak_moment(moments: Sequence[dict[str, int]], earlier: int) -> dict[str, int]:
    """The largest moment, with the gradients of `earlier` batches in all but the last one, when they are one sum."""
    held = [parts | {"gradients": parts["gradients"] + earlier} for parts in moments[:-1]]
    return max((*held, moments[-1]), key=lambda parts: sum(parts.values()))


def _loss_bytes(arithmetic: Arithmetic) -> int:
    """Bytes per logit in the backward pass of the loss.

    Two gradients in fp32; scaled runs also keep the logit in 16 bits, in fp8 twice.
    """
    if not _is_narrow(arithmetic):
        return 2 * _LOGIT_BYTES
    return 2 * _LOGIT_BYTES + (4 if arithmetic.precision == "fp8" else 2)


def _wide_bytes(arithmetic: Arithmetic) -> int:
    """Bytes per output element in the backward pass of a layer.

    Two gradients in their dtype; for scaled gradients three in fp32 and two in 16 bits, as an activation function
    needs.
    """
    return 3 * 4 + 2 * 2 if _is_narrow(arithmetic) else 2 * _crossing_bytes(arithmetic)


def _table_bytes(arithmetic: Arithmetic, sizes: _ModelSizes) -> int:
    """Bytes of the tables' gradients while the embedding's gradient is computed, summed in fp32 if it is scaled.

    A table tied to the head has two gradients at a time and then their sum, which Scalify's scales widen.
    """
    crossing = _crossing_bytes(arithmetic)
    widened = 4 if _is_narrow(arithmetic) else 0
    if sizes.table:
        return crossing * (sizes.head + sizes.table) + widened * sizes.table
    summed = 3 * crossing + (2 * widened if arithmetic.method == "scalify" else 0)
    return max(2 * crossing + widened, summed) * sizes.head


def _is_narrow(arithmetic: Arithmetic) -> bool:
    """Whether tensors are scaled and stored in at most 16 bits."""
    return arithmetic.is_scaled and arithmetic.precision != "fp32"


def smallest_world(rows: Iterable[RecipeMemory], rooms: Mapping[str, int]) -> dict[str, int | None]:
    """For each room (name to bytes), the smallest number of ranks that fit; None if no number does."""
    by_size = sorted(rows, key=lambda r: r.num_ranks)
    return {name: next((r.num_ranks for r in by_size if r.total_bytes <= room), None) for name, room in rooms.items()}


def _state_bytes(arithmetic: Arithmetic) -> int:
    """Bytes of optimizer state per parameter. fp32 weights have gradients of 4 bytes, 16-bit weights of 2."""
    if arithmetic.optimizer == "fp16-state":
        return 4  # two 16-bit moments; the fp32 copy is the parameter itself
    return TRAINING_OPTIMIZERS[arithmetic.optimizer].bytes_per_parameter - 2 * _weight_bytes(arithmetic)


def _weight_bytes(arithmetic: Arithmetic) -> int:
    """Bytes of a stored parameter, and of its gradient."""
    return 4 if arithmetic.variant is None else 2


def _crossing_bytes(arithmetic: Arithmetic) -> int:
    """Bytes of a gathered parameter, and of its gradient before summing."""
    return 2 if arithmetic.variant is not None or _is_narrow(arithmetic) else 4


def _own_elements(parameters: Iterable[Any], num_ranks: int) -> int:
    """Elements on the first rank: rows are distributed, rounded up."""
    return sum(math.ceil(p.shape[0] / num_ranks) * (p.numel() // max(p.shape[0], 1)) for p in parameters)
