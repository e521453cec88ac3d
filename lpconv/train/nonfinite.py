"""Where Inf or NaN came from: a step repeated with a check after every layer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lpconv.scaled import ScaledTensor
from lpconv.train.compiled import uncompiled

__all__ = ["first_nonfinite"]


def first_nonfinite(model: nn.Module, step: Callable[[], Tensor]) -> tuple[str, str] | None:
    """The first layer, and "forward" or "backward", whose output or output gradient is not finite in `step`.

    `step` computes the loss of the batch in question, with the random numbers it had; the gradients are cleared
    afterwards. None where everything is finite, parameters' own gradients aside. A parameter that is not finite itself
    counts as the forward pass of its module.
    """
    found: list[tuple[str, str]] = []
    broken = next((n for n, p in model.named_parameters() if not _is_finite(p.detach())), None)
    if broken is not None:
        return broken, "weights"
    handles = [
        module.register_forward_hook(_checked(name or type(model).__name__, found))
        for name, module in model.named_modules()
    ]
    try:
        with uncompiled(model):
            loss = step()
            if not found and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return found[0] if found else None


def _checked(name: str, found: list[tuple[str, str]]) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that notes the first output that is not finite, and watches for its gradient."""

    def see_gradient(grad: Tensor) -> None:
        if not found and not _is_finite(grad):
            found.append((name, "backward"))

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for x in _tensors(output):
            if not found and not _is_finite(x.detach()):
                found.append((name, "forward"))
            if x.requires_grad:
                x.register_hook(see_gradient)  # type: ignore[no-untyped-call]

    return hook


def _tensors(output: Any) -> list[Tensor]:
    """The floating tensors of a layer's output: the first of a tuple or mapping is what the next layer reads."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        output = next((x for x in output if isinstance(x, Tensor)), None)
    return [output] if isinstance(output, Tensor) and output.is_floating_point() else []


def _is_finite(x: Tensor) -> bool:
    data = x.data_part if isinstance(x, ScaledTensor) else x
    return bool(data.isfinite().all())
