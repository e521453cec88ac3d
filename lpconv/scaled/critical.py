"""Which layers should multiply in 16 bits: those whose inputs e4m3fn holds badly, worst first, in a budget of work.

Where one element of an input is hundreds of times the root mean square, it meets one weight alone, whose rounding
no other term of the sum averages out; and at one scale for the tensor it pushes what is small towards zero. Such inputs
are few: 10 of 210 in SmolLM2-135M, all of `down_proj`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.layers import LinearLayer, linears
from lpconv.scaled.operands import encode_operand
from lpconv.scaled.places import heads

MAX_CREST = 100.0
_MIN_SQNR_DB = 25.0  # e4m3fn leaves 31 of a tensor in its range
_MAX_SHARE = 0.1  # of the work of all products that are cast


@dataclass(frozen=True, kw_only=True)
class InputRisk:
    """What casting the input of a layer would meet, the worst over batches.

    `crest` is its largest magnitude over its root mean square. `sqnr_db` is the signal over the error of e4m3fn at one
    scale for the tensor, in a row of the mean: energy over all rows would show the outliers alone. `share` is the
    layer's part of the work of all products that are cast.
    """

    layer: str
    crest: float
    sqnr_db: float
    share: float

    @property
    def is_critical(self) -> bool:
        """Whether it is beyond a bound."""
        return self.crest > MAX_CREST or self.sqnr_db < _MIN_SQNR_DB


def critical_modules(risks: Sequence[InputRisk], *, max_share: float = _MAX_SHARE) -> tuple[InputRisk, ...]:
    """The layers to keep in 16 bits: the largest crests first, as far as the budget goes."""
    chosen: list[InputRisk] = []
    for risk in sorted(risks, key=lambda r: -r.crest):
        if risk.is_critical and sum(r.share for r in chosen) + risk.share <= max_share:
            chosen.append(risk)
    return tuple(chosen)


@torch.no_grad()
def input_risks(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> tuple[InputRisk, ...]:
    """Measure the inputs of a plain model's linear layers, but of its head and of experts, which are not cast alone."""
    exact = heads(model)
    layers = [x for x in linears(model) if x.kind != "experts" and x.module not in exact]
    seen: dict[str, list[tuple[float, float, int]]] = {}
    handles = [x.module.register_forward_pre_hook(partial(_measure, layer=x, seen=seen)) for x in layers]
    try:
        for batch in batches:
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    work = {x.name: x.in_features * x.out_features * sum(n for *_, n in seen.get(x.name, ())) for x in layers}
    total = max(sum(work.values()), 1)
    return tuple(
        InputRisk(
            layer=name,
            crest=max(crest for crest, _, _ in found),
            sqnr_db=min(sqnr for _, sqnr, _ in found),
            share=work[name] / total,
        )
        for name, found in seen.items()
    )


def _measure(
    module: nn.Module, args: tuple[Any, ...], *, layer: LinearLayer, seen: dict[str, list[tuple[float, float, int]]]
) -> None:
    x_MK = args[0].detach().float().reshape(-1, args[0].shape[-1])
    if not x_MK.numel() or not x_MK.any():
        return
    crest = float(x_MK.abs().amax() / x_MK.square().mean().sqrt())
    seen.setdefault(layer.name, []).append((crest, _row_sqnr_db(x_MK), len(x_MK)))


def _row_sqnr_db(x_MK: Tensor) -> float:
    """Of a cast at one scale: the mean over rows of error over signal."""
    error_M = (encode_operand(x_MK, "e4m3fn", "tensor").decoded(torch.float32) - x_MK).square().sum(1)
    signal_M = x_MK.square().sum(1)
    return float(-10 * torch.log10((error_M / signal_M)[signal_M > 0].mean()))
