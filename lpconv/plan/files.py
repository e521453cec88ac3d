"""The small files of an output: config, index, loader module, residual index, side files, provenance, checksums."""

import importlib.resources
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpconv.forms.facts import ConvertedFacts
from lpconv.plan.plan import Plan
from lpconv.plan.policy import sensitive_kind
from lpconv.results import ConvertResult, FileRecord, ordered_json_text, to_json
from lpconv.storage.checkpoint import RESIDUAL_FOLDER, RESIDUAL_INDEX, Checkpoint, residual_index
from lpconv.storage.contents import ATTRIBUTES, QUANTIZATION_FILES
from lpconv.storage.header import TensorInfo
from lpconv.storage.partfile import write_small, writing
from lpconv.storage.place import sha256_of
from lpconv.storage.resolve import looks_like_path
from lpconv.storage.staging import MARKER, NOT_SUMMED, SUMS, read_marker

LOADER = "lpconv_loader.py"
CARD = "README.md"
SOURCE_CARD = "README.source.md"  # the card of the source, next to the output's own
INDEX = "model.safetensors.index.json"
_NAMED = ("embedding", "output head")  # modules that readers do not find by the class Linear
_NOT_OURS = {".git", ".cache", ATTRIBUTES}  # of version control and the hub; nothing there is loaded


def plain_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of a checkpoint's decoded model, without settings about how the weights are stored.

    Values that an lpconv conversion replaced are restored from its record.
    """
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    replaced = read_marker(checkpoint.directory).get("source_config")
    for key, value in replaced.items() if isinstance(replaced, dict) else ():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    if LOADER.removesuffix(".py") in str(config.get("auto_map", "")):
        del config["auto_map"]
    return _without_paths(config)


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """A config, and those inside it, without the local folder that its author loaded the model from."""
    kept = {k: v for k, v in config.items() if k != "_name_or_path" or not v or not looks_like_path(str(v))}
    return {k: _without_paths(v) if isinstance(v, dict) else v for k, v in kept.items()}


def output_config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """config.json of the output: the source's, plus the settings that readers of the form need.

    If only lpconv opens the codes, `auto_map` points to the loader module, unless the source has code of its own.
    """
    settings = {n: getattr(plan.options, n) for n in ("method", "format", "scale", "granularity")}
    formats = {t.name: t.format.name for t in plan.tensors if t.format is not None}
    ignored = _kept_modules(plan, formats)
    experts = () if plan.linears is None else plan.linears.experts
    made = ConvertedFacts(
        config=checkpoint.config,
        settings=settings,
        formats=formats,
        ignored=ignored,
        experts=experts,
        named=[t.module for t in plan.tensors if t.format is not None and sensitive_kind(t.info) in _NAMED],
        inputs=plan.options.rounds_inputs,
        kv_cache=plan.options.kv_cache is not None,
    )
    config = _without_paths(checkpoint.config) | plan.config_entries(made)
    if plan.form.quantised_by == "lpconv" and "auto_map" not in config and "model_type" in config:
        config["auto_map"] = {"AutoConfig": f"{LOADER.removesuffix('.py')}.Config"}
    return config


def _kept_modules(plan: Plan, formats: Mapping[str, str]) -> list[str]:
    """Names of the modules whose weights are not converted, as in the files.

    If the layout converts `Linear` modules only, the result also has their names in the model, and all other modules
    with a weight except embeddings: readers may build these as `Linear`, even if the transformers model lacks them.
    """
    kept = [t.info for t in plan.tensors if t.format is None and len(t.info.shape) > 1]
    if plan.linears is None:
        return [*dict.fromkeys(i.name.rpartition(".")[0] for i in kept if len(i.shape) > 2 or _is_weight(i))]
    modules = (i.name.rpartition(".")[0] for i in kept if _is_weight(i) or ".experts." in i.name)
    return [*dict.fromkeys([*plan.linears.unquantised(formats), *(m for m in modules if m not in plan.linears.tables)])]


def _is_weight(info: TensorInfo) -> bool:
    return info.name.endswith(".weight")


def replaced_config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """The values of the source's config.json that `output_config` replaces; None for keys that it adds."""
    config = output_config(checkpoint, plan)
    return {k: checkpoint.config.get(k) for k in config if config[k] != checkpoint.config.get(k)}


