"""How much text error feedback needs: KL of gptaq with searched scales by the number of calibration tokens.

    python -m benchmarks.quality.calibration_tokens --work FOLDER --out FILE.json [--tokens N ...] [--layout L ...]

Models, texts and columns are those of `peers.py`. Existing rows of the file are not measured again.
"""

import itertools
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.quality.feedback import GPTAQ, SEARCH
from benchmarks.quality.peers import LAYOUTS, MODELS, HeldOut, measured, model_at

TOKENS = (2048, 8192, 32768)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: KL on each text and its share of that of rounding to nearest, and the cost."""
    nearest = {(r["model"], r["layout"]): r for r in common.recorded("peers")["rows"] if r["rounding"] == "nearest"}
    cells = []
    for r in sorted(rows, key=lambda r: (r["model"], r["layout"], r["tokens"], r["seed"])):
        usual = nearest[r["model"], r["layout"]]
        kls = (f"{r[t]['kl']:.3f} ({r[t]['kl'] / usual[t]['kl']:.2f})" for t in ("plays", "python"))
        cost = f"{r['processor_seconds']:.0f}", f"{r['peak_bytes'] / 1e9:.2f} GB"
        cells.append((f"{r['model']}, {r['layout']}", f"{r['tokens']:,}", *kls, *cost))
    return common.markdown(("layout", "tokens", "KL, plays", "KL, Python", "processor seconds", "peak"), cells)


def main() -> None:
    parser = common.parser(__doc__, work="where models and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["smollm2"], choices=MODELS)
    parser.add_argument("--layout", nargs="+", default=["int4 g32"], choices=LAYOUTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    keys = ("model", "layout", "tokens", "seed")
    rows = common.Rows(args.out, keys, lambda: {"machine": common.machine()})
    with common.work_folder(args.work) as folder:
        for values in itertools.product(args.model, args.layout, args.tokens, args.seed):
            if not rows.has(*values):
                rows.put(dict(zip(keys, values, strict=True)) | measure(folder, *values))


def measure(folder: Path, model: str, layout: str, tokens: int, seed: int) -> dict[str, Any]:
    """The cost of a conversion, and the KL of its output on the held-out texts."""
    source, output = model_at(folder, model), folder / "outputs" / f"{model}-{layout}-{tokens}-{seed}".replace(" ", "-")
    options = f"{LAYOUTS[layout][0]} {GPTAQ} {SEARCH} --calibrate demo --calibration-seed {seed}"
    words = shlex.split(f"{options} --calibration-tokens {tokens} --verify weights --workers 1 -o")
    cost = measured([sys.executable, "-m", "lpconv", "convert", source, *words, output], folder / "log.txt")
    kls = HeldOut(folder, source).compare(output)
    shutil.rmtree(output)
    return cost | kls


if __name__ == "__main__":
    main()
