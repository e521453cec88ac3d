"""Low-precision products against float64, their layouts, and the three products of a Linear's training step."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lpconv.errors import UsageError
from lpconv.formats.cast import cast
from lpconv.formats.codes import encode
from lpconv.kernels.linear import FP16_LINEAR, LinearRecipe, fp8_recipe, linear
from lpconv.kernels.matmul import _scaled_mm as on_tensor_cores, matmul, scaled_mm_operands, why_not_scaled_mm
from lpconv.kernels.operands import OperandCast

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def codes(shape: tuple[int, int], name: str, seed: int, device: str = "cpu") -> Tensor:
    return encode(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), name).to(device)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "names", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e5m2", "e5m2"), ("e4m3fnuz", "e5m2fnuz")]
)
@pytest.mark.parametrize("shape", [(16, 32, 48), (5, 7, 3), (1, 130, 17)])
@pytest.mark.parametrize(("out", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-20)])
def test_fp8_products(
    names: tuple[str, str], shape: tuple[int, int, int], out: torch.dtype, bound: float, device: str
) -> None:
    m, k, n = shape
    a, b = codes((m, k), names[0], 1, device), codes((n, k), names[1], 2, device).t()
    exact = a.cpu().double() @ b.cpu().double()
    if device == "cuda" and why_not_scaled_mm(a, b) is None:  # tensor cores keep about 14 bits of a sum on Hopper
        bound = max(bound, 2**-12)
    for right in (b, b.contiguous()):
        y = matmul(a, right, out_dtype=out)
        assert y.dtype == out
        assert relative_error(y, exact) < bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rowwise", [False, True])
def test_scales_and_bias(rowwise: bool, device: str) -> None:
    a, b = codes((24, 40), "e4m3fn", 3, device), codes((30, 40), "e4m3fn", 4, device).t()
    scale_a = 2.0 ** torch.arange(24.0)[:, None] if rowwise else torch.tensor(0.25)
    scale_b = 2.0 ** -torch.arange(30.0)[None] if rowwise else torch.tensor(8.0)
    bias = torch.randn(30)
    exact = (a.cpu().double() * scale_a) @ (b.cpu().double() * scale_b) + bias
    y = matmul(a, b, scale_a=scale_a.to(device), scale_b=scale_b.to(device), bias=bias.to(device))
    assert relative_error(y, exact) < 2**-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products(dtype: torch.dtype) -> None:
    a, b = torch.randn(20, 300).to(dtype), torch.randn(300, 10).to(dtype)
    exact = a.double() @ b.double()
    assert relative_error(matmul(a, b), exact) < torch.finfo(dtype).eps
    assert matmul(a, b).dtype == dtype
    assert relative_error(matmul(a, b, out_dtype=torch.float32), exact) < 1e-6
    # On the CPU float16 is rounded once, from float32 sums.
    if dtype == torch.float16:
        assert torch.equal(matmul(a, b), (a.float() @ b.float()).half())
        assert matmul(a * 100, b * 100).isinf().any()


def test_an_fp8_product_is_torchs_scaled_mm() -> None:
    a, b = codes((32, 64), "e4m3fn", 5), codes((48, 64), "e4m3fn", 6).t()
    one = torch.ones(())
    theirs = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    assert torch.equal(matmul(a, b), theirs)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch multiplies scaled codes on GPUs only",
)
@pytest.mark.parametrize("names", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("shape", [(128, 512, 96), (17, 33, 65), (1, 64, 16), (40, 64, 1)])
@pytest.mark.parametrize("granularity", ["tensor", "row", "row and tensor"])
def test_a_scaled_product_is_torchs_scaled_mm(
    names: tuple[str, str], shape: tuple[int, int, int], granularity: str
) -> None:
    """What runs on tensor cores, on torch's CPU kernel: bit for bit where scales are powers of two.

    torch scales a CPU's operands, we (and tensor cores) the sums: other scales round at other places.
    """
    m, k, n = shape
    a, b = codes((m, k), names[0], 5), codes((n, k), names[1], 6).t()
    generator = torch.Generator().manual_seed(7)
    sizes = {"tensor": ((), ()), "row": ((m, 1), (1, n)), "row and tensor": ((m, 1), ())}[granularity]
    powers = [2.0 ** torch.randint(-6, 6, size, generator=generator) for size in sizes]
    others = [torch.rand(size, generator=generator) + 0.5 for size in sizes]

    def ours(scales: list[Tensor]) -> Tensor:
        return matmul(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32)

    def theirs(scales: list[Tensor]) -> Tensor:
        return on_tensor_cores(a, b, scales[0], scales[1], torch.float32)

    assert torch.equal(ours(powers), theirs(powers))
    assert relative_error(ours(others), theirs(others).double()) < 2**-21


@pytest.mark.parametrize("shape", [(16, 32, 48), (5, 7, 3), (17, 16, 33)])
def test_operands_meet_the_rules_of_cuda(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = codes((k, m), "e5m2", 7).t(), codes((k, n), "e4m3fn", 8)
    left, right = scaled_mm_operands(a, b)
    assert left.is_contiguous()
    assert right.t().is_contiguous()
    assert left.shape[1] == right.shape[0]
    assert left.shape[1] % 16 == right.shape[1] % 16 == 0
    assert left.shape[0] == m
    one = torch.ones(())
    padded = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.float32)
    assert torch.allclose(padded[:, :n], a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_large_left_operand_on_its_side_gives_the_same_numbers(out_dtype: torch.dtype) -> None:
    a, b = codes((1024, 1040), "e5m2", 0), codes((1024, 16), "e4m3fn", 1)
    expected = a.float().t() @ b.float()
    assert relative_error(matmul(a.t(), b, out_dtype=out_dtype), expected) < (1e-6 if out_dtype.itemsize > 2 else 4e-3)


def test_operands_in_the_right_layout_are_not_copied() -> None:
    a, w = codes((16, 32), "e4m3fn", 9), codes((48, 32), "e4m3fn", 10)
    left, right = scaled_mm_operands(a, w.t())
    assert left.data_ptr() == a.data_ptr()
    assert right.data_ptr() == w.data_ptr()


def test_reasons_against_fp8_tensor_cores_are_named() -> None:
    a = codes((16, 16), "e5m2", 11)
    assert "e5m2" in (why_not_scaled_mm(a, a) or "")
    fnuz = codes((16, 16), "e4m3fnuz", 11)
    assert "AMD" in (why_not_scaled_mm(fnuz, fnuz) or "")


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "fp16", "bf16"])
def test_nan_spoils_its_row_wherever_it_stands(name: str) -> None:
    a, b = torch.ones(8, 8).fill_diagonal_(float("nan")), torch.ones(8, 5)
    a[0] = 1.0
    product = matmul(encode(a, name), encode(b, name))
    assert product[1:].isnan().all()
    assert product[0].tolist() == [8.0] * 5


@pytest.mark.parametrize("name", ["e4m3fn", "fp16", "bf16"])
def test_empty_products(name: str) -> None:
    def operand(*shape: int) -> Tensor:
        return encode(torch.ones(shape), name)

    assert matmul(operand(0, 4), operand(4, 3)).shape == (0, 3)
    y = matmul(operand(2, 0), operand(0, 3), bias=torch.ones(3))
    assert y.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda a: matmul(a, a),
        lambda a: matmul(a, a.t().bfloat16()),
        lambda a: matmul(a.float(), a.t().float()),
        lambda a: matmul(a, a.t(), scale_a=torch.ones(4)),
        lambda a: matmul(a, a.t(), scale_b=torch.ones(3, 1)),
        lambda a: matmul(a, a.t(), bias=torch.ones(4)),
        lambda a: matmul(a[0], a.t()),
    ],
)
def test_operands_that_do_not_fit_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError):
        call(codes((3, 5), "e4m3fn", 12))


def gradients(function, *tensors: Tensor, weight: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    (y * weight).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_three_products_of_a_linear(dtype: torch.dtype) -> None:
    x, w, bias = torch.randn(3, 9, 33), torch.randn(17, 33), torch.randn(17)
    g = torch.randn(3, 9, 17)
    x, w, bias, g = (t.to(dtype) for t in (x, w, bias, g))
    y, dx, dw, db = gradients(linear, x, w, bias, weight=g)
    x_q, w_q, g_q = (cast(t, n).double() for t, n in ((x, "e4m3fn"), (w, "e4m3fn"), (g, "e5m2")))
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-6
    assert relative_error(y, x_q @ w_q.t() + bias.double()) < bound
    assert relative_error(dx, g_q @ w_q) < bound
    assert relative_error(dw, torch.einsum("btn,btk->nk", g_q, x_q)) < bound
    assert relative_error(db, g.double().sum((0, 1))) < bound
    assert [t.dtype for t in (y, dx, dw, db)] == [dtype] * 4


def test_a_compiled_linear_is_one_graph_and_gives_the_same_bits() -> None:
    x, w, g = torch.randn(24, 32), torch.randn(16, 32), torch.randn(24, 16)
    compiled = gradients(torch.compile(linear, fullgraph=True), x, w, weight=g)
    assert all(torch.equal(a, b) for a, b in zip(compiled, gradients(linear, x, w, weight=g), strict=True))


def test_amax_scaling_serves_tensors_far_from_unit_scale() -> None:
    x, w, g = torch.randn(32, 64) * 2.0**-30, torch.randn(16, 64) * 2.0**14, torch.randn(32, 16) * 2.0**-40
    exact = gradients(F.linear, x.double(), w.double(), weight=g.double())
    unit = gradients(linear, x, w, weight=g)
    amax = gradients(lambda a, b: linear(a, b, recipe=fp8_recipe("max")), x, w, weight=g)
    assert all(relative_error(got, want) < 0.1 for got, want in zip(amax, exact, strict=True))
    assert all(relative_error(got, want) > 0.9 for got, want in zip(unit, exact, strict=True))


def test_amax_scaling_of_float16_tensors_below_what_float16_can_scale_by() -> None:
    x, w = (torch.randn(32, 64) * 2.0**-18).half(), torch.randn(16, 64).half()
    y = linear(x, w, recipe=fp8_recipe("max"))
    assert relative_error(y, x.double() @ w.double().t()) < 0.1


def test_a_float16_linear_overflows_to_inf() -> None:
    x, w = torch.full((2, 4), 300.0), torch.full((3, 4), 300.0)
    assert linear(x, w, recipe=FP16_LINEAR).eq(360_000).all()  # float32 outside: no overflow in the sum
    assert linear(x.half(), w.half(), recipe=FP16_LINEAR).isinf().all()
    assert linear(x * 1e6, w, recipe=FP16_LINEAR).isinf().all()


def test_fp8_keeps_one_byte_per_element_for_backward() -> None:
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        linear(torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True))
    assert sum(t.nbytes for t in saved) == 8 * 16 + 4 * 16


def test_operands_without_a_product_or_a_scale_are_refused() -> None:
    for cast_of in (
        lambda: OperandCast(format="e4m3fm"),
        lambda: OperandCast(format="fp16"),
        lambda: OperandCast(scale="rms"),
    ):
        with pytest.raises(UsageError):
            linear(torch.ones(2, 4), torch.ones(3, 4), recipe=LinearRecipe(input=cast_of()))


def test_batches_are_multiplied_one_by_one() -> None:
    a, b = codes((12, 20), "e4m3fn", 1).view(3, 4, 20), codes((60, 8), "e4m3fn", 2).view(3, 20, 8)
    scale_a, scale_b = torch.rand(3, 4, 1) + 0.5, torch.rand(3, 1, 8) + 0.5

    actual = matmul(a, b, scale_a=scale_a, scale_b=scale_b)

    expected = [matmul(*matrices, scale_a=x, scale_b=y) for *matrices, x, y in zip(a, b, scale_a, scale_b, strict=True)]
    assert torch.equal(actual, torch.stack(expected))
    with pytest.raises(UsageError):
        matmul(a, b[:2])
