"""Byte-level language models trained from one start in many arithmetics, on real text.

    python -m benchmarks.reproduce.scaled_training [--models llama bert] [--steps 500] [--seeds 0 1 2] [--out FILE.json]

Every run of a seed has the same initial weights, batches and hyper-parameters; only the arithmetic differs. The final
held-out loss is averaged over fixed batches, evaluated in the arithmetic of the run. Text: the plays that ship with
lpconv. With --out, every run is saved as it ends, and the same command resumes an earlier one.

Two settings. "alone": a batch is a step of its own. "one of 2048": the batch is one micro-batch of a step that averages
2048 of them (the BERT recipe of the unit scaling paper averages 4 devices x 510 accumulations), so its loss is divided
by 2048 before the backward pass, and the clipping norm and Adam's eps are divided too, which leaves fp32 as it was.
"""

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from benchmarks import common
from benchmarks.reproduce.byte_models import batch_of, build, corpus, evaluate
from lpconv.kernels.linear import linear
from lpconv.kernels.matmul import HalfProducts
from lpconv.scaled import AdamW, StepGuard, adaptive_scaling, fallbacks, scaled, scaling_of


class PlainFp8Linear(nn.Linear):
    """A linear layer that casts operands and gradients to fp8 without any scale."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def plain_fp8(model: nn.Module) -> nn.Module:
    """The model in bf16 with every linear layer except the output head in unscaled fp8, as a baseline."""
    head = model.get_output_embeddings()  # type: ignore[operator]  # a method of transformers models
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = PlainFp8Linear
    return model.bfloat16()


@dataclass(frozen=True, kw_only=True)
class Run:
    """How an arithmetic prepares a model and its optimizer.

    Scaled runs skip steps with non-finite gradients, as fp16 training usually does; plain runs show what happens
    without. `alone` runs take part in the easy setting too.
    """

    prepare: Callable[[nn.Module], nn.Module]
    state_dtype: torch.dtype = torch.float32
    alone: bool = False


def _prepare(method: str, compute: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: scaled(model, method=method, compute=compute, **options)


PLACES = ("layernorm_grad", "weight_grad")
MORE_PLACES = (*PLACES, "softmax_grad")
RUNS: dict[str, Run] = {
    "fp32": Run(prepare=lambda m: m, alone=True),
    "plain fp16": Run(prepare=lambda m: m.half(), alone=True),
    "plain fp8": Run(prepare=plain_fp8, alone=True),
    "unit fp16": Run(prepare=_prepare("unit", "fp16")),
    "unit fp8": Run(prepare=_prepare("unit", "fp8")),
    "scalify fp16, fp16 state": Run(prepare=_prepare("scalify", "fp16", rescale=PLACES), state_dtype=torch.float16),
    "scalify fp16, softmax_grad": Run(
        prepare=_prepare("scalify", "fp16", rescale=MORE_PLACES), state_dtype=torch.float16
    ),
    "scalify fp8, fp16 state": Run(prepare=_prepare("scalify", "fp8", rescale=PLACES), state_dtype=torch.float16),
    "adaptive fp16": Run(prepare=adaptive_scaling),
}

SETTINGS = {"one of 2048": 2048, "alone": 1}  # micro-batches that a step averages
RECIPES: dict[str, dict[str, Any]] = {"llama": {"lr": 2e-3, "batch": 8}, "bert": {"lr": 4e-3, "batch": 16}}


def train(name: str, key: str, start: nn.Module, parts: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run; the learning rate warms up over a tenth of the steps and then decays to zero by a cosine."""
    run, began = RUNS[key], time.perf_counter()
    model = run.prepare(copy.deepcopy(start)).train()
    optimizer = AdamW(model.parameters(), lr=RECIPES[name]["lr"], betas=(0.9, 0.95), weight_decay=0.1,
                      eps=1e-8 / parts, state_dtype=run.state_dtype)  # fmt: skip
    schedule = hf.get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    guard = None if scaling_of(model) is None else StepGuard(model)
    text, held_text, count = corpus("train"), corpus("heldout"), RECIPES[name]["batch"]
    batches, evaluation = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10_000)
    held = [batch_of(name, held_text, count, options.length, evaluation) for _ in range(options.eval_batches)]
    curve = []
    with HalfProducts():
        for step in range(options.steps):
            optimizer.zero_grad()
            loss = model(**batch_of(name, text, count, options.length, batches)).loss
            (loss / parts).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 / parts)
            optimizer.step() if guard is None else guard.step(optimizer)
            schedule.step()
            if step % 50 == 0 or step == options.steps - 1:
                curve.append((step, round(loss.item(), 4)))
        final = evaluate(model, held)
    return {"run": key, "seed": seed, "held_out": round(final, 5), "curve": curve,
            "counts": {} if guard is None else fallbacks(model), "skipped": 0 if guard is None else guard.num_skipped,
            "time_s": round(time.perf_counter() - began, 1)}  # fmt: skip


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, of losses and of differences to fp32 (same start, same batches)."""
    rows = []
    for model, setting, key in dict.fromkeys((r["model"], r["setting"], r["run"]) for r in results):
        here = {(r["run"], r["seed"]): r for r in results if (r["model"], r["setting"]) == (model, setting)}
        losses = {seed: r["held_out"] for (run, seed), r in here.items() if run == key}
        gaps = [loss - here["fp32", seed]["held_out"] for seed, loss in losses.items() if ("fp32", seed) in here]
        row = {"model": model, "setting": setting, "run": key, "num_seeds": len(losses)}
        skipped = sum(r["skipped"] for (run, _), r in here.items() if run == key)
        rows.append({**row, **spread("held_out", list(losses.values())), **spread("gap", gaps), "skipped": skipped})
    return rows


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Mean and, for two values or more, standard deviation; rounded."""
    fields = {name: round(statistics.mean(values), 5)} if values else {}
    return fields | ({f"{name}_std": round(statistics.stdev(values), 5)} if len(values) > 1 else {})


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as a Markdown table."""
    cells = []
    for r in rows:
        loss = f"{r['held_out']:.4f}" + (f" ± {r['held_out_std']:.4f}" if "held_out_std" in r else "")
        gap = "" if "gap" not in r or r["run"] == "fp32" else f"{r['gap']:+.4f}"
        gap += f" ± {r['gap_std']:.4f}" if gap and "gap_std" in r else ""
        cells.append((r["model"], r["setting"], r["run"], str(r["num_seeds"]), loss, gap, str(r["skipped"])))
    head = ("model", "setting", "run", "seeds", "held-out loss", "minus fp32, same seed", "skipped steps")
    return common.markdown(head, cells)


def save(path: Path | None, results: list[dict[str, Any]]) -> None:
    """Write the result so far."""
    if path is None:
        return
    head = {"command": common.command(), "machine": common.machine(), "summary": summary(results)}
    common.save({**head, "runs": results}, path)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=["llama", "bert"], default=["llama", "bert"])
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--eval-batches", type=int, default=16)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    if options.out and options.out.exists():  # resume an interrupted command
        results = common.load(options.out)["runs"]
    done = {(r["model"], r["setting"], r["run"], r["seed"]) for r in results}
    for seed, name in itertools.product(options.seeds, options.models):
        torch.manual_seed(seed)
        start = build(name, options.hidden, options.layers, options.length)
        for setting, key in itertools.product(options.settings, options.runs):
            if (setting == "alone" and not RUNS[key].alone) or (name, setting, key, seed) in done:
                continue
            outcome = train(name, key, start, SETTINGS[setting], seed, options)
            results.append({"model": name, "setting": setting, **outcome})
            save(options.out, results)
            print(f"{name:6s} {setting:12s} {key:26s} seed {seed}  {outcome['held_out']:.4f}", file=sys.stderr)
    print(table(summary(results)), end="")


if __name__ == "__main__":
    main()
