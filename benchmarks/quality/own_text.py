"""Is a text that the model writes itself as good for error feedback as a text that is given?

    OMP_NUM_THREADS=1 python -m benchmarks.quality.own_text --work FOLDER --out own-text.json [--model smollm2 gemma3]

KL to the source on four held-out texts, after rounding to nearest, and after gptaq with searched scales calibrated on
plays (`--calibrate demo`) and on the model's own text (`--calibrate self`). A play is like the first of these; Python's
help, the licence of this project and the source of Python's argparse are unlike it. 16 windows of 128 tokens each (8 of
large vocabularies), in fp32. Seconds are of the processor, with the writing of the text; one thread. A row that the
file has is not measured again.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.quality.feedback import INT4, LENGTH, NVFP4, USUAL, WINDOWS, compared, log_probabilities, texts
from benchmarks.quality.peers import measured, model_at
from lpconv.models.tokenizer import read_tokenizer, tokenize

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
    """The rows as a Markdown table: KL on each text and, in brackets, its share of that of rounding to nearest."""
    what = {"plays": "play", "python": "Python's help", "licence": "licence", "code": "code"}
    lines = ["| model, layout | calibrated on | " + " | ".join(what.values()) + " | processor seconds | peak |"]
    lines.append("|---" * (len(what) + 4) + "|")
    nearest = {(r["model"], r["case"].split(", ")[0]): r for r in rows if r["case"].endswith("nearest")}
    for row in sorted(rows, key=lambda r: (r["model"] != "smollm2", r["model"], list(CASES).index(r["case"]))):
        layout, text = row["case"].split(", ")
        usual = nearest[row["model"], layout]
        shares = [f" ({row[t]['kl'] / usual[t]['kl']:.2f})" if row is not usual else "" for t in what]
        kls = [f"{row[t]['kl']:.3f}{share}" for t, share in zip(what, shares, strict=True)]
        cost = f"{row['processor_seconds']:.0f}", f"{row['peak_bytes'] / 1e9:.2f} GB"
        calibrated = "nothing: nearest" if row is usual else text
        lines.append("| " + " | ".join((f"{row['model']}, {layout}", calibrated, *kls, *cost)) + " |")
    return "\n".join(lines)


def held_out(folder: Path, model: Path) -> dict[str, Any]:
    """Windows of each text, by what it is."""
    there = texts(folder) | {"licence": common.ROOT / "LICENSE", "code": Path(argparse.__file__)}
    size, tokenizer = common.load(model / "config.json")["vocab_size"], read_tokenizer(model)
    count = WINDOWS if size < 100_000 else WINDOWS // 2
    return {
        name: tokenize(path, tokenizer, seq_len=LENGTH, vocab_size=size).windows[:count] for name, path in there.items()
    }


def measure(folder: Path, name: str, cases: list[str], found: dict[str, Any], out: Path) -> None:
    rows, model = found["rows"], model_at(folder, name)
    left = [c for c in cases if not any((r["model"], r["case"]) == (name, c) for r in rows)]
    if not left:
        return
    windows = held_out(folder, model)
    source = log_probabilities(model, windows)
    for case in left:
        output = folder / f"{name}-{case}".replace(", ", "-").replace(" ", "-")
        words = ["convert", str(model), *shlex.split(CASES[case]), "--verify", "weights", "--workers", "1", "--force"]
        cost = measured([sys.executable, "-m", "lpconv", *words, "-o", str(output)], folder / "log.txt")
        got = log_probabilities(output, windows)
        rows.append({"model": name, "case": case, **cost, **{n: compared(source[n], got[n]) for n in windows}})
        common.save(found, out)
        print(rows[-1], flush=True)


def main() -> None:
    parser = common.parser(__doc__, work="where models and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--table", action="store_true", help="print the table of the file, and measure nothing")
    asked = parser.parse_args()
    found: dict[str, Any] = common.load(asked.out) if asked.out.exists() else {"rows": []}
    if asked.table:
        print(table(found["rows"]))
        return
    found["machine"] = common.machine()
    with common.work_folder(asked.work) as folder:
        for name in asked.model:
            measure(folder, name, asked.cases, found, asked.out)


if __name__ == "__main__":
    main()
