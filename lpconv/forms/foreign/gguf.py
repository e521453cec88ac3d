"""GGUF of llama.cpp: rows of blocks that contain scales and codes, decoded by the package gguf.

`lpconv.storage.gguf` defines positions and names of tensors. Changes that transformers makes to some values (undo
llama.cpp's row order of q and k, subtract 1 from norms) are made by its own processors, on the whole tensor. Sources:
ggml-org/ggml, docs/gguf.md; transformers 5.23, `modeling_gguf_pytorch_utils.py`.
"""

from __future__ import annotations  # tensors are named below and not imported

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lpconv.errors import InputError, typed_line
from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.form import Side, Stored
from lpconv.gguf import BLOCKS
from lpconv.storage.arranged import TRANSPOSED, arranged
from lpconv.storage.gguf import is_entry
from lpconv.storage.header import DTYPE_BITS

if TYPE_CHECKING:
    from torch import Tensor


_FORMATS = {
    "F32": "fp32",
    "F16": "fp16",
    "BF16": "bf16",
    "Q4_0": "int4",
    "Q4_1": "int4",
    "Q4_K": "int4",
    "MXFP4": "e2m1",
}


@dataclass(frozen=True, kw_only=True)
class Blocks(Stored):
    """Rows of blocks of type `kind`, called `original` in the file, with elements in an `order` that lpconv chose.

    `processed_by` is the architecture whose processor changes decoded values, with its settings as JSON; None without
    one.
    """

    kind: str
    original: str
    rows: int
    codes: Component
    processed_by: tuple[str, str] | None = None
    order: str = ""

    @property
    def words(self) -> str:
        return f"{self.kind} of GGUF"

    @property
    def is_coded(self) -> bool:
        return self.kind not in DTYPE_BITS  # GGUF's F32, F16 and BF16 equal those of safetensors

    @property
    def components(self) -> tuple[Component, ...]:
        return (self.codes,)

    @property
    def agrees(self) -> bool:
        """Whether the stored bytes match the shape."""
        size, num_bytes = BLOCKS[self.kind]
        return self.codes.dtype == "U8" and self.codes.num_bytes * size == self.num_elements * num_bytes

    @property
    def cols(self) -> int:
        return self.num_elements // (1 if self.processed_by or self.order else self.rows)

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        size, num_bytes = BLOCKS[self.kind]
        return start // size * num_bytes, stop // size * num_bytes

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        import torch
        from gguf import GGMLQuantizationType, dequantize

        raw = data[0].numpy().reshape(-1, self.codes.shape[-1])
        values = dequantize(raw, GGMLQuantizationType[self.kind])
        if self.processed_by is not None:
            stored = values if len(self.codes.shape) > 1 else values.reshape(-1)
            try:
                processor = _processor(*self.processed_by)
                made = processor.process(weights=stored, name=self.original, parsed_parameters={"tensors": {}})
            except Exception as e:  # its settings come from the file
                what = f"the settings in config.json do not fit `{self.original}`: {typed_line(e)}"
                raise InputError(what, hint="download the checkpoint again") from e
            values = made.weights
        numbers = torch.tensor(values, dtype=torch.float32)
        if self.order:
            shape = self.shape[::-1] if self.order == TRANSPOSED else self.shape
            numbers = arranged(numbers.view(shape), self.order, back=True)
        return numbers.reshape(-1)


@lru_cache(maxsize=4)
def _processor(architecture: str, settings: str) -> Any:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

    return TENSOR_PROCESSORS[architecture](config=json.loads(settings))


def find_gguf(name: str, headers: Headers) -> Blocks | None:
    """The weight whose blocks are `name`."""
    codes, table = headers.component(name), headers.quantization.get("tensors")
    t = table.get(name) if isinstance(table, dict) else None
    if codes is None or codes.dtype != "U8" or not is_entry(t):
        return None
    settings = json.dumps(headers.quantization.get("settings"))
    return Blocks(
        name=name,
        shape=tuple(t["shape"]),
        format=FORMATS[_FORMATS.get(t["type"], "int8")],
        kind=t["type"],
        original=t["name"],
        rows=math.prod(t["stored"][:-1]),
        codes=codes,
        processed_by=(str(headers.quantization.get("architecture")), settings) if t["processed"] else None,
        order=t.get("order", ""),
    )
