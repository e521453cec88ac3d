"""The fused step: one pass over memory that joins stored parts to fp32, applies the rule and stores the result.

Compilation must not lose the low parts (see `mcf.pairs`), and whether it does depends on private compiler options. So
each kernel is checked on this machine at first use: the candidates run on a few thousand numbers and are compared with
eager mode. The first that agrees is used; if none does, the step runs eagerly with a warning.
"""

import functools
import math
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lpconv.mcf.expansion import EXACT_OPTIONS, expand_scalar
from lpconv.mcf.pairs import Rounding, nearest_by_bits, nearest_by_cast
from lpconv.optim.rules import RULES, Coefficients, UpdateRule, unit_adamw
from lpconv.optim.storage import WITH_OFFSET, Parts, Step, Storage, load, new_parts, store, stored_value

_EAGER_BLOCK = 2**17  # elements: the dozen fp32 temporaries of a block fit the cache of a server core
# Elements of the check. A GPU's block size follows from it.
_CHECKED = {"cpu": 2**12, "cuda": 2**17}
COLUMNS = 64  # a GPU loads several numbers at once only if the compiler knows that their count is a multiple of 16


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A step that has passed its check. `mode` is "cast", "bits" (both compiled) or "eager"."""

    mode: str
    step: Step

    def run(self, parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...], random: Tensor | None) -> None:
        """Update the parts in place. All tensors are 1-D, contiguous and equally long; coefficients are 0-dim fp32."""
        if self.mode != "eager":
            if gradient.device.type != "cpu" and len(gradient) % COLUMNS == 0:
                parts, gradient = tuple(tuple(map(_in_rows, p)) for p in parts), _in_rows(gradient)
                random = random if random is None else _in_rows(random)
            self.step(parts, gradient, coefficients, random)
            return
        for start in range(0, len(gradient), _EAGER_BLOCK):
            block = slice(start, start + _EAGER_BLOCK)
            part_blocks = tuple(tuple(t[block] for t in tensors) for tensors in parts)
            noise = random[block] if random is not None and random.dim() else random
            self.step(part_blocks, gradient[block], coefficients, noise)


def _in_rows(x: Tensor) -> Tensor:
    if not x.dim():
        return x
    rows = x.view(-1, COLUMNS)
    torch._dynamo.mark_static(rows, 1)
    return rows


def apply_rule(
    rule: UpdateRule, storages: Sequence[Storage], parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The new weight and moments in fp32, before rounding."""
    x, *moments = (load(s, p) for s, p in zip(storages, parts, strict=True))
    x, new_moments = rule.update(x, gradient.float(), tuple(moments), coefficients)
    return x, *new_moments


def build_step(rule: UpdateRule, storages: Sequence[Storage], nearest: Rounding) -> Step:
    """Build the step as a plain function, for eager mode or torch.compile."""

    def step(parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...], random: Tensor | None) -> None:
        values = apply_rule(rule, storages, parts, gradient, coefficients)
        if rule.gain is not None and storages[0] is Storage.BF16:
            x, m, *others = values
            error = x - nearest(x).float()
            values = x, m + rule.gain(values[1:], coefficients) * error, *others
        for storage, part, value in zip(storages, parts, values, strict=True):
            store(storage, part, value, nearest, random)

    return step


_Pair: TypeAlias = tuple[Tensor, Tensor]  # fp32 tensors of bf16 numbers


def paper_coefficients(group: Mapping[str, Any], step: int) -> Coefficients:
    """Scalars of one step in the paper's arithmetic, in fp64 on the host; only beta2's two parts are rounded."""
    (lr, eps, weight_decay), (beta1, beta2) = unit_adamw(group), group["betas"]
    return (
        -1.0 if group["maximize"] else 1.0,
        beta1,
        1 - beta1,
        beta2,
        *expand_scalar(beta2),
        1 - beta2,
        math.sqrt(1 - beta2**step),
        eps,
        -lr / (1 - beta1**step),
        lr * weight_decay,
    )


def build_paper_step(storages: Sequence[Storage], nearest: Rounding) -> Step:
    """Build the step of Collage AdamW in the paper's own arithmetic: every operation in bf16, rounded.

    For fidelity and comparison (arXiv 2405.03637, Algorithm 2). The fused step is more accurate, because it rounds the
    first moment and the update once instead of at every operation. Weight decay is part of the update ("compact" in the
    released code): applied to the weight before or after, as torch does, it would round away in bf16, where 1 - 1e-5 is
    1. A bf16 operation is one fp32 operation on bf16 numbers and one rounding, as PyTorch computes it. Written out that
    way the step can be compiled and checked like any other, and is bitwise equal to `mcf.expansion` in eager mode.

    The parts are (theta, d_theta), (m,), and (v,) for light or (v, d_v) for plus.
    """

    def fl(x: Tensor) -> Tensor:
        return nearest(x).float()

    def fast_two_sum(a: Tensor, b: Tensor) -> _Pair:
        s = fl(a + b)
        return s, fl(b - fl(s - a))

    def grow(x: _Pair, a: Tensor) -> _Pair:
        s, e = fast_two_sum(x[0], a)
        return fast_two_sum(s, fl(x[1] + e))

    def multiply(x: _Pair, y: _Pair) -> _Pair:
        p = fl(x[0] * y[0])
        e = fl(x[0] * y[0] - p)  # exact: a product of two bf16 numbers fits fp32
        return fast_two_sum(p, fl(e + fl(fl(x[0] * y[1]) + fl(x[1] * y[0]))))

    def step(parts: Parts, gradient: Tensor, coefficients: tuple[Tensor, ...], random: Tensor | None) -> None:
        sign, beta1, rest1, beta2, beta2_hi, beta2_lo, rest2, root, eps, step_size, decay = coefficients
        (theta, m, v), lows = [p[0].float() for p in parts], [p[1].float() for p in parts if len(p) == 2]
        g = fl(gradient.float()) * sign
        m = fl(fl(m * beta1) + g * rest1)
        if len(lows) == 1:
            v = fl(fl(v * beta2) + rest2 * g * g)
            v_parts: tuple[Tensor, ...] = (v,)
        else:
            v, d_v = grow(multiply((v, lows[1]), (beta2_hi, beta2_lo)), fl(rest2 * g * g))
            v_parts = (v, d_v)
        denominator = fl(fl(fl(torch.sqrt(v)) / root) + eps)
        update = fl(fl(fl(m / denominator) * step_size) - theta * decay)
        for targets, values in zip(parts, (grow((theta, lows[0]), update), (m,), v_parts), strict=True):
            for target, value in zip(targets, values, strict=True):
                target.copy_(value.to(torch.bfloat16))

    return step


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """A step by name: its builder for given storages and rounding, and its coefficients for a group and step number."""

    build: Callable[[Sequence[Storage], Rounding], Step]
    coefficients: Callable[[Mapping[str, Any], int], Coefficients]
    gain: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Tensor] | None = None


