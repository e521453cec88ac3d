"""Loss change allocation: which parameter lowered the loss, by how much, and how much of that rounding undid.

Lan, Liu, Zhou, Yosinski 2019 (arXiv 1909.01440). Along the straight line from θ to θ + Δ the loss changes by the path
integral of its gradient, so parameter i is allotted

    A_i = Δ_i · ḡ_i,   ḡ = (g(θ) + 4 g(θ + Δ/2) + g(θ + Δ)) / 6        [Simpson's rule; the paper's RK4]

and Σ_i A_i is the change of the loss, up to the error of the rule. A negative A lowered the loss. The one-point rule
g(θ)·Δ is not enough: its error can be as large as the value and change its sign.

Beyond the paper: Δ = D + R, where D is the same step computed in fp32 from the stored values and R is the effect of
rounding. A is linear in Δ, so it splits into D·ḡ + R·ḡ; the second term is the change of the loss due to rounding.

Gradients are computed in fp32, on a plain twin of the model and a fixed set of batches: half a step of one bf16 ulp is
not a bf16 number, and a loss in bf16 is coarser than its change. The weights followed are the full stored values,
including low parts and master copies; the values that the model reads may lag behind them.
"""

import copy
import dataclasses
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpconv.errors import UnsupportedError, UsageError
from lpconv.optim.base import LowPrecisionOptimizer
from lpconv.optim.kernel import STEPS, apply_rule
from lpconv.optim.storage import load, stored_value
from lpconv.probe.track import model_loss
from lpconv.scaled.tensor import ScaledTensor


@torch.no_grad()
def weight_value(optimizer: Optimizer, p: Tensor) -> Tensor:
    """The value of a weight as a new fp32 tensor, including low parts, compensations and master copies."""
    if isinstance(p, DTensor):
        raise UnsupportedError("sharded parameters cannot be tracked", hint="measure with one process, without FSDP")
    if isinstance(optimizer, LowPrecisionOptimizer):
        return stored_value(optimizer.storages(p)[0], optimizer.parts(p)[0]).clone()
    master = optimizer.state[p].get("master") if p in optimizer.state else None
    if isinstance(p, ScaledTensor):
        return p.dequantize() if master is None else master * p.scale
    return (p if master is None else master).detach().float().clone()


