"""Loss change allocation: which parameter lowered the loss, by how much, and what rounding took back.

Lan, Liu, Zhou, Yosinski 2019 (arXiv 1909.01440). Along the straight line from θ to θ + Δ the loss changes by the path
integral of its gradient, so parameter i is allotted

    A_i = Δ_i · ḡ_i,   ḡ = (g(θ) + 4 g(θ + Δ/2) + g(θ + Δ)) / 6        [Simpson's rule; the paper's RK4]

and Σ_i A_i is the change of the loss, up to the error of the rule. A is negative where the parameter helped. The one
point rule g(θ)·Δ will not do: it can be wrong by its own size and sign.

What the paper does not have: Δ is what the optimizer meant to do plus what rounding made of it, Δ = D + R, where D is
the same step in fp32 from what is stored. A is linear in Δ, so it splits into D·ḡ + R·ḡ, and the second is the loss
that rounding cost.

Gradients are taken in fp32, on a plain twin of the model and a fixed set of batches: half of a step of one bf16 ulp is
no bf16 number, and the loss in bf16 is coarser than its change. What is followed is all that is kept of a weight, low
parts and master copies included; what the model reads may lag behind it.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lpconv.errors import UsageError
from lpconv.probe.intended import intended_updates, kept_value
from lpconv.probe.track import model_loss
from lpconv.scaled.tensor import ScaledTensor


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What one parameter tensor did to the loss. `change` = intended + rounding; negative helped.

    `helped` is the share of its moved elements whose own change is negative.
    """

    name: str
    change: float
    rounding: float
    num_moved: int
    num_helped: int

    @property
    def intended(self) -> float:
        """What the step would have changed without rounding."""
        return self.change - self.rounding

    @property
    def helped(self) -> float:
        """Share of moved elements that lowered the loss; NaN where none moved."""
        return self.num_helped / self.num_moved if self.num_moved else math.nan


@dataclass(frozen=True, kw_only=True)
class LossChangeStep:
    """One step, or several in a row. `segments` is the number of Simpson segments that it took."""

    step: int
    loss_before: float
    loss_after: float
    segments: int
    parameters: tuple[Allocation, ...]

    @property
    def change(self) -> float:
        """The allotted change of the loss."""
        return math.fsum(a.change for a in self.parameters)

    @property
    def rounding(self) -> float:
        """What rounding added to it."""
        return math.fsum(a.rounding for a in self.parameters)

    @property
    def rounding_share(self) -> float:
        """Rounding's part of what was intended: 1 where rounding took back all of it; NaN where nothing was."""
        intended = self.change - self.rounding
        return -self.rounding / intended if intended else math.nan

    @property
    def closure_error(self) -> float:
        """|allotted - true change| over |true change|: the error of the integration. 0 where the loss did not move."""
        true = self.loss_after - self.loss_before
        return abs(self.change - true) / abs(true) if true else float(bool(self.change))


_RESOLUTION = 2.0**-20  # of the loss: smaller changes drown in the rounding of a mean over tokens in fp32


class LossChange:
    """Loss change allocation of a training run; call `before_step` before each optimizer step, with gradients unscaled
    and clipped.

        lca = LossChange(model, optimizer, probe_batches)
        ...
        with lca.measured():          # or lca.before_step(); optimizer.step(); lca.after_step()
            optimizer.step()
        print(summarise(lca.steps).rounding_share)

    `twin` is a plain fp32 model with the same parameter names, by default a copy of `model`; it is needed for models
    made of scaled tensors. Its parameters are overwritten. Where a step's closure error is above `tolerance`, its
    segments are doubled, up to `max_segments`. A step costs two gradients over all batches with one segment, three if
    the step before it was not measured, and some ten fp32 copies of the parameters while it is measured.
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
            raise UsageError(f"max_segments={max_segments}, tolerance={tolerance}", hint="at least 1 and at least 0")
        if twin is None and any(isinstance(p, ScaledTensor) for p in model.parameters()):
            raise UsageError("a model of scaled tensors needs a twin", hint="pass the plain fp32 model as `twin`")
        optimised = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._parameters = {n: p for n, p in model.named_parameters() if id(p) in optimised and p.requires_grad}
        if not self._parameters:
            raise UsageError("the optimizer holds none of the model's parameters", hint="pass the one that trains it")
        self._optimizer = optimizer
        self._landscape = _Landscape(twin or copy.deepcopy(model), self._parameters, batches)
        self._tolerance, self._max_segments = tolerance, max_segments
        self._start: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, float, Tensor] | None = None
        self._num_steps = 0
        self.steps: list[LossChangeStep] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around `optimizer.step()`."""
        self.before_step()
        yield
        self.after_step()

    def before_step(self) -> None:
        """Remember where the weights are and where the step means to take them."""
        updates = intended_updates(self._optimizer)
        zero = {n: torch.zeros(p.shape, device=p.device) for n, p in self._parameters.items() if p not in updates}
        intended = _flat(zero[n] if n in zero else updates[p] for n, p in self._parameters.items())
        self._start = self._kept(), intended

    def after_step(self) -> LossChangeStep:
        """Allot the change of the loss since `before_step`; appended to `steps` as well."""
        if self._start is None:
            raise UsageError("after_step without before_step", hint="call before_step, then the optimizer, then this")
        (start, intended), self._start = self._start, None
        end = self._kept()
        if not bool(intended.isfinite().all()):  # a step that overflowed is left out by whoever guards the optimizer
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

    def _kept(self) -> Tensor:
        return _flat(kept_value(self._optimizer, p) for p in self._parameters.values())

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
    """Combine consecutive steps into one: allocations add up, and the loss goes from before the first to after the
    last.

    Raises `UsageError` for none and for steps that do not follow on one another, whose sum has no loss beside it.
    """
    if not steps or any(a.loss_after != b.loss_before for a, b in itertools.pairwise(steps)):
        raise UsageError("these steps are not in a row", hint="measure every step of the stretch to be summarised")
    return LossChangeStep(
        step=steps[-1].step,
        loss_before=steps[0].loss_before,
        loss_after=steps[-1].loss_after,
        segments=max(s.segments for s in steps),
        parameters=tuple(_added(same[0].name, same) for same in zip(*(s.parameters for s in steps), strict=True)),
    )


def by_layer(step: LossChangeStep) -> LossChangeStep:
    """Merge the allocations of a step by layer: names are cut after their first number, or else before their last part.

    `model.layers.3.mlp.up_proj.weight` belongs to `model.layers.3`, `model.norm.weight` to `model.norm`.
    """
    layers: dict[str, list[Allocation]] = {}
    for allocation in step.parameters:
        layers.setdefault(_layer_of(allocation.name), []).append(allocation)
    return dataclasses.replace(step, parameters=tuple(_added(layer, found) for layer, found in layers.items()))


def _layer_of(name: str) -> str:
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1]) or name


def _added(name: str, same: Sequence[Allocation]) -> Allocation:
    return Allocation(
        name=name,
        change=math.fsum(a.change for a in same),
        rounding=math.fsum(a.rounding for a in same),
        num_moved=sum(a.num_moved for a in same),
        num_helped=sum(a.num_helped for a in same),
    )


class _Landscape:
    """The loss and its gradient at any weights: the mean over fixed batches, in fp32, without dropout."""

    def __init__(self, twin: nn.Module, names: Iterable[str], batches: Sequence[Mapping[str, Any]]) -> None:
        self.twin, self.batches = twin.float().eval(), batches
        known = dict(self.twin.named_parameters())
        missing = [n for n in names if n not in known]
        if missing:
            raise UsageError(f"the twin has no parameter `{missing[0]}`", hint="pass a model of the same class")
        self.twin.requires_grad_(False)
        self.parameters = [known[n].requires_grad_() for n in names]

    def at(self, weights: Tensor) -> tuple[float, Tensor]:
        """(loss, gradient as one flat vector) where the weights are the flat vector `weights`."""
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
        return math.fsum(losses) / len(losses), _flat(grads)


class _Path:
    """Composite Simpson's rule along a straight line; refining keeps every gradient taken so far."""

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
        """ḡ, the gradient averaged over the line."""
        return (self.ends + 2 * self.inner + 4 * self.middles) / (6 * self.segments)

    def closes(self, tolerance: float) -> bool:
        """Whether the allotted change is the true one, up to the tolerance and the resolution of an fp32 loss."""
        error = abs(float(self.mean_gradient().double() @ self.delta.double()) - self.true_change)
        return error <= tolerance * abs(self.true_change) + _RESOLUTION * abs(self.loss)

    def refine(self) -> None:
        """Halve the segments: their middles become inner points."""
        self.inner += self.middles
        self.segments *= 2
        self.middles = self._gradients_at([(2 * k + 1) / (2 * self.segments) for k in range(self.segments)])

    def _gradients_at(self, places: Sequence[float]) -> Tensor:
        return torch.stack([self.landscape.at(self.start + place * self.delta)[1] for place in places]).sum(0)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1).float() for t in tensors])
