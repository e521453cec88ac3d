"""Native unit scaling of any architecture: a fresh model whose numbers have unit size in both passes.

Blake et al. 2023 write models with ops that divide by their own size. In lpconv the size of an op's result is its
scale, so the model's code is unchanged: `initialise` draws the weights that unit-scaled ops would have, and the method
"native" of `scaled` makes scales follow theory exactly (`rules.native`).
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lpconv.formats.scale import rms
from lpconv.layers import linears
from lpconv.lookup import find
from lpconv.scaled.choices import LEARNING_RATES
from lpconv.scaled.fresh import initialise
from lpconv.scaled.model import scaled
from lpconv.scaled.tensor import ScaledTensor, data_part
from lpconv.shards import local


def native(model: nn.Module, *, seed: int = 0, **options: Any) -> nn.Module:
    """Initialise `model` from `seed` for native unit scaling and scale it, in place; `options` are those of `scaled`.

    fp8 operands are cast without another scale, unless `operand_scale` is given. Train with
    ``AdamW(native_groups(model.parameters(), lr))``. Raises `UsageError` for loaded weights, and `UnsupportedError` for
    a parameter without a native rule or, during the run, for such an op.
    """
    initialise(model, seed=seed)
    settings: dict[str, Any] = {"operand_scale": "static", "strict": True, **options}
    return scaled(model, method="native", **settings)


def native_groups(
    parameters: Iterable[Tensor], lr: float, *, rule: str = "unit", **options: Any
) -> list[dict[str, Any]]:
    """Return parameter groups of a natively scaled model for `lpconv.scaled.AdamW`.

    `rule` is a learning-rate rule of `LEARNING_RATES`, `options` are added to every group. Scaled AdamW steps on Ŵ with
    lr/σ, so a group's own rate is lr·σ.
    """
    find("learning-rate rule", rule, LEARNING_RATES)
    by_rate: dict[float, list[Tensor]] = {}
    for parameter in parameters:
        own = local(parameter)
        scale = float(own.scale) if isinstance(own, ScaledTensor) else 1.0
        rate = lr * scale
        if rule == "u-mup" and parameter.dim() > 1:  # only tables have the scale 1, and their width is the last axis
            rate *= scale if scale < 1 else parameter.shape[-1] ** -0.5
        by_rate.setdefault(rate, []).append(parameter)
    return [{"params": alike, "lr": rate, **options} for rate, alike in by_rate.items()]


def data_sizes(model: nn.Module, step: Callable[[], object]) -> dict[str, list[float]]:
    """Root mean squares of the data of linear outputs, their gradients and weight gradients.

    `step()` runs one forward and backward pass.
    """
    sizes: dict[str, list[float]] = {"outputs": [], "gradients": [], "weight gradients": []}

    def note(what: str, x: Tensor) -> None:
        sizes[what].append(float(rms(data_part(x.detach()))))

    def on_output(_: nn.Module, __: Any, out: Tensor) -> None:
        note("outputs", out)
        out.register_hook(lambda grad: note("gradients", grad))  # type: ignore[no-untyped-call]  # torch's

    hooks = [x.module.register_forward_hook(on_output) for x in linears(model) if x.kind != "experts"]
    step()
    for hook in hooks:
        hook.remove()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.grad is not None:
            note("weight gradients", parameter.grad)
    return sizes
