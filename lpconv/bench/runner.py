"""One case, built and ready, with its step timed on command. A child process holds one."""

import dataclasses
import itertools
import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from lpconv.bench.memory import profile_step
from lpconv.bench.models import (
    check_fits,
    check_parallel,
    estimate_bytes,
    find_model,
    gemms_of,
    make_batch,
    max_over_processes,
    rows_of,
    step_loss,
    wrap_parallel,
)
from lpconv.bench.options import CODES, Case
from lpconv.bench.recipes import apply_recipe, is_emulated, make_optimizer, with_codes
from lpconv.bench.roofline import Gemm
from lpconv.errors import LpconvError, typed_line
from lpconv.layers import blocks_of
from lpconv.machine import peak_rss_bytes
from lpconv.models.inputs import vocabulary_size
from lpconv.models.opening import Blueprint, Opened
from lpconv.models.sharing import running_copy
from lpconv.results import MemoryRecord, NumericsRecord
from lpconv.scaled import ScaledTensor
from lpconv.shards import gather_whole
from lpconv.train.memory import storage_bytes

_PROBE = (1, 64)  # batch and sequence length for the comparison with fp32
_WARM_UP_STEPS = 3
# Arguments of torch.compile for a whole model.
_WHOLE: dict[str, dict[str, Any]] = {"model": {}, "graphs": {"mode": "reduce-overhead"}}


class CaseRunner:
    """A case's model, optimizer and batch. Building checks peers and memory, and compares the model with fp32."""

    def __init__(self, case: Case, *, memory_share: float) -> None:
        if (missing := case.lacks_peer()) is not None:
            raise missing
        check_parallel(case)
        known = find_model(case)
        shadow = known.build_empty()
        self.case = case
        self.gemms: tuple[Gemm, ...] = gemms_of(shadow)
        ranks = rows_of(case, known)
        estimate = estimate_bytes(shadow, case, vocabulary_size(known.config), by_rows=ranks is not None)
        check_fits(estimate, case, memory_share)
        torch.manual_seed(case.seed)
        opened = known.build(case.device, ranks)
        model: nn.Module = opened.model
        self.weights = _weights_origin(known, opened)
        num_layers = len(blocks_of(model))
        self._batch = make_batch(case, known.config)
        probe = make_batch(case, known.config, batch=_PROBE[0], seq=min(_PROBE[1], case.seq))
        watched = _watched_parameters(model) if case.mode == "train" else []
        reference = _observe(model if ranks is None else running_copy(model, ranks), probe, watched)
        if case.format == CODES:
            del opened, model
            model = with_codes(known, case)
        else:
            model = apply_recipe(model, case, self._batch)
        if ranks is None:
            numerics = _compare(reference, _observe(model, probe, watched))
            self._model = wrap_parallel(model, case, probe)
        else:  # with FSDP no process has the whole model
            self._model = wrap_parallel(model, case, probe)
            numerics = _compare(reference, _observe(self._model, probe, watched))
        self._optimizer = make_optimizer(self._model, case) if case.mode == "train" else None
        # Fields of the case's row, without those of the machine.
        self.facts = {
            "emulated": is_emulated(case), "weights": self.weights, "layers": num_layers, "estimate_bytes": estimate,
            "compile_s": self._compile(), "numerics": numerics,
        }  # fmt: skip

    def _compile(self) -> float:
        """Compile as the case requires and run the first steps. Returns the seconds that this took."""
        start = time.perf_counter()
        if self.case.compiled in _WHOLE:
            self._model.compile(dynamic=False, **_WHOLE[self.case.compiled])
        elif self.case.compiled == "blocks":
            for block in blocks_of(self._model):
                block.compile(dynamic=False)
        try:
            self.run(_WARM_UP_STEPS)
        except TorchDynamoException as e:
            if self.case.compiled == "off":  # a peer that compiles on its own
                raise
            hint = "pass --compile off --baseline bf16 to measure without torch.compile"
            raise LpconvError(typed_line(e), hint=hint) from e
        self._graphs = _num_graphs()
        return time.perf_counter() - start

    @property
    def recompiles(self) -> int:
        """Number of graphs compiled since the warm-up. Timings are valid only if it is 0."""
        return _num_graphs() - self._graphs

    def step(self) -> None:
        """Run one forward pass or one training step."""
        if self.case.compiled == "graphs":
            # Allows the memory of the previous step's results to be reused.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self._finish(self._forward())
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def run(self, steps: int) -> None:
        """Run `steps` steps and wait for them to finish."""
        for _ in range(steps):
            self.step()
        self._synchronise()

    def measure(self, iterations: int, seconds: float) -> dict[str, Any]:
        """Step times over at least `iterations` steps and `seconds`, the wall time of a step, and `recompiles`.

        On a GPU the times come from CUDA events between the steps, on a CPU from the wall clock. Cooperating processes
        take the same number of steps: the largest that any of them needs.
        """
        times: list[float] = []
        elapsed = 0.0
        while left := max_over_processes(_steps_left(len(times), elapsed, iterations, seconds)):
            self._synchronise()
            start = time.perf_counter()
            marks = [self._mark()]
            for _ in range(left):
                self.step()
                marks.append(self._mark())
            self._synchronise()
            elapsed += time.perf_counter() - start
            times += itertools.starmap(_seconds_between, itertools.pairwise(marks))
        return {"seconds": times, "wall": elapsed / len(times), "recompiles": self.recompiles}

    def spin(self, seconds: float) -> int:
        """Run steps back to back for `seconds` and return their number."""
        end = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < end:
            self.run(1)
            count += 1
        return count

    def memory(self) -> MemoryRecord:
        """Memory of one step under the profiler. On a GPU the peak is the allocator's own value."""
        self.run(1)
        weights = storage_bytes([*self._model.parameters(), *self._model.buffers()])
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        optimizer = storage_bytes(x for state in states for x in state.values())
        if self.case.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        result = profile_step(
            self._forward,
            self._finish,
            weights=weights,
            optimizer=optimizer,
            gradients=lambda: [p.grad for p in self._model.parameters()],
            device=self.case.device,
        )
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        if self.case.device == "cpu":
            return dataclasses.replace(result, process_bytes=peak_rss_bytes())
        peak, (free, total) = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
        result = _graph_peak(result, peak) if self.case.compiled == "graphs" else result
        return dataclasses.replace(
            result,
            peak_bytes=peak,
            reserved_bytes=torch.cuda.max_memory_reserved(),
            process_bytes=total - free or peak_rss_bytes(),  # of all processes; only NVML can tell them apart
        )

    def _forward(self) -> Any:
        if self._optimizer is not None:
            return step_loss(self._model, self._batch)
        with torch.no_grad():
            return self._model(**self._batch)

    def _finish(self, result: Any) -> None:
        if self._optimizer is not None:
            result.backward()
            self._optimizer.step()

    def _synchronise(self) -> None:
        if self.case.device != "cpu":
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        """The present time: on a GPU an event on the device itself, since the host runs ahead, as in real use."""
        if self.case.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds_between(before: Any, after: Any) -> float:
    return float(after - before if isinstance(after, float) else before.elapsed_time(after) / 1e3)


