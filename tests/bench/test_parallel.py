"""Two processes train one model: gradients are averages, and a bench of torchrun's says what is whose."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lpconv.bench.models import (
    check_parallel,
    find_model,
    join,
    make_batch,
    max_over_processes,
    rows_of,
    step_loss,
    wrap_parallel,
)
from lpconv.bench.options import Case
from lpconv.bench.run import choose_model
from lpconv.errors import UnsupportedError
from lpconv.options import PARALLEL
from tests.helpers.checkpoints import cli_environment
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
SIZES = ("demo", "--layers", "1", "--batch", "1", "--seq", "16", "--min-iters", "4", "--min-time", "0", "--rounds", "2",
         "--launches", "1")  # fmt: skip


def case(**changes: object) -> Case:
    template, _ = choose_model("demo", 1, {"device": "cpu", "name": "CPU"})
    together = dataclasses.replace(template, batch=1, seq=16, mode="train", optimizer="adamw", processes=2)
    return dataclasses.replace(together, **changes)  # type: ignore[arg-type]  # the calls below are well typed


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """All gradients of the loss, in one vector."""
    step_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in found])


def two_ranks() -> list[tuple[dict[str, float], int]]:
    """Of each rank: errors of the gradients by kind, and the largest of numbers that differ between ranks."""
    rank = int(os.environ["RANK"])
    join(case(), rank, f"{Path.cwd()}/meeting")
    errors = {}
    for kind in PARALLEL:
        mine = case(parallel=kind, seed=rank)
        plan = find_model(mine)
        model, batch = plan.build("cpu").model, make_batch(mine, plan.config)
        average = gradients(model, batch)
        dist.all_reduce(average)
        average /= 2
        found = gradients(wrap_parallel(model, mine, batch), batch)
        errors[kind] = float((found - average).norm() / average.norm())
    rows = plan.build("cpu", rows_of(mine, plan)).model
    assert all(isinstance(p, DTensor) for p in rows.parameters())
    found = gradients(wrap_parallel(rows, mine, batch), batch)
    errors["rows"] = float((found - average).norm() / average.norm())
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, (errors, max_over_processes(3 + rank)))  # type: ignore[no-untyped-call]
    return of_ranks


def test_gradients_are_the_average_of_those_of_the_processes(tmp_path: Path) -> None:
    for errors, number in on_ranks(2, two_ranks, tmp_path, has_group=False):
        assert set(errors) == {*PARALLEL, "rows"}
        assert max(errors.values()) < 1e-5
        assert number == 4


def test_scaled_tensors_train_together_by_parts_only() -> None:
    with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
        check_parallel(case(format="fp8", method="scalify", parallel="ddp"))
    with pytest.raises(UnsupportedError, match="fp16"):
        check_parallel(case(format="fp16", method="scalify", parallel="fsdp2"))
    with pytest.raises(UnsupportedError, match="tested"):
        check_parallel(case(format="fp8", method="scalify", parallel="fsdp2", compiled="default"))
    check_parallel(case(format="fp8", method="scalify", parallel="fsdp2", compiled="off"))
    check_parallel(case(format="fp8", method="scalify", mode="infer"))


def test_what_is_drawn_or_calibrated_is_opened_whole() -> None:
    for changes in ({"model": "gpt2"}, {"format": "fp8", "method": "tensor"}, {"parallel": "ddp"}):
        mine = case(**{"parallel": "fsdp2", **changes})
        assert rows_of(mine, find_model(mine)) is None


def test_a_bench_under_torchrun(tmp_path: Path) -> None:
    saved = tmp_path / "bench.json"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lpconv", "bench", *SIZES]
    options = ["--format", "bf16", "--compile", "off", "--baseline", "bf16", "--mode", "train", "--parallel", "fsdp2"]
    command = [sys.executable, "-m", *launcher, *options, "-q", "--json", "--save", str(saved)]

    done = subprocess.run(command, env=cli_environment(), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]  # one document, though two processes ran
    assert (row["status"], row["processes"], row["parallel"]) == ("ok", 2, "fsdp2")
    assert row["tokens_per_s"] == pytest.approx(2 * 16 / row["timing"]["median_s"])
    one = find_model(case()).build_empty()
    whole = 2 * sum(p.numel() for p in one.parameters())
    assert row["memory"]["parts"]["weights"] == pytest.approx(whole / 2, rel=0.05)
    assert sum(row["memory"]["parts"].values()) == row["peak_memory"]
