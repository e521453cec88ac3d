"""Quantised files that nobody changed, of models and settings on which no threshold of `verify` was set.

    python -m benchmarks.quality.honest_files --work FOLDER [--model M ...] [--file NAME ...]
    python -m benchmarks.quality.roundings --honest FOLDER/honest --out FILE.json

One command makes the models, a virtual environment per package in FOLDER/env, and the files in FOLDER/honest; existing
files are not made again. The models are lpconv's demo, four layers from the middle of SmolLM2-135M-Instruct, MiniLM (an
encoder, by lpconv only), the `experts` of `benchmarks.models`, and the demo with weights drawn from Student's t with 3
degrees of freedom. Calibration is on 64 windows of 128 tokens of the plays that ship with lpconv.
"""

import argparse
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import common
from benchmarks.models import model_folder
from benchmarks.quality.peers import calibration_file, environment, making, measured, model_at

_LAYERS, _FIRST = 4, 12  # of SmolLM2
_SEED = 3
# Package, method, element, group size and further settings of `peer_rounding.py`, by the name of the file.
_THEIRS: dict[str, tuple[str, str, str, int | None, dict[str, str]]] = {
    "llm-compressor W4A16 gptq g128": ("llm-compressor", "gptq", "int4", 128, {}),
    "llm-compressor W4A16 gptq imatrix g32": ("llm-compressor", "gptq imatrix_mse", "int4", 32, {}),
    "llm-compressor W8A16 gptq g32": ("llm-compressor", "gptq", "int8", 32, {}),
    "llm-compressor NVFP4 gptq": ("llm-compressor", "gptq", "nvfp4", 16, {}),
    "llm-compressor FP8 gptq": ("llm-compressor", "gptq", "fp8", None, {}),
    "llm-compressor W4A16 mse g64": ("llm-compressor", "nearest mse", "int4", 64, {}),
    "AutoRound W4A16 g32": ("auto-round", "10", "int4", 32, {}),
    "AutoRound W4A16 auto_gptq g64": ("auto-round", "10", "int4", 64, {"format": "auto_gptq"}),
    "AutoRound W8A16 auto_gptq g128": ("auto-round", "10", "int8", 128, {"format": "auto_gptq"}),
    "AutoRound W3A16 auto_gptq g64": ("auto-round", "10", "int3", 64, {"format": "auto_gptq"}),
    "AutoRound W4A16 auto_awq g64": ("auto-round", "10", "int4", 64, {"format": "auto_awq"}),
    "AutoRound NVFP4": ("auto-round", "10", "nvfp4", 16, {}),
    "AutoRound MXFP4": ("auto-round", "10", "mxfp4", 32, {}),
    "GPTQModel W4A16 g128": ("gptqmodel", "gptq", "int4", 128, {}),
    "GPTQModel W4A16 g32": ("gptqmodel", "gptq", "int4", 32, {}),
    "GPTQModel W4A16 desc_act g64": ("gptqmodel", "gptq desc_act", "int4", 64, {}),
    "GPTQModel W8A16 g64": ("gptqmodel", "gptq", "int8", 64, {}),
    "transformers FP8": ("transformers", "float", "fp8", None, {}),
    "transformers FP8, scales of powers of two": ("transformers", "ue8m0", "fp8", None, {}),
}
_TEXT = f"--calibrate demo --calibration-seed {_SEED}"
_OURS = {
    "lpconv W4A16": "--scheme W4A16",
    "lpconv W4A16 search g32": "--scheme W4A16 --granularity group:32 --scale search",
    "lpconv MXFP4": "--scheme MXFP4A16",
    "lpconv W4A16 gptq": f"--scheme W4A16 --rounding gptq {_TEXT}",
    "lpconv W4A16 gptaq g32": f"--scheme W4A16 --granularity group:32 --rounding gptaq --scale search {_TEXT}",
    "lpconv FP8 gptq": f"--scheme FP8_DYNAMIC --rounding gptq {_TEXT}",
    "lpconv NVFP4 gptaq": f"--scheme NVFP4A16 --rounding gptaq {_TEXT}",
}
MODELS = ("demo", "smollm2-middle", "draws", "experts", "minilm")
FILES = (*_THEIRS, *_OURS)


def source_of(folder: Path, name: str) -> Path:
    """A model as a checkpoint in bf16; MiniLM as it is."""
    target = folder / "honest" / f"{name}.source"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    base = {"smollm2-middle": "smollm2", "draws": "demo"}.get(name, name)
    source = model_folder("minilm", folder) if name == "minilm" else model_at(folder, base)
    with making(target) as partial:
        shutil.copytree(source, partial)
        if name in ("smollm2-middle", "draws"):
            weights = load_file(source / "model.safetensors")
            changed = drawn(weights) if name == "draws" else middle(weights)
            save_file(changed, partial / "model.safetensors", {"format": "pt"})
        if name == "smollm2-middle":
            config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": _LAYERS}
            (partial / "config.json").write_text(json.dumps(config))
    return target


def middle(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with only `_LAYERS` layers, from `_FIRST` on."""
    parts = {name: name.split(".") for name in weights}
    layers = {n: int(p[2]) - _FIRST for n, p in parts.items() if p[1] == "layers"}
    return {
        ".".join([*parts[n][:2], str(layers[n]), *parts[n][3:]]) if n in layers else n: x
        for n, x in weights.items()
        if 0 <= layers.get(n, 0) < _LAYERS
    }


def drawn(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with other numbers of the same deviation in all matrices."""
    torch.manual_seed(0)
    kind = torch.distributions.StudentT(3.0)
    return {n: kind.sample(x.shape).mul(x.float().std() / 3**0.5).to(x.dtype) if x.dim() > 1 else x
            for n, x in weights.items()}  # fmt: skip


def make(folder: Path, name: str, files: list[str]) -> None:
    source = source_of(folder, name)
    for file, (package, method, element, group, settings) in _THEIRS.items() if name != "minilm" else ():
        target = folder / "honest" / name / file
        if file not in files or target.exists():
            continue
        job: dict[str, Any] = {"peer": package, "method": method, "element": element, "group": group, **settings}
        job |= {"model": str(source), "windows": str(calibration_file(folder, source, _SEED)), "output": str(target)}
        target.parent.mkdir(exist_ok=True)
        (folder / f"{package}.json").write_text(json.dumps(job))
        python = Path(sys.executable) if package == "transformers" else environment(folder, package)
        run(folder, target, [python, Path(__file__).with_name("peer_rounding.py"), folder / f"{package}.json"])
    for file, options in _OURS.items():
        target = folder / "honest" / name / file
        if file in files and not target.exists():
            words = [*shlex.split(options), "--verify", "none", "--workers", "1"]
            run(folder, target, [sys.executable, "-m", "lpconv", "convert", source, *words, "-o", target])


def run(folder: Path, target: Path, command: list[str | Path]) -> None:
    cost = measured(command, log := folder / f"{target.parent.name} {target.name}.log")
    shutil.rmtree(target.with_name(f"{target.name}.made"), ignore_errors=True)  # of AutoRound
    if "failed" in cost:
        shutil.rmtree(target, ignore_errors=True)
    else:
        log.unlink()
    print(f"{target.parent.name}/{target.name}:", cost.get("failed") or f"{cost['processor_seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, environments and files")
    parser.add_argument("--model", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--file", nargs="*", choices=FILES, default=FILES)
    args = parser.parse_args()
    with common.work_folder(args.work, TORCHDYNAMO_DISABLE="1", CXX="false") as work:  # compiling takes minutes
        for name in args.model:
            make(work, name, args.file)


if __name__ == "__main__":
    main()
