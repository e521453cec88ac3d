"""The character-LM sweep of unit scaling in small.

    python benchmarks/reproduce/character_lm.py --out benchmarks/results/character-lm

Convolutions, attention and a recurrent highway over the bytes of plays, with norms before or after each branch or none
and branches added in two ways: plain and native (`lpconv.scaled.native`) from scratch, each at the best of three
learning rates in fp32; at that rate fp16 and fp8. Plain fp16 and fp8 run with the loss scales 1 and 2048, as in Blake
et al. 2023 (arXiv 2303.11257), native ones with none. fp8 is for linear layers: convolutions stay in bf16.

Three seeds: differences are taken seed by seed, between runs of one start and the same batches, each seed at its own
best rate. Runs are kept in runs.jsonl as they end, and the same command goes on where it stopped. Writes results.json
and table.md. `--quick` is for trying the script.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from character_models import NORMS, CharacterLM, Shape
from miniature import QUICK, Arm, Size, read_arguments, save, spread, train
from native import PLAIN, native_arm, plain_fp16
from scaled_training import plain_fp8
from torch import nn

PLAIN_RATES, NATIVE_RATES = [2.0**e for e in (-8, -7, -6)], [2.0**e for e in (-5, -4, -3)]
LOSS_SCALES = (1, 2048)
LOW: dict[str, Callable[[nn.Module], nn.Module]] = {"fp16": plain_fp16, "fp8": plain_fp8}
STEPS = 120


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model trained once, and its held-out loss in nats per byte, in the arithmetic of the run."""

    shape: Shape
    method: str
    arithmetic: str
    lr: float
    seed: int
    loss: float
    time_s: float

    @property
    def column(self) -> str:
        return f"{self.method} {self.arithmetic}"


def shapes() -> list[Shape]:
    """Every place of norms in convolutions and attention, one short recurrence, and branches added as they are."""
    found = [Shape(kind=kind, norm=norm) for kind in ("convolution", "attention") for norm in NORMS]
    found.append(Shape(kind="recurrence", depth=2, length=32))
    return [*found, Shape(kind="convolution", residual="sum")]


class Runs:
    """Runs of one size, kept in a file as they end."""

    def __init__(self, path: Path, size: Size) -> None:
        self.path, self.size = path, size
        self.done: dict[tuple[Shape, str, str, float, int], Run] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            kept = json.loads(line)
            run = Run(shape=Shape(**kept.pop("shape")), **kept)
            self.done[run.shape, run.method, run.arithmetic, run.lr, run.seed] = run

    def get(self, shape: Shape, method: str, arithmetic: str, arm: Arm, lr: float, seed: int) -> Run:
        key, size = (shape, method, arithmetic, lr, seed), self.size
        if key not in self.done:
            length = min(shape.length, size.length)
            own = replace(size, lr=lr, length=length, batch=size.batch * size.length // length)
            curve, _ = train(arm, "llama", seed, own, lambda: CharacterLM(replace(shape, length=length)))
            loss, time_s = curve.held_out_loss[-1], curve.time_s
            run = Run(shape=shape, method=method, arithmetic=arithmetic, lr=lr, seed=seed, loss=loss, time_s=time_s)
            self.done[key] = run
            with self.path.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(asdict(run)) + "\n")
        print(self.done[key], file=sys.stderr, flush=True)
        return self.done[key]


def best(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda r: r.loss)


def compare(shape: Shape, kept: Runs, seed: int) -> list[Run]:
    """Every run of one shape; recurrences take no part in fp8, whose products of single steps are slow to emulate."""
    formats = ["fp16"] if shape.kind == "recurrence" else list(LOW)
    runs = [kept.get(shape, "plain", "fp32", PLAIN, lr, seed) for lr in PLAIN_RATES]
    rate = best(runs).lr
    for compute in formats:
        for scale in LOSS_SCALES:
            arm = Arm(name=compute, prepare=LOW[compute], loss_scale=("constant", {"scale": float(scale)}))
            runs.append(kept.get(shape, "plain", f"{compute}, scale {scale}", arm, rate, seed))
    native = [kept.get(shape, "native", "fp32", native_arm("", "fp32", "unit", lr), lr, seed) for lr in NATIVE_RATES]
    rate = best(native).lr
    runs += native
    return runs + [kept.get(shape, "native", c, native_arm("", c, "unit", rate), rate, seed) for c in formats]


def powers(rates: Sequence[float]) -> str:
    """Learning rates of some seeds as powers of two: one, or the first and the last."""
    found = sorted({f"2^{math.log2(lr):.0f}" for lr in rates}, key=lambda p: int(p[2:]))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def shape_table(runs: Sequence[Run]) -> str:
    """Losses of plain and native fp32 at their best rates, and what low precision adds to each."""
    low = [c for c in dict.fromkeys(r.column for r in runs) if not c.endswith("fp32")]
    seeds = list(dict.fromkeys(r.seed for r in runs))
    columns = ["plain fp32", "native fp32", "native over plain", *low]
    lines = ["| model | norm | branches | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for shape in dict.fromkeys(r.shape for r in runs):
        here = [r for r in runs if r.shape == shape]
        base = {
            m: [best([r for r in here if (r.column, r.seed) == (f"{m} fp32", seed)]) for seed in seeds]
            for m in ("plain", "native")
        }
        cells = [f"{spread([b.loss for b in bs], '.3f')} ({powers([b.lr for b in bs])})" for bs in base.values()]
        cells.append(spread([n.loss - p.loss for p, n in zip(base["plain"], base["native"], strict=True)], "+.3f"))
        for column in low:
            added = {r.seed: r.loss - base[r.method][seeds.index(r.seed)].loss for r in here if r.column == column}
            cells.append(spread(list(added.values()), "+.4f") if added else "")
        lines.append(f"| {shape.kind} | {shape.norm} | {shape.residual} | " + " | ".join(cells) + " |")
    title = "Held-out loss in fp32 (best rate of three), and what fp16 and fp8 add to it at that rate"
    title += f", {len(seeds)} seeds"
    return "\n".join([title, "", *lines, ""])


def sized(given: Size, steps: int) -> Size:
    """The size of a reproduction with its own number of steps, and one evaluation at the end."""
    steps = 2 if given is QUICK else steps
    return replace(given, steps=steps, evaluate_every=steps)


def main() -> None:
    out, given = read_arguments(__doc__)
    size = sized(given, STEPS)
    kept = Runs(out / "runs.jsonl", size)
    tried = shapes()[:: 3 if given is QUICK else 1]
    found = [run for seed in range(size.seeds) for shape in tried for run in compare(shape, kept, seed)]
    save(out, asdict(size), {"runs": [asdict(r) for r in found]}, [shape_table(found)])


if __name__ == "__main__":
    main()