STEPS: dict[str, StepKind] = {
    **{
        r.name: StepKind(build=functools.partial(build_step, r), coefficients=r.coefficients, gain=r.gain)
        for r in RULES.values()
    },
    "adamw-paper": StepKind(build=build_paper_step, coefficients=paper_coefficients),
}


@functools.cache
def get_kernel(name: str, storages: tuple[Storage, ...], device_type: str, *, compiled: bool) -> Kernel:
    """The fastest step with eager's results on this kind of device; compiling takes seconds the first time."""
    kind = STEPS[name]
    eager = kind.build(storages, nearest_by_cast)
    if not compiled:
        return Kernel(mode="eager", step=eager)
    failures = []
    for mode, nearest, options in (("cast", nearest_by_cast, EXACT_OPTIONS), ("bits", nearest_by_bits, None)):
        try:
            step = _compile(kind.build(storages, nearest), options)
            agrees = _agrees(kind, storages, step, torch.device(device_type))
        except Exception as error:  # no compiler, an unknown option, a recompile limit: try the next candidate
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
    """Compile `step` under its own code object: dynamo allows eight graphs for each, and all steps share one."""
    own = types.FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=True, options=options)


def _agrees(kind: StepKind, storages: tuple[Storage, ...], step: Step, device: torch.device) -> bool:
    """Whether a compiled step gives eager's values to a few fp32 roundings, since their sqrt differs in the last bit.

    That difference may flip one rounding of a stored number. A lost low part changes a bf16 pair by up to 2^-8, an fp8
    pair by up to 2^-4. If a rule adds the weight's rounding error to the first moment, a weight rounded the other way
    moves that moment by an ulp of the weight times the gain, and no other element may differ.
    """
    eager = kind.build(storages, nearest_by_bits)
    parts, gradient, coefficients, random = _check_inputs(kind, storages, device)
    other = tuple(tuple(t.clone() for t in tensors) for tensors in parts)
    for _ in range(2):  # low parts are read from the second step on
        Kernel(mode="cast", step=step).run(parts, gradient, coefficients, random)
        eager(other, gradient, coefficients, random)
    returned = [torch.zeros((), device=device)] * len(parts)
    if kind.gain is not None:
        moments = tuple(stored_value(s, b) for s, b in zip(storages[1:], other[1:], strict=True))
        returned[1] = kind.gain(moments, coefficients) * (other[0][0].float() - parts[0][0].float())
    return all(
        bool(((a[0].short() - b[0].short()).abs() <= 1).all())
        if s.dtype == torch.int8
        else _near(a[0].float(), b[0].float(), r, 2 * torch.finfo(s.dtype).eps)
        and _near(stored_value(s, a), stored_value(s, b), r, 4 * s.relative_error)
        for s, a, b, r in zip(storages, parts, other, returned, strict=True)
    )


def _near(a: Tensor, b: Tensor, difference: Tensor, rtol: float) -> bool:
    return bool(((a - b - difference).abs() <= max(rtol, 2.0**-14) * (b.abs() + difference.abs())).all())


def _check_inputs(
    kind: StepKind, storages: tuple[Storage, ...], device: torch.device
) -> tuple[Parts, Tensor, tuple[Tensor, ...], Tensor | None]:
    generator, count = torch.Generator().manual_seed(0), _CHECKED.get(device.type, 2**12)

    def uniform() -> Tensor:  # far from 0, so that relative differences are meaningful
        return (torch.rand(count, generator=generator) + 0.5).to(device)

    parts = tuple(new_parts(s, (uniform() * (1 if s.dtype.is_floating_point else 64)).to(s.dtype)) for s in storages)
    random = torch.randint(0, 2**16, (count,), dtype=torch.int32, generator=generator).to(device)
    offset = torch.tensor(0.25, device=device) if any(s in WITH_OFFSET for s in storages) else None
    group: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
    group |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
    coefficients = torch.tensor(kind.coefficients(group, 3), dtype=torch.float32, device=device).unbind()
    dtype = torch.bfloat16 if storages[0].dtype == torch.float8_e4m3fn else storages[0].dtype
    return parts, uniform().to(dtype), coefficients, random if Storage.STOCHASTIC in storages else offset
