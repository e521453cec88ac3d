"""Memory of a training step: estimated before the run, and measured by part at its start.

One step's forward and backward pass under a profiler (on CUDA, with the allocator's counter) gives the peak, and the
next step's, under PyTorch's MemTracker, the parts alive at that moment. The two methods are independent. The parts of a
peak are not the maxima of each part: gradients grow while activations are freed. The optimizer's temporary tensors are
left out, because its compiled step does not run under a tracker.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from lpconv.errors import ResourceError, UnsupportedError, first_line
from lpconv.machine import available_memory, out_of_memory
from lpconv.models.coded import CodedTensor
from lpconv.report.numbers import size_text
from lpconv.results import PeakMemory
from lpconv.train.processes import is_main_process
from lpconv.train.recipes import TRAINING_OPTIMIZERS, Arithmetic

_FIRST = 2  # the optimizer allocates its state in the first step
_PARTS = {
    "PARAM": "weights", "BUFFER": "weights", "GRAD": "gradients", "OPT": "optimizer", "ACT": "activations",
    "TEMP": "temporary", "OTH": "temporary",
}  # fmt: skip
_HINT = "lower --batch-size or --seq-len, or choose a smaller optimizer, such as --optimizer collage-int8-moment"


def available_bytes(limit: int | None) -> int:
    """Bytes that a run may use: `limit`, or the free memory of the device."""
    return free_device_bytes("cuda" if torch.cuda.is_available() else "cpu") if limit is None else limit


def free_device_bytes(device: str) -> int:
    """Free memory of the device in bytes; for a CPU, of the machine within the container's limit."""
    return available_memory() if device == "cpu" else int(torch.cuda.mem_get_info()[0])


def weight_bytes(num_parameters: int, arithmetic: Arithmetic) -> int:
    return num_parameters * TRAINING_OPTIMIZERS[arithmetic.optimizer].bytes_per_parameter


