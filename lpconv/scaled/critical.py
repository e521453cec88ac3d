"""Layers to multiply in 16 bits, because e4m3fn represents their inputs badly: worst first, within a budget of work.

If one element of an input is hundreds of times the root mean square, it meets a single weight, whose rounding error no
other term of the sum averages out; and with one scale for the tensor it pushes small elements towards zero. Such inputs
are few: 10 of 210 in SmolLM2-135M, all of `down_proj`.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.kernels.operands import encode_operand
from lpconv.layers import linears
from lpconv.scaled.operands import operand_cast
from lpconv.scaled.places import heads

MAX_CREST = 100.0
_MIN_SQNR_DB = 25.0  # a tensor within e4m3fn's range has 31
_MAX_SHARE = 0.1  # fraction of the work of all cast products


@dataclass(frozen=True, kw_only=True)
class InputRisk:
    """Statistics of a layer's input that predict the error of casting it, the worst over batches.

    `crest` is its largest magnitude over its root mean square. `sqnr_db` is the signal-to-noise ratio of e4m3fn with
    one scale for the tensor, averaged over rows: the energy over all rows would be dominated by outliers. `share` is
    the layer's fraction of the work of all cast products.
    """

    layer: str
    crest: float
    sqnr_db: float
    share: float

    @property
    def is_critical(self) -> bool:
        """Whether the input exceeds a bound."""
        return self.crest > MAX_CREST or self.sqnr_db < _MIN_SQNR_DB


def critical_modules(risks: Sequence[InputRisk], *, max_share: float = _MAX_SHARE) -> tuple[InputRisk, ...]:
    """The layers to keep in 16 bits: largest crests first, within the budget."""
    selection: list[InputRisk] = []
    for risk in sorted(risks, key=lambda r: -r.crest):
        if risk.is_critical and sum(r.share for r in selection) + risk.share <= max_share:
            selection.append(risk)
    return tuple(selection)


@torch.no_grad()
def input_risks(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> tuple[InputRisk, ...]:
    """Measure the inputs of a plain model's linear layers, except head and experts, which are not cast alone."""
    exact = heads(model)
    layers = [x for x in linears(model) if x.kind != "experts" and x.module not in exact]
    measurements: dict[str, list[tuple[float, float, int]]] = {}

    def measure(module: nn.Module, args: tuple[Any, ...], *, name: str) -> None:
        x_MK = args[0].detach().float().reshape(-1, args[0].shape[-1])
        if x_MK.numel() and x_MK.any():
            crest = float(x_MK.abs().amax() / x_MK.square().mean().sqrt())
            measurements.setdefault(name, []).append((crest, _row_sqnr_db(x_MK), len(x_MK)))

    with ExitStack() as hooks:
        for x in layers:
            hooks.enter_context(x.module.register_forward_pre_hook(partial(measure, name=x.name)))
        for batch in batches:
            model(**batch)
    work = {x.name: x.in_features * x.out_features * sum(n for *_, n in measurements.get(x.name, ())) for x in layers}
    total = max(sum(work.values()), 1)
    return tuple(
        InputRisk(
            layer=name,
            crest=max(crest for crest, _, _ in values),
            sqnr_db=min(sqnr for _, sqnr, _ in values),
            share=work[name] / total,
        )
        for name, values in measurements.items()
    )


def _row_sqnr_db(x_MK: Tensor) -> float:
    """SQNR of a cast with one scale, from the mean of error over signal by row."""
    error_M = (encode_operand(x_MK, operand_cast("e4m3fn", "tensor")).decoded(torch.float32) - x_MK).square().sum(1)
    signal_M = x_MK.square().sum(1)
    return float(-10 * torch.log10((error_M / signal_M)[signal_M > 0].mean()))
