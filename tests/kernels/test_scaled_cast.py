"""Magnitudes and codes piece by piece, against the plain expressions: bit for bit, in every layout."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpconv.formats.spec import get_format
from lpconv.kernels import scaled_cast
from lpconv.kernels.linear import FP8_RECIPES, fp8_recipe, use_recipe
from lpconv.kernels.scaled_cast import largest_magnitude, scale_product_, scaled_codes

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(7,), (5, 7), (1, 9), (9, 1), (3, 4, 5), (2, 70, 3), (0, 4), (3, 0)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every shape here has several."""
    monkeypatch.setattr(scaled_cast, "_PIECE", 16)


def example(shape: tuple[int, ...], dtype: torch.dtype, *, turned: bool = False) -> Tensor:
    size = shape if not turned else (*shape[:-2], shape[-1], shape[-2])
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.mT if turned else x


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_magnitude_along_each_axis(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for turned in (False, True) if len(shape) > 1 else (False,):
        x = example(shape, dtype, turned=turned)
        for axis in (None, -1, -2) if len(shape) > 1 else (None,):
            if 0 in shape:
                assert not largest_magnitude(x, axis).any()
                continue
            expected = x.abs().amax() if axis is None else x.abs().amax(axis, keepdim=True)
            actual = largest_magnitude(x, axis)
            assert actual.dtype == torch.float32
            assert torch.equal(actual, expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_the_largest(dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(6, 7).to(dtype)
    x[2, 3] = bad
    expected = torch.tensor(abs(bad))
    assert largest_magnitude(x).equal(expected) or (math.isnan(bad) and largest_magnitude(x).isnan())
    assert largest_magnitude(x, -1).isfinite().flatten().tolist() == [i != 2 for i in range(6)]
    assert largest_magnitude(x, -2).isfinite().flatten().tolist() == [i != 3 for i in range(7)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("saturate", [False, True])
def test_codes_are_those_of_the_plain_expression(shape: tuple[int, ...], dtype: torch.dtype, saturate: bool) -> None:
    spec = get_format("e4m3fn")
    for turned in (False, True) if len(shape) > 1 else (False,):
        x = example(shape, dtype, turned=turned)
        grids = [None, torch.tensor(300.0 if saturate else 3.0), torch.tensor(3.0).to(dtype)]
        if len(shape) > 1:
            grids += [torch.rand(*shape[:-1], 1) * 3, torch.rand(*shape[:-2], 1, shape[-1]) * 3]
        for inverse in grids:
            wide = x if inverse is None else x.to(torch.promote_types(dtype, inverse.dtype)) * inverse
            expected = (wide.clamp(-448, 448) if saturate else wide).to(torch.float8_e4m3fn)
            actual = scaled_codes(x, inverse, spec, saturate=saturate)
            assert actual.shape == x.shape
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiling", [False, True])
def test_an_overflow_is_no_large_number(
    format: str, dtype: torch.dtype, compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    spec = get_format(format)
    x = torch.tensor([[1.0, math.inf], [-math.inf, math.nan], [spec.max, -spec.max]]).to(dtype)
    for inverse in (None, torch.tensor(2.0)):
        actual = scaled_codes(x, inverse, spec, saturate=True).float()
        assert actual.isnan().tolist() == [[False, True], [True, True], [False, False]]
        assert actual[2].tolist() == [spec.max, -spec.max]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (1, 40), (40, 1), (0, 3), (4, 3, 5), (2, 9, 40)])
def test_a_product_takes_its_scales_and_is_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    out = example(shape, dtype)
    rows, columns = torch.rand(*shape[:-1], 1) + 0.5, torch.rand(*shape[:-2], 1, shape[-1]) + 0.5
    for scales in (
        (rows, columns),
        (rows, None),
        (None, columns),
        (torch.tensor(0.3), torch.tensor(1.7)),
        (None, None),
    ):
        expected = out.float() if dtype != torch.float64 else out
        for scale in scales:
            expected = expected if scale is None else expected * scale
        assert torch.equal(scale_product_(out.clone(), *scales), expected.to(dtype))


LAYERS = [*FP8_RECIPES, "l2", "max"]


def layer(name: str) -> nn.Module:
    module = nn.Linear(6, 5, bias=False)
    module.weight.data = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    use_recipe(module, fp8_recipe(name))
    return module


def check_overflows(run: Any, where: str, bad: float) -> None:
    for _ in range(2):  # delayed scales are those of the call before
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
        if where == "input":
            x.data[1, 2] = bad
        y = run(x)
        gradient = torch.ones_like(y)
        if where == "gradient":
            gradient[1, 2] = bad
        (actual,) = torch.autograd.grad(y, x, gradient)
        assert not (y if where == "input" else actual)[1].isfinite().any()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("name", LAYERS)
def test_no_linear_layer_makes_an_overflow_finite(name: str, where: str, bad: float) -> None:
    check_overflows(layer(name), where, bad)


@pytest.mark.parametrize("name", ["static", "delayed", "row"])
def test_nor_does_a_compiled_one(name: str) -> None:
    torch._dynamo.reset()
    run = torch.compile(layer(name), fullgraph=True, backend="aot_eager")
    for where in ("input", "gradient"):
        check_overflows(run, where, math.inf)
