"""Break down memory at the peak of a step, from the allocator's events.

torch's profiler records every allocation, on CPUs and GPUs, in eager and compiled code. Blocks allocated before the
step are weights or optimizer state. Of the step's own blocks, gradients are identified by address, and activations are
what the forward pass leaves allocated. The rest are temporaries.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import record_function

from lpconv.results import MemoryParts, MemoryRecord
from lpconv.train.memory import profiled_memory, storages_of

_FORWARD = "lpconv:forward"


@dataclass(frozen=True, kw_only=True)
class BlockEvent:
    """An allocation (`size` above 0) or a free at `time_ns`."""

    time_ns: int
    address: int
    size: int


def profile_step(
    forward: Callable[[], Any],
    finish: Callable[[Any], None],
    *,
    weights: int,
    optimizer: int,
    gradients: Callable[[], Iterable[Any]],
    device: str,
) -> MemoryRecord:
    """Run one step under the profiler: `forward`, then `finish` on its result.

    `finish` runs the backward pass and the optimizer, or nothing.

    `weights` and `optimizer` are bytes allocated before the step. `gradients` returns the gradients after `finish`,
    which must not free them.
    """
    with profiled_memory() as profiled:
        with record_function(_FORWARD):
            result = forward()
        finish(result)
        del result
        if device != "cpu":
            torch.cuda.synchronize()
        gradient_sizes = {s.data_ptr(): s.nbytes() for g in gradients() for s in storages_of(g)}
    results = profiled.profiler.kineto_results
    events = list(_walk_events(results.experimental_event_tree()))
    forward_end = next(e.end_time_ns for e in events if e.name == _FORWARD)
    allocations = [
        BlockEvent(time_ns=e.start_time_ns, address=e.extra_fields.ptr, size=e.extra_fields.alloc_size)
        for e in events
        if e.tag == _EventType.Allocation and e.extra_fields.device.type == torch.device(device).type
    ]
    allocations.sort(key=lambda a: a.time_ns)
    return parts_at_peak(allocations, forward_end, gradient_sizes, weights=weights, optimizer=optimizer)


def _walk_events(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk_events(event.children)


def parts_at_peak(
    allocations: Sequence[BlockEvent], forward_end_ns: int, gradients: dict[int, int], *, weights: int, optimizer: int
) -> MemoryRecord:
    """Replay the allocations of a step, in order. `gradients` maps addresses to sizes of the gradients at its end.

    Gradients that the step did not allocate existed before it: DDP's buckets.
    """
    count = sum(a.time_ns <= forward_end_ns for a in allocations)
    saved = _live_events(allocations[:count])
    at_peak = _live_events(allocations[: _peak_index(allocations) + 1])
    made_gradients = {i for i in _live_events(allocations) if allocations[i].address in gradients}
    made_addresses = {allocations[i].address for i in made_gradients}
    buckets = sum(size for address, size in gradients.items() if address not in made_addresses)
    of_gradients = sum(allocations[i].size for i in at_peak & made_gradients)
    of_activations = sum(allocations[i].size for i in at_peak & saved - made_gradients)
    peak = sum(allocations[i].size for i in at_peak)
    parts = MemoryParts(
        weights=weights,
        gradients=of_gradients + buckets,
        optimizer=optimizer,
        activations=of_activations,
        other=peak - of_gradients - of_activations,
    )
    saved_bytes = sum(allocations[i].size for i in saved)
    return MemoryRecord(peak_bytes=weights + optimizer + buckets + peak, saved_bytes=saved_bytes, parts=parts)


def _peak_index(allocations: Sequence[BlockEvent]) -> int:
    """Index of the event with the most bytes allocated, not counting blocks from before the step."""
    alive: dict[int, int] = {}
    total = most = 0
    peak = -1
    for i, a in enumerate(allocations):
        if a.size > 0:
            alive[a.address] = a.size
            total += a.size
        else:
            total -= alive.pop(a.address, 0)
        if total > most:
            most, peak = total, i
    return peak


def _live_events(allocations: Sequence[BlockEvent]) -> set[int]:
    """Indices of the events whose blocks are still allocated after the last event."""
    alive: dict[int, int] = {}
    for i, a in enumerate(allocations):
        if a.size > 0:
            alive[a.address] = i
        else:
            alive.pop(a.address, None)
    return set(alive.values())
