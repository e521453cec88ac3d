"""What bf16 training loses, and what Collage keeps: one command, tables, one figure, the raw figures beside them.

    python benchmarks/reproduce/collage.py --out benchmarks/results/collage

1. Displacement: 20,000 weights follow 1,500 given gradients; each variant beside AdamW in fp64.
2. Training from scratch: a byte-level language model on the plays that ship with lpconv, beta2 = 0.999, small lr.
3. Fine-tuning: the demo checkpoint, converted with `--method collage`, on two thirds of the play it never saw; the last
   third is held out. The learning rate is so small that most updates are below half an ulp of a bf16 weight.

Of the last two: held-out loss, effective descent quality and lost updates of each variant, over several seeds. All arms
of a seed start from the same fp32 weights, as exactly as each can keep them, and see the same batches.

Writes results.json, table.md and figure.png. `--quick` is for trying the script: its numbers mean nothing.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import matplotlib
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint, demo_text
from lpconv.optim import CollageAdamW, start_from_checkpoint, start_from_fp32
from lpconv.optim.diagnostics import combine
from lpconv.optim.storage import VARIANTS, total

matplotlib.use("agg")
from matplotlib import pyplot as plt

MakeOptimizer: TypeAlias = Callable[[LlamaForCausalLM], CollageAdamW]

ARMS = [(variant, "fused") for variant in VARIANTS] + [("light", "paper"), ("plus", "paper")]
BASE = "fp32-master"
BETA2S = (0.95, 0.99, 0.999)


@dataclass(frozen=True, kw_only=True)
class Displacement:
    """Relative error of the total displacement, and the median of v over fp64's v."""

    arm: str
    beta2: float
    displacement_error: float
    v_ratio: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training run; losses are held-out, in nats per byte, and `steps` says at which step each was taken."""

    task: str
    arm: str
    seed: int
    steps: list[int]
    held_out_loss: list[float]
    edq_hi: list[float]
    edq_full: list[float]
    lost_full: list[float]
    bytes_per_parameter: float
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much work; the second set is `--quick`."""

    num_weights: int
    displacement_steps: int
    train_steps: int
    evaluate_every: int
    batch: int
    length: int
    hidden: int
    layers: int
    seeds: int


FULL = Size(
    num_weights=20_000, displacement_steps=1500, train_steps=1000, evaluate_every=50, batch=8, length=128,
    hidden=128, layers=4, seeds=3,
)  # fmt: skip
QUICK = Size(
    num_weights=500, displacement_steps=50, train_steps=20, evaluate_every=10, batch=2, length=32, hidden=32, layers=1,
    seeds=2,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """`start(seed, make_optimizer)` gives the bf16 model and its optimizer, both at the fp32 starting point."""

    name: str
    train: Tensor
    held_out: Tensor
    lr: float
    start: Callable[[int, MakeOptimizer], tuple[LlamaForCausalLM, CollageAdamW]]


def arm_name(variant: str, arithmetic: str) -> str:
    return variant if arithmetic == "fused" else f"{variant} ({arithmetic})"


def displacement(variant: str, arithmetic: str, beta2: float, size: Size) -> Displacement:
    """Weights N(0, 0.02); gradients with a persistent direction and noise; lr 1e-4 after warm-up, weight decay 0.1."""
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(size.num_weights, generator=generator) * 0.02).bfloat16()
    mean = torch.randn(size.num_weights, generator=generator) * 1e-3
    p = nn.Parameter(start.clone())
    optimizer = CollageAdamW([p], betas=(0.9, beta2), weight_decay=0.1, variant=variant, arithmetic=arithmetic)
    x, m, v = start.double(), torch.zeros_like(start.double()), torch.zeros_like(start.double())
    for t in range(1, size.displacement_steps + 1):
        noise = torch.randn(size.num_weights, generator=generator) * 1e-2 * torch.rand(1, generator=generator)
        lr = 1e-4 * min(1.0, t / 100)
        p.grad = (mean + noise).bfloat16()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        g = p.grad.double()
        m = 0.9 * m + 0.1 * g
        v = beta2 * v + (1 - beta2) * g * g
        x = x - lr * (m / (1 - 0.9**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8) + 0.1 * x)
    storages, parts = optimizer.storages(p), optimizer.parts(p)
    moved, wanted = total(storages[0], parts[0]).double() - start.double(), x - start.double()
    return Displacement(
        arm=arm_name(variant, arithmetic),
        beta2=beta2,
        displacement_error=float((moved - wanted).norm() / wanted.norm()),
        v_ratio=float((total(storages[2], parts[2]).double() / v).median()),
    )


