"""Find the origin of Inf and NaN in a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.scaled.tensor import data_part


def first_nonfinite(model: nn.Module, step: Callable[[], Tensor]) -> tuple[str, str] | None:
    """The first layer whose output or output gradient is not finite in `step`, and "forward" or "backward".

    `step` computes the loss of the batch in question with the same random numbers; the gradients are cleared
    afterwards. None if everything is finite, not counting the parameters' own gradients. A non-finite parameter counts
    as the forward pass of its module.
    """
    layers: list[tuple[str, str]] = []
    broken = next((n for n, p in model.named_parameters() if not _is_finite(p.detach())), None)
    if broken is not None:
        return broken, "weights"
    with ExitStack() as stack:
        stack.callback(model.zero_grad)
        for name, module in model.named_modules():
            hook = _output_hook(name or type(model).__name__, layers)
            stack.enter_context(module.register_forward_hook(hook))
        stack.enter_context(_uncompiled(model))
        loss = step()
        if loss.requires_grad:  # even if a layer was found: ranks that share a model gather it together
            loss.backward()  # type: ignore[no-untyped-call]
    return layers[0] if layers else None


def _output_hook(name: str, layers: list[tuple[str, str]]) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that notes the first non-finite output, and watches its gradient."""

    def see_gradient(grad: Tensor) -> None:
        if not layers and not _is_finite(grad):
            layers.append((name, "backward"))

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for x in _tensors(output):
            if not layers and not _is_finite(x.detach()):
                layers.append((name, "forward"))
            if x.requires_grad:
                x.register_hook(see_gradient)  # type: ignore[no-untyped-call]

    return hook


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of a layer's output; only the first of a tuple, which the next layer reads."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        output = next((x for x in output if isinstance(x, Tensor)), None)
    return [output] if isinstance(output, Tensor) and output.is_floating_point() else []


def _is_finite(x: Tensor) -> bool:
    return bool(data_part(x).isfinite().all())


def _uncompiled(model: Any) -> AbstractContextManager[Any]:
    """Context manager that runs a compiled model eagerly, because compiled code does not call hooks added later."""
    is_compiled = model._compiled_call_impl is not None
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