def write_metadata(directory: Path, checkpoint: Checkpoint, plan: Plan, files: Sequence[FileRecord]) -> None:
    """Write index, config, loader module and residual index. `files` are the weight files with their hashes."""
    config = output_config(checkpoint, plan)
    write_small(directory / "config.json", ordered_json_text(config))
    if LOADER.removesuffix(".py") in str(config.get("auto_map", "")):
        write_small(directory / LOADER, _loader_source(str(config["model_type"])))
    if len(plan.shards) > 1:
        stored = [(t, s.root.name) for s in plan.shards for t in s.root.tensors]
        index = weight_index({t.name: file for t, file in stored}, sum(t.num_bytes for t, _ in stored))
        write_small(directory / INDEX, ordered_json_text(index))
    hashes = {f.name: f.sha256 or "" for f in files}
    pairs = [(s.residual.name, s.root.name, hashes[s.root.name]) for s in plan.shards if s.residual is not None]
    if pairs:
        write_small(directory / RESIDUAL_INDEX, ordered_json_text(residual_index(str(plan.options.residual), pairs)))


def weight_index(files: Mapping[str, str], total_bytes: int) -> dict[str, Any]:
    """The index of a sharded checkpoint, from a table of tensor names to files."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}


def _loader_source(model_type: str) -> str:
    # Located from the top-level package: importing the module would import transformers (seconds).
    plugin = importlib.resources.files("lpconv").joinpath("models", "plugin.py").read_text(encoding="utf-8")
    return f'''{plugin}

register()


class Config:
    """What `auto_map` in config.json points to: it makes the stock config, now that the quantizer is known."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[{model_type!r}].from_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, *args: Any) -> None:
        """Nothing to register: saving must not take the stock config for code of this checkpoint."""
'''


def model_side_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The side files of a checkpoint that belong to the model: tokenizer and other accompanying files.

    Files that belong to the stored form (residual folder, loader module, checksums) are not copied to other forms; nor
    is the card, which describes one checkpoint.
    """
    of_the_form = {CARD, SUMS, LOADER, *QUANTIZATION_FILES}
    return tuple(n for n in checkpoint.side_files if n not in of_the_form and not n.startswith(RESIDUAL_FOLDER + "/"))


def copy_side_files(
    directory: Path,
    checkpoint: Checkpoint,
    names: Iterable[str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Copy side files (default: those of the model), some under another name. Returns the names in `directory`."""
    copied = []
    for name in model_side_files(checkpoint) if names is None else names:
        target = (renamed or {}).get(name, name)
        with writing(directory / target):
            (directory / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.directory / name, directory / target)
        copied.append(target)
    return tuple(copied)


# Fields of a result that do not change from run to run or place to place, in the order of lpconv.json.
_RECORDED = (
    "method", "format", "residual", "source", "architecture", "tensors", "files", "side_files", "bytes", "verify",
    "calibration", "options", "versions", "card", "warnings", "unit_shares",
)  # fmt: skip


def write_provenance(directory: Path, result: ConvertResult, checkpoint: Checkpoint, plan: Plan) -> None:
    """Write lpconv.json: everything about the output that does not depend on the run or the location."""
    document: Mapping[str, Any] = to_json(result)
    changed = replaced_config(checkpoint, plan)
    kept = {k: document[k] for k in _RECORDED if k in document}
    if result.calibration is None:
        del kept["calibration"]
    for name in ("attestation", "files", "warnings"):  # of `lpconv verify` only; a conversion has its own
        del kept["verify"][name]
    for tensor in kept["tensors"]:
        if tensor["rounding"] is None:
            del tensor["rounding"]
    write_small(directory / MARKER, ordered_json_text({"format_version": 1, **kept, "source_config": changed}))


def summed_files(directory: Path) -> dict[str, Path]:
    """Every file that SHA256SUMS must list, by name: all but the run's own reports. Links to folders count as files."""
    paths = {p.relative_to(directory): p for p in directory.rglob("*") if p.is_symlink() or not p.is_dir()}
    names = {n.as_posix(): p for n, p in paths.items() if n.parts[0] not in _NOT_OURS}
    return {n: p for n, p in names.items() if n not in NOT_SUMMED and not n.startswith("journal.")}


def write_sums(directory: Path, known: Iterable[FileRecord], renamed: Mapping[str, str] | None = None) -> None:
    """Write SHA256SUMS of all files except the run's own reports, using the hashes in `known` where available.

    Files that are about to be `renamed` are listed under their new names.
    """
    hashes = {f.name: f.sha256 for f in known}
    named = sorted(((renamed or {}).get(name, name), p) for name, p in summed_files(directory).items())
    write_small(directory / SUMS, "".join(f"{hashes.get(name) or sha256_of(p)}  {name}\n" for name, p in named))
