"""Small valid and broken checkpoints, and functions that run lpconv on them."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lpconv
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import LpconvError
from lpconv.plan.files import write_sums
from lpconv.plan.options import ConvertOptions
from lpconv.results import ConvertResult
from lpconv.storage.place import sha256_of

__all__ = [
    "DEMO_TENSORS",
    "REPORTS",
    "Run",
    "bits_of",
    "cli_environment",
    "converted_demo",
    "files_of",
    "keep_layers",
    "published",
    "raw_safetensors",
    "refusal",
    "rehash",
    "run_cli",
    "shallow_demo",
    "write_checkpoint",
]

Run = Callable[..., ConvertResult]

# A matrix that is converted, a vector that is kept, and an integer buffer that is copied.
DEMO_TENSORS = {
    "layer.weight": torch.linspace(-1, 1, 48).view(6, 8),
    "layer.bias": torch.linspace(0, 1, 6),
    "position_ids": torch.arange(6),
}
REPORTS = {"report.json", "report.html"}  # they name times and memory; everything else is a function of the input


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] = DEMO_TENSORS,
    *,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint with the safetensors library; each table of a sequence becomes a shard."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {}))
    if isinstance(tensors, Mapping):
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    (directory / "model.safetensors").unlink(missing_ok=True)  # transformers would prefer it to an index
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(tensors, 1):
        name = f"model-{i:05d}-of-{len(tensors):05d}.safetensors"
        save_file(dict(shard), directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def converted_demo(folder: Path, forms: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Convert the demo model with several sets of options."""
    for name, options in forms.items():
        convert("demo", folder / name, ConvertOptions(verify="none", **options))
    return {name: folder / name for name in forms}


def shallow_demo(target: Path, *, num_layers: int = 1) -> Path:
    """Write the demo model with its first layers only, which exports and trains in a fraction of the time."""
    shutil.copytree(demo_checkpoint(), target)
    keep_layers(target, num_layers)
    return target


def keep_layers(folder: Path, num_layers: int) -> None:
    """Drop all decoder layers but the first ones from a checkpoint in one file."""
    weights = load_file(folder / "model.safetensors")
    numbers = {name: re.search(r"\.layers\.(\d+)\.", name) for name in weights}
    kept = {name: weights[name] for name, found in numbers.items() if found is None or int(found[1]) < num_layers}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))


def raw_safetensors(header: Mapping[str, Any] | bytes, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a safetensors file with any header at all; `length` overrides the length prefix."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + payload


def files_of(directory: Path, *, without: set[str] = REPORTS) -> dict[str, bytes]:
    """The bytes of every file below `directory`, without the two reports of the run."""
    found = ((p.relative_to(directory).as_posix(), p) for p in sorted(directory.rglob("*")) if p.is_file())
    return {name: path.read_bytes() for name, path in found if name not in without}


def bits_of(x: Tensor) -> bytes:
    """The bytes of a tensor."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def rehash(output: Path, *, with_residual: bool = False) -> None:
    """Write SHA256SUMS again; `with_residual` also updates the hashes in the index of a residual."""
    index = output / "collage" / "residual.json"
    if with_residual and index.exists():
        document = json.loads(index.read_text())
        for entry in document["files"].values():
            if (output / entry["root"]).is_file():
                entry["root_sha256"] = sha256_of(output / entry["root"])
        index.write_text(json.dumps(document))
    write_sums(output, ())


def published(output: Path) -> bool:
    """Whether the output exists, or something next to it looks like a finished output."""
    partial = output.with_name(output.name + ".partial")
    return os.path.lexists(output) or ((partial / "lpconv.json").exists() and not (partial / "journal.jsonl").exists())


def refusal(run: Run, output: Path, **options: Any) -> LpconvError:
    """The error of a run that must fail with a hint and publish nothing."""
    with pytest.raises(LpconvError) as caught:
        run(**options)
    assert caught.value.hint
    assert not published(output)
    return caught.value


def cli_environment(**extra: str) -> dict[str, str]:
    """Environment of a child process that imports this checkout of lpconv."""
    return os.environ | {"PYTHONPATH": str(Path(lpconv.__file__).parents[1]), "OMP_NUM_THREADS": "1"} | extra


def run_cli(*arguments: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `lpconv ARGUMENTS…` in a process of its own."""
    command = [sys.executable, "-m", "lpconv", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=cli_environment(**env), capture_output=True, text=True, check=False)
