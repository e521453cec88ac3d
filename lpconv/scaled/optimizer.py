"""AdamW on scaled parameters, and the hyperparameters with which a scaled model trains like its source.

For W = σ·Ŵ, AdamW's step on W is a step on Ŵ with lr/σ; with power-of-two σ and fp32 state the two are bitwise equal.
16-bit state is stored as (data, scale); at every step the scale maps the largest magnitude to the top of fp16's range,
so that numbers down to 2^-28 of it keep all their bits, and those down to 2^-38 some. The second moment is stored as
its square root, which spans half as many binades, rounded stochastically: at beta2 = 0.999 one step's decay is half an
fp16 ulp, so that rounding to nearest would prevent it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.scale import pow2_floor
from lpconv.kernels.quantise import fake_quantise
from lpconv.lookup import find
from lpconv.scaled.scales import MAX_SCALE, MIN_SCALE, Scale, ratio, times
from lpconv.scaled.tensor import ScaledTensor
from lpconv.shards import is_sharded, local, placed_like


@dataclass(frozen=True, kw_only=True)
class HyperParameters:
    """Hyperparameters of an optimizer that depend on the scale of a weight: learning rate, ε and weight decay."""

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0


# (power of σ, power of c) in the factors of lr, ε and weight decay, for W = σ·Ŵ and ĝ = c·∂L/∂W.
_SCALE_POWERS: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    "adamw": ((-1, 0), (0, 1), (1, 0)),
    "adam": ((-1, 0), (0, 1), (1, 1)),
    "sgd": ((-1, -1), (0, 0), (1, 1)),
    "lion": ((-1, 0), (0, 0), (1, 0)),
}


def equivalent(
    optimizer: str, source: HyperParameters, *, weight_scale: float, gradient_factor: float = 1.0
) -> HyperParameters:
    """Return the hyperparameters with which the scaled weight Ŵ = W/σ follows W exactly, step by step.

    `weight_scale` is σ, and `gradient_factor` is c if the optimizer receives ĝ = c·∂L/∂W (c = σ if autograd runs on Ŵ
    alone). For AdamW: lr/σ, c·ε, σ·wd. β, momentum and schedules are unchanged; clip gradients by the norm of ĝ/c.
    """
    powers = find("optimizer", optimizer, _SCALE_POWERS)
    lr, eps, decay = (weight_scale**a * gradient_factor**b for a, b in powers)
    return HyperParameters(lr=source.lr * lr, eps=source.eps * eps, weight_decay=source.weight_decay * decay)


class AdamW(torch.optim.Optimizer):
    """Decoupled-weight-decay Adam (Loshchilov & Hutter, arXiv 1711.05101) for scaled and plain parameters.

    All hyperparameters are those of the source model; the step on the data divides lr by the parameter's scale.
    Gradients may have any scale, static or dynamic. 16-bit parameters have an fp32 copy of their data in the state
    unless `master` is False. The copy starts from the parameter's fp32 value in `start`: rounded data are on the 16-bit
    grid, where updates below half a step are lost until many have accumulated. With `rounding` "stochastic" data are
    rounded stochastically at each step, so that such updates reach the forward pass on average, for any start. With a
    16-bit `state_dtype` moments are stored as data and scale.

    Under FSDP2 state tensors are DTensors, placed like their parameters, and a step does not depend on the number of
    ranks, except for the noise of stochastic rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype = torch.float32,
        master: bool = True,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        start: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= b < 1 for b in betas)):
            raise UsageError(
                f"AdamW: one of lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay} is out of range",
                hint="all must be at least 0, and the betas below 1",
            )
        if state_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UsageError(f"AdamW cannot keep its state in {state_dtype}", hint="use float32, float16 or bfloat16")
        self.state_dtype, self.master, self.rounding = state_dtype, master, rounding
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for parameter, value in (start or {}).items():  # now, before rounded data become the copy
            data, scale = _parts(parameter)
            if master and data.dtype != torch.float32:
                self.state[parameter] = {"master": times(value.float(), ratio(1.0, scale)), "master_scale": scale}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owned = [(p, group) for group in self.param_groups for p in group["params"]]
        for index, (parameter, group) in enumerate(owned):
            if parameter.grad is not None:
                self._update(parameter, parameter.grad, group, index)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, keeping its dtypes: torch would cast fp32 state to the dtype of a 16-bit parameter."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for parameter, index in zip(parameters, saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.detach().clone().to(parameter.device)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        data, scale = _parts(parameter)
        target = self._master(parameter, data, scale)
        grad, grad_scale = _parts(gradient)
        state["step"] = state.get("step", 0) + 1
        first, second = self._load(state, "exp_avg", target), self._load(state, "exp_avg_sq", target)
        for x, g, m, v in _blocks(target, grad, first, second):
            _update_block(x, times(g.float(), grad_scale), m, v, scale, group, state["step"])
        self._store(parameter, "exp_avg", first)
        self._store(parameter, "exp_avg_sq", second, noise=index)
        if target is not data:
            data.copy_(self._round_to_data(target, data.dtype, state["step"], index))

    def _round_to_data(self, target: Tensor, dtype: torch.dtype, step: int, index: int) -> Tensor:
        """Round the fp32 copy to data. Noise depends only on step and parameter, so that a run can be resumed."""
        if self.rounding == "nearest":
            return target
        generator = torch.Generator(target.device).manual_seed(-step * _PRIME - index)
        return fake_quantise(target, _FORMATS[dtype], rounding="stochastic", generator=generator)

    def _master(self, parameter: Tensor, data: Tensor, scale: Scale) -> Tensor:
        """The tensor to update: the data, their fp32 copy in the state, or a temporary copy.

        The copy follows its parameter to another scale (after "every:N", or after a checkpoint was loaded).
        """
        if data.dtype == torch.float32:
            return data
        if not self.master:
            return data.float()
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = placed_like(parameter, data.float())
        elif state["master_scale"] is not scale:
            moved = times(local(state["master"]), ratio(state["master_scale"], scale))
            state["master"] = placed_like(parameter, moved)
        state["master_scale"] = scale
        return local(state["master"])

    def _load(self, state: dict[str, Any], name: str, like: Tensor) -> Tensor:
        if name not in state:
            return torch.zeros_like(like)
        if self.state_dtype == torch.float32:
            return local(state[name])
        moment: Tensor = local(state[name]).float() * state[f"{name}_scale"]
        return moment.square_() if name == "exp_avg_sq" else moment

    def _store(self, parameter: Tensor, name: str, moment: Tensor, *, noise: int = 0) -> None:
        """Store a moment. The second moment's noise depends only on step and `noise`, so that a run can be resumed."""
        state = self.state[parameter]
        if self.state_dtype == torch.float32:
            state[name] = placed_like(parameter, moment)
            return
        values = moment.sqrt() if name == "exp_avg_sq" else moment
        data, state[f"{name}_scale"] = _balance(values, parameter)
        if name == "exp_avg_sq":
            generator = torch.Generator(data.device).manual_seed(state["step"] * _PRIME + noise)
            data = fake_quantise(data, _FORMATS[self.state_dtype], rounding="stochastic", generator=generator)
        state[name] = placed_like(parameter, data.to(self.state_dtype))


