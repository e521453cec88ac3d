"""HALP and its predecessors: stochastic gradient methods whose weights are integers of a few bits.

De Sa, Leszczynski, Zhang, Marzoev, Aberger, Olukotun, Ré 2018, "High-Accuracy Low-Precision Training", arXiv
1803.03383. A weight on a fixed grid cannot come nearer to the optimum than the grid's spacing allows. HALP's *bit
centring* stores value = centre + spacing · offset, with a full-precision centre and an offset of b bits. At every epoch
it chooses a spacing in proportion to the remaining gradient: the optimum of a function that is strongly convex with
modulus μ is within ‖∇f(w)‖/μ. This is a sum of scaled components, like everything in lpconv, with a shrinking scale.

Gradients are computed in the dtype of the parameters; only the state that a step writes has b bits.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.cast import cast
from lpconv.formats.spec import FORMATS, Format

Closure = Callable[[], Any]
"""Clears gradients, computes the gradients of a batch (or of all data) at the current weights, and returns the loss."""


def integer_format(bits: int) -> Format:
    """Integer format of `bits` bits, ±(2^(bits-1) - 1), like `int4` and `int8`."""
    if not 2 <= bits <= 24:
        raise UsageError(f"a grid of {bits} bits is not supported", hint="use 2 to 24 bits; the paper uses 8 and 16")
    magnitude = bits - 2
    return replace(
        FORMATS["int8"],
        name=f"int{bits}",
        mantissa_bits=magnitude,
        bias=1 - magnitude,
        max_mantissa=2**magnitude - 1,
        storage_bits=bits,
    )


class LPSGD(torch.optim.Optimizer):
    """SGD whose weights are rounded stochastically to `bits`-bit multiples of `spacing` after each step (LP-SGD).

    Weights are rounded to the grid at the start. `seed` is the seed of the rounding.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, spacing: float, bits: int = 8, seed: int = 0) -> None:
        if not (lr > 0 and spacing > 0 and math.isfinite(lr * spacing)):
            raise UsageError(f"lr={lr} or spacing={spacing} is out of range", hint="both must be finite and above 0")
        self.format, self.spacing = integer_format(bits), spacing
        super().__init__(params, {"lr": lr})
        device = self.param_groups[0]["params"][0].device
        self.generator = torch.Generator(device).manual_seed(seed)
        self._start()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"spacing": self.spacing, "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.spacing = state_dict["spacing"]
        self.generator.set_state(state_dict["generator"].cpu())

    @torch.no_grad()
    def _start(self) -> None:
        for p, _ in self._parameters():
            p.copy_(self._round(p))

    @torch.no_grad()
    def step(self, closure: Closure) -> Any:  # type: ignore[override]  # the step chooses where gradients are computed
        """Update once from the batch of `closure` and return its loss."""
        loss = _evaluate(closure)
        for p, lr in self._parameters():
            p.copy_(self._round(p - lr * _gradient(p)))
        return loss

    def _parameters(self) -> list[tuple[Tensor, float]]:
        return [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _round(self, x: Tensor) -> Tensor:
        """Round `x` to the grid; a spacing of 0 gives 0."""
        if self.spacing == 0:
            return torch.zeros_like(x)
        steps = cast(x / self.spacing, self.format, rounding="stochastic", generator=self.generator)
        return steps * self.spacing


class LPSVRG(LPSGD):
    """Variance-reduced LP-SGD: w ← Q(w - lr·(g(w) - g(c) + ∇f(c))) with the centre c of the epoch (LP-SVRG).

    Call `recentre` before the first step and at every epoch; a step makes two passes over its batch.
    """

    @torch.no_grad()
    def recentre(self, full: Closure) -> float:
        """Make the current weights the centre, compute the gradient of all data there, and return its norm."""
        _evaluate(full)
        for p, _ in self._parameters():
            self.state[p].update(centre=p.clone(), gradient=_gradient(p).clone())
        return math.sqrt(sum(float(self.state[p]["gradient"].double().square().sum()) for p, _ in self._parameters()))

    @torch.no_grad()
    def step(self, closure: Closure) -> Any:  # type: ignore[override]  # as above
        """Update once from the batch that `closure` evaluates twice; return the loss at the current weights."""
        if any("centre" not in self.state[p] for p, _ in self._parameters()):
            raise UsageError(
                "the optimizer has no centre yet", hint="first call `recentre` with the gradient of all data"
            )
        loss = _evaluate(closure)
        here = [(p.clone(), _gradient(p).clone()) for p, _ in self._parameters()]
        for p, _ in self._parameters():
            p.copy_(self.state[p]["centre"])
        _evaluate(closure)
        for (p, lr), (weight, gradient) in zip(self._parameters(), here, strict=True):
            state = self.state[p]
            self._move(p, weight, lr * (gradient - _gradient(p) + state["gradient"]), state)
        return loss

    def _move(self, p: Tensor, weight: Tensor, change: Tensor, state: dict[str, Any]) -> None:
        p.copy_(self._round(weight - change))


class HALP(LPSVRG):
    """LP-SVRG with bit centring: the weight is a full-precision centre plus an offset rounded to `bits` bits.

    `recentre` adds the offset to the centre and chooses the spacing ‖∇f(c)‖ / (μ·(2^(bits-1) - 1)), so that offsets
    just reach the farthest possible optimum. `mu` is the modulus of strong convexity, or an estimate: too large a value
    truncates steps, too small a value wastes bits. A function that is not convex has no such modulus, and `mu` must be
    tuned.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, mu: float, bits: int = 8, seed: int = 0) -> None:
        if not (mu > 0 and math.isfinite(mu)):
            raise UsageError(f"mu={mu} is out of range", hint="mu must be finite and above 0")
        self.mu = mu
        super().__init__(params, lr=lr, spacing=1.0, bits=bits, seed=seed)

    def _start(self) -> None:
        """Does not round the weights, which are the first centre."""

    def recentre(self, full: Closure) -> float:
        norm = super().recentre(full)
        self.spacing = norm / (self.mu * self.format.max)
        for p, _ in self._parameters():
            self.state[p]["offset"] = torch.zeros_like(p)
        return norm

    def _move(self, p: Tensor, weight: Tensor, change: Tensor, state: dict[str, Any]) -> None:
        state["offset"] = self._round(state["offset"] - change)
        p.copy_(state["centre"] + state["offset"])


def _evaluate(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure()


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad
