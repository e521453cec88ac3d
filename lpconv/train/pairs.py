"""Collage, and its rivals, on scaled parameters: unit-scaled weights kept as pairs.

The data Ŵ of a scaled parameter W = σ·Ŵ is an ordinary bf16 tensor, so a 16-bit AdamW can step on it. Under the map of
`scaled.equivalent` (lr/σ, σ·wd) it moves W as it would move the weight itself; with σ a power of two, and bf16's range
of exponents, every rounding is the same too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.optim import LowPrecisionAdamW, fp32_state_dict, start_from_fp32
from lpconv.scaled import HyperParameters, ScaledTensor, equivalent

__all__ = ["ScaledLowPrecisionAdamW"]


class ScaledLowPrecisionAdamW(LowPrecisionAdamW):
    """`LowPrecisionAdamW` for a model of `lpconv.scaled` whose data are bf16; arguments and variants are its own.

    `start` holds the fp32 values of the source model: what bf16 drops of them goes to the low parts at once. One
    parameter group per scale, so that schedulers work; `group["scale"]` gives lr back as lr·scale.
    """

    def __init__(
        self, model: nn.Module, start: Mapping[str, Tensor], *, lr: float, weight_decay: float, **options: Any
    ) -> None:
        self.model = model
        self._scaled: dict[str, ScaledTensor] = {}
        data = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert isinstance(p, ScaledTensor)
                self._scaled[name] = p
                data[name] = nn.Parameter(p.data_part)  # shares the memory
        self.data = nn.ParameterDict({name.replace(".", "/"): x for name, x in data.items()})
        source = HyperParameters(lr=lr, weight_decay=weight_decay)
        groups = []
        for scale in sorted({float(p.scale) for p in self._scaled.values()}):
            mapped = equivalent("adamw", source, weight_scale=scale)
            params = [(name, data[name]) for name, p in self._scaled.items() if p.scale == scale]
            groups.append({"params": params, "lr": mapped.lr, "weight_decay": mapped.weight_decay, "scale": scale})
        super().__init__(groups, lr=lr, weight_decay=weight_decay, **options)
        values = {name.replace(".", "/"): start[name] / p.scale for name, p in self._scaled.items()}
        start_from_fp32(self, self.data, values)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As `LowPrecisionAdamW.step`; gradients of any scale enter as bf16 values."""
        for name, p in self._scaled.items():
            grad = p.grad
            values = grad.dequantize(torch.bfloat16) if isinstance(grad, ScaledTensor) else grad
            self.data[name.replace(".", "/")].grad = None if values is None else values.to(torch.bfloat16)
        return super().step() if closure is None else super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the model's parameters and of the data they share."""
        super().zero_grad(set_to_none)
        self.model.zero_grad(set_to_none)

    def values(self) -> dict[str, Tensor]:
        """The trained parameters in fp32 by their names in the model, exactly as kept."""
        kept = fp32_state_dict(self, self.data)
        return {name: kept[name.replace(".", "/")] * p.scale for name, p in self._scaled.items()}
