"""Contents of a checkpoint directory: weight files, index, config, and side files. Plain Python, no torch."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from lpconv.errors import InputError
from lpconv.gguf import GGUF, WEIGHTS
from lpconv.gguf.view import is_view
from lpconv.lookup import missing_directory
from lpconv.report.numbers import name_list
from lpconv.results import from_json
from lpconv.storage.place import read_small

T = TypeVar("T")
_INDEX_SUFFIX = ".index.json"
# Weights in the order in which transformers looks for them (`_get_resolved_checkpoint_files`, tested).
_PRECEDENCE = tuple(stem + end for stem in ("model.safetensors", "pytorch_model.bin") for end in ("", _INDEX_SUFFIX))
_LAYERS, _MOST_LAYERS = re.compile(r"layers?$"), 10_000  # transformers builds them one by one
# If one of these is null, transformers builds the class's default number of layers, with random weights.
_NUM_LAYERS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"}
_DTYPE = re.compile(r"b?float\d+\w*|u?int\d+|half|float|double")  # names of torch's dtypes
ADAPTER = "adapter_config.json"
PACKED = "packed.json"  # of a folder with packed weight files, or restored from one
WEIGHT_ENDINGS = "safetensors|h5|msgpack|onnx|gguf|ggml|pt|pth|ckpt|npz|ot|tflite|mlmodel"
# Weight files of any framework, and leftovers of training: never copied as side files.
_WEIGHT_FILE = re.compile(
    rf"""(?x) .*\.({WEIGHT_ENDINGS})(\.index\.json)?
    | (pytorch_model|flax_model|tf_model|adapter_model|training_args|optimizer|scheduler|rng_state|model) [^/]* \.bin
    | .*\.(bin|safetensors)\.index\.json """
)
# Those that another reader may take for the model's weights.
_RIVAL = re.compile(r".*\.(safetensors|gguf)|(.*/)?(pytorch_|adapter_)?model[^/]*\.bin")
# Files in which some tools store ``quantization_config`` instead of in config.json, and their methods.
QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
OURS = {"lpconv.json", "lpconv_loader.py", "journal.jsonl", "report.json", "report.html", "SHA256SUMS", PACKED}
ATTRIBUTES = ".gitattributes"  # a hidden file of every repository on the hub
_IGNORED_FOLDERS = {".git", ".cache", "__pycache__", ".ipynb_checkpoints"}


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config of a checkpoint directory. Raises InputError if it is missing or damaged."""
    if not directory.is_dir():
        raise missing_directory(directory, hint="pass a checkpoint directory or a hub id")
    path = directory / "config.json"
    if not path.exists():
        raise no_checkpoint_error(directory)
    check_inside(directory, path.name)
    config = _with_quantization(read_json(path), directory)
    check_config(config, path)
    if os.path.exists(directory / ADAPTER):
        raise InputError(
            f"`{directory}` has `{ADAPTER}` beside full weights: transformers applies the adapter if peft is installed",
            hint="merge the two with peft, or move the adapter's files away to use the weights without it",
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises InputError for anything else, and the errors of `read_small`."""
    try:
        document = json.loads(read_small(path).decode())
        json.dumps(document, ensure_ascii=False).encode()  # an escaped lone surrogate parses, but cannot be written
    except (ValueError, RecursionError) as e:
        raise InputError(f"`{path}` is not JSON: {e}", hint="download the file again") from e
    if not isinstance(document, dict):
        raise InputError(f"`{path}` is not a JSON object", hint="download the file again")
    return document


def read_result(cls: type[T], path: Path, *, hint: str) -> T:
    """The result of a run in a file. Raises InputError with `hint` for a file that holds anything else."""
    document, kind = read_json(path), str(vars(cls)["kind"])
    if document.get("kind") != kind:
        raise InputError(f"`{path}` is not a result of kind `{kind}`", hint=hint)
    return from_json(cls, document)


def _with_quantization(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The config with the `quantization_config` of its weights, which older tools wrote to a file of its own.

    A model that transformers decodes from a GGUF file keeps an entry without tensors, although its weights are plain.
    """
    settings = config.get("quantization_config")
    if isinstance(settings, dict) and settings.get("quant_method") == GGUF and "tensors" not in settings:
        return {k: v for k, v in config.items() if k != "quantization_config"}
    if settings is not None:
        return config
    for name, method in QUANTIZATION_FILES.items():
        if os.path.isfile(directory / name):
            check_inside(directory, name)
            document = read_json(directory / name)
            inner = document.get("quantization")
            settings = inner if isinstance(inner, dict) else document
            return {**config, "quantization_config": {"quant_method": method, **settings}}
    return config


def check_config(config: dict[str, Any], path: Path) -> None:
    """Check the keys of a config that lpconv reads: their types, and a plausible number of layers.

    Raises InputError if one is invalid.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise InputError(f"`{path}`: architectures is not a list of names", hint="download the file again")
    if not isinstance(config.get("model_type", ""), str):
        raise InputError(f"`{path}`: model_type is not a name", hint="download the file again")
    nested = [part for part in config.values() if isinstance(part, dict)]  # such as text_config
    for key, value in (item for part in (config, *nested) for item in part.items()):
        if key in ("dtype", "torch_dtype") and isinstance(value, str) and not _DTYPE.fullmatch(value):
            name = value.removeprefix("torch.") if value.startswith("torch.") else "bfloat16"
            raise InputError(
                f"`{path}`: {key} is `{value}`, which transformers cannot open",
                hint=f"write the name of a dtype of torch, such as `{name}`",
            )
        if key in _NUM_LAYERS and value is None:
            raise InputError(f"`{path}`: {key} is null", hint="set it to the number of layers")
        if _LAYERS.search(key) and isinstance(value, int) and value > _MOST_LAYERS:
            raise InputError(f"`{path}`: {key} is more than {_MOST_LAYERS}", hint="download the file again")


def no_checkpoint_error(directory: Path) -> InputError:
    """Error for a directory without config.json; says what it holds instead, if that is known."""
    if (directory / ADAPTER).is_file():
        base = read_json(directory / ADAPTER).get("base_model_name_or_path")
        return InputError(
            f"`{directory}` contains a PEFT adapter for `{base}`, not a model",
            hint="merge the two with peft, and pass `merged`:\n"
            f"  model = peft.AutoPeftModelForCausalLM.from_pretrained({str(directory)!r})\n"
            "  model.merge_and_unload().save_pretrained('merged')\n"
            f"  transformers.AutoTokenizer.from_pretrained({base!r}).save_pretrained('merged')",
        )
    folders = sorted(p.parent for p in directory.glob("*/config.json"))
    inner = [f.name for f in folders if any(map(_WEIGHT_FILE.fullmatch, os.listdir(f)))]
    if inner:
        hint = "pass one of its subdirectories: " + name_list(inner)
    else:
        hint = "pass a Hugging Face checkpoint directory"
    return InputError(f"`{directory}` has no config.json", hint=hint)


def find_weights(directory: Path, config: Mapping[str, Any]) -> tuple[str, tuple[str, ...], dict[str, str] | None]:
    """The kind of the weights in a directory, their files in index order, and the index's table or None.

    The files are those that transformers reads: the ones that the config names, else a single file before an index, and
    safetensors before `pytorch_model.bin`. Only lpconv also reads a lone safetensors file of any other name. Raises
    InputError if there are no weights, if the index is damaged, and for links that lead out of the directory.
    """
    kind, files, weight_map = _weights(directory, config)
    for name in files if kind != GGUF else ():  # a view links to its file
        check_inside(directory, name)
    return kind, files, weight_map


def _weights(directory: Path, config: Mapping[str, Any]) -> tuple[str, tuple[str, ...], dict[str, str] | None]:
    named = config.get("transformers_weights")
    if is_view(directory, config):
        return GGUF, (WEIGHTS,), None
    for name in _PRECEDENCE if named is None else (str(named),):
        kind = "torch" if name.startswith("pytorch_model") else "safetensors"
        if not is_plain(name) or not (directory / name).exists():
            continue
        if not name.endswith(_INDEX_SUFFIX):
            return kind, (name,), None
        check_inside(directory, name)
        weight_map = _weight_map(directory / name)
        files = tuple(sorted(set(weight_map.values())))
        missing = [f for f in files if not (directory / f).exists()]
        if missing:
            raise InputError(
                f"`{directory / name}` names missing files, {len(missing)} in all; the first is `{missing[0]}`",
                hint="download the missing files, or delete the index if it is stale",
                details={"missing": missing},
            )
        return kind, files, weight_map
    loose = sorted(p.name for p in directory.glob("*.safetensors"))
    if len(loose) == 1 and named is None:
        return "safetensors", (loose[0],), None
    what = "no weights that lpconv reads" if not loose else f"{len(loose)} safetensors files and no index"
    raise InputError(
        f"`{directory}` has {what}" if named is None else f"`{directory}` has no `{named}`, which config.json names",
        hint="lpconv reads model.safetensors, pytorch_model.bin and their sharded forms with an index",
    )


def find_ignored(directory: Path, read: Collection[str]) -> tuple[str, ...]:
    """Files with weights that are not among those `read` here, such as a second checkpoint or one for another tool."""
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    is_weights = (n for n in names if _WEIGHT_FILE.fullmatch(n) and not n.endswith(_INDEX_SUFFIX) and n not in read)
    return tuple(sorted(n for n in is_weights if _IGNORED_FOLDERS.isdisjoint(n.split("/")[:-1])))


def is_rival(name: str) -> bool:
    """Whether another reader may take a file of `find_ignored` for the model's weights."""
    return _RIVAL.fullmatch(name) is not None


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"`{index}` has no weight_map", hint="download the index again, or delete it")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not is_plain(file):
            raise InputError(
                f"`{index}` puts tensor `{tensor}` into {file!r}, which is not a file of this directory",
                hint="do not trust checkpoints from this source",
            )
    return weight_map


def is_plain(name: str) -> bool:
    """Whether a name is a relative path that stays below its directory."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def check_inside(directory: Path, name: str) -> None:
    """Raise InputError for a name that is not a regular file, or that leads out of `directory`.

    The Hugging Face cache is an exception: its snapshots link to its blobs.
    """
    target = Path(os.path.realpath(directory / name))  # Path.resolve raises RuntimeError for a link to itself
    root = directory.resolve()
    blobs = root.parent.parent / "blobs"
    inside_cache = root.parent.name == "snapshots" and target.is_relative_to(blobs)
    if not target.is_relative_to(root) and not inside_cache:
        raise InputError(
            f"`{directory / name}` points outside the checkpoint", hint="if you trust it, replace the link by the file"
        )
    if not target.is_file():
        raise InputError(f"`{directory / name}` is not a regular file", hint="delete it or download it again")


def find_side_files(directory: Path, weight_files: Collection[str]) -> tuple[str, ...]:
    """All files except weights and config, sorted. Raises InputError for names that cannot be copied."""
    names = tuple(sorted(_side_files(directory, set(weight_files))))
    for name in names:
        if not name.isprintable():  # SHA256SUMS holds no line breaks, and only UTF-8
            raise InputError(f"file name {name!r} in `{directory}` has unprintable characters", hint="rename the file")
        check_inside(directory, name)
    return names


def hidden_files(directory: Path) -> list[str]:
    """Names of hidden files and folders. They are never copied, because they may hold credentials."""
    return sorted({p.name for p in directory.rglob(".*") if p.name not in {*_IGNORED_FOLDERS, ATTRIBUTES}})


def _side_files(directory: Path, weights: set[str]) -> Iterator[str]:
    modules = set(_modules(directory))
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if name in weights or name in OURS or name == "config.json":
            continue
        if _WEIGHT_FILE.fullmatch(name) and path.parent not in modules:
            continue
        parts = path.relative_to(directory).parts
        if _IGNORED_FOLDERS.isdisjoint(parts[:-1]) and not any(p[0] == "." and p != ATTRIBUTES for p in parts):
            yield name


def _modules(directory: Path) -> Iterator[Path]:
    """Folders of modules that sentence-transformers runs after the model; their weights are side files."""
    path = directory / "modules.json"
    if not path.is_file():
        return
    try:
        modules = json.loads(read_small(path))
    except (InputError, ValueError, RecursionError):  # another program's file, which is copied unchanged
        return
    for module in modules if isinstance(modules, list) else ():
        name = module.get("path") if isinstance(module, dict) else None
        if isinstance(name, str) and is_plain(name):
            yield directory / name
