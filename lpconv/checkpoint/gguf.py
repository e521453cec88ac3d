"""A GGUF file seen as a checkpoint directory, and what its tensors are.

All that reads checkpoints reads such a directory: what the file's metadata says as config.json and tokenizer files, and
a link to the file. The config's ``quantization_config`` has where every tensor lies, under the name that transformers
gives it; nothing is copied. `gguf_view.py` finds the directory of a file in a cache, or has it made.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpconv.checkpoint.header import Header, TensorInfo, read_header
from lpconv.checkpoint.place import cache_folder

GGUF = "gguf"
WEIGHTS = "model.gguf"  # in a view, a link to the file
# The types that are read: numbers of a block along a row, and its bytes.
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip


def is_view(directory: Path) -> bool:
    """Whether a directory is one that `gguf_view.as_directory` made."""
    return directory.parent == cache_folder(GGUF)


def header_of(path: Path, config: Mapping[str, Any]) -> Header:
    """What one weight file of a checkpoint holds; of a GGUF file, as the config of its view has it.

    Raw blocks are U8, with the bytes of a row for its numbers; plain numbers that need no processing are what they are.
    """
    if path.name != WEIGHTS or not is_view(path.parent):
        return read_header(path)
    tensors = {}
    for name, t in config["quantization_config"]["tensors"].items():
        size, num_bytes = BLOCKS[t["type"]]
        is_plain = size == 1 and not t["processed"]
        *lead, cols = t["shape"] if is_plain else t["stored"]
        shape = (*lead, cols) if is_plain else (*lead, cols // size * num_bytes)
        tensors[name] = TensorInfo(
            name=name, dtype=t["type"] if is_plain else "U8", shape=shape, begin=t["begin"], end=t["end"]
        )
    return Header(tensors=tensors, metadata={}, data_start=0, file_size=path.stat().st_size)
