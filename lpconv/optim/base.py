"""The optimizer around a fused step: parameter groups, state, checks, saving and loading."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lpconv.errors import InputError
from lpconv.optim.diagnostics import UpdateRecord, snapshot
from lpconv.optim.kernel import STEPS, get_kernel
from lpconv.optim.settings import Settings, check_group
from lpconv.optim.shards import all_finite, flat_gradient, flat_parts, local
from lpconv.optim.state import check_state, new_state, parts_of
from lpconv.optim.storage import Parts, Storage

__all__ = ["LowPrecisionOptimizer", "ParamsLike"]

ParamsLike: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

# Elements. Copying a parameter of this size and its state into a batch and back is cheaper than a kernel call of its
# own; the batch itself should stay in the cache, and below the size from which malloc maps and unmaps it every time.
_SMALL = 2**15
_BATCH = 2**17


@dataclass(frozen=True, slots=True)
class _Job:
    """A parameter with a gradient; the gradient is local and flat."""

    p: Tensor
    name: str
    group: dict[str, Any]
    gradient: Tensor


class LowPrecisionOptimizer(Optimizer):
    """Any rule of `rules.RULES` with any variant of `storage.VARIANTS`; use it through CollageAdamW, SGD or Lion.

    bf16 parameters are kept as the variant says, e4m3fn ones likewise with an e4m3fn high part; fp32 parameters among
    them stay fp32 with fp32 moments. Other dtypes raise UnsupportedError. State tensors have the shape, device and
    placement of their parameter (DTensor included), and every operation is elementwise, so the result does not depend
    on how parameters are sharded (but for the noise of "stochastic").
    """

    def __init__(self, params: ParamsLike, defaults: dict[str, Any], settings: Settings) -> None:
        self.settings = settings
        self.records: list[UpdateRecord] = []
        self.num_skipped = 0
        self._coefficients_now: dict[tuple[int, str, int, torch.device], tuple[Tensor, ...]] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = ("settings", "records", "num_skipped")  # PyTorch keeps groups and state only; this is for deepcopy
        return super().__getstate__() | {name: getattr(self, name) for name in own} | {"_coefficients_now": {}}

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
    # Inside somebody's compiled training step the low parts would be lost.
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
        if self.settings.nonfinite_gradients != "ignore" and not self._all_finite(jobs):
            self._refuse()
            return loss
        self.records = []
        self._coefficients_now.clear()
        for step, batch in self._batches(jobs):
            self._run(batch, step)
        return loss

    def storages(self, p: Tensor) -> tuple[Storage, ...]:
        """How the weight `p` and each of its moments are kept."""
        if p.dtype == torch.float8_e4m3fn:
            assert self.settings.fp8_storages is not None  # `check_group` has seen to it
            return self.settings.fp8_storages
        return self.settings.fp32_storages if p.dtype == torch.float32 else self.settings.bf16_storages

    def weight_scale(self, p: Tensor) -> float:
        """σ, where the weight is σ times what `p` holds."""
        group = next(g for g in self.param_groups if any(p is q for q in g["params"]))
        return float(group.get("weight_scale", 1.0))

    def parts(self, p: Tensor) -> Parts:
        """The tensors that hold `p` and each moment, made on first use; writing to them changes the state."""
        storages = self.storages(p)
        if not self.state[p]:
            self.state[p] = new_state(p, self.settings.rule.name, storages)
        return parts_of(p, self.state[p], self.settings.rule.name, storages)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim, but every state tensor keeps its own dtype.

        PyTorch casts floating-point state to the parameter's dtype, which would round fp32 masters and moments to bf16.
        Raises InputError where the saved state does not fit the variant, and changes nothing then.
        """
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        saved = [(p, state_dict["state"].get(i, {})) for p, i in zip(params, saved_ids, strict=False)]
        for p, state in saved:
            if state:
                check_state(state, self.settings.rule.name, self.storages(p))
        super().load_state_dict(state_dict)  # raises where the groups differ in number or length
        for p, state in saved:
            for name, value in state.items():
                if value.dtype != self.state[p][name].dtype:
                    self.state[p][name] = value.detach().to(self.state[p][name].device, copy=True)

    def bytes_per_parameter(self) -> float:
        """Measured: bytes of parameters, gradients and state tensors over the number of parameters (on this rank)."""
        params = [p for group in self.param_groups for p in group["params"]]
        states = [t for p in params for name, t in self.state.get(p, {}).items() if name != "step"]
        gradients = [p.grad for p in params if p.grad is not None]
        num_bytes = sum(local(t).nbytes for t in (*params, *gradients, *states))
        return num_bytes / sum(local(p).numel() for p in params)

    def _jobs(self) -> list[_Job]:
        return [
            _Job(p, name, group, flat_gradient(p, name))
            for number, group in enumerate(self.param_groups)
            for p, name in zip(group["params"], _names(group, number), strict=True)
            if p.grad is not None
        ]

    def _batches(self, jobs: list[_Job]) -> Iterator[tuple[int, list[_Job]]]:
        """Count the step, and put small parameters that take the very same step together: each call has its price."""
        together: dict[tuple[int, tuple[object, ...]], list[_Job]] = defaultdict(list)
        for job in jobs:
            storages = self.storages(job.p)
            if not self.state[job.p]:
                self.state[job.p] = new_state(job.p, self.settings.rule.name, storages)
            count = self.state[job.p]["step"]
            count += 1
            step = int(count)
            alone = self._measures(step) or Storage.STOCHASTIC in storages  # these look at each parameter
            if alone or job.gradient.numel() > _SMALL:
                yield step, [job]
            else:
                alike = (id(job.group), job.p.dtype, job.gradient.dtype, job.gradient.device)
                together[step, alike].append(job)
        for (step, _), small in together.items():
            for batch in _cut(small):
                yield step, batch

    def _all_finite(self, jobs: list[_Job]) -> bool:
        return all_finite([job.gradient for job in jobs], self.param_groups[0]["params"][0].device)

    def _measures(self, step: int) -> bool:
        return self.settings.diagnostics_every > 0 and step % self.settings.diagnostics_every == 0

    def _run(self, batch: list[_Job], step: int) -> None:
        first = batch[0]
        gradient = first.gradient if len(batch) == 1 else torch.cat([job.gradient for job in batch])
        if gradient.numel() == 0:
            return
        rule, storages = self.settings.rule, self.storages(first.p)
        paper = self.settings.arithmetic == "paper" and first.p.dtype == torch.bfloat16
        name = "adamw-paper" if paper else rule.name
        kernel = get_kernel(name, storages, gradient.device.type, compiled=self.settings.compiled)
        with flat_parts([self.parts(job.p) for job in batch]) as parts:
            before = None
            if self._measures(step):
                before = snapshot(rule, storages, parts, gradient, self._coefficients(first, rule.name, step))
            kernel.run(parts, gradient, self._coefficients(first, name, step), self._random(first, step))
            if before is not None:
                self.records.append(before.compare(first.name, step, parts[0]))

    def _coefficients(self, job: _Job, name: str, step: int) -> tuple[Tensor, ...]:
        """The scalars of the step as 0-dim tensors, which compiled code does not specialise on; kept for one step()."""
        device = job.gradient.device
        key = (id(job.group), name, step, device)
        if key not in self._coefficients_now:
            values = STEPS[name].coefficients(job.group, step)
            self._coefficients_now[key] = torch.tensor(values, dtype=torch.float32, device=device).unbind()
        return self._coefficients_now[key]

    def _random(self, job: _Job, step: int) -> Tensor | None:
        """Noise for stochastic rounding, from the seed, the parameter and the step: a resumed run draws the same."""
        if Storage.STOCHASTIC not in self.storages(job.p):
            return None
        shape, device = job.gradient.shape, job.gradient.device
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self.settings.seed}/{job.name}/{step}".encode()))
        return torch.randint(0, 2**16, shape, dtype=torch.int32, device=device, generator=generator)

    def _refuse(self) -> None:
        self.num_skipped += 1
        if self.settings.nonfinite_gradients == "raise":
            raise InputError(
                "a gradient has Inf or NaN; nothing was changed",
                hint="lower the learning rate or clip, or pass nonfinite_gradients='skip' to leave such steps out",
            )


def _cut(jobs: list[_Job]) -> Iterator[list[_Job]]:
    """Consecutive runs of jobs with about _BATCH elements each."""
    batch: list[_Job] = []
    for job in jobs:
        batch.append(job)
        if sum(j.gradient.numel() for j in batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _names(group: dict[str, Any], number: int) -> list[str]:
    """Parameter names where the optimizer was given them, else group.position."""
    return group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
