"""Error-free transforms are exact in bf16 and fp16, eager and compiled; the default compile is not, and is noticed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.mcf.expansion import EXACT_OPTIONS, fast_two_sum, two_prod, two_sum
from tests.helpers.exact_compile import compile_keeps_roundings

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def every_finite(dtype: torch.dtype) -> Tensor:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[x.isfinite()]


def partners(dtype: torch.dtype, count: int) -> Tensor:
    """A stratified sample: one number from each of `count` equal slices of the codes, so all exponents and signs."""
    x = every_finite(dtype)
    jitter = torch.rand(count, generator=torch.Generator().manual_seed(3))
    return x[((torch.arange(count) + jitter) * (len(x) / count)).long()]


def same_sum(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
    """Whether two sums are the same real number: TwoSum in fp64 gives each its one normalised form."""
    a, b = two_sum(x[0].double(), x[1].double()), two_sum(y[0].double(), y[1].double())
    return (a[0] == b[0]) & (a[1] == b[1])


def number(code: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([code - 2**15], dtype=torch.int16).view(dtype)


def exponent(x: Tensor) -> Tensor:
    return torch.where(x == 0, 10_000, torch.frexp(x.float())[1] - 1)


@DTYPES
def test_two_sum_is_exact_for_every_number(dtype: torch.dtype) -> None:
    a, b = every_finite(dtype)[:, None], partners(dtype, 96)[None, :]
    s, e = two_sum(a, b)
    finite = s.isfinite() & (a.abs().float() < 0.49 * torch.finfo(dtype).max)
    assert s.dtype == e.dtype == dtype
    assert bool(same_sum((a, b), (s, e))[finite].all())
    assert torch.equal(s, (a.double() + b.double()).float().to(dtype))


@DTYPES
def test_fast_two_sum_is_exact_when_ordered(dtype: torch.dtype) -> None:
    a, b = every_finite(dtype)[:, None], partners(dtype, 96)[None, :]
    s, e = fast_two_sum(a, b)
    ordered = (exponent(a) >= exponent(b)) & s.isfinite()
    exact = same_sum((a, b), (s, e))
    assert bool(exact[ordered].all())
    assert not bool(exact[s.isfinite()].all()), "the order is a real condition"


@DTYPES
def test_two_prod_is_exact_inside_its_condition(dtype: torch.dtype) -> None:
    a, b = every_finite(dtype)[:, None], partners(dtype, 96)[None, :]
    p, e = two_prod(a, b)
    lowest = -119 if dtype == torch.bfloat16 else -4
    inside = (exponent(a) + exponent(b) >= lowest) & p.isfinite()
    assert float(inside.double().mean()) > 0.2
    assert bool((a.double() * b.double() == p.double() + e.double())[inside].all())


@pytest.mark.parametrize("transform", [fast_two_sum, two_sum, two_prod])
def test_no_element_is_treated_differently(transform: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """PyTorch handles the last elements of a tensor, and strided ones, outside its vector loops."""
    generator = torch.Generator().manual_seed(0)
    a = (torch.rand(100, generator=generator) + 2).bfloat16()
    b = (torch.rand(100, generator=generator) + 1).bfloat16()
    whole = transform(a, b)
    for size in range(1, 100):
        part = transform(a[:size], b[:size])
        assert all(torch.equal(p, w[:size]) for p, w in zip(part, whole, strict=True)), size
    strided = transform(a[::3], b[::3])
    assert all(torch.equal(s, w[::3]) for s, w in zip(strided, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_work_in_wider_dtypes_and_products_are_refused(dtype: torch.dtype) -> None:
    a, b = torch.tensor([1.0], dtype=dtype), torch.tensor([2.0**-60], dtype=dtype)
    s, e = two_sum(b, a)
    assert (float(s), float(e)) == (1.0, 2.0**-60)
    with pytest.raises(UnsupportedError):
        two_prod(a, b)


@pytest.mark.skipif(not compile_keeps_roundings(), reason="this build of torch.compile cannot keep bf16 roundings")
@pytest.mark.parametrize("transform", [fast_two_sum, two_sum, two_prod])
def test_compiled_transforms_equal_eager(transform: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    a, b = every_finite(torch.bfloat16)[:, None], partners(torch.bfloat16, 16)[None, :]
    a = a.expand(-1, 16).contiguous()
    b = b.expand(len(a), -1).contiguous()
    actual, expected = torch.compile(transform, options=EXACT_OPTIONS, dynamic=True)(a, b), transform(a, b)
    finite = expected[0].isfinite()
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1][finite].nan_to_num(0.0), expected[1][finite].nan_to_num(0.0))


def test_default_compile_loses_the_error_terms() -> None:
    """Why `EXACT_OPTIONS` exists. When this fails, PyTorch has changed its default and the docs can say so."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4096, generator=generator).bfloat16()
    b = (torch.randn(4096, generator=generator) / 100).bfloat16()
    _, compiled_error = torch.compile(fast_two_sum)(a, b)
    _, eager_error = fast_two_sum(a, b)
    assert float((eager_error != 0).double().mean()) > 0.9
    assert float((compiled_error != 0).double().mean()) < 0.1
