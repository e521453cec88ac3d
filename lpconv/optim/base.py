"""Base class of optimizers with a fused step: parameter groups, state, checks, saving and loading."""

import itertools
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpconv.errors import InputError
from lpconv.optim.diagnostics import UpdateRecord, snapshot
from lpconv.optim.kernel import STEPS, get_kernel
from lpconv.optim.rules import ratio_scale
from lpconv.optim.settings import UpdateSettings, check_group
from lpconv.optim.state import (
    HOST_ENTRIES,
    Scratch,
    SharedState,
    all_finite,
    batches_of,
    check_state,
    flat_parts,
    local_gradient,
    new_state,
    parts_of,
)
from lpconv.optim.storage import WITH_OFFSET, Parts, Storage
from lpconv.shards import local

ParamsLike: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

# By type of device, in elements: the largest tensor that is stepped together with others, and the size of a batch.
# A CPU copies a small weight and gradient in less time than a kernel call takes, and a batch fits its cache. An H100
# (3.35 TB/s) is idle while the host makes a call (40 µs) for fewer than 6 M elements of 22 bytes. The copies move 12
# bytes more, so they pay up to 40 µs · 3.35 TB/s / 34 bytes = 3.9 M; their scratch memory is 4 bytes per element.
_LIMITS = {"cpu": (2**15, 2**18), "cuda": (2**22, 2**24)}
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class _Job:
    """A parameter with a gradient, and the local part of that gradient."""

    p: Tensor
    name: str
    group: dict[str, Any]
    gradient: Tensor


