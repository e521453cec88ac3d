"""What the miniature reproductions share: small language models on the plays that ship with lpconv, trained in some
arithmetic from one start, and the files that a reproduction leaves."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks import common
from benchmarks.reproduce.byte_models import batch_of, build, corpus, evaluate
from lpconv.kernels.matmul import HalfProducts
from lpconv.loss_scale import largest_gradient, make_loss_scale, unscale_
from lpconv.scaled import AdamW, ScaledTensor, StepGuard


@dataclass(frozen=True, kw_only=True)
class Size:
    """The amount of work: `FULL` is published; the numbers of `QUICK` mean nothing."""

    steps: int = 200
    evaluate_every: int = 20
    seeds: int = 3
    batch: int = 8
    length: int = 64
    hidden: int = 128
    layers: int = 3
    lr: float = 2e-3


FULL = Size()
QUICK = Size(steps=4, evaluate_every=2, seeds=1, batch=2, length=16, hidden=32, layers=1)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arithmetic: how to prepare a model, the loss scale, and the optimizer."""

    name: str
    prepare: Callable[[nn.Module], nn.Module]
    loss_scale: tuple[str, Mapping[str, Any]] = ("none", {})
    optimizer: Callable[..., torch.optim.Optimizer] = AdamW
    options: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    guarded: bool = False


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training run. Losses are held-out, in nats per byte; `steps` are the steps after which they were measured."""

    arm: str
    seed: int
    steps: list[int]
    held_out_loss: list[float]
    scales: list[tuple[int, float]]
    skipped: int
    time_s: float


def amp_fp16() -> AbstractContextManager[Any]:
    """PyTorch's mixed precision: fp32 parameters, with products and activations in fp16.

    Its cache is off, because it would keep the fp16 weights of the first step as long as the context lasts.
    """
    return torch.autocast("cpu", torch.float16, cache_enabled=False)


def start_model(kind: str, size: Size, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build(kind, size.hidden, size.layers, size.length)


def draw(kind: str, size: Size, seed: int = 0) -> dict[str, Tensor]:
    """A training batch for looking at gradients."""
    generator = torch.Generator().manual_seed(seed)
    return batch_of(kind, corpus("train"), size.batch, size.length, generator)


def observe(model: nn.Module, batch: dict[str, Tensor]) -> dict[tuple[str, str], float]:
    """RMS of the data of each weighted module's output, and of the gradient that reaches it."""
    seen: dict[tuple[str, str], float] = {}

    def on_output(name: str, out: Tensor) -> None:
        seen[name, "activation"] = rms(out)
        out.register_hook(lambda grad: seen.__setitem__((name, "gradient"), rms(grad)))

    handles = [
        module.register_forward_hook(lambda _, __, out, name=name: on_output(name, out))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor)
    ]
    model(**batch).loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return seen


def rms(x: Tensor) -> float:
    """The root mean square of the data."""
    data = x.data_part if isinstance(x, ScaledTensor) else x
    return float(data.detach().double().square().mean().sqrt())


def train(
    arm: Arm, kind: str, seed: int, size: Size, make: Callable[[], nn.Module] | None = None
) -> tuple[Curve, nn.Module]:
    """One run; the learning rate warms up over a tenth of the steps and then decays to zero by a cosine.

    `make` builds another model, which takes the batches of `kind`.
    """
    torch.manual_seed(seed)
    model = arm.prepare(make() if make else start_model(kind, size, seed)).train()
    optimizer = arm.optimizer(model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1, **arm.options)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, size.steps // 10, size.steps)
    scale, guard = make_loss_scale(arm.loss_scale[0], **arm.loss_scale[1]), StepGuard(model) if arm.guarded else None
    text, generator = corpus("train"), torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(10_000)
    held_out = [batch_of(kind, corpus("heldout"), 16, size.length, fixed) for _ in range(4)]
    steps, losses = [], []
    began = time.perf_counter()
    with HalfProducts(), arm.around():
        for step in range(1, size.steps + 1):
            optimizer.zero_grad()
            loss = model(**batch_of(kind, text, size.batch, size.length, generator)).loss
            (loss.float() * scale.scale).backward()
            found_nonfinite = unscale_(model.parameters(), scale.scale)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if guard is not None:
                guard.step(optimizer)
            elif not found_nonfinite:
                optimizer.step()
            largest = None if found_nonfinite else largest_gradient(model.parameters())
            scale.update(found_nonfinite, max_gradient=largest)
            schedule.step()
            if step % size.evaluate_every == 0:
                steps.append(step)
                losses.append(evaluate(model, held_out))
    curve = Curve(
        arm=arm.name,
        seed=seed,
        steps=steps,
        held_out_loss=losses,
        scales=list(scale.history),
        skipped=scale.num_skipped,
        time_s=round(time.perf_counter() - began, 2),
    )
    return curve, model


def train_all(arms: Sequence[Arm], kind: str, size: Size) -> Iterator[tuple[Curve, nn.Module]]:
    """Run every arm from every seed and yield the curve and the final model; arms of a seed share start and batches."""
    for seed in range(size.seeds):
        for arm in arms:
            curve, model = train(arm, kind, seed, size)
            print(f"{kind}, seed {seed}  {arm.name:36} {curve.held_out_loss[-1]:.4f}", file=sys.stderr, flush=True)
            yield curve, model


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation over seeds."""
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def training_table(title: str, curves: Sequence[Curve]) -> str:
    """Means over seeds at the last step. The excess over the first arm is taken seed by seed, ± its deviation."""
    by_arm = {arm: [c for c in curves if c.arm == arm] for arm in dict.fromkeys(c.arm for c in curves)}
    base = next(iter(by_arm.values()))
    rows = []
    for arm, runs in by_arm.items():
        excess = [c.held_out_loss[-1] - b.held_out_loss[-1] for c, b in zip(runs, base, strict=True)]
        loss, skipped = statistics.fmean(c.held_out_loss[-1] for c in runs), statistics.fmean(c.skipped for c in runs)
        rows.append((arm, f"{loss:.4f}", spread(excess, "+.4f"), f"{skipped:.1f}"))
    head = ("arithmetic", "held-out loss", f"over {base[0].arm}", "steps skipped")
    return f"{title}, {len(base)} seeds\n\n{common.markdown(head, rows)}"


def mean_curve(curves: Sequence[Curve], arm: str) -> tuple[list[int], list[float]]:
    """The steps of an arm and its held-out losses, averaged over seeds."""
    runs = [c for c in curves if c.arm == arm]
    return runs[0].steps, [statistics.fmean(losses) for losses in zip(*(c.held_out_loss for c in runs), strict=True)]


def read_arguments(doc: str | None) -> tuple[Path, Size]:
    """Parse the arguments of a script with this docstring: the folder for results, created if needed, and the size."""
    parser = common.parser(doc, needs_out=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args.out, QUICK if args.quick else FULL


def save(out: Path, settings: Mapping[str, Any], raw: Mapping[str, Any], tables: Sequence[str]) -> None:
    """Write results.json.xz and table.md, and print the tables."""
    report = {"command": common.command(), "machine": common.machine(), "settings": dict(settings), **raw}
    common.save(report, out / "results.json.xz")
    page = "\n".join(tables)
    (out / "table.md").write_text(page, encoding="utf-8")
    print(page)
