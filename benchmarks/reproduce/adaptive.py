"""The claims of adaptive loss scaling in miniature: one command for tables, a figure and the raw results.

    python -m benchmarks.reproduce.adaptive --out DIRECTORY

1. Gradients of a net of 24 sigmoid layers, whose magnitudes span 13 decades: every constant loss scale from 2^0 to 2^32
   next to the adaptive one, with the bounds of the authors' code and with ours.
2. The same for two transformers, for which a constant is expected to suffice.
3. Training one net with four tasks whose losses weigh 1, 2^-12, 2^-24 and 2^-36: a spread that no single scale covers.

scaled_training.py compares transformers trained with it with the other methods.

The paper: Zhao, Vogel, Ahmed 2019, arXiv 1910.12385. Writes results.json.xz, table.md and figure.png. `--quick` is for
trying the script: its numbers mean nothing.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import markdown
from benchmarks.reproduce.figures import panels
from benchmarks.reproduce.gradient_errors import gradients, relative_errors
from benchmarks.reproduce.miniature import (
    QUICK,
    Arm,
    Size,
    amp_fp16,
    draw,
    read_arguments,
    save,
    start_model,
)
from lpconv.kernels.matmul import HalfProducts
from lpconv.loss_scale import largest_gradient, make_loss_scale, unscale_
from lpconv.scaled import AdamW, AdaptiveOptions, StepGuard, adaptive_scaling, loss_scales

POWERS = range(33)
ADAPTIVE = {
    "adaptive, the authors' bounds": AdaptiveOptions(layer_bound=16, total_bound=1024),
    "adaptive": AdaptiveOptions(),
    "adaptive, T = 1e-4": AdaptiveOptions(threshold=1e-4),
    "adaptive, floor normal": AdaptiveOptions(floor="normal"),
}
TASK_WEIGHTS = (1.0, 2.0**-12, 2.0**-24, 2.0**-36)


def adaptive(model: nn.Module) -> nn.Module:
    return adaptive_scaling(model, compute="fp16")


SCALES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "constant 1": ("none", {}),
    "constant 2^8": ("constant", {"scale": 2.0**8}),
    "constant 2^16": ("constant", {"scale": 2.0**16}),
    "dynamic": ("dynamic", {"growth_interval": 50}),  # runs here are shorter than GradScaler's 2000
    "logmax": ("logmax", {}),
}
ARMS = [
    Arm(name="fp32", prepare=lambda m: m),
    *(Arm(name=name, prepare=lambda m: m, around=amp_fp16, loss_scale=scale) for name, scale in SCALES.items()),
    Arm(name="adaptive", prepare=adaptive, guarded=True),
]
TASK_STEPS = 400


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The gradients that reached the parameters: the share of elements wrongly zero, and the largest relative error of
    any parameter.

    `largest_scale` is the largest loss scale used on the way.
    """

    model: str
    scale: str
    power: int | None
    finite: bool
    zeroed: float
    worst_error: float
    largest_scale: float


@dataclass(frozen=True, kw_only=True)
class TaskRun:
    """Final loss of each task over its initial loss; 1 means that nothing was learnt."""

    scale: str
    seed: int
    remaining: list[float]
    skipped: int
    final_scale: float


