"""The fused step: one pass over memory that joins what is stored to fp32, applies the rule and stores the result.

Compiled, it must not lose the low parts (see `mcf.pairs`), and whether it does depends on private compiler options. So
each kernel is checked on this machine when it is first needed: the candidates run on a few thousand numbers beside
eager mode, the first that agrees is taken, and if none does the step runs eagerly and says so.
"""

import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpconv.mcf.pairs import Rounding, nearest_by_bits, nearest_by_cast
from lpconv.mcf.transforms import EXACT_OPTIONS
from lpconv.optim.paper import build_paper_step, paper_coefficients
from lpconv.optim.rules import RULES, Coefficients, Rule
from lpconv.optim.storage import Parts, Step, Storage, load, new_parts, store, total

_EAGER_BLOCK = 2**17  # elements: the dozen fp32 temporaries of a block stay in the cache of a server core
_CHECKED = 4096


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A step that has passed its check. `mode` is "cast", "bits" (both compiled) or "eager"."""

    mode: str
    step: Step

    def run(self, parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...], random: Tensor | None) -> None:
        """Update the parts in place. All tensors are 1-D, contiguous and of one length; coefficients are 0-dim fp32."""
        if self.mode != "eager":
            self.step(parts, gradient, coefficients, random)
            return
        for start in range(0, len(gradient), _EAGER_BLOCK):
            block = slice(start, start + _EAGER_BLOCK)
            part_blocks = tuple(tuple(t[block] for t in tensors) for tensors in parts)
            self.step(part_blocks, gradient[block], coefficients, None if random is None else random[block])


def apply_rule(
    rule: Rule, storages: Sequence[Storage], parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The new weight and moments in fp32, before anything is rounded."""
    x, *moments = (load(s, p) for s, p in zip(storages, parts, strict=True))
    x, new_moments = rule.update(x, gradient.float(), tuple(moments), coefficients)
    return x, *new_moments


def build_step(rule: Rule, storages: Sequence[Storage], nearest: Rounding) -> Step:
    """The step as a plain function, for eager mode or for torch.compile."""

    def step(parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...], random: Tensor | None) -> None:
        values = apply_rule(rule, storages, parts, gradient, coefficients)
        for storage, part, value in zip(storages, parts, values, strict=True):
            store(storage, part, value, nearest, random)

    return step


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """A step by name: how to build it for some storages and a rounding, and its coefficients for a group and step."""

    build: Callable[[Sequence[Storage], Rounding], Step]
    coefficients: Callable[[Mapping[str, Any], int], Coefficients]


STEPS: dict[str, StepKind] = {
    **{r.name: StepKind(build=functools.partial(build_step, r), coefficients=r.coefficients) for r in RULES.values()},
    "adamw-paper": StepKind(build=build_paper_step, coefficients=paper_coefficients),
}


@functools.cache
def get_kernel(name: str, storages: tuple[Storage, ...], device_type: str, *, compiled: bool) -> Kernel:
    """The fastest step that gives eager's results on this kind of device; takes seconds the first time if compiled."""
    kind = STEPS[name]
    eager = kind.build(storages, nearest_by_cast)
    if not compiled:
        return Kernel(mode="eager", step=eager)
    failures = []
    for mode, nearest, options in (("cast", nearest_by_cast, EXACT_OPTIONS), ("bits", nearest_by_bits, None)):
        try:
            step = _compile(kind.build(storages, nearest), options)
            agrees = _agrees(kind, storages, step, torch.device(device_type))
        except Exception as error:  # no compiler, an unknown option, a recompile limit: all mean the next candidate
            failures.append(f"{mode}: {type(error).__name__}")
            continue
        if agrees:
            return Kernel(mode=mode, step=step)
        failures.append(f"{mode}: results differ from eager")
    warnings.warn(
        f"the {name} step runs eagerly on {device_type}, several times slower: torch.compile failed its check "
        f"({'; '.join(failures)})",
        stacklevel=2,
    )
    return Kernel(mode="eager", step=eager)


def _compile(step: Step, options: dict[str, Any] | None) -> Step:
    """Under a code object of its own: dynamo allows eight graphs to each, and all steps here come from one closure."""
    own = types.FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=True, options=options)


def _agrees(kind: StepKind, storages: tuple[Storage, ...], step: Step, device: torch.device) -> bool:
    """Whether it leaves eager's values, to a few fp32 roundings: compiled and eager sqrt differ in the last bit.

    So one rounding of what is kept may go the other way. A lost low part moves a bf16 pair by up to 2^-8, an fp8 one by
    up to 2^-4.
    """
    eager = kind.build(storages, nearest_by_bits)
    parts, gradient, coefficients, random = _check_inputs(kind, storages, device)
    other = tuple(tuple(t.clone() for t in tensors) for tensors in parts)
    for _ in range(2):  # from the second step on the low parts are read
        step(parts, gradient, coefficients, random)
        eager(other, gradient, coefficients, random)
    return all(
        torch.allclose(a[0].float(), b[0].float(), rtol=max(2 * torch.finfo(s.dtype).eps, 2.0**-14), atol=0.0)
        and torch.allclose(total(s, a), total(s, b), rtol=max(4 * s.relative_error, 2.0**-14), atol=0.0)
        for s, a, b in zip(storages, parts, other, strict=True)
    )


def _check_inputs(
    kind: StepKind, storages: tuple[Storage, ...], device: torch.device
) -> tuple[Parts, Tensor, tuple[Tensor, ...], Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def uniform() -> Tensor:  # far from 0, so that relative differences mean something
        return (torch.rand(_CHECKED, generator=generator) + 0.5).to(device)

    parts = tuple(new_parts(storage, uniform().to(storage.dtype)) for storage in storages)
    random = torch.randint(0, 2**16, (_CHECKED,), dtype=torch.int32, generator=generator).to(device)
    group: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
    group |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
    coefficients = torch.tensor(kind.coefficients(group, 3), dtype=torch.float32, device=device).unbind()
    dtype = torch.bfloat16 if storages[0].dtype == torch.float8_e4m3fn else storages[0].dtype
    return parts, uniform().to(dtype), coefficients, random if Storage.STOCHASTIC in storages else None