def parameter_bytes(num_parameters: int, largest: int, arithmetic: Arithmetic, *, num_ranks: int) -> dict[str, int]:
    """Bytes that one of `num_ranks` ranks needs, by part. `largest` is the size of the largest parameter.

    The first rank saves the model; with GPUs that takes no GPU memory.
    """
    needed = {"weights, gradients and optimizer": weight_bytes(num_parameters, arithmetic) // num_ranks}
    if arithmetic.on_codes:
        needed |= {"latents": 4 * num_parameters, "source": 4 * num_parameters}
    if num_ranks > 1:
        needed["the largest parameter, gathered"] = 4 * largest
        if is_main_process() and not torch.cuda.is_available():
            needed["the whole model while it is saved"] = 4 * num_parameters
    return needed


def check_room(needed: dict[str, int], limit: int | None) -> None:
    """Raise ResourceError if the parts of an estimate exceed the available memory."""
    total, available = sum(needed.values()), available_bytes(limit)
    if total > available:
        raise ResourceError(
            f"a step needs about {size_text(total)} of memory ({_by_part(needed)}); "
            f"{size_text(available)} is available",
            hint=_HINT,
            details={"estimate": needed, "available": available},
        )


@contextmanager
def explain_oom(needed: dict[str, int]) -> Iterator[None]:
    """Convert failed allocations in the block to a ResourceError with the estimate."""
    try:
        yield
    except Exception as e:
        if out_of_memory(e) is None:
            raise
        raise ResourceError(
            f"out of memory: {first_line(e):.120} (estimated: {_by_part(needed)})",
            hint=_HINT,
            details={"estimate": needed},
        ) from e


def _by_part(needed: dict[str, int]) -> str:
    return ", ".join(f"{part} {size_text(size)}" for part, size in needed.items())


def keep_only_inputs(model: Any) -> None:
    """Turn on activation checkpointing, without the re-entrant kind, which drops gradients of frozen inputs."""
    if not model.supports_gradient_checkpointing:
        raise UnsupportedError(
            f"--gradient-checkpointing: `{type(model).__name__}` of transformers does not support it",
            hint="leave it out; a smaller --batch-size with --grad-accum saves memory too",
        )
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # from 5.23 on
    enable({"use_reentrant": False})


class StepMemory:
    """Measures the passes of a run's second and third step: the second gives the peak, the third its parts.

    Call `begin` and `end` around the passes, and `stop` before anything else runs, or when training ends.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.record: PeakMemory | None = None
        self._stack: ExitStack | None = None
        self._profile: Any = None
        self._tracker: Any = None
        self._kept_bytes = 0

    def begin(self, step: int, optimizer: torch.optim.Optimizer) -> bool:
        """Call before step `step` (from 1). Returns whether the step is measured."""
        if step == _FIRST:
            self._stack = ExitStack()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            else:
                state = (x for values in optimizer.state.values() for x in values.values())
                self._kept_bytes = storage_bytes([*self.model.parameters(), *self.model.buffers(), *state])
                self._profile = self._stack.enter_context(profiled_memory())
        elif step == _FIRST + 1 and self.record is not None:
            self._tracker = MemTracker()
            self._tracker.track_external(self.model, optimizer)
            self._stack = ExitStack()
            self._stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Module is None")  # modules the trainer wraps
            self._stack.enter_context(self._tracker)
        return self._stack is not None

    def next_batch(self) -> None:
        """Call between the batches of a step: the tracker expects each module once."""
        if self._tracker is not None:
            self._tracker.reset_mod_stats()

    def stop(self) -> None:
        if self._stack is not None:
            self._stack.close()
        self._stack = self._tracker = self._profile = None

    def end(self) -> None:
        """Call after the backward pass. Does nothing if the step is not measured."""
        if self._stack is None:
            return
        tracker, profiled = self._tracker, self._profile
        self.stop()
        if tracker is not None and self.record is not None:
            parts = _parts(tracker)
            if torch.cuda.is_available():  # cuBLAS takes 32 MiB on Hopper for each thread that multiplies
                parts["workspaces and other"] = max(0, self.record.measured_bytes - sum(parts.values()))
            self.record = dataclasses.replace(self.record, parts=parts)
        elif torch.cuda.is_available():
            peak, instrument = torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated"
            self.record = PeakMemory(parts={}, measured_bytes=peak, instrument=instrument)
        else:
            peak = self._kept_bytes + largest_sum(profiled)
            self.record = PeakMemory(parts={}, measured_bytes=peak, instrument="torch.profiler")


@contextmanager
def profiled_memory() -> Iterator[Any]:
    """Record what CPU and GPU allocate and free in the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears")  # torch 2.11 says so of a single cycle
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            yield profiled


def largest_sum(profiled: Any) -> int:
    """Maximum bytes allocated and not yet freed since the profile began."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        largest = max(largest, now)
    return largest


def _parts(tracker: Any) -> dict[str, int]:
    """Bytes alive at the peak by part, on the device that held most."""
    peak: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot("peak")
    device = max(peak.values(), key=lambda sizes: sum(sizes.values()))
    parts = dict.fromkeys(_PARTS.values(), 0)
    for kind, size in device.items():
        name = _PARTS.get(getattr(kind, "name", ""))
        if name is not None:  # other entries are totals
            parts[name] += size
    return parts


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Total bytes of the distinct storages behind tensors, including tensors inside wrappers."""
    sizes = {s.data_ptr(): s.nbytes() for t in tensors for s in storages_of(t)}
    return sum(sizes.values())


def storages_of(x: Any) -> Iterator[Any]:
    """The storages behind a tensor, including tensors inside wrappers; none for other objects."""
    if not isinstance(x, Tensor):
        return
    if isinstance(x, CodedTensor):
        for piece in x.pieces:
            yield from (part.untyped_storage() for part in piece.parts.values())
        return
    inner = getattr(x, "__tensor_flatten__", None)
    if inner is None:
        yield x.untyped_storage()
        return
    names, _ = inner()
    for name in names:
        yield from storages_of(getattr(x, name))
