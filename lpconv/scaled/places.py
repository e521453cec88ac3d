"""Named places in a model: where scales are reset by data, and which modules compute exactly."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from lpconv.scaled import ops
from lpconv.scaled.rescale import dynamic_rescale_grad
from lpconv.scaled.tensor import ScaledTensor

__all__ = ["PLACES", "heads", "install", "layernorm_grad", "logits_grad", "norm_modules", "weight_grad"]


def norm_modules(model: nn.Module) -> Iterable[nn.Module]:
    """Layer and RMS norms, by class name: transformers defines one per architecture."""
    return (m for m in model.modules() if type(m).__name__.endswith(("LayerNorm", "RMSNorm")))


def layernorm_grad(model: nn.Module) -> None:
    """l2 on the gradient that reaches each norm: twice per block, the paper's only rescaling for fp16 and fp8.

    The paper rescales where the norm's backward pass ends. Here it is where that begins: a norm written in several ops
    (RMS norms of transformers) sums its parts into the residual stream, and a node in between would reorder that sum.
    """
    for module in norm_modules(model):
        module.register_forward_hook(lambda _, __, output: dynamic_rescale_grad(output))


def logits_grad(model: nn.Module) -> None:
    """l2 on the gradient of the output head's result."""
    for module in heads(model):
        module.register_forward_hook(lambda _, __, output: dynamic_rescale_grad(output))


def weight_grad(model: nn.Module) -> None:
    """l2 on every finished parameter gradient, for optimizer state of 16 bits."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_rebalanced_grad)  # type: ignore[no-untyped-call]


def _rebalanced_grad(grad: Tensor) -> Tensor:
    rebalanced: Tensor = ops.rebalance(grad, "l2", "")
    return rebalanced


PLACES: dict[str, Callable[[nn.Module], None]] = {
    "layernorm_grad": layernorm_grad,
    "logits_grad": logits_grad,
    "weight_grad": weight_grad,
}


def heads(model: nn.Module) -> Sequence[nn.Module]:
    """The modules that produce logits: the output embeddings, else the last linear layer."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if head is not None:
        return [head]
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return linear[-1:]


def _mark_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x = args[0]
    return (ops.as_exact(x) if isinstance(x, ScaledTensor) else x, *args[1:])


def install(model: nn.Module, places: Iterable[str], exact: Iterable[nn.Module]) -> None:
    """Put the hooks of the named places on `model`, and mark what enters the modules of `exact`."""
    for place in places:
        PLACES[place](model)
    for module in exact:
        module.register_forward_pre_hook(_mark_input)
