"""Error feedback next to rounding to nearest, at equal bytes: KL to the source on two held-out texts.

    python -m benchmarks.quality.feedback --out FILE.json [--model demo smollm2] [--work FOLDER]

Calibrated on the sample plays, or on `--calibrate FILE`. One held-out text is a play, the other (Python's help topics)
is unlike plays. For 16 windows of 128 tokens of each, in fp32: KL of the source to the output in nats per token, and
the share of equal first choices. Seconds and peak memory are of the whole command on one thread. SmolLM2's weights had
4 bits before, so compare its rows only with each other. Existing rows, models and outputs are reused.
"""

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.models import model_folder
from benchmarks.quality.held_out import compare_texts, converted, predictions, texts, windows_of

INT4, NVFP4, MXFP4 = "--format int4 --granularity group:32", "--scheme NVFP4A16", "--scheme MXFP4A16"
GPTQ, GPTAQ, SEARCH = "--rounding gptq", "--rounding gptaq", "--scale search"
USUAL = "--scale pow2"  # NVFP4 searches by default
CASES = {
    "int4 g32, nearest": INT4,
    "int4 g32, search": f"{INT4} {SEARCH}",
    "int4 g32, gptq": f"{INT4} {GPTQ}",
    "int4 g32, gptq and search": f"{INT4} {GPTQ} {SEARCH}",
    "int4 g32, gptaq and search": f"{INT4} {GPTAQ} {SEARCH}",
    "nvfp4, nearest": f"{NVFP4} {USUAL}",
    "nvfp4, search": f"{NVFP4} {SEARCH}",
    "nvfp4, gptq": f"{NVFP4} {USUAL} {GPTQ}",
    "nvfp4, gptq and search": f"{NVFP4} {GPTQ} {SEARCH}",
    "nvfp4, gptaq and search": f"{NVFP4} {GPTAQ} {SEARCH}",
    "mxfp4, nearest": MXFP4,
    "mxfp4, search": f"{MXFP4} {SEARCH}",
    "mxfp4, gptq": f"{MXFP4} {GPTQ}",
    "mxfp4, gptq and search": f"{MXFP4} {GPTQ} {SEARCH}",
    "mxfp4, gptaq and search": f"{MXFP4} {GPTAQ} {SEARCH}",
}


def measure(name: str, model: Path, folder: Path, args: argparse.Namespace, result: dict[str, Any]) -> None:
    rows, windows = result.setdefault(name, {}), windows_of(model, texts(folder))
    source = predictions(model, windows)
    for case in args.cases:
        row, options = case, CASES[case]
        if "--rounding" in options:
            options += f" --calibrate {shlex.quote(args.calibrate)}"
            row += "" if args.calibrate == "demo" else f" on {Path(args.calibrate).stem}"
        if row not in rows:
            output = folder / f"{name}-{row}".replace(", ", "-").replace(" ", "-")
            rows[row] = {**converted(model, output, options), **compare_texts(source, predictions(output, windows))}
            common.save(result, args.out)
            print(name, row, json.dumps(rows[row]), flush=True)


def measure_models(measure: Callable[..., None], args: argparse.Namespace) -> None:
    """Call `measure` for each of the asked models; it adds rows to the result that it gets."""
    result = common.load_or_begin(args.out)
    result["machine"] = common.machine()
    with common.work_folder(args.work) as folder:
        for name in args.model:
            measure(name, model_folder(name, folder), folder, args, result)


def main() -> None:
    parser = common.parser(__doc__, work="where outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["demo", "smollm2"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--calibrate", default="demo", help="text of the calibration")
    args = parser.parse_args()
    measure_models(measure, args)


if __name__ == "__main__":
    main()