@torch.no_grad()
def intended_updates(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """The fp32 change, without rounding, that the next step would make to each parameter with a gradient.

    Changes nothing.

    Call it in place of `optimizer.step()`, with gradients unscaled and clipped. For lpconv's optimizers the rule is
    applied to the stored parts. Any other optimizer is copied, with parameters, gradients and state in fp32, and the
    copy takes the step; its state must be tensors of the parameter's shape or smaller, as in torch's optimizers.
    """
    if isinstance(optimizer, LowPrecisionOptimizer):
        return {
            p: _update_by_rule(optimizer, group, p)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        }
    return _updates_by_copy(optimizer)


def _update_by_rule(optimizer: LowPrecisionOptimizer, group: dict[str, Any], p: Tensor) -> Tensor:
    assert p.grad is not None
    rule, storages, parts = optimizer.settings.rule, optimizer.storages(p), optimizer.parts(p)
    step = int(optimizer.state[p]["step"]) + 1
    coefficients = STEPS[rule.name].coefficients(group, step)
    scalars = torch.tensor(coefficients, dtype=torch.float32, device=p.device).unbind()
    return apply_rule(rule, storages, parts, p.grad, scalars)[0] - load(storages[0], parts[0])


def _updates_by_copy(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    twins = {p: _twin(optimizer, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    starts = {p: twin.detach().clone() for p, twin in twins.items()}
    shadow = object.__new__(type(optimizer))
    # Not `step`, which a learning-rate scheduler wraps on the instance, and no hooks: this step must have no side
    # effects.
    shadow.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.param_groups = [
        {**group, "params": [twins[p] for p in group["params"] if p in twins]} for group in optimizer.param_groups
    ]
    shadow.state = defaultdict(
        dict, {twins[p]: _widen_state(optimizer.state[p]) for p in twins if p in optimizer.state}
    )
    shadow.step()
    return {p: twin.detach() - starts[p] for p, twin in twins.items()}


def _twin(optimizer: Optimizer, p: Tensor) -> Tensor:
    """The weight as a plain fp32 parameter with a plain fp32 gradient."""
    twin = torch.nn.Parameter(weight_value(optimizer, p))
    assert p.grad is not None
    twin.grad = p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad.detach().float().clone()
    return twin


def _widen_state(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer state with 16-bit tensors in fp32, and without the master copy."""
    narrow = (torch.bfloat16, torch.float16)
    return {
        name: value.float() if isinstance(value, Tensor) and value.dtype in narrow else copy.deepcopy(value)
        for name, value in state.items()
        if name != "master"
    }


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The loss change due to one parameter tensor. `change` = intended + rounding; negative values lowered the loss.

    `helped` is the share of its moved elements whose own change is negative.
    """

    name: str
    change: float
    rounding: float
    num_moved: int
    num_helped: int

    @property
    def intended(self) -> float:
        """The loss change of the step without rounding."""
        return self.change - self.rounding

    @property
    def helped(self) -> float:
        """Share of moved elements that lowered the loss; NaN if none moved."""
        return self.num_helped / self.num_moved if self.num_moved else math.nan


@dataclass(frozen=True, kw_only=True)
class LossChangeStep:
    """The loss change of one step or of several consecutive steps, with the number of Simpson segments used."""

    step: int
    loss_before: float
    loss_after: float
    segments: int
    parameters: tuple[Allocation, ...]

    @property
    def change(self) -> float:
        return math.fsum(a.change for a in self.parameters)

    @property
    def rounding(self) -> float:
        return math.fsum(a.rounding for a in self.parameters)

    @property
    def rounding_share(self) -> float:
        """Share of the intended change that rounding undid: 1 if all of it; NaN if the intended change is 0."""
        intended = self.change - self.rounding
        return -self.rounding / intended if intended else math.nan

    @property
    def closure_error(self) -> float:
        """Integration error: |allotted - true change| / |true change|; 0 / 0 counts as 0."""
        true = self.loss_after - self.loss_before
        return abs(self.change - true) / abs(true) if true else float(bool(self.change))


_RESOLUTION = 2.0**-20  # relative to the loss: smaller changes drown in the rounding of a mean over tokens in fp32


class LossChange:
    """Loss change allocation of a training run.

    Call `before_step` before each optimizer step, with gradients unscaled and clipped.

        lca = LossChange(model, optimizer, probe_batches)
        ...
        with lca.measure():          # or lca.before_step(); optimizer.step(); lca.after_step()
            optimizer.step()
        print(summarise(lca.steps).rounding_share)

    `twin` is a plain fp32 model with the same parameter names, by default a copy of `model`; models of scaled tensors
    need one. Its parameters are overwritten. If a step's closure error is above `tolerance`, its segments are doubled,
    up to `max_segments`. A step with one segment costs two gradients over all batches, three if the previous step was
    not measured. Measuring needs memory for about ten fp32 copies of the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Sequence[Mapping[str, Tensor]],
        *,
        twin: nn.Module | None = None,
        tolerance: float = 0.01,
        max_segments: int = 8,
    ) -> None:
        if not batches:
            raise UsageError("loss change allocation needs a probe batch", hint="pass one or more labelled batches")
        if max_segments < 1 or not tolerance >= 0:
            raise UsageError(
                f"max_segments={max_segments} or tolerance={tolerance} is out of range",
                hint="max_segments must be at least 1 and tolerance at least 0",
            )
        if twin is None and any(isinstance(p, ScaledTensor) for p in model.parameters()):
            raise UsageError("a model of scaled tensors needs a twin", hint="pass the plain fp32 model as `twin`")
        optimised = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._parameters = {n: p for n, p in model.named_parameters() if id(p) in optimised and p.requires_grad}
        if not self._parameters:
            raise UsageError(
                "the optimizer has none of the model's parameters", hint="pass the optimizer that trains the model"
            )
        self._optimizer = optimizer
        self._landscape = _Landscape(twin or copy.deepcopy(model), self._parameters, batches)
        self._tolerance, self._max_segments = tolerance, max_segments
        self._start: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, float, Tensor] | None = None
        self._num_steps = 0
        self.steps: list[LossChangeStep] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Context manager around `optimizer.step()`."""
        self.before_step()
        yield
        self.after_step()

    def before_step(self) -> None:
        """Store the current weights and the intended update."""
        updates = intended_updates(self._optimizer)
        zero = {n: torch.zeros(p.shape, device=p.device) for n, p in self._parameters.items() if p not in updates}
        intended = _flatten(zero[n] if n in zero else updates[p] for n, p in self._parameters.items())
        self._start = self._stored_weights(), intended

    def after_step(self) -> LossChangeStep:
        """Allocate the change of the loss since `before_step`; the result is also appended to `steps`."""
        if self._start is None:
            raise UsageError(
                "after_step was called without before_step",
                hint="call before_step, then optimizer.step, then after_step",
            )
        (start, intended), self._start = self._start, None
        end = self._stored_weights()
        if not bool(intended.isfinite().all()):  # an overflowed step, which the loss scaler skips
            intended = torch.zeros_like(intended)
        first = self._last[1:] if self._last and torch.equal(self._last[0], start) else self._landscape.at(start)
        last = self._landscape.at(end)
        path = _Path(self._landscape, start, end, first, last)
        while path.segments < self._max_segments and not path.closes(self._tolerance):
            path.refine()
        self._last = end, *last
        self._num_steps += 1
        step = LossChangeStep(
            step=self._num_steps,
            loss_before=first[0],
            loss_after=last[0],
            segments=path.segments,
            parameters=tuple(self._allot(path.mean_gradient(), end - start, end - start - intended)),
        )
        self.steps.append(step)
        return step

    def _stored_weights(self) -> Tensor:
        return _flatten(weight_value(self._optimizer, p) for p in self._parameters.values())

    def _allot(self, gradient: Tensor, moved: Tensor, rounded: Tensor) -> Iterator[Allocation]:
        sizes = [p.numel() for p in self._parameters.values()]
        pieces = zip(self._parameters, *(torch.split(v, sizes) for v in (gradient, moved, rounded)), strict=True)
        for name, g, delta, rounding in pieces:
            change = g.double() * delta
            yield Allocation(
                name=name,
                change=float(change.sum()),
                rounding=float((g.double() * rounding).sum()),
                num_moved=int((delta != 0).sum()),
                num_helped=int((change < 0).sum()),
            )


def summarise(steps: Sequence[LossChangeStep]) -> LossChangeStep:
    """Combine consecutive steps into one: allocations add up.

    Raises `UsageError` if `steps` is empty or not consecutive, because the sum then matches no change of the loss.
    """
    if not steps or any(a.loss_after != b.loss_before for a, b in itertools.pairwise(steps)):
        raise UsageError("these steps are not consecutive", hint="measure every step of the range that you summarise")
    return LossChangeStep(
        step=steps[-1].step,
        loss_before=steps[0].loss_before,
        loss_after=steps[-1].loss_after,
        segments=max(s.segments for s in steps),
        parameters=tuple(_total(same[0].name, same) for same in zip(*(s.parameters for s in steps), strict=True)),
    )


def by_layer(step: LossChangeStep) -> LossChangeStep:
    """Merge the allocations of a step by layer: names are cut after their first number, or else before their last part.

    `model.layers.3.mlp.up_proj.weight` belongs to `model.layers.3`, `model.norm.weight` to `model.norm`.
    """
    layers: dict[str, list[Allocation]] = {}
    for allocation in step.parameters:
        layers.setdefault(_layer_of(allocation.name), []).append(allocation)
    return dataclasses.replace(
        step, parameters=tuple(_total(layer, allocations) for layer, allocations in layers.items())
    )


def _layer_of(name: str) -> str:
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1]) or name


def _total(name: str, same: Sequence[Allocation]) -> Allocation:
    return Allocation(
        name=name,
        change=math.fsum(a.change for a in same),
        rounding=math.fsum(a.rounding for a in same),
        num_moved=sum(a.num_moved for a in same),
        num_helped=sum(a.num_helped for a in same),
    )


class _Landscape:
    """The loss and its gradient at given weights: the mean over fixed batches, in fp32, without dropout."""

    def __init__(self, twin: nn.Module, names: Iterable[str], batches: Sequence[Mapping[str, Any]]) -> None:
        self.twin, self.batches = twin.float().eval(), batches
        known = dict(self.twin.named_parameters())
        missing = [n for n in names if n not in known]
        if missing:
            raise UsageError(f"the twin has no parameter `{missing[0]}`", hint="pass a model of the same class")
        self.twin.requires_grad_(False)
        self.parameters = [known[n].requires_grad_() for n in names]

    def at(self, weights: Tensor) -> tuple[float, Tensor]:
        """(loss, flat gradient vector) at the flat weight vector `weights`."""
        with torch.no_grad():
            for p, piece in zip(
                self.parameters, torch.split(weights, [p.numel() for p in self.parameters]), strict=True
            ):
                p.copy_(piece.view_as(p))
        self.twin.zero_grad()
        losses = []
        with torch.enable_grad():
            for batch in self.batches:
                loss = model_loss(self.twin(**batch))
                (loss / len(self.batches)).backward()  # type: ignore[no-untyped-call]
                losses.append(float(loss.detach().double()))
        grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters)
        return math.fsum(losses) / len(losses), _flatten(grads)


class _Path:
    """Composite Simpson's rule along a straight line; refining reuses all gradients computed so far."""

    def __init__(
        self, landscape: _Landscape, start: Tensor, end: Tensor, first: tuple[float, Tensor], last: tuple[float, Tensor]
    ) -> None:
        self.landscape, self.start, self.delta = landscape, start, end - start
        self.loss, self.true_change = first[0], last[0] - first[0]
        self.segments = 1
        self.ends = first[1] + last[1]
        self.inner = torch.zeros_like(start)
        self.middles = self._gradients_at([0.5])

    def mean_gradient(self) -> Tensor:
        return (self.ends + 2 * self.inner + 4 * self.middles) / (6 * self.segments)

    def closes(self, tolerance: float) -> bool:
        """Whether the allotted change equals the true one, up to the tolerance and the resolution of an fp32 loss."""
        error = abs(float(self.mean_gradient().double() @ self.delta.double()) - self.true_change)
        return error <= tolerance * abs(self.true_change) + _RESOLUTION * abs(self.loss)

    def refine(self) -> None:
        """Halve the segments: their midpoints become inner points."""
        self.inner += self.middles
        self.segments *= 2
        self.middles = self._gradients_at([(2 * k + 1) / (2 * self.segments) for k in range(self.segments)])

    def _gradients_at(self, places: Sequence[float]) -> Tensor:
        return torch.stack([self.landscape.at(self.start + place * self.delta)[1] for place in places]).sum(0)


def _flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1).float() for t in tensors])
