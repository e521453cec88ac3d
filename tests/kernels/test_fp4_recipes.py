"""Products in four bits: scales of blocks, their ingredients, and layers that stay wide."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lpconv.formats.cast import cast
from lpconv.kernels.linear import FP4_RECIPES, linear, use_recipe, wide_modules
from lpconv.kernels.operands import Coded, OperandCast, block_values, coded_product, encode_operand, random_signs

NVFP4, NVFP4_STATIC, MXFP4 = (OperandCast(format="e2m1", scale=kind) for kind in ("nvfp4", "nvfp4-static", "mx"))
EDEN, FOUR_SIX = (OperandCast(format="e2m1", scale=kind) for kind in ("ms-eden", "four-six"))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers whose blocks differ in size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator).exp2() * 3


def value_of(coded: Coded, columns: int) -> Tensor:
    """The numbers that a product sums."""
    return (coded.codes.float() * torch.as_tensor(coded.scale))[:, :columns]


def by_block(block: Tensor, kind: str, tensor_amax: float) -> Tensor:
    """A block as the definition of its format says, in float64."""
    amax = float(block.abs().max())
    if kind == "mx":
        scale = 2.0 ** (math.floor(math.log2(amax)) - 2)
        return cast(block.double() / scale, "e2m1") * scale
    tensor = tensor_amax / (448 * 6) if kind == "nvfp4" else 1.0
    scale = float(cast(torch.tensor(amax / 6 / tensor), "e4m3fn")) * tensor
    return cast((block.double() / scale).float(), "e2m1").double() * scale


@pytest.mark.parametrize("how", [NVFP4, NVFP4_STATIC, MXFP4])
def test_values_follow_the_definition_of_their_blocks(how: OperandCast) -> None:
    x = drawn(6, 64)
    size = 32 if how.scale == "mx" else 16

    actual = value_of(encode_operand(x, how, axis=-1), 64)

    blocks = [by_block(b, how.scale, float(x.abs().max())) for row in x for b in row.split(size)]
    assert torch.allclose(actual.double(), torch.cat(blocks).view(6, 64), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("how", "decibel"), [(NVFP4, 20.4), (MXFP4, 18.8), (replace(MXFP4, format="e4m3fn"), 30.7)])
def test_accuracy_of_normal_numbers(how: OperandCast, decibel: float) -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    coded = encode_operand(x, how, axis=-1)
    values = block_values(coded).float() if how.format == "e4m3fn" else value_of(coded, 512)
    assert 10 * math.log10(x.square().sum() / (values - x).square().sum()) == pytest.approx(decibel, abs=0.1)


def test_square_blocks_give_a_matrix_and_its_transpose_the_same_values() -> None:
    w = drawn(40, 24)
    square = replace(NVFP4, square=True)
    along, across = (value_of(encode_operand(x, square, axis=-1), x.shape[1]) for x in (w, w.t()))
    assert torch.equal(along, across.t())
    alone = [value_of(encode_operand(x, NVFP4, axis=-1), x.shape[1]) for x in (w, w.t())]
    assert not torch.equal(alone[0], alone[1].t())


def test_a_product_of_rotated_operands_is_that_of_the_originals() -> None:
    a, b = drawn(8, 64), drawn(5, 64, seed=1)
    plain, rotated = (
        [value_of(encode_operand(x, replace(NVFP4, rotated=how), axis=-1), 64) for x in (a, b)] for how in (False, True)
    )
    assert float((rotated[0] - a).norm() / a.norm()) > 1  # other numbers
    for x, y in (plain, rotated):
        assert float((x @ y.t() - a @ b.t()).norm() / (a @ b.t()).norm()) < 0.2


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-static", "mx", "row"])
def test_stochastic_rounding_is_right_on_average(kind: str) -> None:
    torch.manual_seed(0)
    x, count = torch.linspace(-4, 5.9, 64).view(1, 64), 4000
    x[0, ::16] = 6.0  # so that every scale is 1

    actual = encode_operand(x.expand(count, 64), replace(NVFP4, scale=kind, rounding="stochastic"), axis=-1)

    values = value_of(actual, 64).double()
    assert len(values[:, 1].unique()) == 2
    assert float((values.mean(0) - x[0]).abs().max()) < 5 / math.sqrt(count)  # five of the largest deviations


@pytest.mark.parametrize("kind", ["nvfp4", "ms-eden"])
def test_nothing_is_drawn_without_gradients(kind: str) -> None:
    x, w = drawn(16, 32), drawn(8, 32, seed=1)
    before = torch.get_rng_state()
    first = linear(x, w, recipe=FP4_RECIPES[kind])
    assert torch.equal(first, linear(x, w, recipe=FP4_RECIPES[kind]))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["nvfp4", "mx", "row"])
def test_gradients_approach_those_of_wide_products(kind: str) -> None:
    torch.manual_seed(0)
    x, w = (z.requires_grad_() for z in (drawn(40, 50), drawn(24, 50, seed=1)))
    grad = drawn(40, 24, seed=2)
    linear(x, w, recipe=FP4_RECIPES[kind]).backward(grad)
    assert x.grad is not None
    assert w.grad is not None
    for actual, exact in ((x.grad, grad @ w.detach()), (w.grad, grad.t() @ x.detach())):
        assert 0.05 < float((actual - exact).norm() / exact.norm()) < 0.3


def test_the_last_blocks_stay_wide() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(10))
    recipe = FP4_RECIPES["nvfp4"]
    assert wide_modules(model, recipe) == {model.layers[9]}
    assert use_recipe(model, recipe) == [f"layers.{i}" for i in range(9)]


@pytest.mark.parametrize("kind", ["nvfp4", "mx"])
def test_frozen_weights_give_the_same_output(kind: str) -> None:
    model = nn.Sequential(nn.Linear(48, 16))
    use_recipe(model, FP4_RECIPES[kind])
    x = drawn(4, 48)
    before = model(x)
    model[0].freeze()
    assert torch.equal(model(x), before)


def test_what_is_not_finite_stays_visible() -> None:
    for how in (NVFP4, MXFP4):
        x = drawn(2, 32)
        x[0, 3] = math.inf
        assert not value_of(encode_operand(x, how, axis=-1), 32)[0, :16].isfinite().all()


def eden_reference(x: Tensor, signs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rotated rows, the elements after rounding to nearest, and the corrected scales of blocks, in float64."""
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]).double() / 128**0.5
    rotated = (x.double().view(-1, 128) * signs.double()) @ matrix
    blocks = rotated.view(-1, 16)
    top = 6 / (17 / 16 * 0.93)
    tensor = float(blocks.abs().max()) / (256 * top)
    scales = cast((blocks.abs().amax(-1) / top / tensor).float(), "e4m3fn").double() * tensor
    rounded = cast((blocks / scales.unsqueeze(-1)).float(), "e2m1").double()
    correction = (blocks.square().sum(-1) / (blocks * rounded * scales.unsqueeze(-1)).sum(-1)) * scales
    return rotated.view(x.shape), rounded, correction / tensor


def test_ms_eden_follows_its_algorithm() -> None:
    """Elements equal those of a slow version, and each scale is one of the two neighbours of the corrected one."""
    torch.manual_seed(0)
    x = drawn(6, 256)
    signs = random_signs(x.device)
    coded = encode_operand(x, EDEN, axis=-1, state=signs)
    _, rounded, wanted = eden_reference(x, signs)
    blocks = coded.codes.double().view(-1, 16)
    position = rounded.abs().argmax(-1, keepdim=True)
    scales = (blocks / rounded).gather(-1, position).squeeze(-1)
    assert torch.allclose(blocks, rounded * scales.unsqueeze(-1), rtol=2**-8)
    low, high = (cast((wanted * (1 + step / 16)).float(), "e4m3fn").double() for step in (-1, 1))
    assert bool(((scales >= low * 0.999) & (scales <= high * 1.001)).all())
    assert torch.equal(cast(scales.float(), "e4m3fn"), scales.float())


def test_products_of_ms_eden_are_right_on_average() -> None:
    """The error of a mean falls with the number of draws; with stochastic rounding it starts twice as high."""
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(48, 256)
    exact = a @ b.t()

    def error(how: OperandCast, count: int) -> float:
        total = torch.zeros_like(exact)
        for _ in range(count):
            signs = random_signs(a.device) if how is EDEN else None
            total += coded_product(*(encode_operand(x, how, axis=-1, state=signs) for x in (a, b)), out_dtype=a.dtype)
        return float((total / count - exact).square().mean() / exact.square().mean())

    one = error(EDEN, 1)
    assert error(EDEN, 64) < one / 50
    assert error(replace(NVFP4, rounding="stochastic"), 1) > 1.8 * one


