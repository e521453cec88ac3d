"""The dynamic loss scale beside PyTorch's own, and the floor that PyTorch's does not have."""

import random

import pytest
import torch
from torch import nn

from lpconv.errors import UsageError
from lpconv.loss_scale import Floor, LossScale, make_loss_scale, unscale_

RULES = [
    {},
    {"init_scale": 2.0**10, "growth_interval": 7},
    {"init_scale": 2.0**120, "growth_interval": 2},
    {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3},
]


def one_step(net: nn.Module, overflow: bool, scale: float) -> None:
    """Leave gradients of the scaled loss, Inf where the step is to overflow."""
    net.zero_grad()
    (net(torch.ones(1, 2)).sum() * scale).backward()
    if overflow:
        net.weight.grad[0, 0] = torch.inf


@pytest.mark.parametrize("options", RULES)
def test_the_schedule_is_that_of_grad_scaler(options: dict[str, float]) -> None:
    ours, net = make_loss_scale("dynamic", **options), nn.Linear(2, 2)
    theirs = torch.amp.GradScaler(device="cpu", **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    theirs.scale(torch.zeros(()))
    pattern = random.Random(0)

    for step in range(300):
        overflow = pattern.random() < 0.15
        assert ours.scale == theirs.get_scale(), step
        one_step(net, overflow, 1.0)
        theirs.step(optimizer)
        theirs.update()
        one_step(net, overflow, 1.0)
        actual = unscale_(net.parameters(), ours.scale)
        assert actual == overflow
        ours.update(actual)

    assert len(ours.history) > 20
    assert 20 < ours.num_skipped < 100


def test_default_growth_comes_at_the_step_of_grad_scaler() -> None:
    ours = make_loss_scale("dynamic")
    theirs = torch.amp.GradScaler(device="cpu")
    net = nn.Linear(2, 2)
    theirs.scale(torch.zeros(()))
    for _ in range(2001):
        net.weight.grad = torch.zeros(2, 2)
        theirs.step(torch.optim.SGD([net.weight], lr=0.0))
        theirs.update()
        ours.update(False)
        assert ours.scale == theirs.get_scale()
    assert list(ours.history) == [(0, 2.0**16), (2000, 2.0**17)]


def drive(scale: LossScale, overflows: int) -> float:
    for _ in range(overflows):
        scale.update(True)
    return scale.scale


def test_it_does_not_fall_to_zero_as_grad_scaler_does() -> None:
    scale = make_loss_scale("dynamic")
    assert drive(scale, 400) == 2.0**-126
    assert scale.num_skipped_in_a_row == 400
    for _ in range(2000):
        scale.update(False)
    assert scale.scale == 2.0**-125
    assert scale.num_skipped_in_a_row == 0


def test_the_floor_rises_by_its_schedule() -> None:
    scale = make_loss_scale("dynamic", init_scale=16.0, floor="0:4,10:64")
    assert drive(scale, 9) == 4
    assert drive(scale, 1) == 64
    assert drive(scale, 5) == 64
    assert list(scale.history) == [(0, 16.0), (1, 8.0), (2, 4.0), (10, 64.0)]


@pytest.mark.parametrize("written", ["0:1,40000:8192", {0: 1, 40000: 8192.0}])
def test_floors_as_people_write_them(written: object) -> None:
    floor = Floor.parse(written)
    assert [floor.at_step(step) for step in (0, 39_999, 40_000, 10**6)] == [1, 1, 8192, 8192]


def test_one_number_is_a_floor_from_the_start() -> None:
    assert Floor.parse("128").at_step(0) == Floor.parse(128).at_step(5) == 128
    assert Floor.parse("3:128").at_step(2) == Floor.parse(None).at_step(9) == 2.0**-126


@pytest.mark.parametrize("wrong", ["5:1,2:4", "a:b", "1:2:3", "", "0:0", "0:inf", "0:nan", "-1:2", "1:2,1:3", -1.0])
def test_wrong_floors_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError):
        Floor.parse(wrong)
