"""Is a text that the model writes itself as good for error feedback as a text that is given?

    OMP_NUM_THREADS=1 python -m benchmarks.quality.own_text --work FOLDER --out own-text.json [--model smollm2 gemma3]

KL to the source on four held-out texts, after rounding to nearest, and after gptaq with searched scales calibrated on
plays (`--calibrate demo`) and on the model's own text (`--calibrate self`). One held-out text is a play; Python's help,
the licence of this project and the source of Python's argparse are unlike plays. 16 windows of 128 tokens each (8 for
large vocabularies), in fp32. Processor seconds of one thread include writing the text. Existing rows of the file are
not measured again.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.quality.feedback import INT4, NVFP4, USUAL
from benchmarks.quality.held_out import WINDOWS, compare_texts, predictions, texts, windows_of
from benchmarks.quality.peers import measured, model_at

FEEDBACK = "--rounding gptaq --scale search --calibrate"
CASES = {
    "int4 g32, nearest": f"{INT4} --layout compressed-tensors",
    "int4 g32, plays": f"{INT4} --layout compressed-tensors {FEEDBACK} demo",
    "int4 g32, self": f"{INT4} --layout compressed-tensors {FEEDBACK} self",
    "NVFP4, nearest": f"{NVFP4} {USUAL}",
    "NVFP4, plays": f"{NVFP4} {FEEDBACK} demo",
    "NVFP4, self": f"{NVFP4} {FEEDBACK} self",
}


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: KL on each text and, in brackets, its share of that of rounding to nearest."""
    names = {"plays": "play", "python": "Python's help", "licence": "licence", "code": "code"}
    nearest = {(r["model"], r["case"].split(", ")[0]): r for r in rows if r["case"].endswith("nearest")}
    cells = []
    for row in sorted(rows, key=lambda r: (r["model"] != "smollm2", r["model"], list(CASES).index(r["case"]))):
        layout, text = row["case"].split(", ")
        usual = nearest[row["model"], layout]
        shares = [f" ({row[t]['kl'] / usual[t]['kl']:.2f})" if row is not usual else "" for t in names]
        kls = [f"{row[t]['kl']:.3f}{share}" for t, share in zip(names, shares, strict=True)]
        cost = f"{row['processor_seconds']:.0f}", f"{row['peak_bytes'] / 1e9:.2f} GB"
        calibrated = "nothing: nearest" if row is usual else text
        cells.append((f"{row['model']}, {layout}", calibrated, *kls, *cost))
    head = ("model, layout", "calibrated on", *names.values(), "processor seconds", "peak")
    return common.markdown(head, cells)


def held_out(folder: Path, model: Path) -> dict[str, Any]:
    """Windows of each text by name, half as many for a large vocabulary."""
    paths = texts(folder) | {"licence": common.ROOT / "LICENSE", "code": Path(argparse.__file__)}
    is_small = common.load(model / "config.json")["vocab_size"] < 100_000
    return windows_of(model, paths, WINDOWS if is_small else WINDOWS // 2)


def measure(folder: Path, name: str, cases: list[str], rows: common.Rows) -> None:
    """Add the missing cases of a model."""
    cases = [case for case in cases if not rows.has(name, case)]
    if not cases:
        return
    model = model_at(folder, name)
    windows = held_out(folder, model)
    source = predictions(model, windows)
    for case in cases:
        output = folder / f"{name}-{case}".replace(", ", "-").replace(" ", "-")
        words = ["convert", str(model), *shlex.split(CASES[case]), "--verify", "weights", "--workers", "1", "--force"]
        cost = measured([sys.executable, "-m", "lpconv", *words, "-o", str(output)], folder / "log.txt")
        kls = compare_texts(source, predictions(output, windows))
        rows.put({"model": name, "case": case, **cost, **kls})


def main() -> None:
    parser = common.parser(__doc__, work="where models and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    args = parser.parse_args()
    rows = common.Rows(args.out, ("model", "case"), lambda: {"machine": common.machine()})
    with common.work_folder(args.work) as folder:
        for name in args.model:
            measure(folder, name, args.cases, rows)


if __name__ == "__main__":
    main()
