"""The one-pass histogram counts what the reference counts."""

import pytest
import torch

from lpconv.errors import UsageError
from lpconv.formats.histogram import ExponentHistogram, exponent_histogram_reference
from lpconv.kernels import histogram
from lpconv.kernels.compiled import eager_mode
from lpconv.kernels.histogram import exponent_histogram


def agree(x: torch.Tensor) -> None:
    got, expected = exponent_histogram(x), exponent_histogram_reference(x)
    assert torch.equal(got.counts, expected.counts)
    assert facts(got) == facts(expected)


def facts(h: ExponentHistogram) -> tuple[int, ...]:
    return h.first_exponent, h.num_zero, h.num_inf, h.num_nan


def patterns() -> torch.Tensor:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    near = [bits & ~((1 << k) - 1) for k in (12, 13, 16, 19, 23)] + [
        bits | ((1 << k) - 1) for k in (12, 13, 16, 19, 23)
    ]
    return torch.cat([bits, *near]).view(torch.float32)


def test_float32_patterns_ties_and_subnormals() -> None:
    agree(patterns())
    agree(patterns()[:1000] * 2.0**-100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype: torch.dtype) -> None:
    agree(torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype))


def test_compiled_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "always")
    agree(patterns())
    assert not histogram._BINS_OF_FLOAT32.fallback_reason


def test_one_compilation_serves_views_of_any_rank_in_both_modes_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "always")
    agree(torch.randn(1000))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for grad in (True, False):
            for x in (torch.randn(20, 30), torch.randn(2, 3, 500)[1:], torch.randn(3, 4, 5, 60).transpose(0, 3)):
                with torch.set_grad_enabled(grad):
                    agree(x.requires_grad_())


def test_the_number_of_threads_changes_no_count() -> None:
    x = torch.randn(3 * 2**15 + 1, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            agree(x)
            agree(x.bfloat16())
    finally:
        torch.set_num_threads(threads)


def test_buffers_made_in_inference_mode_serve_later() -> None:
    with torch.inference_mode():
        agree(torch.randn(100))
    agree(torch.randn(100))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_layouts(dtype: torch.dtype) -> None:
    x = torch.randn(40, 50).to(dtype)
    for view in (x, x.t(), x[::2, ::3], x[:0], x[0, 0], x * 0, x.requires_grad_()):
        agree(view)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_in_every_position(value: float, dtype: torch.dtype) -> None:
    agree(torch.ones(70, 70, dtype=dtype).fill_diagonal_(value))


def test_integers_are_refused() -> None:
    with pytest.raises(UsageError):
        exponent_histogram(torch.ones(3, dtype=torch.int32))


def test_nothing_is_compiled_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "always")
    with eager_mode():
        assert not histogram._BINS_OF_FLOAT32.wants(patterns())
        with eager_mode():
            pass
        assert not histogram._BINS_OF_FLOAT32.wants(patterns())
    assert histogram._BINS_OF_FLOAT32.wants(patterns())