class LowPrecisionOptimizer(Optimizer):
    """Any rule of `rules.RULES` with any variant of `storage.VARIANTS`; construct it through `optim.collage`.

    bf16 parameters are stored according to the variant, e4m3fn ones likewise with an e4m3fn high part; fp32 parameters
    stay fp32 with fp32 moments. Other dtypes raise UnsupportedError. State tensors have the shape, device and placement
    of their parameter (DTensor included), and every operation is elementwise, so the result does not depend on how
    parameters are sharded (except for the noise of "stochastic").
    """

    def __init__(self, params: ParamsLike, defaults: dict[str, Any], settings: UpdateSettings) -> None:
        self.settings = settings
        self.records: list[UpdateRecord] = []
        self.num_skipped = 0
        self._scalars_now: dict[tuple[object, ...], tuple[Tensor, ...]] = {}
        self._shared: dict[Tensor, SharedState] = {}
        self._scratch: Scratch = {}
        super().__init__(params, defaults)
        if all(p.dtype == torch.float32 for group in self.param_groups for p in group["params"]):
            warnings.warn(
                f"all parameters are fp32, so '{settings.variant.name}' is plain {settings.rule.name} in fp32 and "
                "saves no memory; convert the model first: model.to(torch.bfloat16)",
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        own = ("settings", "records", "num_skipped")  # for deepcopy: PyTorch saves groups and state only
        empty: dict[str, Any] = {"_scalars_now": {}, "_shared": {}, "_scratch": {}}
        return super().__getstate__() | {name: getattr(self, name) for name in own} | empty

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1], self.settings)
        except Exception:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    # In a user's compiled training step the low parts would be lost.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
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
        jobs = self._jobs()
        if self.settings.nonfinite_gradients != "ignore":
            device = self.param_groups[0]["params"][0].device
            if not all_finite([job.gradient for job in jobs], device):
                self._skip_or_raise()
                return loss
        self.records = []
        self._scalars_now.clear()
        small: dict[tuple[object, ...], list[_Job]] = defaultdict(list)
        for job in jobs:
            if self._is_small(job):
                small[id(job.group), job.p.dtype, job.gradient.dtype, job.gradient.device].append(job)
            else:
                self._run(job, self._count(job.p))
        for alike in small.values():
            self._run_together(alike)
        return loss

    def storages(self, p: Tensor) -> tuple[Storage, ...]:
        return self.settings.storages[p.dtype]  # which `check_group` has accepted

    def weight_scale(self, p: Tensor) -> float:
        """The factor σ from the stored data of `p` to the weight."""
        group = next(g for g in self.param_groups if any(p is q for q in g["params"]))
        return float(group.get("weight_scale", 1.0))

    def parts(self, p: Tensor) -> Parts:
        """The tensors that store `p` and each moment, created on first use; writing to them changes the state."""
        return parts_of(p, self._state(p), self.settings.rule.name, self.storages(p))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict like torch.optim, but keep the dtype of every state tensor.

        PyTorch casts state to the parameter's dtype, which would round fp32 masters and moments to bf16, and keeps
        other tensors of the state dict as they are, which would then be stepped. Raises InputError, changing nothing,
        if the saved state does not fit the variant.
        """
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        saved = [(p, state_dict["state"].get(i, {})) for p, i in zip(params, saved_ids, strict=False)]
        if self.settings.rule.name == "adamw-ratio":  # states of older versions lack this
            saved = [(p, state and {"ratio_scale": torch.zeros(2), **state}) for p, state in saved]
        for p, state in saved:
            if state:
                check_state(p, state, self.settings.rule.name, self.storages(p))
        super().load_state_dict(state_dict)  # raises if the groups differ in number or length
        self._shared.clear()
        for p, state in saved:
            for name, value in state.items():
                device = value.device if name in HOST_ENTRIES else self.state[p][name].device
                self.state[p][name] = value.detach().to(device, copy=True)

    def bytes_per_parameter(self) -> float:
        """Measured bytes of parameters, gradients and state tensors, per parameter on this rank."""
        params = [p for group in self.param_groups for p in group["params"]]
        states = [t for p in params for name, t in self.state.get(p, {}).items() if name not in HOST_ENTRIES]
        gradients = [p.grad for p in params if p.grad is not None]
        num_bytes = sum(local(t).nbytes for t in (*params, *gradients, *states))
        return num_bytes / sum(local(p).numel() for p in params)

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state |= new_state(p, self.settings.rule.name, self.storages(p))
        return state

    def _jobs(self) -> list[_Job]:
        return [
            _Job(p, name, group, local_gradient(p, name))
            for number, group in enumerate(self.param_groups)
            for p, name in zip(group["params"], _names(group, number), strict=True)
            if p.grad is not None
        ]

    def _measures(self, step: int) -> bool:
        return self.settings.diagnostics_every > 0 and step % self.settings.diagnostics_every == 0

    def _is_small(self, job: _Job) -> bool:
        """Whether to step it together with others; not if it draws its own noise, or if its state must be a DTensor."""
        small = job.gradient.numel() <= _limits(job)[0] and not isinstance(job.p, DTensor)
        return small and Storage.STOCHASTIC not in self.storages(job.p)

    def _count(self, p: Tensor) -> int:
        count = self._state(p)["step"]
        count += 1
        return int(count)

    def _run_together(self, alike: list[_Job]) -> None:
        """Step parameters of one group, dtype and device; those that share state in one call if all have a gradient."""
        self._share([job for job in alike if job.p not in self._shared])
        sharing: dict[SharedState, list[_Job]] = defaultdict(list)
        for job in alike:
            sharing[self._shared[job.p]].append(job)
        for shared, jobs in sharing.items():
            gradients = [job.gradient for job in jobs]
            step = shared.count() if shared.is_usable(self.state, gradients) else None
            if step is not None and not self._measures(step):
                shared.gather(gradients)
                self._run_kernel(jobs, step, shared.parts, shared.gradient)
                shared.scatter()
                continue
            for job in jobs:
                self._run(job, step or self._count(job.p))

    def _share(self, jobs: list[_Job]) -> None:
        """Move the state of these parameters into shared buffers."""
        by_step: dict[int, list[_Job]] = defaultdict(list)
        for job in jobs:
            by_step[int(self._state(job.p)["step"])].append(job)
        batches = (
            batches_of(equal, lambda job: job.gradient.numel(), _limits(equal[0])[1]) for equal in by_step.values()
        )
        for batch in itertools.chain.from_iterable(batches):
            params, gradient_dtype = [job.p for job in batch], batch[0].gradient.dtype
            rule, storages = self.settings.rule.name, self.storages(params[0])
            states = [self.state[p] for p in params]
            shared = SharedState(params, states, rule, storages, gradient_dtype, self._scratch)
            self._shared |= dict.fromkeys(params, shared)

    def _run(self, job: _Job, step: int) -> None:
        """Step one parameter, and record lost updates if this step is measured."""
        if job.gradient.numel() == 0:
            return
        gradient, storages = job.gradient.reshape(-1), self.storages(job.p)
        with flat_parts(self.parts(job.p)) as parts:
            before = None
            if self._measures(step):
                rule = self.settings.rule
                before = snapshot(rule, storages, parts, gradient, self._coefficients(job, rule.name, step))
            self._run_kernel([job], step, parts, gradient)
            if before is not None:
                self.records.append(before.compare(job.name, step, parts[0]))

    def _run_kernel(self, jobs: list[_Job], step: int, parts: Parts, gradient: Tensor) -> None:
        """Step flat parts of one job, or of several that are alike."""
        job = jobs[0]
        paper = self.settings.arithmetic == "paper" and job.p.dtype == torch.bfloat16
        name = "adamw-paper" if paper else self.settings.rule.name
        kernel = get_kernel(name, self.storages(job.p), gradient.device.type, compiled=self.settings.compiled)
        kernel.run(parts, gradient, self._coefficients(job, name, step), self._random(job, step))
        if name == "adamw-ratio":
            scale = torch.tensor(ratio_scale(self._with_last_scale(job), step))
            for other in jobs:
                self.state[other.p]["ratio_scale"].copy_(scale)

    def _with_last_scale(self, job: _Job) -> dict[str, Any]:
        """The options of the group, and `rules.ratio_scale` of the last step, which had its own betas and eps."""
        last = self.state[job.p].get("ratio_scale")
        return job.group if last is None else {**job.group, "ratio_scale": tuple(last.tolist())}

    def _coefficients(self, job: _Job, name: str, step: int) -> tuple[Tensor, ...]:
        """The scalars of the step, to which compiled code is not specialised."""
        group = self._with_last_scale(job)
        key = (id(job.group), name, step, group.get("ratio_scale"))
        return self._sent(key, job.gradient.device, lambda: STEPS[name].coefficients(group, step))

    def _sent(
        self, key: tuple[object, ...], device: torch.device, values: Callable[[], Sequence[float]]
    ) -> tuple[Tensor, ...]:
        """0-dim tensors on the device, sent once per step(), because a GPU waits for each copy."""
        key = (*key, device)
        if key not in self._scalars_now:
            self._scalars_now[key] = torch.tensor(values(), dtype=torch.float32, device=device).unbind()
        return self._scalars_now[key]

    def _random(self, job: _Job, step: int) -> Tensor | None:
        """Noise for stochastic rounding, determined by seed, parameter and step, so a resumed run draws the same.

        For dithered storage one offset: multiples of the golden ratio, modulo 1, fill an interval most evenly.
        """
        shape, device = (job.gradient.numel(),), job.gradient.device
        if any(s in WITH_OFFSET for s in self.storages(job.p)):
            return self._sent(("offset", step), device, lambda: [step * _GOLDEN % 1 - 0.5])[0]
        if Storage.STOCHASTIC not in self.storages(job.p):
            return None
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self.settings.seed}/{job.name}/{step}".encode()))
        return torch.randint(0, 2**16, shape, dtype=torch.int32, device=device, generator=generator)

    def _skip_or_raise(self) -> None:
        self.num_skipped += 1
        if self.settings.nonfinite_gradients == "raise":
            raise InputError(
                "a gradient has Inf or NaN, so the step was not taken",
                hint="lower the learning rate, clip gradients, or pass nonfinite_gradients='skip' to skip such steps",
            )


def _limits(job: _Job) -> tuple[int, int]:
    return _LIMITS.get(job.gradient.device.type, _LIMITS["cpu"])


def _names(group: dict[str, Any], number: int) -> list[str]:
    """The parameter names if the optimizer was given them, else "group.position"."""
    return group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
