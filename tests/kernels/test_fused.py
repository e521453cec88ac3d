"""The fused passes give the bits of the plain ones, and so does a training step that runs on them."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lpconv.formats.codes import code_dtype
from lpconv.formats.spec import get_format
from lpconv.kernels import buffers, fused
from lpconv.kernels.buffers import operand, operand_like
from lpconv.kernels.decode import decode, decode_operand
from lpconv.kernels.fused import fused_codes, fused_largest, fused_product_, fused_transpose, fused_values
from lpconv.kernels.linear import FP8_RECIPES, linear
from lpconv.kernels.scaled_cast import largest_magnitude, scale_product_, scaled_codes

BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Small matrices run compiled, and a kernel that does not prove itself is an error."""
    monkeypatch.setenv("LPCONV_COMPILE", "always")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs eagerly")
        yield monkeypatch


def same(a: Tensor | None, b: Tensor) -> bool:
    """To the bit, but for the sign of NaN."""
    assert a is not None
    is_nan = b.float().isnan()
    return torch.equal(a.float().isnan(), is_nan) and torch.equal(
        a.float().view(torch.int32)[~is_nan], b.float().view(torch.int32)[~is_nan]
    )


def patterns(largest: float) -> Tensor:
    """Every pattern of bfloat16 in 256 rows, zeros in place of what is above `largest`."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    return x.masked_fill(x.abs().float() > largest, 0)


def some(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 0.9 + 0.1


FACTORS = [torch.tensor(1.0), torch.tensor(0.3), some(256, 1), some(1, 256)]


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("inverse", FACTORS, ids=["one", "number", "rows", "columns"])
def test_values_and_codes_of_every_pattern(format: str, inverse: Tensor, compiled: pytest.MonkeyPatch) -> None:
    spec = get_format(format)
    x = patterns(spec.max)
    values, codes = fused_values(x, inverse, spec, torch.empty_like(x)), fused_codes(x, inverse, spec)
    compiled.setenv("LPCONV_COMPILE", "never")
    expected = scaled_codes(x, inverse, spec, saturate=False)

    assert same(values, decode(expected))
    assert codes is None if format == "e5m2" else same(codes, expected)


@pytest.mark.usefixtures("compiled")
def test_an_overflow_whose_scale_is_infinite_is_seen() -> None:
    x, spec = torch.tensor([[1.0, float("inf")], [-float("inf"), float("nan")]]).to(BF16), get_format("e4m3fn")
    for actual in (
        fused_values(x, torch.tensor(0.0), spec, torch.empty_like(x)),
        fused_codes(x, torch.tensor(0.0), spec),
    ):
        assert actual is not None
        assert actual.float().isnan().tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_operands_are_decoded(format: str, is_turned: bool, compiled: pytest.MonkeyPatch) -> None:
    spec = get_format(format)
    codes = torch.arange(256).to(torch.uint8).repeat(3).view(12, 64).view(code_dtype(spec))
    codes = codes.t() if is_turned else codes
    finite = codes.float().isfinite()
    raw = codes.view(torch.uint8) * finite

    for x in (codes, raw.view(codes.dtype)):
        assert same(decode_operand(x, BF16, "a test's"), x.to(BF16))
    assert not fused._DECODE.fallback_reason


@pytest.mark.usefixtures("compiled")
def test_the_largest_magnitudes() -> None:
    x = torch.randn(70, 52).to(BF16)
    x[1, 2], x[3, 4], x[5], x[:, 6] = float("nan"), -float("inf"), 0, -0.0
    for axis in (-1, -2):
        assert same(fused_largest(x, axis), x.abs().amax(axis))
    assert same(largest_magnitude(x), torch.tensor(float("nan")))
    assert same(largest_magnitude(x[6:]), x[6:].abs().amax().float())
    assert same(largest_magnitude(x.t(), -1), x.t().abs().amax(-1, keepdim=True).float())


def test_a_product_takes_its_scales_in_order(compiled: pytest.MonkeyPatch) -> None:
    out = torch.randn(70, 51).to(BF16)
    for scales in (
        (torch.tensor(0.3), torch.tensor(1.7)),
        (some(70, 1), some(1, 51)),
        (some(70, 1), torch.tensor(3.1)),
    ):
        compiled.setenv("LPCONV_COMPILE", "always")
        actual = fused_product_(out.clone(), *scales)
        compiled.setenv("LPCONV_COMPILE", "never")
        assert same(actual, scale_product_(out.clone(), *scales))


@pytest.mark.usefixtures("compiled")
def test_a_matrix_is_turned() -> None:
    x = patterns(1e40)[:, :100].contiguous()
    assert same(fused_transpose(x.t(), torch.empty(100, 256, dtype=BF16)), x.t())


@pytest.mark.usefixtures("compiled")
def test_what_does_not_fit_is_left_to_others() -> None:
    x, spec, one = torch.randn(6, 8).to(BF16), get_format("e4m3fn"), torch.tensor(1.0)
    assert fused_values(x[:, :7].contiguous(), one, spec, torch.empty(6, 7, dtype=BF16)) is None  # no pairs
    assert fused_values(x, one.to(BF16), spec, torch.empty_like(x)) is None  # a product rounded to bfloat16
    assert fused_codes(x.float(), one, spec) is None
    assert fused_codes(x.t(), one, spec) is None
    assert fused_product_(x, some(1, 8), some(6, 1)) is None


@pytest.mark.parametrize("recipe", ["tensor", "row"])
@pytest.mark.parametrize("shape", [(48, 96, 80), (33, 95, 70)])
def test_a_training_step_has_the_same_bits(
    recipe: str, shape: tuple[int, int, int], compiled: pytest.MonkeyPatch
) -> None:
    m, k, n = shape
    x, weight, grad = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16), torch.randn(m, n).to(BF16)
    x[3], x[:, 5], grad[7] = 0, -0.0, 0

    def step(mode: str) -> tuple[Tensor, ...]:
        compiled.setenv("LPCONV_COMPILE", mode)
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = linear(*leaves, recipe=FP8_RECIPES[recipe])
        return y, *torch.autograd.grad(y, leaves, grad)

    for actual, plain in zip(step("always"), step("never"), strict=True):
        assert same(actual, plain)


def test_an_operands_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        first = operand("a test's", torch.Size((4, 6)), BF16)
    again = operand_like("a test's", torch.empty(6, 4).t(), torch.float32)
    other = operand("another of a test's", torch.Size((4, 6)), BF16)

    assert not again.is_inference()
    assert again.shape == (4, 6)
    assert again.stride() == (1, 4)
    assert first.data_ptr() != other.data_ptr()
    assert operand("a test's", torch.Size((2, 6)), BF16).data_ptr() == again.data_ptr()
    monkeypatch.setattr(buffers, "_MOST", 8)
    assert operand("a test's", torch.Size((2, 6)), BF16).data_ptr() != again.data_ptr()