def byte_model(size: Size, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=size.hidden, intermediate_size=4 * size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32, max_position_embeddings=size.length, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def byte_tensor(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def windows(data: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(data) - length, (count,), generator=generator)
    return torch.stack([data[s : s + length] for s in starts.tolist()])


def scratch(size: Size) -> Task:
    def start(seed: int, make_optimizer: MakeOptimizer) -> tuple[LlamaForCausalLM, CollageAdamW]:
        model = byte_model(size, seed).bfloat16()
        optimizer = make_optimizer(model)
        start_from_fp32(optimizer, model, byte_model(size, seed).state_dict())
        return model, optimizer

    train_text, held_out = (byte_tensor(demo_text(split)) for split in ("train", "heldout"))
    return Task(name="from scratch", train=train_text, held_out=held_out, lr=2e-4, start=start)


def finetune(folder: Path) -> Task:
    if not folder.exists():
        convert(str(demo_checkpoint()), folder, ConvertOptions(method="collage"))

    def start(seed: int, make_optimizer: MakeOptimizer) -> tuple[LlamaForCausalLM, CollageAdamW]:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        optimizer = make_optimizer(model)
        start_from_checkpoint(optimizer, model, folder)
        return model, optimizer

    play = byte_tensor(demo_text("heldout"))
    cut = len(play) * 2 // 3
    return Task(name="fine-tuning", train=play[:cut], held_out=play[cut:], lr=5e-6, start=start)


def train(task: Task, variant: str, arithmetic: str, seed: int, size: Size) -> Curve:
    model, optimizer = task.start(
        seed,
        lambda model: CollageAdamW(
            model.parameters(), lr=task.lr, betas=(0.9, 0.999), weight_decay=0.1, variant=variant,
            arithmetic=arithmetic, seed=seed, diagnostics_every=size.evaluate_every,
        ),
    )  # fmt: skip
    held_out = windows(task.held_out, 64, size.length, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    steps, losses, records = [], [], []
    began = time.perf_counter()
    for step in range(1, size.train_steps + 1):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = task.lr * min(1.0, step / 100)
        tokens = windows(task.train, size.batch, size.length, generator)
        torch.autograd.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        if step % size.evaluate_every == 0:
            steps.append(step)
            records.append(combine(optimizer.records))
            with torch.no_grad():
                losses.append(float(model(input_ids=held_out, labels=held_out).loss))
    return Curve(
        task=task.name,
        arm=arm_name(variant, arithmetic),
        seed=seed,
        steps=steps,
        held_out_loss=losses,
        edq_hi=[r.edq_hi for r in records],
        edq_full=[r.edq_full for r in records],
        lost_full=[r.lost_full for r in records],
        bytes_per_parameter=optimizer.bytes_per_parameter(),
        time_s=time.perf_counter() - began,
    )


def mean_of(curves: list[Curve], value: Callable[[Curve], float]) -> float:
    return statistics.fmean(map(value, curves))


def displacement_table(found: list[Displacement]) -> str:
    lines = ["| variant | " + " | ".join(f"beta2 = {b}" for b in BETA2S) + " |", "|---|" + "---|" * len(BETA2S)]
    for arm in dict.fromkeys(d.arm for d in found):
        cells = [f"{d.displacement_error:.1e}; {d.v_ratio:.3f}" for d in found if d.arm == arm]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(["Displacement error; v over fp64's v", "", *lines, ""])


def training_table(task: str, curves: list[Curve]) -> str:
    """Means over seeds at the last step; the excess over fp32-master is taken seed by seed, ± its deviation."""
    by_arm = {arm: [c for c in curves if c.arm == arm] for arm in dict.fromkeys(c.arm for c in curves)}
    lines = [
        "| variant | bytes/parameter | held-out loss | over fp32-master | EDQ hi | EDQ full | updates lost |",
        "|" + "---|" * 7,
    ]
    for arm, runs in by_arm.items():
        excess = [c.held_out_loss[-1] - b.held_out_loss[-1] for c, b in zip(runs, by_arm[BASE], strict=True)]
        spread = statistics.stdev(excess) if len(excess) > 1 else 0.0
        lines.append(
            f"| {arm} | {mean_of(runs, lambda c: c.bytes_per_parameter):.1f} "
            f"| {mean_of(runs, lambda c: c.held_out_loss[-1]):.4f} | {statistics.fmean(excess):+.4f} ± {spread:.4f} "
            f"| {mean_of(runs, lambda c: c.edq_hi[-1]):.4f} | {mean_of(runs, lambda c: c.edq_full[-1]):.4f} "
            f"| {mean_of(runs, lambda c: c.lost_full[-1]):.1%} |"
        )
    return "\n".join([f"{task.capitalize()}, {len(by_arm[BASE])} seeds", "", *lines, ""])


def figure(curves: list[Curve], path: Path) -> None:
    """Per task: held-out loss and EDQ of what is kept, over the steps; one line per arm, the mean over seeds."""
    tasks = list(dict.fromkeys(c.task for c in curves))
    _, axes = plt.subplots(len(tasks), 2, figsize=(11, 4 * len(tasks)), layout="constrained", squeeze=False)
    for (left, right), task in zip(axes, tasks, strict=True):
        for arm in dict.fromkeys(c.arm for c in curves):
            runs = [c for c in curves if (c.task, c.arm) == (task, arm)]
            left.plot(runs[0].steps, [statistics.fmean(x) for x in zip(*(c.held_out_loss for c in runs), strict=True)])
            edq = [statistics.fmean(x) for x in zip(*(c.edq_full for c in runs), strict=True)]
            right.plot(runs[0].steps, edq, label=arm)
        left.set(title=task, xlabel="step", ylabel="held-out loss, nats per byte")
        right.set(xlabel="step", ylabel="EDQ / |intended update|")
        right.legend(fontsize=8)
    plt.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="variant .* keeps the second moment in bf16")  # that is the experiment

    size = QUICK if args.quick else FULL
    args.out.mkdir(parents=True, exist_ok=True)
    displacements = [displacement(v, a, b, size) for v, a in ARMS for b in BETA2S]
    curves = []
    for task in (scratch(size), finetune(args.out / "demo-collage")):
        for seed in range(size.seeds):
            for variant, arithmetic in ARMS:
                curves.append(train(task, variant, arithmetic, seed, size))
                print(f"{task.name}, seed {seed}  {curves[-1].arm:14} {curves[-1].held_out_loss[-1]:.4f}", flush=True)

    settings = asdict(size) | {"torch": torch.__version__}
    raw = {
        "settings": settings,
        "displacement": [asdict(d) for d in displacements],
        "runs": [asdict(c) for c in curves],
    }
    (args.out / "results.json").write_text(json.dumps(raw, indent=1) + "\n")
    by_task = {task: [c for c in curves if c.task == task] for task in dict.fromkeys(c.task for c in curves)}
    tables = [displacement_table(displacements), *(training_table(task, runs) for task, runs in by_task.items())]
    (args.out / "table.md").write_text("\n".join(tables))
    figure(curves, args.out / "figure.png")
    print("\n".join(tables))


if __name__ == "__main__":
    main()
