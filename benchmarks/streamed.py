"""Verify a model on a text in a container a quarter of its size, and compare the figures with those of whole models.

    python -m benchmarks.streamed --work DIRECTORY --out benchmarks/results/streamed.json [--limit 700MB]

The model is Llama-shaped with random weights, as large in fp32 as four times the limit, stored in bf16 and converted to
e4m3fn; the text is the plays that ship with lpconv, in the demo's tokens. The container is that of
`benchmarks/limits.py`.
Whole models then run in this process, one at a time, without a limit.
"""

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

import lpconv
from benchmarks.limits import run_in
from benchmarks.synthetic import make_checkpoint
from lpconv.convert.logits import compare
from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.models.tokenizer import read_tokenizer, tokenize
from lpconv.options import parse_size

_LENGTH, _TOKENS = 64, 256


def make(work: Path, limit: int) -> Path:
    """The source and what it is converted to."""
    source = work / "source"
    if not source.exists():
        make_checkpoint(source, 2 * limit, torch.bfloat16)
        for file in Path(demo_checkpoint()).glob("token*"):
            shutil.copyfile(file, source / file.name)
        convert(str(source), work / "converted", ConvertOptions(method="unit", format="e4m3fn", verify="none"))
    return source


def whole(work: Path, text: Path) -> dict[str, Any]:
    """The figures of whole models, both ways."""
    tokenizer = read_tokenizer(work / "source")
    ids = tokenize(text, tokenizer, seq_len=_LENGTH, vocab_size=32_000).windows[: _TOKENS // _LENGTH]
    said = []
    for name in ("source", "converted"):
        model = lpconv.load(work / name, dtype=torch.float32)
        with torch.no_grad():
            said.append(model(ids).logits)
        del model
    back = compare(said[1], said[0], "", "").mean_kl
    return {**dataclasses.asdict(compare(said[0], said[1], "", "")), "reverse_kl": back}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=parse_size, default=700_000_000)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    source = make(options.work, options.limit)
    text = options.work / "text.txt"
    text.write_text((Path(str(lpconv.data.__file__)).parent / "text" / "heldout.txt").read_text()[:20_000])
    arguments = ("verify", "converted", "--against", source.name, "--level", "hash", "--data", text.name,
                 "--seq-len", str(_LENGTH), "--max-tokens", str(_TOKENS))  # fmt: skip
    ran = run_in(options.limit, arguments, cwd=options.work, model="4 x the limit")
    streamed = json.loads((options.work / "stdout").read_text()).get("logits")
    print(json.dumps(dataclasses.asdict(ran)), json.dumps(streamed), flush=True)
    found = {"run": dataclasses.asdict(ran), "streamed": streamed, "whole": whole(options.work, text)}
    print(json.dumps(found["whole"]))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
