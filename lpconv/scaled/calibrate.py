"""Static scales from data: the magnitude of every edge, measured on a few batches and then fixed.

Theory assumes independent unit inputs; trained weights and real data are neither. Here an edge is the output of a
module with its own weight, including embeddings. Its RMS and its gradient's RMS are measured, and one power of two per
direction is stored that brings both near 1, or an output's outliers to half of e4m3fn's largest number: queries, keys
and values are operands without another cast. The input of a linear layer is not an edge if activations are in between;
its outliers have their own power of two, with the same headroom. Scales are bookkeeping, so any choice keeps values and
gradients exact: the rule that all paths between two nodes have the same product of factors (unit scaling §5.1) holds by
construction.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lpconv.errors import UsageError
from lpconv.formats.scale import amax, pow2_ceil, pow2_floor, rms
from lpconv.formats.spec import get_format
from lpconv.layers import weighted_modules
from lpconv.scaled.model import scaling_of
from lpconv.scaled.rules.own import recentre
from lpconv.scaled.scales import MAX_SCALE, MIN_SCALE, static
from lpconv.scaled.tensor import ScaledTensor

_LARGEST = get_format("e4m3fn").max
_HEADROOM = 2.0  # factor above the largest measured magnitude


@dataclass(frozen=True, kw_only=True)
class EdgeFactors:
    """Powers of two that multiply the scales of an edge's output, its gradient, and a linear layer's input."""

    forward: float = 1.0
    backward: float = 1.0
    input: float = 1.0


def calibrate(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, loss: Callable[[Any], Tensor] = attrgetter("loss")
) -> dict[str, EdgeFactors]:
    """Measure a `model` scaled with method "unit" on labelled batches, then set and return its factors by edge.

    Each batch holds the model's keyword arguments; `loss` computes a scalar from the model's output. Save the factors
    with `write_factors`, and set them on another copy of the model with `read_factors` and `apply_factors`.

    Runs one forward and backward pass per batch, and one more on the first to find the factors that give every edge its
    measured scale; gradients are cleared. Raises `UsageError` for a model of another method and without batches.
    """
    scaling = scaling_of(model)
    if scaling is None or scaling.method != "unit":
        raise UsageError(
            "calibration needs a model scaled with method unit", hint="scale it first: scaled(model, method='unit')"
        )
    batch_list = list(batches)
    if not batch_list:
        raise UsageError("calibration needs at least one batch", hint="pass a few labelled batches")
    measured: dict[tuple[str, str], list[_Magnitudes]] = {}
    _run(model, batch_list, loss, lambda name, side, x: measured.setdefault((name, side), []).append(_Magnitudes.of(x)))
    targets = {(name, side): _scale_of(sizes, side) for (name, side), sizes in measured.items() if side != "input"}
    factors: dict[tuple[str, str], float] = {}

    def settle(name: str, side: str, x: ScaledTensor) -> float:
        if side == "input":
            needed = _fitting_scale(measured[name, side]) / static(x.scale)
            factors[name, side] = max(needed, 1.0)
        else:
            factors[name, side] = targets[name, side] / static(x.scale)
        return factors[name, side]

    _run(model, batch_list[:1], loss, settle)
    edges = {
        name: EdgeFactors(
            forward=factors[name, "forward"],
            backward=factors.get((name, "backward"), 1.0),
            input=factors.get((name, "input"), 1.0),
        )
        for name in weighted_modules(model)
        if (name, "forward") in factors
    }
    apply_factors(model, edges)
    return edges


def apply_factors(model: nn.Module, factors: Mapping[str, EdgeFactors]) -> None:
    """Set edge factors from `calibrate`, on the same model or on another one of its architecture."""
    known = weighted_modules(model)
    for name, edge in factors.items():
        if name not in known:
            raise UsageError(
                f"the model has no edge `{name}`", hint="use factors that were measured on the same architecture"
            )
        known[name].register_forward_hook(_recentre_hook(edge))
        if edge.input != 1.0:
            known[name].register_forward_pre_hook(functools.partial(_recentre_input, factor=edge.input))


def _recentre_hook(edge: EdgeFactors) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda _, __, out: recentre(out, edge.forward, edge.backward) if isinstance(out, ScaledTensor) else out


def _recentre_input(module: nn.Module, args: tuple[Any, ...], *, factor: float) -> tuple[Any, ...]:
    x = args[0]
    return (recentre(x, factor, 1.0) if isinstance(x, ScaledTensor) else x, *args[1:])


def _run(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    loss: Callable[[Any], Tensor],
    visit: Callable[[str, str, ScaledTensor], float | None],
) -> None:
    """Run forward and backward passes, passing each edge to `visit` and applying the factor it returns."""

    def on_output(name: str, out: Any) -> Any:
        if not isinstance(out, ScaledTensor):
            return out
        out = recentre(out, visit(name, "forward", out) or 1.0, 1.0)
        if out.requires_grad:
            out.register_hook(lambda grad: recentre(grad, visit(name, "backward", grad) or 1.0, 1.0))
        return out

    def on_input(module: nn.Module, args: tuple[Any, ...], name: str) -> tuple[Any, ...]:
        if isinstance(args[0], ScaledTensor):
            return _recentre_input(module, args, factor=visit(name, "input", args[0]) or 1.0)
        return args

    with contextlib.ExitStack() as stack:
        stack.callback(model.zero_grad)
        for name, module in weighted_modules(model).items():
            if isinstance(module, (nn.Linear, Conv1D)):
                hook = functools.partial(on_input, name=name)
                stack.enter_context(module.register_forward_pre_hook(hook))
            stack.enter_context(module.register_forward_hook(lambda _, __, out, name=name: on_output(name, out)))
        for batch in batches:
            loss(model(**batch)).backward()  # type: ignore[no-untyped-call]


class _Magnitudes(NamedTuple):
    """Root mean square and largest magnitude of a tensor's value."""

    rms: float
    amax: float

    @classmethod
    def of(cls, x: ScaledTensor) -> "_Magnitudes":
        return cls(*(float(size(x.data_part)) * static(x.scale) for size in (rms, amax)))


def _fitting_scale(sizes: list[_Magnitudes]) -> float:
    """The power-of-two scale at which the largest magnitude fits e4m3fn, with headroom."""
    return float(pow2_ceil(_HEADROOM * max(s.amax for s in sizes) / _LARGEST))


def _scale_of(sizes: list[_Magnitudes], side: str) -> float:
    """The power of two below the RMS over batches, or the one that fits an output's outliers if that is larger.

    1 if all measured values are zero.
    """
    size = (sum(s.rms**2 for s in sizes) / len(sizes)) ** 0.5
    if not MIN_SCALE <= size <= MAX_SCALE:
        return 1.0
    return max(float(pow2_floor(size)), _fitting_scale(sizes) if side == "forward" else 0.0)
