"""Make the checkpoint directory that represents a GGUF file (see `lpconv.storage.gguf`).

Names, config, tokenizer and the rearrangement of tensors come from transformers' own GGUF functions, so every file that
transformers opens with ``gguf_file=`` opens here, with the same values.
"""

import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from lpconv.errors import InputError, UnsupportedError, first_line
from lpconv.models.quiet import quiet_transformers
from lpconv.storage.gguf import BLOCKS, GGUF, WEIGHTS
from lpconv.storage.partfile import write_error

_KNOWN = "lpconv reads the architectures that transformers opens from GGUF, except mixtures of experts"


def make_view(file: Path, view: Path) -> None:
    """Make the directory `view` for a GGUF file; raises as documented at `as_directory`."""
    reader = _read(file)
    with _as_error(f"transformers cannot open `{file.name}`"):
        parsed = load_gguf_checkpoint(str(file))["config"]
        config = transformers.CONFIG_MAPPING[parsed["model_type"]].from_dict(dict(parsed))
        with torch.device("meta"):
            model = _model_class(config)(config)
    architecture = reader.get_field("general.architecture").contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=parsed)
    names = get_gguf_hf_weights_map(model, processor)
    shapes = {n: list(x.shape) for n, x in model.state_dict().items()}
    read = [t for t in reader.tensors if t.name in names]  # others are llama.cpp's own
    tensors = {names[t.name]: _entry(t, shapes[names[t.name]], processor, file) for t in read}
    _check_complete(tensors, model, file)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    settings = {"quant_method": GGUF, "architecture": architecture, "settings": parsed, "tensors": tensors}
    try:
        view.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=view.parent))
        try:
            _write(folder, file, config, settings)
            os.replace(folder, view)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as e:
        if not (view / "config.json").exists():  # otherwise another process was faster
            raise write_error(e, view) from e


def _read(file: Path) -> Any:
    """Read the tables of a GGUF file. Raises InputError if it is damaged, UnsupportedError for unknown types."""
    from gguf import GGUFReader  # needs the gguf extra

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about overflows in damaged files
            reader = GGUFReader(file)
        unknown = sorted({t.tensor_type.name for t in reader.tensors} - BLOCKS.keys())
        named = reader.get_field("general.architecture")
        is_named = named is not None and isinstance(named.contents(), str)
    except Exception as e:  # a damaged file raises ValueError, IndexError, OverflowError, KeyError and others
        what = f"`{file}` is not a valid GGUF file: {first_line(e):.120}"
        raise InputError(what, hint="download the file again") from e
    if not is_named:
        raise InputError(f"`{file}` does not name its architecture", hint="download the file again")
    if reader.byte_order != "I":
        raise UnsupportedError(
            f"`{file}` has the other byte order", hint="convert it with gguf's script gguf_convert_endian.py"
        )
    if unknown:
        raise UnsupportedError(
            f"`{file}` has tensors of unknown type {', '.join(unknown)}", hint="lpconv reads " + ", ".join(BLOCKS)
        )
    return reader


@contextmanager
def _as_error(what: str) -> Iterator[None]:
    try:
        with quiet_transformers():
            yield
    except Exception as e:  # transformers raises arbitrary exceptions for unexpected metadata
        raise UnsupportedError(f"{what}: {first_line(e):.160}", hint=_KNOWN) from e


def _model_class(config: Any) -> Any:
    named = next(iter(config.architectures or ()), None)
    return getattr(transformers, named) if named else transformers.AutoModelForCausalLM.from_config


def _entry(t: Any, shape: list[int], processor: Any, file: Path) -> dict[str, Any]:
    """Position, type and shape of a tensor in the file, and whether its values are processed after decoding."""
    stored = [int(n) for n in reversed(t.shape)]
    size, num_bytes = BLOCKS[t.tensor_type.name]
    count = math.prod(stored)
    end = int(t.data_offset) + count // size * num_bytes
    if len(stored) > 2:
        raise UnsupportedError(f"`{t.name}` contains several matrices, like a layer of experts", hint=_KNOWN)
    if count != math.prod(shape) or stored[-1] % size or end > file.stat().st_size:
        raise InputError(
            f"`{t.name}` has shape {stored}, but the model's weight has {shape}", hint="download the file again"
        )
    return {
        "name": t.name, "type": t.tensor_type.name, "stored": stored, "shape": shape,
        "processed": _is_processed(processor, t.name),
        "begin": int(t.data_offset), "end": end,
    }  # fmt: skip


def _is_processed(processor: Any, name: str) -> bool:
    """Whether transformers changes the values of a tensor: the processor returns something else, or fails."""
    unseen = object()  # in place of the values
    try:
        return processor.process(weights=unseen, name=name).weights is not unseen
    except Exception:  # the processor tried to use the values
        return True


def _check_complete(tensors: dict[str, Any], model: Any, file: Path) -> None:
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}
    missing = [n for n in model.state_dict() if n not in tensors and n not in tied]
    if missing:
        raise UnsupportedError(
            f"`{file}` has no tensor for the weight that transformers calls `{missing[0]}`", hint=_KNOWN
        )


def _write(folder: Path, file: Path, config: Any, settings: dict[str, Any]) -> None:
    config.save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    document["quantization_config"] = settings
    text = json.dumps(document, default=lambda x: x.tolist())
    (folder / "config.json").write_text(text, encoding="utf-8")
    (folder / WEIGHTS).symlink_to(file)
    try:
        with _as_error("the tokenizer cannot be opened"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
            tokenizer.save_pretrained(folder)
    except UnsupportedError:  # models without a tokenizer are valid
        pass
