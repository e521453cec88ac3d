"""The optimizer around a fused step: parameter groups, state, checks, saving and loading."""

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.lookup import find
from lpconv.optim.diagnostics import UpdateRecord, snapshot
from lpconv.optim.kernel import Parts, get_kernel
from lpconv.optim.paper import paper_step
from lpconv.optim.rules import RULES
from lpconv.optim.shards import all_finite, flat_gradient, flat_parts, local
from lpconv.optim.storage import VARIANTS, Storage, Variant, new_parts

__all__ = ["ARITHMETICS", "NONFINITE", "LowPrecisionOptimizer", "ParamsLike"]

ParamsLike: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

ARITHMETICS = ("fused", "paper")
NONFINITE = ("ignore", "skip", "raise")

# v · beta2 rounds back to v where 1 - beta2 is under half the relative spacing of bf16, 2^-9 to 2^-8.
_LARGEST_BF16_BETA2 = 0.998

_COMPANION_NAMES = {Storage.PAIR: "residual", Storage.KAHAN: "compensation", Storage.MASTER: "master"}


class LowPrecisionOptimizer(Optimizer):
    """Any rule of `rules.RULES` with any variant of `storage.VARIANTS`; use it through CollageAdamW, SGD or Lion.

    bf16 parameters are kept as the variant says; fp32 parameters among them stay fp32 with fp32 moments. Other dtypes
    raise UnsupportedError. State tensors have the shape, device and placement of their parameter (DTensor included),
    and every operation is elementwise, so the result does not depend on how parameters are sharded.
    """

    def __init__(
        self,
        params: ParamsLike,
        defaults: dict[str, Any],
        *,
        rule: str,
        variant: str,
        arithmetic: str,
        state_dtype: torch.dtype,
        nonfinite_gradients: str,
        compiled: bool,
        seed: int,
        diagnostics_every: int,
    ) -> None:
        self.rule = RULES[rule]
        self.variant = _with_state_dtype(find("variant", variant, VARIANTS), state_dtype)
        self.arithmetic = find("arithmetic", arithmetic, {a: a for a in ARITHMETICS})
        self.nonfinite_gradients = find("nonfinite_gradients", nonfinite_gradients, {n: n for n in NONFINITE})
        self.compiled = compiled
        self.seed = seed
        self.diagnostics_every = diagnostics_every
        self.records: list[UpdateRecord] = []
        self.num_skipped = 0
        if self.arithmetic == "paper" and (
            rule != "adamw" or self.variant not in (VARIANTS["light"], VARIANTS["plus"])
        ):
            raise UsageError(
                f"the paper's arithmetic covers AdamW light and plus with bf16 moments, not {rule} {variant}",
                hint="use arithmetic='fused'",
            )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], self.rule.name, self.variant)
        except Exception:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step for every parameter with a gradient; returns the closure's loss.

        With `nonfinite_gradients` "skip" a step with any Inf or NaN gradient (on any rank) changes nothing but
        `num_skipped`, and with "raise" it raises InputError; parameters and state are then as before. Sparse gradients
        raise UnsupportedError.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._work()
        if self.nonfinite_gradients != "ignore" and not all_finite([gradient for *_, gradient in work]):
            self._refuse()
            return loss
        self.records = []
        for p, name, group, gradient in work:
            self._update(p, name, group, gradient)
        return loss

    def storages(self, p: Tensor) -> tuple[Storage, ...]:
        """How the weight `p` and each of its moments are kept."""
        if p.dtype == torch.float32:
            return (Storage.FP32,) * (1 + len(self.rule.moments))
        return self.variant.weight, *self.variant.moments[: len(self.rule.moments)]

    def parts(self, p: Tensor) -> Parts:
        """The tensors that hold `p` and its moments, made as zeros (the weight's companion from `p`) where missing."""
        state = self.state[p]
        weight, *moments = self.storages(p)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            _put(state, "", weight, new_parts(weight, p.detach()))
            for name, storage in zip(self.rule.moments, moments, strict=True):
                _put(state, name, storage, new_parts(storage, torch.zeros_like(p, dtype=storage.dtype)))
        of_moments = (_get(state, n, s, state[n]) for n, s in zip(self.rule.moments, moments, strict=True))
        return _get(state, "", weight, p.detach()), *of_moments

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim, but every state tensor keeps its own dtype.

        PyTorch casts floating-point state to the parameter's dtype, which would round fp32 masters and moments to bf16.
        Raises InputError where the saved state does not fit the variant.
        """
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, p in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id, {})
            for name, value in saved.items():
                if isinstance(value, Tensor) and value.dtype != self.state[p][name].dtype:
                    self.state[p][name] = value.detach().to(self.state[p][name].device, copy=True)
            if saved:
                self._check_state(p)

    def _check_state(self, p: Tensor) -> None:
        expected = {"step": torch.float32}
        weight, *moments = self.storages(p)
        for name, storage in [("", weight), *zip(self.rule.moments, moments, strict=True)]:
            if name:
                expected[name] = storage.dtype
            if storage.companion:
                expected[_companion_name(name, storage)] = storage.companion
        found = {name: value.dtype for name, value in self.state[p].items()}
        if found != expected:
            raise InputError(
                f"the saved state does not fit {self.rule.name} '{self.variant.name}': it holds {found}",
                hint=f"make the optimizer with the options of the saved run; these need {expected}",
            )

    def bytes_per_parameter(self) -> float:
        """Measured: bytes of parameters, gradients and state tensors over the number of parameters (on this rank)."""
        params = [p for group in self.param_groups for p in group["params"]]
        tensors = [t for p in params for t in (p, p.grad, *self.state[p].values()) if isinstance(t, Tensor) and t.dim()]
        return sum(local(t).nbytes for t in tensors) / sum(local(p).numel() for p in params)

    def _update(self, p: Tensor, name: str, group: dict[str, Any], gradient: Tensor) -> None:
        parts = self.parts(p)
        state = self.state[p]
        state["step"] += 1
        step = int(state["step"])
        if gradient.numel() == 0:
            return
        values = self.rule.coefficients(group, step)
        coefficients = torch.tensor(values, dtype=torch.float32, device=gradient.device).unbind()
        with flat_parts(parts) as flats:
            measured = self.diagnostics_every > 0 and step % self.diagnostics_every == 0
            before = snapshot(self.rule, self.storages(p), flats, gradient, coefficients) if measured else None
            if self.arithmetic == "paper" and p.dtype == torch.bfloat16:
                paper_step(flats, gradient, group, step)
            else:
                kernel = get_kernel(self.rule.name, self.storages(p), p.device.type, compiled=self.compiled)
                kernel.run(flats, gradient, coefficients, self._random(p, name, step, gradient))
            if before is not None:
                self.records.append(before.compare(name, step, flats[0]))

    def _random(self, p: Tensor, name: str, step: int, like: Tensor) -> Tensor | None:
        """Noise for stochastic rounding, from the seed, the parameter and the step: a resumed run draws the same."""
        if Storage.STOCHASTIC not in self.storages(p):
            return None
        generator = torch.Generator(like.device).manual_seed(zlib.crc32(f"{self.seed}/{name}/{step}".encode()))
        return torch.randint(0, 2**16, like.shape, dtype=torch.int32, device=like.device, generator=generator)

    def _work(self) -> list[tuple[Tensor, str, dict[str, Any], Tensor]]:
        """(parameter, name, group, flat local gradient) of all that have a gradient."""
        return [
            (p, name, group, flat_gradient(p, name))
            for number, group in enumerate(self.param_groups)
            for p, name in zip(group["params"], _names(group, number), strict=True)
            if p.grad is not None
        ]

    def _refuse(self) -> None:
        self.num_skipped += 1
        if self.nonfinite_gradients == "raise":
            raise InputError(
                "a gradient has Inf or NaN; nothing was changed",
                hint="lower the learning rate or clip, or pass nonfinite_gradients='skip' to leave such steps out",
            )


def _names(group: dict[str, Any], number: int) -> list[str]:
    """Parameter names where the optimizer was given them, else group.position."""
    return group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]


def _with_state_dtype(variant: Variant, state_dtype: torch.dtype) -> Variant:
    if state_dtype == torch.bfloat16:
        return variant
    if state_dtype == torch.float32:
        return replace(variant, first=Storage.FP32, second=Storage.FP32)
    raise UnsupportedError(f"no optimizer state in {state_dtype}", hint="use torch.bfloat16 or torch.float32")


def _check_group(group: Mapping[str, Any], rule: str, variant: Variant) -> None:
    for p in group["params"]:
        if p.dtype not in (torch.bfloat16, torch.float32):
            raise UnsupportedError(
                f"cannot train a parameter of {p.dtype}",
                hint="bf16 (kept as the variant says) and fp32 parameters work",
            )
    for name in ("lr", "eps", "weight_decay", "momentum"):
        if not 0 <= float(group.get(name, 0.0)) < float("inf"):
            raise UsageError(f"{name} = {group[name]} is out of range", hint="0 or more")
    betas = group.get("betas", ())
    if not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"betas = {betas} are out of range", hint="0 <= beta < 1")
    if rule == "adamw" and variant.second is Storage.BF16 and betas[1] > _LARGEST_BF16_BETA2:
        warnings.warn(
            f"variant '{variant.name}' keeps the second moment in bf16, where it cannot decay with beta2 = {betas[1]}: "
            f"v · beta2 rounds back to v above {_LARGEST_BF16_BETA2}; use variant='plus'",
            stacklevel=4,
        )


def _put(state: dict[str, Any], name: str, storage: Storage, parts: tuple[Tensor, ...]) -> None:
    if name:
        state[name] = parts[0]
    if storage in _COMPANION_NAMES:
        state[_companion_name(name, storage)] = parts[1]


def _get(state: Mapping[str, Any], name: str, storage: Storage, first: Tensor) -> tuple[Tensor, ...]:
    return (first, state[_companion_name(name, storage)]) if storage in _COMPANION_NAMES else (first,)


def _companion_name(name: str, storage: Storage) -> str:
    return f"{name}_{_COMPANION_NAMES[storage]}" if name else _COMPANION_NAMES[storage]
