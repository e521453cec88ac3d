"""Measure the memory that each rank needs to open a model for a sharded run, whole and by rows.

    torchrun --nproc-per-node 4 -m benchmarks.speed.opening_memory --out opening-memory-4.json

A Llama of 427 MB in fp32, stored in bf16, from its files to the optimizer of the first step, under four recipes; with
`--of bench`, as `lpconv bench --parallel fsdp2` opens it. Measured is the peak of resident memory (VmHWM) above the
start, which only Linux reports. "Whole" is a program that opens the full model and then shards it.
"""

import contextlib
import ctypes
import dataclasses
import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers

from benchmarks import common
from lpconv.bench import runner
from lpconv.bench.run import choose_model
from lpconv.models.opening import open_to_train
from lpconv.models.tasks import TASKS
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import prepare, shard
from lpconv.train.processes import mesh
from lpconv.train.recipes import arithmetic

_RECIPES = ("fp32", "collage-bf16", "unit-fp8", "unit-fp8-collage")
_FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"format": "fp32"}, "bf16": {"format": "bf16"}, "scalify fp8": {"format": "fp8", "method": "scalify"},
}  # fmt: skip
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h: memory of larger tensors is returned when they are freed
_CONFIG = transformers.LlamaConfig(
    vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=7, num_attention_heads=16,
    num_key_value_heads=16,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on all ranks, and write the record."""
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--of", choices=("finetune", "bench"), default="finetune")
    args = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)
    with tempfile.TemporaryDirectory() as own:
        folder = _of_first(Path(own))
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            transformers.LlamaForCausalLM(_CONFIG).to(torch.bfloat16).save_pretrained(folder)
        dist.barrier()
        names, peak = (_RECIPES, _peak) if args.of == "finetune" else (tuple(_FORMS), _bench_peak)
        peak(names[0], folder, by_rows=True)  # warm-up: loads modules
        rows = [_row(peak, name, folder) for name in names]
        dist.barrier()
    if dist.get_rank() == 0:
        with torch.device("meta"):
            size = 4 * sum(p.numel() for p in transformers.LlamaForCausalLM(_CONFIG).parameters())
        record = {
            "schema_version": 1,
            "kind": "opening_memory",
            "of": args.of,
            "ranks": dist.get_world_size(),
            "model_bytes": size,
            "rows": rows,
        }
        common.save(record, args.out)
    dist.barrier()
    os._exit(0)


def _row(peak: Callable[..., int], recipe: str, folder: Path) -> dict[str, Any]:
    """Bytes that each rank adds at its peak."""
    ways = {"by rows": peak(recipe, folder, by_rows=True), "whole": peak(recipe, folder, by_rows=False)}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, ways)
    return {"recipe": recipe} | {way: [rank[way] for rank in by_rank] for way in ways}


def _peak(recipe: str, folder: Path, *, by_rows: bool) -> int:
    before = _resident()
    options = FinetuneOptions(arithmetic=arithmetic(recipe=recipe), parallel="fsdp2")
    shared = mesh() if by_rows else None
    model = open_to_train(TASKS["clm"], folder, seed=0, mesh=shared).model
    prepared = prepare(model, options.arithmetic, options, seed=0)
    shard(prepared.model, options.arithmetic)
    optimizer = prepared.make_optimizer()  # some optimizers keep the fp32 start in low parts
    assert optimizer.param_groups
    return _status("VmHWM") - before


def _bench_peak(form: str, folder: Path, *, by_rows: bool) -> int:
    template, _ = choose_model("demo", 1, {"device": "cpu", "name": "CPU"})
    case = dataclasses.replace(
        template, model=str(folder), layers=None, batch=1, seq=16, mode="train", optimizer="adamw", compiled="off",
        parallel="fsdp2", processes=dist.get_world_size(), **_FORMS[form],
    )  # fmt: skip
    before = _resident()
    with contextlib.ExitStack() as changed:
        if not by_rows:
            changed.enter_context(mock.patch.object(runner, "rows_of", return_value=None))
        held = runner.CaseRunner(case, memory_share=1.0)
    assert held.num_parameters
    return _status("VmHWM") - before


def _resident() -> int:
    """Resident bytes now; also resets the peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(what: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return 1024 * int(line.split()[1])


def _of_first(folder: Path) -> Path:
    """Rank 0's folder, on all ranks."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    return folders[0]


if __name__ == "__main__":
    main()
