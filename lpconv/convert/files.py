"""The small files of an output: config, index, loader module, residual index, side files, provenance, checksums."""

import importlib.resources
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpconv.checkpoint.contents import Contents
from lpconv.checkpoint.partfile import sha256_of, write_error, write_small
from lpconv.checkpoint.residual import RESIDUAL_INDEX, residual_index
from lpconv.convert.plan import Plan
from lpconv.convert.verify import SUMS
from lpconv.errors import UnsupportedError
from lpconv.formats.spec import FORMATS
from lpconv.results import ConvertResult, FileRecord, to_json

__all__ = ["check_convertible", "copy_side_files", "output_config", "write_metadata", "write_provenance", "write_sums"]

_LOADER = "lpconv_loader.py"
_CARD, _SOURCE_CARD = "README.md", "README.source.md"
# These describe one run, with its times; all other files depend only on source and options.
_NOT_SUMMED = {SUMS, "report.json", "report.html"}


def check_convertible(contents: Contents) -> None:
    """Refuse checkpoints that are already quantised. Raises UnsupportedError."""
    quantization = contents.config.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "another method")
        hint = "run `lpconv restore` first" if method == "lpconv" else "convert from the unquantised checkpoint"
        raise UnsupportedError(f"the checkpoint is already quantised by `{method}`", hint=hint)


def output_config(contents: Contents, plan: Plan) -> dict[str, Any]:
    """config.json of the output: the source's, and what the method needs in order to be opened.

    A pair is an ordinary checkpoint of its 16-bit dtype. Scaled codes get a `quantization_config`, and an `auto_map` to
    the loader module unless the source has code of its own.
    """
    config = dict(contents.config)
    if plan.method.encoder == "pair":
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = FORMATS[plan.options.format or ""].torch
        return config
    converted = [t for t in plan.tensors if t.format is not None]
    config["quantization_config"] = {
        "quant_method": "lpconv",
        "format_version": 1,
        "method": plan.method.name,
        "format": plan.options.format,
        "scale": plan.options.scale,
        "leaves": sorted({t.name.rpartition(".")[2] for t in converted}) or ["weight"],
        "exceptions": {t.name: t.format.name for t in converted if t.format and t.format.name != plan.options.format},
    }
    if "auto_map" not in config and "model_type" in config:
        config["auto_map"] = {"AutoConfig": f"{_LOADER.removesuffix('.py')}.Config"}
    return config


def write_metadata(directory: Path, contents: Contents, plan: Plan, files: Sequence[FileRecord]) -> None:
    """Index, config, loader module and residual index. `files` are the weight files with their hashes."""
    config = output_config(contents, plan)
    write_small(directory / "config.json", _json(config))
    if _LOADER.removesuffix(".py") in str(config.get("auto_map", "")):
        write_small(directory / _LOADER, _loader_source(str(config["model_type"])))
    if len(plan.shards) > 1:
        write_small(directory / "model.safetensors.index.json", _json(_index(plan)))
    hashes = {f.name: f.sha256 or "" for f in files}
    pairs = [(s.residual.name, s.root.name, hashes[s.root.name]) for s in plan.shards if s.residual is not None]
    if pairs:
        write_small(directory / RESIDUAL_INDEX, _json(residual_index(plan.options.residual or "", pairs)))


def _index(plan: Plan) -> dict[str, Any]:
    tensors = [(t, s.root.name) for s in plan.shards for t in s.root.tensors]
    return {
        "metadata": {"total_size": sum(t.num_bytes for t, _ in tensors)},
        "weight_map": {t.name: file for t, file in sorted(tensors, key=lambda it: it[0].name)},
    }


def _loader_source(model_type: str) -> str:
    plugin = importlib.resources.files("lpconv.hf").joinpath("plugin.py").read_text(encoding="utf-8")
    return f"""{plugin}

# What `auto_map` in config.json points to: the stock config class, after the quantizer is known.
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

register()
Config = CONFIG_MAPPING[{model_type!r}]
"""


def copy_side_files(directory: Path, contents: Contents) -> tuple[str, ...]:
    """Copy everything that is no weight; the source's model card becomes README.source.md. Returns the new names."""
    names = []
    for name in contents.side_files:
        target = _SOURCE_CARD if name == _CARD else name
        try:
            (directory / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(contents.directory / name, directory / target)
        except OSError as e:
            raise write_error(e, directory / target) from e
        names.append(target)
    return tuple(names)


def write_provenance(directory: Path, result: ConvertResult) -> None:
    """lpconv.json: everything about the output that does not change from run to run or place to place."""
    document: Mapping[str, Any] = to_json(result)
    left_out = {"schema_version", "kind", "output", "seconds", "peak_rss_bytes", "command"}
    write_small(
        directory / "lpconv.json",
        _json({"format_version": 1, **{k: v for k, v in document.items() if k not in left_out}}),
    )


def write_sums(directory: Path, known: Iterable[FileRecord]) -> None:
    """SHA256SUMS of every file of the output but the run's own reports; hashes that are known are not taken again."""
    hashes = {f.name: f.sha256 for f in known}
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    lines = []
    for name in names:
        if name in _NOT_SUMMED or name.startswith("journal."):
            continue
        lines.append(f"{hashes.get(name) or sha256_of(directory / name)}  {name}\n")
    write_small(directory / SUMS, "".join(lines))


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
