"""Memory that a forward pass keeps for the backward pass, counted on a model without storage (meta device).

Operators on meta tensors keep the shapes and dtypes that they save. They differ from a real device in two ways:
attention runs unfused and saves its probabilities, and autocast ignores them. So attention is sent to the fused kernel
if a device would use it, and recipes with autocast run on fake CPU tensors.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lpconv.layers import blocks_of
from lpconv.scaled import saved_bytes
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import prepare
from lpconv.train.recipes import Arithmetic

_COUNTED = 2  # blocks; further equal blocks are extrapolated


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Bytes that a forward pass keeps for the backward pass on a rank, and its number of tokens and logits.

    `block_activations` are those of one block; `activations` includes all blocks.
    """

    activations: int
    block_activations: int
    num_tokens: int
    num_logits: int

    def times(self, sequences: int) -> "Passes":
        """The same for several sequences, given the counts for one."""
        return Passes(**{name: sequences * count for name, count in asdict(self).items()})


def passes_of(empty: Any, arithmetic: Arithmetic, batch_shape: tuple[int, int]) -> Passes:
    """Memory that an arithmetic keeps for a batch of token ids. Equal blocks are extrapolated from two."""
    blocks = blocks_of(empty)
    if len(blocks) <= _COUNTED or len({_shapes(block) for block in blocks}) > 1:
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


def _shapes(block: nn.Module) -> tuple[Any, ...]:
    return (type(block), *(p.shape for p in block.parameters()))


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
    """A copy of the model with only its first blocks."""
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