@pytest.mark.parametrize("how", [EDEN, FOUR_SIX])
def test_tiny_blocks_become_zero(how: OperandCast) -> None:
    """Their scale rounds to 0, so the factor before the cast would be infinite."""
    x = torch.zeros(2, 256)
    x[0, :128], x[1, :128] = 1e4, 1e-9
    values = encode_operand(x, how, axis=-1, state=torch.ones(128)).codes
    assert bool(values.isfinite().all())
    assert not bool(values[1].any())
    assert bool(values[0].any())


def test_four_six_takes_the_better_of_two_scales() -> None:
    x = drawn(20, 64)
    values = value_of(encode_operand(x, FOUR_SIX, axis=-1), 64)
    errors = (values - x).view(-1, 16).square().sum(-1)
    tensor, candidates = float(x.abs().max()) / (6 * 256), []
    for factor in (1.0, 1.5):
        blocks = x.view(-1, 16).double()
        scale = cast((blocks.abs().amax(-1) / 6 / tensor).float(), "e4m3fn").double()
        scale = cast((scale * factor).float(), "e4m3fn").double().unsqueeze(-1) * tensor
        candidates.append((cast((blocks / scale).float(), "e2m1").double() * scale - blocks).square().sum(-1))
    best = torch.minimum(*candidates)
    assert torch.allclose(errors.double(), best, rtol=1e-4)
    assert 0.1 < float((candidates[1] < candidates[0]).double().mean()) < 0.9
    assert float(best.sum()) < 0.9 * float(candidates[0].sum())


def test_gradients_of_quartet_are_those_of_the_rounded_layer_on_average() -> None:
    """E dx = g · Q(w) and E dw = gᵀ · Q(x), for operands that do not fill the rotations."""
    torch.manual_seed(0)
    recipe = FP4_RECIPES["ms-eden"]
    x, w = drawn(40, 50), drawn(24, 50, seed=1)
    grad = drawn(40, 24, seed=2)
    sums, count = [torch.zeros_like(x), torch.zeros_like(w)], 300
    for _ in range(count):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        output = linear(*leaves, recipe=recipe)
        for total, actual in zip(sums, torch.autograd.grad(output, leaves, grad), strict=True):
            total += actual / count
    rounded = [value_of(encode_operand(z, FOUR_SIX, axis=-1), 50) for z in (x, w)]
    assert torch.allclose(linear(x, w, recipe=recipe), rounded[0] @ rounded[1].t(), rtol=1e-3, atol=1e-3)
    for actual, exact in zip(sums, (grad @ rounded[1], grad.t() @ rounded[0]), strict=True):
        assert float((actual - exact).norm() / exact.norm()) < 0.015  # a single draw: 0.13


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it after a graph break
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_compiled_products_share_their_signs(backend: str) -> None:
    """Operands that were rotated by different signs would give a gradient with an error of 1.4."""
    torch.manual_seed(0)
    x, w, grad = drawn(64, 256).requires_grad_(), drawn(128, 256, seed=1).requires_grad_(), drawn(64, 128, seed=2)
    compiled = torch.compile(lambda a, b: linear(a, b, recipe=FP4_RECIPES["ms-eden"]), backend=backend)
    compiled(x, w).backward(grad)
    assert x.grad is not None
    assert w.grad is not None
    for actual, exact in ((x.grad, grad @ w.detach()), (w.grad, grad.t() @ x.detach())):
        assert 0.05 < float((actual - exact).norm() / exact.norm()) < 0.3