def _steps_left(count: int, elapsed: float, iterations: int, seconds: float) -> int:
    """Number of steps to run next: up to `iterations` first, then as many as fit in the remaining time."""
    if count < iterations:
        return iterations - count
    return math.ceil((seconds - elapsed) * count / elapsed) if elapsed < seconds else 0


def _weights_origin(known: Blueprint, opened: Opened) -> str:
    """Description of where the weights come from, with the number of parameters missing in the checkpoint."""
    if known.checkpoint is None:
        return "random"
    count = sum(1 for _ in opened.model.parameters())
    return f"{len(opened.missing)} of {count} parameters random, else checkpoint" if opened.missing else "checkpoint"


def _num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _graph_peak(record: MemoryRecord, peak: int) -> MemoryRecord:
    """The parts of a peak with CUDA graphs, which keep their memory between steps: no event shows a step's own use."""
    pool = max(0, peak - record.parts.total)
    parts = dataclasses.replace(record.parts, other=record.parts.other + pool)
    return dataclasses.replace(record, saved_bytes=None, parts=parts)


def _watched_parameters(model: nn.Module) -> list[str]:
    """Names of the vectors in the first block, whose gradients depend on the whole backward pass, in every recipe."""
    block = blocks_of(model)[0]
    own = {id(p) for p in block.parameters() if p.ndim == 1}
    return [name for name, p in model.named_parameters() if id(p) in own]


def _observe(model: nn.Module, batch: dict[str, Tensor], watched: list[str]) -> tuple[Tensor, Tensor | None]:
    """Outputs in fp32 on the CPU, and the watched gradients concatenated into one vector."""
    with torch.no_grad():
        output = model(**batch)[0].float().cpu()
    if not watched:
        return output, None
    step_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    parameters = dict(model.named_parameters())
    grads = [parameters[name].grad for name in watched]
    gathered = [None if g is None else gather_whole(g) for g in grads]
    values = [g.dequantize() if isinstance(g, ScaledTensor) else g for g in gathered if g is not None]
    gradient = torch.cat([g.float().flatten() for g in values]).cpu()
    model.zero_grad(set_to_none=True)
    return output, gradient


def _compare(reference: tuple[Tensor, Tensor | None], result: tuple[Tensor, Tensor | None]) -> NumericsRecord:
    (output, gradient), (output_hat, gradient_hat) = reference, result
    return NumericsRecord(
        output_error=_relative_error(output, output_hat),
        gradient_error=None if gradient is None or gradient_hat is None else _relative_error(gradient, gradient_hat),
    )


def _relative_error(x: Tensor, x_hat: Tensor) -> float:
    norm = float(x.norm())
    return float((x - x_hat).norm()) / norm if norm else float("nan")
