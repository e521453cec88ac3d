"""HALP and its rivals: convergence on least squares, the grid of each, bad input."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.optim import HALP, LPSGD, LPSVRG

DTYPES = [torch.float64, torch.float32]


class LeastSquares:
    """½·mean((a·w - b)²) of 64 rows and 6 columns, with its optimum."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.a = torch.randn(64, 6, dtype=dtype, generator=generator)
        self.b = self.a @ torch.randn(6, dtype=dtype, generator=generator) + torch.randn(
            64, dtype=dtype, generator=generator
        )
        self.best = torch.linalg.lstsq(self.a, self.b[:, None]).solution[:, 0]
        self.w = torch.zeros(6, dtype=dtype, requires_grad=True)
        self.draw = torch.Generator().manual_seed(4)

    def gradient(self, rows: Tensor) -> float:
        residual = self.a[rows] @ self.w.detach() - self.b[rows]
        self.w.grad = self.a[rows].T @ residual / len(rows)
        return float(residual.square().mean() / 2)

    def full(self) -> float:
        return self.gradient(torch.arange(64))

    def batch(self) -> Callable[[], float]:
        rows = torch.randint(0, 64, (4,), generator=self.draw)
        return lambda: self.gradient(rows)

    @property
    def distance(self) -> float:
        return float((self.w.detach() - self.best).norm())


def run(problem: LeastSquares, optimizer: LPSGD, epochs: int = 10, steps: int = 100) -> float:
    for _ in range(epochs):
        if isinstance(optimizer, LPSVRG):
            optimizer.recentre(problem.full)
        for _ in range(steps):
            optimizer.step(problem.batch())
    return problem.distance


def test_halp_passes_the_floor_of_its_bits_and_the_others_do_not() -> None:
    sgd, svrg, halp = LeastSquares(), LeastSquares(), LeastSquares()
    spacing = 1.25 * float(sgd.best.abs().max()) / 127
    floor_sgd = run(sgd, LPSGD([sgd.w], lr=0.05, spacing=spacing))
    floor_svrg = run(svrg, LPSVRG([svrg.w], lr=0.05, spacing=spacing))
    assert run(halp, HALP([halp.w], lr=0.05, mu=0.3)) < 1e-5 < 1e-3 < floor_svrg < floor_sgd


@pytest.mark.parametrize("dtype", DTYPES)
def test_halp_keeps_an_offset_of_whole_numbers_that_shrinks_with_the_gradient(dtype: torch.dtype) -> None:
    problem = LeastSquares(dtype)
    optimizer = HALP([problem.w], lr=0.05, mu=0.3, bits=8)
    norms, spacings = [], []
    for _ in range(3):
        norms.append(optimizer.recentre(problem.full))
        spacings.append(optimizer.spacing)
        for _ in range(50):
            optimizer.step(problem.batch())
        offset = optimizer.state[problem.w]["offset"] / optimizer.spacing
        torch.testing.assert_close(offset, offset.round(), rtol=0, atol=1e-4)
        assert float(offset.abs().max()) <= 127
    assert problem.w.dtype == dtype
    assert spacings == [pytest.approx(n / (0.3 * 127)) for n in norms]
    assert norms[2] < norms[1] < norms[0]


def test_rivals_stay_on_their_grid() -> None:
    for kind in (LPSGD, LPSVRG):
        problem = LeastSquares()
        optimizer = kind([problem.w], lr=0.05, spacing=1 / 64, bits=4)
        run(problem, optimizer, epochs=1, steps=5)
        steps = problem.w.detach() * 64
        assert torch.equal(steps, steps.round())
        assert float(steps.abs().max()) <= 7


def test_a_gradient_of_zero_leaves_the_optimum_alone() -> None:
    problem = LeastSquares()
    problem.b = torch.zeros(64, dtype=torch.float64)  # the optimum is where it starts
    optimizer = HALP([problem.w], lr=0.05, mu=0.3)
    assert optimizer.recentre(problem.full) == optimizer.spacing == 0
    optimizer.step(problem.batch())
    assert not problem.w.any()


def test_the_same_seed_gives_the_same_weights() -> None:
    ends = []
    for _ in range(2):
        problem = LeastSquares()
        run(problem, HALP([problem.w], lr=0.05, mu=0.3, seed=1), epochs=1, steps=20)
        ends.append(problem.w.detach().clone())
    assert torch.equal(*ends)


def test_a_resumed_optimizer_continues_bit_for_bit() -> None:
    problem, resumed = LeastSquares(), LeastSquares()
    optimizer = HALP([problem.w], lr=0.05, mu=0.3)
    run(problem, optimizer, epochs=1, steps=5)
    other = HALP([resumed.w], lr=0.05, mu=0.3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.w.detach().copy_(problem.w.detach())
    resumed.draw.set_state(problem.draw.get_state())
    for _ in range(5):
        optimizer.step(problem.batch())
        other.step(resumed.batch())
    assert torch.equal(problem.w, resumed.w)


def test_bad_input() -> None:
    w = torch.zeros(1, requires_grad=True)
    with pytest.raises(UsageError, match=" 1 bits"):
        LPSGD([w], lr=0.1, spacing=0.1, bits=1)
    with pytest.raises(UsageError, match="lr=0"):
        LPSGD([w], lr=0, spacing=0.1)
    with pytest.raises(UsageError, match="mu=nan"):
        HALP([w], lr=0.1, mu=math.nan)
    with pytest.raises(UsageError, match="centre"):
        HALP([w], lr=0.1, mu=1.0).step(lambda: 0.0)
