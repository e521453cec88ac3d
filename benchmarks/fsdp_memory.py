"""Measure what a sharded step needs on a rank, beside what `lpconv.train.plan` foretells.

    torchrun --nproc-per-node 2 -m benchmarks.fsdp_memory --out benchmarks/results/fsdp-memory-2.json

A Llama of 12.6 million parameters, for each recipe: what is kept, counted by storage, and the most that the forward and
backward pass of the second step allocate beside it, by PyTorch's profiler. The optimizer's step is left out.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lpconv.shards import local
from lpconv.train.memory import kept_bytes, largest_sum
from lpconv.train.options import FinetuneOptions
from lpconv.train.plan import passes_of, recipe_memory
from lpconv.train.prepare import prepare
from lpconv.train.recipes import arithmetic
from lpconv.train.sharded import shard

_RECIPES = ("fp32", "collage-bf16", "bf16", "unit-fp16", "unit-fp8", "unit-fp8-collage", "scalify-fp8")
_SHAPE = (4, 128)
_CONFIG = transformers.LlamaConfig(
    vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    rows = [_row(recipe) for recipe in _RECIPES]
    if dist.get_rank() == 0:
        record = {"schema_version": 1, "kind": "fsdp_memory", "ranks": dist.get_world_size(), "rows": rows}
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    os._exit(0)


def _row(recipe: str) -> dict[str, Any]:
    options = FinetuneOptions(arithmetic=arithmetic(recipe=recipe), parallel="fsdp2")
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(_CONFIG)
    passes = passes_of(empty, recipe, _SHAPE)
    foretold = recipe_memory(empty, recipe, num_ranks=dist.get_world_size(), passes=passes)
    kept, most = _measured(options)
    return {
        "recipe": recipe,
        "foretold_bytes": foretold.total_bytes,
        "measured_bytes": kept + most,
        "foretold_kept_bytes": foretold.parts["weights"] + foretold.parts["optimizer"],
        "measured_kept_bytes": kept,
        "parts": foretold.parts,
        "error": foretold.total_bytes / (kept + most) - 1,
    }


def _measured(options: FinetuneOptions) -> tuple[int, int]:
    """Weights and optimizer state of this rank, and the most that two passes allocate."""
    torch.manual_seed(0)
    prepared = prepare(transformers.LlamaForCausalLM(_CONFIG), options.arithmetic, options, seed=0)
    shard(prepared.model, options.arithmetic)
    optimizer = prepared.make_optimizer()
    ids = torch.randint(0, _CONFIG.vocab_size, _SHAPE)

    def passes() -> None:
        loss: Tensor = prepared.model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]

    passes()
    optimizer.step()
    optimizer.zero_grad()
    kept = kept_bytes([local(p) for p in prepared.model.parameters()], optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        passes()
    return kept, largest_sum(seen)


if __name__ == "__main__":
    main()
