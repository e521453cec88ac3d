"""LoRA over codes next to LoRA over wider weights and full fine-tuning: held-out loss, step time and peak memory.

    python -m benchmarks.quality.lora --out FILE.json [--model demo smollm2] [--cases ...] [--steps N] [--work FOLDER]

Each row is `lpconv finetune --precision fp32` on Python's help topics, in its own process with one thread. Memory is
the peak of that process minus the peak of a tiny run on the demo model, so Python, torch and transformers are not
counted. Cases in `SHORT` only run three steps, for their memory. Existing rows of the file are not measured again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.models import model_folder
from benchmarks.quality.feedback import INT4
from benchmarks.quality.held_out import converted, texts

# Options of the conversion (None for the source), and whether adapters are trained.
CASES: dict[str, tuple[str | None, bool]] = {
    "LoRA over int4 in groups of 32": (f"{INT4} --layout compressed-tensors", True),
    "LoRA over NVFP4": ("--scheme NVFP4A16", True),
    "LoRA over bf16": ("--format bf16", True),
    "LoRA over fp32": (None, True),
    "all weights in fp32": (None, False),
}
SHORT = ("LoRA over bf16", "all weights in fp32")


def train(model: Path, data: str, output: Path, settings: dict[str, Any], lora: bool) -> dict[str, Any]:
    """Train in this process and return the row."""
    from lpconv.machine import peak_rss_bytes
    from lpconv.train.options import FinetuneOptions
    from lpconv.train.recipes import arithmetic
    from lpconv.train.run import finetune

    how = arithmetic(lora=16, precision="fp32") if lora else arithmetic(recipe="fp32")
    options = FinetuneOptions(arithmetic=how, data=data, twin="none", force=True, **settings)
    result = finetune(str(model), output, options)
    (run,) = result.runs
    (loss,) = result.held_out
    return {
        "loss_before": loss.before,
        "loss_after": loss.after,
        "standard_error_of_change": loss.change_error,
        "steps": options.steps,
        "tokens_per_step": options.batch_size * (options.seq_len or 0),
        "lr": options.highest_lr,
        "step_s": run.step_time_s,
        "peak_bytes": peak_rss_bytes(),
    }


def child(model: Path, data: Path, output: Path, settings: dict[str, Any], lora: bool) -> dict[str, Any]:
    """Run `train` in its own process."""
    words = [str(model), str(data), str(output), json.dumps(settings), str(int(lora))]
    command = [sys.executable, "-m", "benchmarks.quality.lora", "--out", "-", "--one", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LPCONV_COMPILE": "never"}
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = common.parser(__doc__, work="where outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["demo", "smollm2"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--one", nargs=5, help="one run in this process: MODEL DATA OUTPUT OPTIONS 0|1")
    args = parser.parse_args()
    if args.one is not None:
        model, data, output, options, lora = args.one
        print(json.dumps(train(Path(model), data, Path(output), json.loads(options), lora == "1")))
        return
    result = common.load_or_begin(args.out)
    result["machine"], result["command"] = common.machine(), common.command()
    usual = {"batch_size": 2, "seq_len": 128, "eval_batches": 8, "eval_every": 0, "lr": args.lr}
    with common.work_folder(args.work) as folder:
        data = texts(folder)["python"]
        least = {**usual, "steps": 2, "seq_len": 16, "batch_size": 1, "eval_batches": 1}
        result["imports_bytes"] = child(model_folder("demo", folder), data, folder / "least", least, True)["peak_bytes"]
        for name in args.model:
            source, rows = model_folder(name, folder), result.setdefault(name, {})
            for case in (c for c in args.cases if c not in rows):
                conversion, lora = CASES[case]
                base = source if conversion is None else folder / f"{name}-{case}".replace(" ", "-")
                if conversion is not None:
                    converted(source, base, conversion)
                steps = 3 if case in SHORT else args.steps
                row = child(base, data, folder / "trained", {**usual, "steps": steps}, lora)
                row["memory_bytes"] = row["peak_bytes"] - result["imports_bytes"]
                row["weight_bytes"] = sum(p.stat().st_size for p in base.glob("*.safetensors"))
                rows[case] = row | {"load_average": os.getloadavg()[1]}
                common.save(result, args.out)
                print(name, case, json.dumps(rows[case]), flush=True)


if __name__ == "__main__":
    main()
