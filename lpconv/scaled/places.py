"""Rescaling, named places in a model where it happens, and modules that compute exactly.

Rescaling gives the same value with data near 1, by moving a power of two into the scale (Scalify §3.3, Alg. 4). The
resulting scale stays on the device, so nothing waits for it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.errors import UnsupportedError, UsageError
from lpconv.layers import head, linears
from lpconv.lookup import find
from lpconv.scaled.rules.own import STATISTICS, as_exact, rebalance
from lpconv.scaled.tensor import ScaledTensor
from lpconv.shards import is_sharded


def dynamic_rescale(x: Tensor, statistic: str = "l2") -> Tensor:
    """Return `x` with data rescaled to near 1 by a "max", "l1" or "l2" statistic; gradients pass unchanged."""
    find("statistic", statistic, STATISTICS)
    return rebalance(x, statistic, "") if isinstance(x, ScaledTensor) else x


def dynamic_rescale_grad(x: Tensor, statistic: str = "l2") -> Tensor:
    """Return `x` unchanged, and rescale the data of its gradient to near 1 in the backward pass."""
    find("statistic", statistic, STATISTICS)
    return rebalance(x, "", statistic) if isinstance(x, ScaledTensor) else x


def norm_modules(model: nn.Module) -> Iterable[nn.Module]:
    """Layer and RMS norms, by class name, since transformers defines one per architecture."""
    return (m for m in model.modules() if type(m).__name__.endswith(("LayerNorm", "RMSNorm")))


def _rescale_output_grads(modules: Iterable[nn.Module]) -> None:
    """l2 on the gradient that reaches each module."""
    for module in modules:
        module.register_forward_hook(lambda _, __, output: dynamic_rescale_grad(output))


def _weight_grad(model: nn.Module) -> None:
    """l2 on every finished parameter gradient, for 16-bit optimizer state."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: rebalance(grad, "l2", ""))  # type: ignore[no-untyped-call]


def _every_n_steps(model: nn.Module, num_steps: int) -> None:
    """l2 on every parameter, before each `num_steps`-th forward pass in training, for weights that outgrow their scale.

    The hook is on the whole model, outside the graph that `torch.compile` captures.
    """
    model.lpconv_num_passes = 0  # type: ignore[assignment]  # nn.Module types every attribute as a tensor or module
    model.register_forward_pre_hook(functools.partial(_rescale_parameters, num_steps=num_steps))


def _rescale_parameters(model: nn.Module, _: Any, *, num_steps: int) -> None:
    if not (model.training and torch.is_grad_enabled()):
        return
    model.lpconv_num_passes += 1  # type: ignore[operator, assignment]  # an int, see above
    if model.lpconv_num_passes % num_steps == 0:  # type: ignore[operator]  # an int, see above
        for parameter in model.parameters():
            if is_sharded(parameter):
                raise UnsupportedError(
                    "every:N needs whole parameters, but these are sharded",
                    hint="leave every:N out of `rescale`",
                )
            if isinstance(parameter, ScaledTensor):
                parameter.rebalance_()


_PLACES: dict[str, Callable[[nn.Module], None]] = {
    # Twice per block, the paper's only rescaling for fp16 and fp8. The paper rescales at the end of the norm's backward
    # pass, lpconv at its start: a norm of several ops (RMS norms of transformers) sums its parts into the residual
    # stream, and a node in between would reorder that sum.
    "layernorm_grad": lambda model: _rescale_output_grads(norm_modules(model)),
    "logits_grad": lambda model: _rescale_output_grads(heads(model)),
    "softmax_grad": lambda model: None,  # no module has the scores; see `Numerics.softmax_grad`
    "weight_grad": _weight_grad,
}


def place(name: str) -> Callable[[nn.Module], None]:
    """The function that installs a place: one of `_PLACES`, or ``every:N``. Raises `UsageError` for other names."""
    kind, _, number = name.partition(":")
    if kind != "every":
        return find("place", name, _PLACES)
    if not number.isdecimal() or int(number) == 0:
        raise UsageError(f"`{name}` has no number of steps", hint="write every:N, for example every:100")
    return functools.partial(_every_n_steps, num_steps=int(number))


def heads(model: nn.Module) -> Sequence[nn.Module]:
    """The modules that produce logits: the model's head, or else its last linear layer."""
    output_head = head(model)
    return [output_head] if output_head is not None else [x.module for x in linears(model)[-1:]]


def _mark_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x = args[0]
    return (as_exact(x) if isinstance(x, ScaledTensor) else x, *args[1:])


def install(model: nn.Module, places: Iterable[str], exact: Iterable[nn.Module]) -> None:
    """Register the hooks of the named places on `model`, and mark the inputs of the modules in `exact`."""
    for name in places:
        place(name)(model)
    for module in exact:
        module.register_forward_pre_hook(_mark_input)
