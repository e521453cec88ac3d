"""How much text error feedback needs: KL of gptaq with searched scales by the number of calibration tokens.

    python -m benchmarks.quality.calibration_tokens --work FOLDER --out FILE.json [--tokens N ...] [--layout L ...]
    python -m benchmarks.quality.calibration_tokens --table --out FILE.json

Models, texts and columns are those of `peers.py`. A row that the file has is not measured again.
"""

import shlex
import shutil
import sys
from typing import Any

import torch

from benchmarks import common
from benchmarks.quality.feedback import GPTAQ, SEARCH
from benchmarks.quality.peers import LAYOUTS, MODELS, HeldOut, measured, model_at

TOKENS = (2048, 8192, 32768)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table: KL on each held-out text and its share of that of nearest, and what it took."""
    lines = ["| layout | tokens | KL, plays | KL, Python | processor seconds | peak |", "|---|---|---|---|---|---|"]
    nearest = {(r["model"], r["layout"]): r for r in common.recorded("peers")["rows"] if r["rounding"] == "nearest"}
    for r in sorted(rows, key=lambda r: (r["model"], r["layout"], r["tokens"], r["seed"])):
        usual = nearest[r["model"], r["layout"]]
        kls = (f"{r[t]['kl']:.3f} ({r[t]['kl'] / usual[t]['kl']:.2f})" for t in ("plays", "python"))
        cost = f"{r['processor_seconds']:.0f}", f"{r['peak_bytes'] / 1e9:.2f} GB"
        lines.append("| " + " | ".join((f"{r['model']}, {r['layout']}", f"{r['tokens']:,}", *kls, *cost)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = common.parser(__doc__, work="where models and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["smollm2"], choices=MODELS)
    parser.add_argument("--layout", nargs="+", default=["int4 g32"], choices=LAYOUTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--table", action="store_true", help="print the table of the file, and measure nothing")
    asked = parser.parse_args()
    found = common.load(asked.out) if asked.out.exists() else {"rows": []}
    if asked.table:
        print(table(found["rows"]))
        return
    torch.set_num_threads(1)
    found["machine"] = common.machine()
    wanted = [(m, x, n, s) for m in asked.model for x in asked.layout for n in asked.tokens for s in asked.seed]
    keys = ("model", "layout", "tokens", "seed")
    with common.work_folder(asked.work) as folder:
        for model, layout, tokens, seed in wanted:
            key = dict(zip(keys, (model, layout, tokens, seed), strict=True))
            if any(key.items() <= r.items() for r in found["rows"]):
                continue
            path, output = (
                model_at(folder, model),
                folder / "outputs" / f"{model}-{layout}-{tokens}-{seed}".replace(" ", "-"),
            )
            words = f"{LAYOUTS[layout][0]} {GPTAQ} {SEARCH} --calibrate demo --calibration-seed {seed}"
            words += f" --calibration-tokens {tokens} --verify weights --workers 1 -o"
            cost = measured(
                [sys.executable, "-m", "lpconv", "convert", path, *shlex.split(words), output], folder / "log.txt"
            )
            found["rows"].append({**key, **cost, **HeldOut(folder, path).compare(output)})
            shutil.rmtree(output)
            common.save(found, asked.out)
            print(found["rows"][-1], flush=True)


if __name__ == "__main__":
    main()
