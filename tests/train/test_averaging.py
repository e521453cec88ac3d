"""Gradients that are averaged while the backward pass runs have the bits of those that are averaged after it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpconv.scaled import ScaledTensor, scaled
from lpconv.train import processes
from lpconv.train.processes import GradientAverage
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


class Layers(nn.Module):
    """Four products, one weight of them used twice, and a branch that is not always taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last, self.branch = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, *, branches: bool) -> Tensor:
        x = self.middle(self.middle(self.first(x)).relu())
        return self.last(x + self.branch(x) if branches else x)


def model_of(kind: str) -> nn.Module:
    model = Layers()
    return model.bfloat16() if kind == "bf16" else scaled(model, method=kind, compute="fp8")


def averaged_both_ways(kind: str) -> dict[str, Any]:
    """Of four steps: whether gradients are equal, and how many buckets were sent off inside the backward pass."""
    processes._BUCKET = 70  # a weight and a bias
    after, inside = model_of(kind), model_of(kind)
    average, afterwards = GradientAverage(inside.parameters()), GradientAverage(after.parameters())
    equal, begun = [], []
    for step, branches in enumerate((True, True, False, True)):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 8, generator=generator, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        x = x * 4.0 ** (dist.get_rank() * step)  # so that scales that follow the data differ
        for model in (after, inside):
            model.zero_grad()
        after(x, branches=branches).square().sum().backward()
        afterwards.finish(after.parameters())
        with average.backward():
            inside(x, branches=branches).square().sum().backward()
        begun.append(average.num_begun)
        average.finish(inside.parameters())
        equal.append(all(same(p.grad, q.grad) for p, q in zip(after.parameters(), inside.parameters(), strict=True)))
    return {"equal": equal, "begun": begun}


def same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, ScaledTensor):
        return torch.equal(a.data_part, b.data_part) and float(a.scale) == float(b.scale)
    return torch.equal(a, b)


@pytest.mark.parametrize(("kind", "ranks"), [("bf16", 2), ("unit", 2), ("scalify", 3)])
def test_the_bits_are_those_of_an_average_after_the_backward_pass(kind: str, ranks: int, tmp_path: Path) -> None:
    found = on_ranks(ranks, averaged_both_ways, tmp_path, kind)
    assert found["equal"] == [True] * 4
    # The branch has no gradient in the third step: its bucket, the first, is waited for then, and left out afterwards.
    assert found["begun"] == [4, 4, 0, 4]


def begun_outside() -> list[int]:
    """Of a backward pass that is not the step's own, as the search for a value that is not finite makes one."""
    model = model_of("bf16")
    average = GradientAverage(model.parameters())
    if dist.get_rank() == 0:
        model(torch.ones(1, 8, dtype=torch.bfloat16), branches=True).sum().backward()
    return [average.num_begun]


def test_other_backward_passes_are_let_alone(tmp_path: Path) -> None:
    assert on_ranks(2, begun_outside, tmp_path) == [0]
