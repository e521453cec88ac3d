"""Decoders with the keys and values of earlier tokens as inputs and outputs of the graph, named as Optimum names them.

Letters in shapes: B batch, L tokens of this step, P earlier tokens, T = P + L, H heads with keys, D size of a head.
Layers with a sliding window also keep all keys: the mask hides those outside of the window.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lpconv.errors import UnsupportedError
from lpconv.export.options import NO_CACHE_HINT, PAST
from lpconv.export.trace import Traceable, TracedCase, open_in_memory, running
from lpconv.models.inputs import random_ids, vocabulary_size
from lpconv.models.opening import read_text_config
from lpconv.models.tasks import CLM, architecture, cache_argument, resolve_auto_class, task_of
from lpconv.storage.checkpoint import Checkpoint

_PRESENT = "present."
_STEP_AXES = {0: "batch", 1: "sequence"}
_AXES = {"attention_mask": {0: "batch", 1: "total_sequence"}}
_PAST_AXES = {0: "batch", 2: "past_sequence"}
# Batch, earlier tokens and tokens of each checked step, the traced one first; see `models.inputs._TRACED`.
_STEPS = ((2, 10, 13), (3, 0, 9), (3, 8, 1))


def open_with_cache(checkpoint: Checkpoint) -> Traceable:
    """Open a decoder for tracing one step of generation. Right outputs come from PyTorch without a cache.

    Raises UnsupportedError, before it reads weights, for models that keep anything but keys and values.
    """
    has_positions = _check(checkpoint)
    opened = open_in_memory(checkpoint)
    model = opened.model
    with running():
        cases = [_case(model, *step, has_positions=has_positions) for step in _STEPS]
    inputs = {name: x.clone() for name, x in cases[0][0].items()}  # outside of inference mode, for torch.export
    return Traceable(
        model=model,
        inputs=inputs,
        axes={n: _PAST_AXES if n.startswith(PAST) else _AXES.get(n, _STEP_AXES) for n in inputs},
        outputs=("logits", *(n.replace(PAST, _PRESENT) for n in inputs if n.startswith(PAST))),
        forward=_step,
        cases=tuple(cases),
        missing=opened.missing,
    )


def _check(checkpoint: Checkpoint) -> bool:
    """Whether the model takes position ids. Raises UnsupportedError if it cannot take keys and values."""
    config = read_text_config(checkpoint, hint=NO_CACHE_HINT)
    model_class = resolve_auto_class(architecture(checkpoint.config), config)
    parameters = inspect.signature(model_class.forward).parameters
    layers = DynamicCache(config=config).layers
    other = next((type(x).__name__ for x in layers if type(x) not in (DynamicLayer, DynamicSlidingWindowLayer)), None)
    if task_of(model_class.__name__) is not CLM or cache_argument(model_class) is None:
        raise UnsupportedError(f"`{model_class.__name__}` does not generate with a cache", hint=NO_CACHE_HINT)
    if other is not None:
        raise UnsupportedError(
            f"`{model_class.__name__}` has layers with a `{other}`, not only keys and values", hint=NO_CACHE_HINT
        )
    return "position_ids" in parameters


def _case(model: nn.Module, batch: int, num_past: int, num_tokens: int, *, has_positions: bool) -> TracedCase:
    """A step after `num_past` tokens, and its right outputs from one run over all tokens. Half of a row is padding."""
    ids_BT = random_ids((batch, num_past + num_tokens), vocabulary_size(model.config), seed=num_past)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, : ids_BT.shape[1] // 2] = 0
    whole = {"input_ids": ids_BT, "attention_mask": mask_BT}
    if has_positions:
        whole["position_ids"] = (mask_BT.cumsum(1) - 1).clamp(min=0)
    logits = model(**whole).logits
    _, *present = _step(model, whole)
    step = {name: x if name in _AXES else x[:, num_past:].contiguous() for name, x in whole.items()}
    past = {_name(PAST, i): x[:, :, :num_past].contiguous() for i, x in enumerate(present)}
    return {**step, **past}, (logits[:, num_past:], *present)


def _name(prefix: str, index: int) -> str:
    return f"{prefix}{index // 2}.{('key', 'value')[index % 2]}"


def _step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Logits [B, L, vocabulary], and the keys and values [B, H, T, D] of each layer."""
    past = [x for name, x in inputs.items() if name.startswith(PAST)]
    others = {name: x for name, x in inputs.items() if not name.startswith(PAST)}
    cache = DynamicCache(ddp_cache_data=list(zip(past[::2], past[1::2], strict=True)))
    argument = cache_argument(type(model)) or ""
    logits: Tensor = model(**others, **{argument: cache}, use_cache=True).logits
    return (logits, *(x for layer in cache.layers for x in (layer.keys, layer.values)))
