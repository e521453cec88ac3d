"""What a step lost is counted: EDQ, lost updates and the size of the low parts."""

import math

import pytest
import torch
from torch import nn

from lpconv.optim import LowPrecisionAdamW
from lpconv.optim.diagnostics import combine

pytestmark = pytest.mark.filterwarnings("ignore:variant:UserWarning")


def optimizer_after(steps: int, variant: str, every: int = 1, lr: float = 1e-5) -> LowPrecisionAdamW:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter((torch.randn(n, generator=generator) * 0.02).bfloat16()) for n in (5000, 100)]
    named = list(zip(("body", "head"), params, strict=True))
    optimizer = LowPrecisionAdamW(named, lr=lr, variant=variant, compiled=False, diagnostics_every=every)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()
    return optimizer


def test_plain_bf16_loses_most_updates_and_plus_none() -> None:
    plain = combine(optimizer_after(5, "bf16").records)
    plus = combine(optimizer_after(5, "plus").records)
    assert plain.lost_full > 0.5
    assert plain.lost_hi == plain.lost_full
    assert plain.edq_full < 0.8
    assert plus.lost_full < 0.01
    assert plus.lost_hi > 0.5, "hi alone moves rarely"
    assert plus.edq_full == pytest.approx(1, abs=0.01)


def test_fp32_master_loses_nothing() -> None:
    record = combine(optimizer_after(3, "fp32-master").records)
    assert record.lost_full == 0.0
    assert record.edq_full == pytest.approx(1, abs=1e-6)


def test_records_come_at_the_asked_steps_with_names() -> None:
    assert optimizer_after(3, "plus", every=2).records == []
    records = optimizer_after(4, "plus", every=2).records
    assert [(r.name, r.step) for r in records] == [("body", 4), ("head", 4)]
    assert all(r.num_meant <= n for r, n in zip(records, (5000, 100), strict=True))
    whole = combine(records)
    assert whole.num_meant == sum(r.num_meant for r in records)
    assert whole.intended_norm == pytest.approx(math.hypot(*(r.intended_norm for r in records)))


def test_measuring_changes_nothing_and_no_intended_change_is_no_loss() -> None:
    measured, plain = optimizer_after(5, "plus", every=1), optimizer_after(5, "plus", every=0)
    for a, b in zip(measured.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
    still = combine(optimizer_after(2, "plus", lr=0.0).records)
    assert (still.num_meant, still.lost_hi, still.lost_full) == (0, 0, 0)
