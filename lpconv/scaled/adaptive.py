"""Adaptive layer-wise loss scaling (Zhao et al. 2019, arXiv 1910.12385): scales in the backward pass only.

The forward pass is the plain model's. Gradients travel as (raw, scale) pairs, raw = gradient / scale, so 1/scale is the
cumulative loss scale s of the paper. At each linear layer and convolution a factor α, chosen from the statistics of the
incoming gradient and the weight, multiplies what is handed down; parameters receive true gradients, unscaled in fp32.

Departures from the authors' code: parameter gradients are unscaled in fp32 (in fp16 the gain is lost again), the bounds
on α and on s are wide by default (2^16 and 2^40 instead of 16 and 1024), joins bound the sum of the magnitudes instead
of the largest, and casts from fp32 to 16 bits choose a scale that fits, as joins do. Factors and scales stay on the
device; nothing is read back.
"""

import torch
from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.layers import convolutions, linears
from lpconv.lookup import find
from lpconv.scaled.adaptive_factor import AdaptiveOptions, LayerState
from lpconv.scaled.adaptive_layers import make_adaptive
from lpconv.scaled.model import COMPUTE, Scaling, leave_plain, refuse_scaled
from lpconv.scaled.pair import Numerics, Role
from lpconv.scaled.tensor import ScaledTensor, scaled_tensor


def adaptive_scaling(
    model: nn.Module, *, compute: str = "fp16", options: AdaptiveOptions | None = None, strict: bool = False
) -> nn.Module:
    """`model`, changed in place: its backward pass chooses a loss scale for each linear layer and convolution.

    The forward pass and the parameters stay plain; it runs under autocast to `compute` ("fp16", "bf16" or "fp32").
    Parameters receive plain gradients, so any optimizer will do. `strict` is that of `lpconv.scaled.scaled`. Raises
    `UsageError` for unknown names and a model scaled before.
    """
    if compute == "fp8":
        raise UsageError("adaptive loss scaling has no fp8 compute", hint="use compute='fp16' or 'bf16'")
    dtype = find("compute", compute, COMPUTE).carrier
    refuse_scaled(model)
    options = options or AdaptiveOptions()
    found = [layer.module for layer in linears(model) if layer.is_replaceable] + convolutions(model)
    for module in found:
        make_adaptive(module, LayerState(options=options, dtype=dtype, format=compute))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_unscaled)  # type: ignore[no-untyped-call]
    underflow = options.threshold if options.casts == "lognormal" else 0.0
    numerics = Numerics(unit_factors=False, fit_joins=True, cast_underflow=underflow, strict=strict)
    unit = scaled_tensor(torch.ones(()), 1.0, role=Role.GRADIENT, numerics=numerics)
    scaling = Scaling(
        method="adaptive", compute=compute, numerics=numerics, scales={}, saved=None, unit=unit, autocast=dtype
    )
    return leave_plain(model, scaling)


def _unscaled(grad: Tensor) -> Tensor:
    return grad.dequantize(grad.dtype) if isinstance(grad, ScaledTensor) else grad


def loss_scales(model: nn.Module) -> dict[str, tuple[float, float]]:
    """(cumulative loss scale that arrived, factor α applied) of each adaptive layer in the last backward pass."""
    states = {n: m.adaptive for n, m in model.named_modules() if isinstance(getattr(m, "adaptive", None), LayerState)}
    return {
        name: (1 / float(state.scale), float(state.factor))
        for name, state in states.items()
        if isinstance(state, LayerState) and state.factor is not None
    }
