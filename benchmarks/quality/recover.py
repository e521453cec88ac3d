"""Recovery of converted models: KL to the source before and after `finetune --recover`, on two held-out texts.

    python -m benchmarks.quality.recover --out FILE.json [--model demo smollm2] [--cases ...] [--work FOLDER]

Texts and figures are those of `benchmarks.quality.feedback`. Trained and calibrated on the sample plays, or on
`--data FILE`. Seconds are of the whole command on one thread, with the machine's load at the end. Existing rows, models
and outputs are reused.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.quality.feedback import GPTQ, INT4, SEARCH, measure_models
from benchmarks.quality.held_out import LENGTH, compare_texts, converted, predictions, texts, windows_of

MXFP4 = "--format e2m1 --granularity mx"
CASES = {
    "int4 g32, nearest": f"{INT4} --layout compressed-tensors",
    "int4 g32, gptq and search": f"{INT4} --layout compressed-tensors {GPTQ} {SEARCH}",
    "mxfp4, nearest": MXFP4,
    "mxfp4, gptq": f"{MXFP4} {GPTQ}",
}


def recovered(output: Path, source: Path, trained: Path, options: str) -> dict[str, Any]:
    """Train towards the source, unless the output exists, and return the report's figures."""
    if not (trained / "report.json").exists():
        words = ["--source", str(source), "--eval-batches", "4", *shlex.split(options), "--resume", "-o", str(trained)]
        command = [sys.executable, "-m", "lpconv", "finetune", str(output), "--recover", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LPCONV_COMPILE": "never"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
    report = json.loads((trained / "report.json").read_text())
    (run,) = report["runs"]
    settings = report["options"]
    return {
        "steps": settings["steps"],
        "tokens_per_step": settings["batch_size"] * (settings["seq_len"] or LENGTH),
        "lr": settings["lr"] or "default",
        "seconds": report["seconds"],
        "step_s": run["step_time_s"],
        "losses": run["losses"]["values"],
    }


def measure(name: str, model: Path, folder: Path, args: argparse.Namespace, result: dict[str, Any]) -> None:
    rows, windows, data = result.setdefault(name, {}), windows_of(model, texts(folder)), args.data
    source = predictions(model, windows)
    for case in args.cases:
        row = case if data == "demo" else f"{case}, recovered on {Path(data).stem}"
        if row in rows:
            continue
        output = folder / f"{name}-{case}".replace(", ", "-").replace(" ", "-")
        trained = folder / f"{output.name}-recovered-{Path(data).stem}"
        converted(model, output, CASES[case] + (f" --calibrate {shlex.quote(data)}" if GPTQ in CASES[case] else ""))
        options = args.options + ("" if data == "demo" else f" --data {shlex.quote(data)}")
        cost = recovered(output, model, trained, options)
        before, after = (compare_texts(source, predictions(path, windows)) for path in (output, trained))
        rows[row] = {what: {"before": before[what], "after": after[what]} for what in windows}
        rows[row] |= {**cost, "load_average": os.getloadavg()[1]}
        common.save(result, args.out)
        print(name, row, json.dumps({k: v for k, v in rows[row].items() if k != "losses"}), flush=True)


def main() -> None:
    parser = common.parser(__doc__, work="where outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["demo", "smollm2"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--data", default="demo", help="text to calibrate and train on")
    parser.add_argument("--options", default="", help="further options of finetune, such as '--steps 50'")
    args = parser.parse_args()
    measure_models(measure, args)


if __name__ == "__main__":
    main()
