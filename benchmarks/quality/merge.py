"""Share of a LoRA adapter's gain that is left after merging it into int4 codes in groups of 32, by several ways.

    python -m benchmarks.quality.merge --out FILE.json [--model demo smollm2] [--steps 20 60 180] [--work FOLDER]

Adapters of rank 8 are trained by `lpconv finetune --lora` over the codes on nine tenths of Python's help topics; losses
are those of the next token on the first 32 windows of the rest. "plain" rounds the merged weights to the nearest codes,
with the scales of the base or as a new conversion; "gptaq" is a new conversion with error feedback and searched scales
on the adapter's text. All commands run on one thread. Existing rows, adapters and outputs are reused.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import lpconv
from benchmarks import common
from benchmarks.models import model_folder
from benchmarks.quality.feedback import INT4
from benchmarks.quality.held_out import LENGTH, converted, kl_of, outputs_of, texts, windows_of
from lpconv.layouts.reader import stored_shapes
from lpconv.models.coded import CodedTensor
from lpconv.storage.checkpoint import Checkpoint
from lpconv.train.adapter import Adapter
from lpconv.train.recover import Grid

OPTIONS = f"{INT4} --layout compressed-tensors"
RATES = {20: 3e-4, 60: 1e-3, 180: 2e-3}  # of the adapters, by their number of steps
WINDOWS = 32


def run(*words: object) -> dict[str, float]:
    """Run a command on one thread; returns its wall seconds."""
    start, environment = time.perf_counter(), {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "lpconv", *map(str, words)], check=True, capture_output=True, env=environment)
    return {"seconds": round(time.perf_counter() - start, 1)}


def rounded(base: Path, merged: Any) -> Any:
    """The merged model with weights rounded to the nearest numbers that the codes of `base` reach with its scales."""
    stored = dict(lpconv.load(base, resident=True, dtype=torch.float32).named_parameters())
    for name, p in merged.named_parameters():
        if isinstance(x := stored[name], CodedTensor):
            grid = Grid(pieces=tuple(x.pieces))
            grid.scale_(grid.divide_(p.data))
    return merged


def measure(name: str, steps: int, folder: Path, args: argparse.Namespace, rows: common.Rows) -> None:
    source, base = model_folder(name, folder), folder / f"{name}-int4"
    converted(source, base, OPTIONS)
    text = texts(folder)["python"].read_text(encoding="utf-8")
    train, rest = folder / "train.txt", folder / "rest.txt"
    train.write_text(text[: len(text) * 9 // 10], encoding="utf-8")
    rest.write_text(text[len(text) * 9 // 10 :], encoding="utf-8")
    (windows,) = windows_of(source, {"rest": rest}, WINDOWS).values()
    fit = ["--data", train, "--batch-size", args.batch_size, "--seq-len", LENGTH, "--resume"]
    adapter = folder / f"{name}-adapter-{steps}"
    lora = ["--lora", 8, "--precision", "fp32", "--twin", "none", "--eval-batches", 4, "--steps", steps]
    run("finetune", base, *lora, "--lr", RATES[steps], *fit, "-o", adapter)
    shapes = stored_shapes(Checkpoint.open(base))

    def merged_model() -> Any:
        model = lpconv.load(base, dtype=torch.float32)
        with torch.no_grad():
            Adapter.open(adapter, shapes, shapes).merge_into(model)
        return model

    merged = folder / f"{name}-merged-{steps}"
    if not merged.exists():
        shutil.copytree(source, merged, ignore=shutil.ignore_patterns("*.safetensors"))
        state = merged_model().state_dict()
        save_file({n: state[n].contiguous() for n in shapes}, merged / "model.safetensors", metadata={"format": "pt"})

    def conversion(options: str) -> Callable[[Path], Any]:
        def convert(output: Path) -> Any:
            converted(merged, output, f"{OPTIONS} {options}")
            return lpconv.load(output, dtype=torch.float32)

        return convert

    def trained(output: Path) -> Any:
        run("merge", base, adapter, *fit, "--steps", args.trained, "-o", output)
        return lpconv.load(output, dtype=torch.float32)

    feedback = f"--rounding gptaq --scale search --calibrate {shlex.quote(str(train))}"
    ways: dict[str, Callable[[Path], Any]] = {
        "plain, same scales": lambda output: rounded(base, merged_model()),
        "plain, new scales": conversion(""),
        "gptaq, new scales": conversion(feedback),
        "lpconv merge": trained,
    }
    start, wanted = (outputs_of(m, windows) for m in (lpconv.load(base, dtype=torch.float32), merged_model()))
    gain = loss_of(start, windows) - loss_of(wanted, windows)
    for way, make in ways.items():
        if rows.has(name, steps, way):
            continue
        output = folder / f"{name}-{steps}-{way}".replace(", ", "-").replace(" ", "-")
        begun = time.perf_counter()
        got = outputs_of(make(output), windows)
        row = {"gain": gain, "kept": (loss_of(start, windows) - loss_of(got, windows)) / gain}
        row |= {"kl_before": float(kl_of(wanted, start).mean()), "kl_after": float(kl_of(wanted, got).mean())}
        if way == "lpconv merge":
            (trained_run,) = json.loads((output / "report.json").read_text())["runs"]
            row |= {"trained_steps": args.trained, "batch_size": args.batch_size}
            row["kept_by_layer"] = trained_run["kept_by_layer"]
        rows.put({"model": name, "steps": steps, "way": way, **row, "seconds": time.perf_counter() - begun})


def loss_of(outputs: Tensor, windows: Tensor) -> float:
    """Mean loss of the next token, from log-probabilities [tokens, vocabulary]."""
    predicted = outputs.view(*windows.shape, -1)[:, :-1]
    return -float(predicted.gather(-1, windows[:, 1:, None]).mean())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: the adapter's gain in nats, and the share of it after each way of merging."""
    ways = tuple(dict.fromkeys(r["way"] for r in rows))
    cells = {(r["model"], r["steps"], r["way"]): r for r in rows}
    lines = []
    for model, steps in dict.fromkeys((r["model"], r["steps"]) for r in rows):
        found = [cells.get((model, steps, way)) for way in ways]
        gain = next(r["gain"] for r in found if r)
        kept = (f"{r['kept']:.0%} ({r['kl_after']:.2g})" if r else "" for r in found)
        lines.append((model, f"{steps}", f"{gain:.3f}", *kept))
    return common.markdown(("model", "steps of the adapter", "gain, nats per token", *ways), lines)


def main() -> None:
    parser = common.parser(__doc__, work="where models, adapters and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["demo", "smollm2"])
    parser.add_argument("--steps", nargs="+", type=int, default=list(RATES), choices=RATES)
    parser.add_argument("--trained", type=int, default=200, help="steps of `lpconv merge`")
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = {"machine": common.machine(), "command": common.command()}
    rows = common.Rows(args.out, ("model", "steps", "way"), lambda: head)
    with common.work_folder(args.work) as folder:
        for name in args.model:
            for steps in args.steps:
                measure(name, steps, folder, args, rows)


if __name__ == "__main__":
    main()
