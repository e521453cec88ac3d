"""Measure what a sharded step needs on a rank, beside what `lpconv.train.plan` foretells.

    torchrun --nproc-per-node 2 -m benchmarks.fsdp_memory --case mistral --out mistral-2.json

A small model, for each of eight recipes: what is kept, counted by storage, and the most that the forward and
backward pass of the second step allocate beside it, by PyTorch's profiler. The optimizer's step is left out.

Ranks exchange in place, as NCCL does it: gloo's own collectives copy what they send, and its threads let go of the
copies when the machine has time for them, so that one and the same pass has other peaks. With these it is measured
too.
"""

import argparse
import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from lpconv.shards import local
from lpconv.train.memory import kept_bytes, largest_sum
from lpconv.train.options import FinetuneOptions
from lpconv.train.passes import passes_of
from lpconv.train.plan import recipe_memory
from lpconv.train.prepare import prepare
from lpconv.train.recipes import arithmetic
from lpconv.train.sharded import shard

_REPEATS = 3
_RECIPES = ("fp32", "amp-bf16", "bf16", "collage-bf16", "unit-fp16", "unit-fp8", "unit-fp8-collage", "scalify-fp8")


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A model, and the batch of each rank. Phi-3 and Gemma were not measured before the formulas were settled."""

    model: Any
    config: Any
    shape: tuple[int, int]


_CASES = {
    "llama": _Case(
        model=transformers.LlamaForCausalLM, shape=(4, 128),
        config=transformers.LlamaConfig(
            vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=256,
        ),
    ),
    "deep-tied-llama": _Case(
        model=transformers.LlamaForCausalLM, shape=(1, 192),
        config=transformers.LlamaConfig(
            vocab_size=2000, hidden_size=320, intermediate_size=1280, num_hidden_layers=14, num_attention_heads=5,
            num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True,
        ),
    ),
    "gpt2": _Case(
        model=transformers.GPT2LMHeadModel, shape=(2, 256),
        config=transformers.GPT2Config(vocab_size=8192, n_embd=256, n_layer=5, n_head=4, n_positions=256),
    ),
    "opt": _Case(
        model=transformers.OPTForCausalLM, shape=(3, 96),
        config=transformers.OPTConfig(
            vocab_size=3000, hidden_size=256, ffn_dim=1024, num_hidden_layers=6, num_attention_heads=4,
            word_embed_proj_dim=256, max_position_embeddings=256,
        ),
    ),
    "mistral": _Case(
        model=transformers.MistralForCausalLM, shape=(2, 160),
        config=transformers.MistralConfig(
            vocab_size=2500, hidden_size=288, intermediate_size=960, num_hidden_layers=8, num_attention_heads=6,
            num_key_value_heads=3, max_position_embeddings=256,
        ),
    ),
    "pythia": _Case(
        model=transformers.GPTNeoXForCausalLM, shape=(1, 256),
        config=transformers.GPTNeoXConfig(
            vocab_size=5000, hidden_size=320, intermediate_size=1280, num_hidden_layers=5, num_attention_heads=5,
            max_position_embeddings=256,
        ),
    ),
    "phi3": _Case(
        model=transformers.Phi3ForCausalLM, shape=(2, 128),
        config=transformers.Phi3Config(
            vocab_size=3500, hidden_size=320, intermediate_size=832, num_hidden_layers=7, num_attention_heads=5,
            num_key_value_heads=5, max_position_embeddings=256, pad_token_id=0,
        ),
    ),
    "gemma": _Case(
        model=transformers.GemmaForCausalLM, shape=(1, 224),
        config=transformers.GemmaConfig(
            vocab_size=6000, hidden_size=256, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=256,
        ),
    ),
    "wide-qwen2": _Case(
        model=transformers.Qwen2ForCausalLM, shape=(2, 64),
        config=transformers.Qwen2Config(
            vocab_size=1000, hidden_size=512, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False,
        ),
    ),
}  # fmt: skip


class _Gather:
    """Each rank's part, which lies in the output already, is sent to the others."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        for rank, part in enumerate(output_tensor.chunk(dist.get_world_size())):
            dist.broadcast(part, rank)


class _ReduceScatter:
    """The parts of the input, which is spent, are summed where they lie."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        parts = input_tensor.chunk(dist.get_world_size())
        for rank, part in enumerate(parts):
            dist.reduce(part, rank)
        output_tensor.copy_(parts[dist.get_rank()])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=_CASES, default="llama")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    case = _CASES[asked.case]
    rows = [_row(case, recipe) for recipe in _RECIPES]
    if dist.get_rank() == 0:
        record = {
            "schema_version": 1,
            "kind": "fsdp_memory",
            "case": asked.case,
            "ranks": dist.get_world_size(),
            "rows": rows,
        }
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    os._exit(0)


def _row(case: _Case, recipe: str) -> dict[str, Any]:
    options = FinetuneOptions(
        arithmetic=arithmetic(recipe=recipe), parallel="fsdp2" if dist.get_world_size() > 1 else "ddp"
    )
    with torch.device("meta"):
        empty = case.model(case.config)
    passes = passes_of(empty, options.arithmetic, case.shape)
    foretold = recipe_memory(empty, options.arithmetic, num_ranks=dist.get_world_size(), passes=passes)
    kept, peaks = _measured(case, options, in_place=True)
    _, of_gloo = _measured(case, options, in_place=False)
    most = min(peaks)
    return {
        "recipe": recipe,
        "foretold_bytes": foretold.total_bytes,
        "measured_bytes": kept + most,
        "measured_peaks_bytes": [kept + peak for peak in peaks],
        "measured_gloo_peaks_bytes": [kept + peak for peak in of_gloo],
        "foretold_kept_bytes": foretold.parts["weights"] + foretold.parts["optimizer"],
        "measured_kept_bytes": kept,
        "parts": foretold.parts,
        "error": foretold.total_bytes / (kept + most) - 1,
    }


def _measured(case: _Case, options: FinetuneOptions, *, in_place: bool) -> tuple[int, list[int]]:
    """Weights and optimizer state of this rank, and the most that two passes allocate, several times."""
    torch.manual_seed(0)
    model = case.model(copy.deepcopy(case.config))
    model.config.use_cache = False  # as where a model is opened to train
    prepared = prepare(model, options.arithmetic, options, seed=0)
    if dist.get_world_size() > 1:
        shard(prepared.model, options.arithmetic)
    for module in prepared.model.modules():
        if in_place and isinstance(module, FSDPModule):
            module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]  # torch's base class is private
            module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]  # as well
    optimizer = prepared.make_optimizer()
    ids = torch.randint(0, case.config.vocab_size, case.shape)

    def passes() -> None:
        with prepared.around_forward("cpu"):
            loss: Tensor = prepared.model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]

    passes()
    optimizer.step()
    optimizer.zero_grad()
    kept = kept_bytes([local(p) for p in prepared.model.parameters()], optimizer)
    peaks = []
    for _ in range(_REPEATS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            passes()
        prepared.model.zero_grad()
        peaks.append(largest_sum(seen))
    return kept, peaks


if __name__ == "__main__":
    main()