class Tasks(nn.Module):
    """A shared trunk of two layers and a tower of two layers per task; returns the loss of each task.

    The losses are part of the model, as in transformers: outside it, fp32 gradients would be cast to fp16 before any
    scale could help.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)) for _ in TASK_WEIGHTS
        )

    def outputs(self, x: Tensor) -> list[Tensor]:
        features = self.trunk(x)
        return [tower(features) for tower in self.towers]

    def forward(self, x: Tensor, targets: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple((out.float() - y).square().mean() for out, y in zip(self.outputs(x), targets, strict=True))


def sigmoid_net() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A net of 24 layers of width 128, weights N(0, 1.2²/128), and its loss on a batch of 64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(24):
        linear = nn.Linear(128, 128, bias=False)
        nn.init.normal_(linear.weight, std=1.2 / math.sqrt(128))
        layers += [linear, nn.Sigmoid()]
    x, y = torch.randn(64, 128), torch.rand(64, 128)
    net = nn.Sequential(*layers)

    def loss(net: nn.Module) -> Tensor:
        dtype = net[0].weight.dtype  # type: ignore[index]  # a Sequential
        out = net(x.to(dtype))
        return (out.to(torch.promote_types(out.dtype, torch.float32)) - y).square().mean()

    return net, loss


def transformer(kind: str, size: Size) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    batch = draw(kind, size)

    def loss(model: nn.Module) -> Tensor:
        out: Tensor = model(**batch).loss
        return out

    return start_model(kind, size, 0), loss


def sweep(name: str, make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]) -> list[Sweep]:
    exact, loss = make()
    exact.double()
    loss(exact).backward()
    reference = gradients(exact)
    sweeps = []
    for power in POWERS:
        model, loss = make()
        with HalfProducts(), amp_fp16():
            (loss(model) * 2.0**power).backward()
        sweeps.append(compare(name, f"constant 2^{power}", power, gradients(model, 2.0**power), reference, 2.0**power))
    for scale, options in ADAPTIVE.items():
        model = adaptive_scaling(make()[0], compute="fp16", options=options)
        with HalfProducts():
            loss(model).backward()
        largest = max(s for s, _ in loss_scales(model).values())
        sweeps.append(compare(name, scale, None, gradients(model), reference, largest))
    return sweeps


def compare(
    name: str, scale: str, power: int | None, got: dict[str, Tensor], reference: dict[str, Tensor], largest: float
) -> Sweep:
    zeroed = sum(int(((got[n] == 0) & (g != 0)).sum()) for n, g in reference.items())
    return Sweep(
        model=name,
        scale=scale,
        power=power,
        finite=all(bool(g.isfinite().all()) for g in got.values()),
        zeroed=zeroed / sum(int((g != 0).sum()) for g in reference.values()),
        worst_error=max(relative_errors(got, reference)),
        largest_scale=largest,
    )


def train_tasks(arm: Arm, seed: int, steps: int) -> TaskRun:
    """AdamW with an ε far below every gradient, without clipping, on targets from a net of the same shape."""
    torch.manual_seed(seed)
    teacher, model = Tasks(), arm.prepare(Tasks())
    x = torch.randn(512, 16)
    with torch.no_grad():
        targets = [(y - y.mean()) / y.std() for y in teacher.outputs(x)]
    optimizer = AdamW(model.parameters(), lr=3e-3, eps=1e-25)
    scale, guard = make_loss_scale(arm.loss_scale[0], **arm.loss_scale[1]), StepGuard(model) if arm.guarded else None

    def losses() -> tuple[Tensor, ...]:
        with arm.around():
            per_task: tuple[Tensor, ...] = model(x, targets)
        return per_task

    with HalfProducts():
        start = [loss.item() for loss in losses()]
        for _ in range(steps):
            optimizer.zero_grad()
            total = sum(w * loss for w, loss in zip(TASK_WEIGHTS, losses(), strict=True))
            (total * scale.scale).backward()
            found_nonfinite = unscale_(model.parameters(), scale.scale)
            if guard is not None:
                guard.step(optimizer)
            elif not found_nonfinite:
                optimizer.step()
            scale.update(
                found_nonfinite, max_gradient=None if found_nonfinite else largest_gradient(model.parameters())
            )
        end = [loss.item() for loss in losses()]
    return TaskRun(
        scale=arm.name,
        seed=seed,
        remaining=[e / s for e, s in zip(end, start, strict=True)],
        skipped=scale.num_skipped,
        final_scale=scale.scale,
    )


def sweep_table(name: str, sweeps: list[Sweep]) -> str:
    constants = [s for s in sweeps if s.power is not None]
    best = min((s for s in constants if s.finite), key=lambda s: (s.zeroed, s.worst_error))
    largest = max((s for s in constants if s.finite), key=lambda s: s.power or 0)
    shown = {s.scale: s for s in (constants[0], constants[10], best, largest)}
    rows = []
    for s in (*shown.values(), *(s for s in sweeps if s.power is None)):
        what = " (the best constant)" if s is best else " (the largest finite)" if s is largest else ""
        power = f"2^{math.log2(s.largest_scale):.0f}"
        rows.append((f"{s.scale}{what}", f"{s.zeroed:.2%}", f"{s.worst_error:.2g}", power))
    head = ("scale", "gradients zeroed", "worst relative error", "largest scale")
    return f"Gradients of one batch: {name}\n\n{markdown(head, rows)}"


def task_table(runs: list[TaskRun]) -> str:
    head = ("scale", *(f"weight 2^{math.log2(w):.0f}" for w in TASK_WEIGHTS), "steps skipped", "last scale")
    rows = []
    for scale in dict.fromkeys(r.scale for r in runs):
        mine = [r for r in runs if r.scale == scale]
        remaining = [sum(column) / len(mine) for column in zip(*(r.remaining for r in mine), strict=True)]
        skipped = sum(r.skipped for r in mine) / len(mine)
        last = f"2^{math.log2(mine[0].final_scale):.0f}"
        rows.append((scale, *(f"{r:.4f}" for r in remaining), f"{skipped:.1f}", last))
    return f"Four tasks: loss left over of that at the start (1: nothing was learnt)\n\n{markdown(head, rows)}"


def figure(swept: list[Sweep], runs: list[TaskRun], path: Path) -> None:
    with panels(path, 2) as (left, right):
        for colour, model in enumerate(dict.fromkeys(s.model for s in swept)):
            line = [s for s in swept if s.model == model and s.power is not None and s.finite]
            left.plot(
                [s.power for s in line], [s.zeroed for s in line], color=f"C{colour}", label=f"{model}: constants"
            )
            ours = next(s for s in swept if s.model == model and s.scale == "adaptive")
            left.axhline(ours.zeroed, linestyle="--", color=f"C{colour}", label=f"{model}: adaptive")
        left.set(title="gradients lost", xlabel="log2 of the scale", ylabel="share zeroed")
        left.set_yscale("symlog", linthresh=1e-4)
        for scale in dict.fromkeys(r.scale for r in runs):
            mine = [r.remaining for r in runs if r.scale == scale]
            right.plot([sum(c) / len(c) for c in zip(*mine, strict=True)], "o-", label=scale)
        right.set(title="four tasks", xlabel="task, by falling weight", ylabel="loss left over", yscale="log")
        right.set_xticks(range(len(TASK_WEIGHTS)), [f"2^{math.log2(w):.0f}" for w in TASK_WEIGHTS])


def main() -> None:
    out, size = read_arguments(__doc__)

    swept = {
        "24 sigmoid layers": sweep("24 sigmoid layers", sigmoid_net),
        "bert": sweep("bert", lambda: transformer("bert", size)),
        "llama": sweep("llama", lambda: transformer("llama", size)),
    }
    runs = []
    for seed in range(size.seeds):
        for arm in ARMS:
            runs.append(train_tasks(arm, seed, 30 if size is QUICK else TASK_STEPS))
            print(f"tasks, seed {seed}  {arm.name}", runs[-1].remaining, file=sys.stderr, flush=True)
    every = [s for sweeps in swept.values() for s in sweeps]
    raw = {
        "sweeps": [asdict(s) for s in every],
        "tasks": [asdict(r) for r in runs],
    }
    tables = [*(sweep_table(name, sweeps) for name, sweeps in swept.items()), task_table(runs)]
    save(out, asdict(size) | {"task_steps": TASK_STEPS}, raw, tables)
    figure(every, runs, out / "figure.png")


if __name__ == "__main__":
    main()
