"""Double-bf16 arithmetic keeps its bounds, scalars expand from fp64, pairs survive compilers."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from lpconv.mcf.expansion import EXACT_OPTIONS, add, expand_scalar, grow, mul
from lpconv.mcf.pairs import join, nearest_by_bits, nearest_by_cast, split, stochastic_by_bits
from lpconv.mcf.split import BF16
from tests.helpers.exact_compile import compile_keeps_roundings

U = 2.0**-8


def randn(count: int = 200_000, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.exp2(torch.randint(-20, 20, (count,), generator=generator))


def value(*parts: Tensor) -> Tensor:
    return torch.stack([p.double() for p in parts]).sum(0)


def test_grow_bound() -> None:
    x = BF16.split(randn())
    a = (x[0].float() * torch.rand(len(x[0]), generator=torch.Generator().manual_seed(1)) * 2 - x[0].float()).bfloat16()
    error = (value(*grow(x, a)) - value(*x, a)).abs()
    assert bool((error <= 3 * U**2 * x[0].double().abs()).all())
    assert float((error > 0).double().mean()) > 0.1, "the bound is of a rounding that happens"


def test_add_bound() -> None:
    x, y = BF16.split(randn()), BF16.split(randn(seed=1))
    error = (value(*add(x, y)) - value(*x, *y)).abs()
    assert bool((error <= 4 * U**2 * (value(*x).abs() + value(*y).abs())).all())


def test_mul_bound() -> None:
    x, y = BF16.split(randn()), BF16.split(randn(seed=1))
    exact = value(*x) * value(*y)
    assert float(((value(*mul(x, y)) - exact).abs() / exact.abs()).max()) <= 8 * U**2


def test_mul_leaves_its_operands_alone() -> None:
    """The aliasing error of the released code of the paper: v decays to a third of the true value."""
    v, dv = BF16.split(torch.full((100,), 1e-4))
    kept = v.clone(), dv.clone()
    hi, lo = expand_scalar(0.95)
    beta2, pair = (torch.full_like(v, hi), torch.full_like(v, lo)), (v, dv)
    for _ in range(50):
        pair = mul(pair, beta2)
        pair = grow(pair, torch.full_like(v, 0.05 * 1e-4))
    assert torch.equal(v, kept[0])
    assert torch.equal(dv, kept[1])
    assert value(*pair)[0].item() == pytest.approx(1e-4, rel=3e-3)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999, 1.0, 0.0])
def test_scalars_expand_from_fp64(beta: float) -> None:
    hi, lo = expand_scalar(beta)
    assert hi == float(ml_dtypes.bfloat16(beta))
    assert lo == float(ml_dtypes.bfloat16(np.float64(beta) - hi))
    assert abs(hi + lo - beta) <= 2.0**-17 * beta
    hi, lo = expand_scalar(beta, torch.float16)
    assert (hi, lo) == (float(np.float16(beta)), float(np.float16(beta - hi)))


def test_compiled_pairs_equal_eager() -> None:
    """The integer rounding survives the default compile, specials included."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, 1.00390625])
    x = torch.cat([randn(10_000), special])
    random = torch.randint(0, 2**16, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(1))

    def all_of(x: Tensor, random: Tensor) -> tuple[Tensor, ...]:
        return *split(x), stochastic_by_bits(x, random)

    expected = all_of(x, random)
    for actual, wanted in zip(torch.compile(all_of)(x, random), expected, strict=True):
        assert torch.equal(actual.nan_to_num(0.5), wanted.nan_to_num(0.5))
    assert torch.equal(expected[0].nan_to_num(0.5), x.bfloat16().nan_to_num(0.5))


@pytest.mark.skipif(not compile_keeps_roundings(), reason="this build of torch.compile cannot keep bf16 roundings")
def test_pairs_by_cast_survive_the_exact_compile_only() -> None:
    def by_cast(x: Tensor) -> tuple[Tensor, Tensor]:
        return split(x, nearest_by_cast)

    x = randn(10_000)
    for actual, wanted in zip(torch.compile(by_cast, options=EXACT_OPTIONS)(x), split(x), strict=True):
        assert torch.equal(actual, wanted)
    torch._dynamo.reset()
    assert float((torch.compile(by_cast)(x)[1] != 0).double().mean()) < 0.1


def test_pair_bound() -> None:
    x = (torch.arange(2**23, dtype=torch.int32) | (127 << 23)).view(torch.float32)
    assert float((x.double() - join(*split(x)).double()).abs().max()) <= 2.0**-17
    assert torch.equal(nearest_by_bits(x), x.bfloat16())


def test_stochastic_rounding_is_unbiased_and_keeps_bf16_numbers() -> None:
    x = torch.full((2**16,), 1 + 2.0**-7 * 0.3)
    rounded = stochastic_by_bits(x, torch.arange(2**16, dtype=torch.int32))
    assert set(rounded.tolist()) == {1.0, 1 + 2.0**-7}
    assert float(rounded.double().mean()) == pytest.approx(float(x[0]), abs=2.0**-23)
    exact = torch.tensor([1.5, -0.0, torch.inf, -torch.inf])
    assert torch.equal(stochastic_by_bits(exact, torch.full((4,), 0xFFFF, dtype=torch.int32)).float(), exact)
