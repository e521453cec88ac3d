"""Trace how much of the time in which gradients are averaged lies within the backward pass.

    torchrun --nproc-per-node 2 -m benchmarks.ddp_overlap --out benchmarks/results/ddp-overlap.json

A Llama of 28 million parameters on gloo ranks, with a batch for each, takes steps as `lpconv finetune` does: wrapped in
torch's DistributedDataParallel where it is plain fp32, and averaged by `lpconv.train.averaging` where gradients have
scales or 16 bits. A reduction lasts from when it is sent off until gloo is done, by PyTorch's profiler; those that run
at a time count once. The backward pass lasts until the last gradient is computed: DDP waits for its reductions inside
of `backward`. Every other step averages nothing, which tells what a backward pass takes alone. Beside the JSON goes a
figure of the step in the middle.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from lpconv.train.averaging import GradientAverage, needs_averaging
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import prepare
from lpconv.train.recipes import arithmetic

matplotlib.use("agg")
from matplotlib import pyplot as plt

_RECIPES = ("fp32", "collage-bf16", "unit-fp8", "unit-fp8-collage", "scalify-fp8")
_WARM_UP = 2  # DDP deals its buckets out anew after the first step
_BATCH = (2, 128)
_STEP, _REDUCTION = "backward pass and averages", "gloo:"
_NODE, _OF_LEAVES = "autograd::engine::evaluate_function: ", "AccumulateGrad"
_CONFIG = transformers.LlamaConfig(
    vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=8, use_cache=False,
)  # fmt: skip

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Milliseconds since the backward pass began: when it ended, when all gradients were means, and the reductions;
    `alone_ms` is when it ended where nothing was averaged."""

    backward_ms: float
    alone_ms: float
    done_ms: float
    reductions_ms: tuple[Span, ...]

    @property
    def share_within(self) -> float:
        """The share of the reductions' time that lies within the backward pass."""
        inside = [(max(a, 0.0), min(b, self.backward_ms)) for a, b in self.reductions_ms if a < self.backward_ms]
        return _length(inside) / _length(self.reductions_ms)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and write the record and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    measured = {recipe: _steps(recipe, asked.steps) for recipe in _RECIPES}
    if dist.get_rank() == 0:
        record = {
            "schema_version": 1,
            "kind": "ddp_overlap",
            "ranks": dist.get_world_size(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "torch": torch.__version__,
            "rows": [_row(recipe, steps) for recipe, steps in measured.items()],
        }
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _draw({recipe: _median(steps) for recipe, steps in measured.items()}, asked.out.with_suffix(".png"))
    dist.barrier()
    os._exit(0)


def _row(recipe: str, steps: Sequence[Step]) -> dict[str, Any]:
    shares = [s.share_within for s in steps]
    return {
        "recipe": recipe,
        "averaged_by": "torch DDP" if recipe == "fp32" else "lpconv.train.averaging",
        "share_within_backward": statistics.median(shares),
        "shares": shares,
        "backward_alone_ms": statistics.median(s.alone_ms for s in steps),
        "backward_ms": statistics.median(s.backward_ms for s in steps),
        "done_ms": statistics.median(s.done_ms for s in steps),
        "reductions_ms": statistics.median(_length(s.reductions_ms) for s in steps),
        "middle_step": asdict(_median(steps)),
    }


def _median(steps: Sequence[Step]) -> Step:
    return sorted(steps, key=lambda s: s.share_within)[len(steps) // 2]


def _steps(recipe: str, count: int) -> list[Step]:
    """What the profiler sees of so many steps on this rank."""
    torch.manual_seed(0)
    options = FinetuneOptions(arithmetic=arithmetic(recipe=recipe))
    prepared = prepare(transformers.LlamaForCausalLM(_CONFIG), options.arithmetic, options, seed=0)
    own: nn.Module = prepared.model
    averages = needs_averaging(own)
    average = GradientAverage(own.parameters()) if averages else None
    model: Any = own if averages else DistributedDataParallel(own)
    optimizer = prepared.make_optimizer()
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for number in range(_WARM_UP + count):
        ids = torch.randint(0, _CONFIG.vocab_size, _BATCH, generator=generator)
        seen = []
        for averaging in (False, True):
            optimizer.zero_grad()
            dist.barrier()
            with nullcontext() if averaging or averages else model.no_sync():
                loss: Tensor = model(input_ids=ids, labels=ids).loss
                with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(_STEP):
                    _backward(loss, average if averaging else None, [*own.parameters()])
            seen.append(profiled)
        if number >= _WARM_UP:
            found.append(_step_of(*seen))
        optimizer.step()
    return found


def _backward(loss: Tensor, average: GradientAverage | None, parameters: Sequence[nn.Parameter]) -> None:
    if average is None:
        loss.backward()  # type: ignore[no-untyped-call]
        return
    with average.backward():
        loss.backward()  # type: ignore[no-untyped-call]
    average.finish(parameters)


def _step_of(alone: Any, seen: Any) -> Step:
    start, done = _spans(seen, _STEP)[0]
    reductions = tuple((a - start, b - start) for a, b in _spans(seen, _REDUCTION))
    return Step(
        backward_ms=_last_gradient(seen),
        alone_ms=_last_gradient(alone),
        done_ms=max(done - start, *(b for _, b in reductions)),
        reductions_ms=reductions,
    )


def _last_gradient(seen: Any) -> float:
    """When the last one is computed; what stores it afterwards may send it off and wait."""
    nodes = (e for e in seen.profiler.kineto_results.events() if e.name().startswith(_NODE))
    last: float = max(e.end_ns() / 1e6 for e in nodes if _OF_LEAVES not in e.name())
    return last - _spans(seen, _STEP)[0][0]


def _spans(seen: Any, name: str) -> list[Span]:
    """Of the events whose names begin so, in milliseconds."""
    events = (e for e in seen.profiler.kineto_results.events() if e.name().startswith(name))
    return sorted((e.start_ns() / 1e6, e.end_ns() / 1e6) for e in events)


def _length(spans: Sequence[Span]) -> float:
    """The time that is in any of them."""
    total, reached = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, reached))
        reached = max(reached, b)
    return total


def _draw(steps: dict[str, Step], path: Path) -> None:
    """A bar for each backward pass, and below it the reductions."""
    _, axes = plt.subplots(figsize=(8, 1 + 0.7 * len(steps)), layout="constrained")
    for row, step in enumerate(steps.values()):
        axes.broken_barh([(0, step.backward_ms)], (-row, 0.35), color="tab:blue")
        spans = [(a, b - a) for a, b in step.reductions_ms]
        axes.broken_barh(spans, (-row - 0.4, 0.35), color="tab:orange")
    axes.set_yticks([-row for row in range(len(steps))], [*steps])
    axes.set(xlabel="ms since the backward pass began", title="backward pass (blue), reductions under way (orange)")
    plt.savefig(path, dpi=110)
    plt.close()


if __name__ == "__main__":
    main()
