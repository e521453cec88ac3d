"""Llama-shaped checkpoints of a given size with random weights, for timing.

    python -m benchmarks.speed.synthetic DIRECTORY --size 2GB --dtype float32

Names, shapes and config.json are those of a `LlamaForCausalLM`, so transformers opens the result. Weights are normal
with standard deviation 0.02, a common initialisation, and only depend on the arguments. Embedding and head are always
there, so the smallest checkpoint has about 16 M parameters.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import common
from lpconv.options import parse_size

_VOCABULARY, _HEAD_DIM, _ROUND = 32000, 128, 256
_ASPECT = 100  # width over depth, as in most models of 1 to 7 G parameters
_SHARD_BYTES = 10**9
_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The sizes that determine the shapes of a Llama's tensors."""

    width: int
    mlp_width: int
    num_layers: int

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names, without the prefix of the layer, and shapes of one layer's tensors."""
        square, up = (self.width, self.width), (self.mlp_width, self.width)
        return {
            "input_layernorm.weight": (self.width,),
            "mlp.down_proj.weight": (self.width, self.mlp_width),
            "mlp.gate_proj.weight": up,
            "mlp.up_proj.weight": up,
            "post_attention_layernorm.weight": (self.width,),
            **{f"self_attn.{p}_proj.weight": square for p in "kqvo"},
        }

    @property
    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in the order of the model."""
        yield "model.embed_tokens.weight", (_VOCABULARY, self.width)
        for i in range(self.num_layers):
            for name, shape in self.layer_shapes.items():
                yield f"model.layers.{i}.{name}", shape
        yield "model.norm.weight", (self.width,)
        yield "lm_head.weight", (_VOCABULARY, self.width)

    def config(self, dtype: torch.dtype) -> dict[str, object]:
        """config.json of the model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.width // _HEAD_DIM,
            "num_key_value_heads": self.width // _HEAD_DIM,
            "vocab_size": _VOCABULARY,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "dtype": str(dtype).removeprefix("torch."),
        }


def shape_for(num_parameters: int) -> LlamaShape:
    """The shape with the nearest number of parameters; a layer has about 12 width² of them."""
    width = max(_ROUND, _rounded((num_parameters * _ASPECT / 12) ** (1 / 3)))
    mlp_width = _rounded(width * 8 / 3)
    per_layer = 4 * width**2 + 3 * width * mlp_width + 2 * width
    num_layers = max(1, round((num_parameters - 2 * _VOCABULARY * width) / per_layer))
    return LlamaShape(width=width, mlp_width=mlp_width, num_layers=num_layers)


def make_checkpoint(directory: Path, size_bytes: int, dtype: torch.dtype) -> None:
    """Write a sharded checkpoint of about `size_bytes`; `directory` appears when it is complete."""
    shape = shape_for(size_bytes // dtype.itemsize)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards = list(_shards(shape, dtype))
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file({n: _weight(s, dtype, generator) for n, s in names.items()}, partial / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (partial / "config.json").write_text(json.dumps(shape.config(dtype), indent=2))
    (partial / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    partial.rename(directory)


def _rounded(width: float) -> int:
    return round(width / _ROUND) * _ROUND


def _shards(shape: LlamaShape, dtype: torch.dtype) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    used = 0
    for name, dims in shape.tensors:
        size = torch.Size(dims).numel() * dtype.itemsize
        if shard and used + size > _SHARD_BYTES:
            yield shard
            shard, used = {}, 0
        shard[name] = dims
        used += size
    yield shard


def _weight(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:  # norms
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(std=_STD, generator=generator)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=parse_size, default=parse_size("2GB"))
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    args = parser.parse_args()
    make_checkpoint(args.directory, args.size, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