def _balance(values: Tensor, parameter: Tensor) -> tuple[Tensor, Scale]:
    """Split `values`, shaped like `parameter`, into data below 2^15 and a scale common to all ranks."""
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    if is_sharded(parameter):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=parameter.device_mesh.get_group())
    norm = pow2_floor(largest) * 2.0**-14
    norm = torch.where(norm.isfinite(), norm.clamp(MIN_SCALE, MAX_SCALE), 1.0)
    return times(values, 1 / norm), norm


def _parts(x: Tensor) -> tuple[Tensor, Scale]:
    x = local(x)
    return (x.data_part, x.scale) if isinstance(x, ScaledTensor) else (x.detach(), 1.0)


def _update_block(
    target: Tensor, grad: Tensor, first: Tensor, second: Tensor, scale: Scale, group: dict[str, Any], step: int
) -> None:
    """One AdamW step in place on fp32 data at `scale`, from the gradient of the value."""
    beta1, beta2 = group["betas"]
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    target.mul_(1 - group["lr"] * group["weight_decay"])
    target.addcdiv_(first, times(denominator, scale), value=-group["lr"] / (1 - beta1**step))


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Views of all tensors, block by block if they are contiguous, so that intermediate results stay in the cache."""
    if not all(t.is_contiguous() for t in tensors):
        return [tensors]
    return zip(*(torch.split(t.view(-1), _BLOCK) for t in tensors), strict=True)


_BLOCK = 2**16  # elements
_PRIME = 1_000_003  # more than a model's parameters, so that every step of each has its own seed (of 32 bits)
_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
