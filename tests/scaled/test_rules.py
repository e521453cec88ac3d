"""Every rule on its own: values and gradients are the plain op's, data stay near 1, scales stay powers of two."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lpconv.errors import UnsupportedError, UsageError
from lpconv.scaled import ScaledTensor, scaled_tensor
from lpconv.scaled.pair import Numerics, Role
from lpconv.scaled.rules import FILES, RULES
from lpconv.scaled.scales import MAX_SCALE, MIN_SCALE, MODERATE_SCALE

TARGET = torch.tensor([1, 0, 3, 2])
MASK = torch.tensor([[True, False, True, True, False, True]])

# Functions of x (4×6), y (4×6) and w (6×6), each run on values and on scaled tensors, forward and backward.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda x, y, w: x @ w,
    "bmm": lambda x, y, w: x.view(2, 2, 6) @ y.view(2, 2, 6).transpose(1, 2),
    "addmm": lambda x, y, w: F.linear(x, w, y[0]),
    "baddbmm": lambda x, y, w: torch.baddbmm(y.view(2, 2, 6), x.view(2, 2, 6), w.expand(2, 6, 6), beta=0.5, alpha=3.0),
    "conv1d": lambda x, y, w: F.conv1d(x.view(2, 2, 6), w.view(9, 2, 2)[:4], y[0, :4], padding=1),
    "conv2d": lambda x, y, w: F.conv2d(x.view(2, 1, 3, 4), w.view(9, 1, 2, 2)[:3], y[0, :3]),
    "integers": lambda x, y, w: (
        torch.maximum(x + TARGET[:, None], y.masked_fill(MASK, 0.5)) + MASK - torch.cat([w, MASK])[:4]
    ),
    "mul": lambda x, y, w: x * y,
    "mul number": lambda x, y, w: 0.3 * x * -2,
    "div": lambda x, y, w: x / (y * y + 1.5),
    "div number": lambda x, y, w: x / 3,
    "reciprocal": lambda x, y, w: (x * x + 0.5).reciprocal(),
    "pow": lambda x, y, w: x**3 + x**2,
    "pow half": lambda x, y, w: (x * x + 0.5) ** 0.5 + (y * y + 0.5) ** -0.5,
    "pow tensors": lambda x, y, w: (x * x + 0.5) ** y + 2.0**x,
    "prod": lambda x, y, w: x.prod(1) + y[:2].prod(),
    "pow other": lambda x, y, w: (x * x + 0.5) ** 1.7,
    "sqrt": lambda x, y, w: (x * x + 0.5).sqrt(),
    "rsqrt": lambda x, y, w: (x * x + 0.5).rsqrt(),
    "add": lambda x, y, w: torch.add(x, y, alpha=3) + 1,
    "sub": lambda x, y, w: 2 - x - torch.sub(y, x, alpha=0.5),
    "sub, spelled otherwise": lambda x, y, w: torch.rsub(x, y) + torch.ops.aten.sub.Scalar(x, 2.0),
    "cat": lambda x, y, w: torch.cat([x, y[:0], y]),
    "stack": lambda x, y, w: torch.stack([x, y], 1),
    "where": lambda x, y, w: torch.where(MASK, x, y) + torch.where(MASK, x, 0.0),
    "masked fill": lambda x, y, w: x.masked_fill(MASK, 7.0) + y.masked_fill(MASK, torch.tensor(2.0)),
    "maximum": lambda x, y, w: torch.maximum(x, y) + torch.minimum(x, w[:4]),
    "sum": lambda x, y, w: x.sum(1) + y.sum(),
    "mean": lambda x, y, w: x.mean(-1, keepdim=True) + y.mean(),
    "cumsum": lambda x, y, w: x.cumsum(1),
    "vector norms": lambda x, y, w: torch.linalg.vector_norm(x, 3, 0) + torch.linalg.vector_norm(y.abs(), math.inf, 0),
    "clamp": lambda x, y, w: x.clamp(-0.5, 1.0) + y.clamp(max=0.2) + x.clamp(torch.tensor(-1.0), torch.tensor(0.3)),
    "index": lambda x, y, w: x[TARGET] + y.index_select(0, TARGET),
    "index put": lambda x, y, w: x.index_put((TARGET[:3],), y[:3]) + x.index_put((TARGET,), y, accumulate=True),
    "gather": lambda x, y, w: x.gather(0, TARGET[:, None].expand(4, 6)),
    "layout": lambda x, y, w: (
        x.t().reshape(3, 8)[:, 1:].unsqueeze(0).expand(2, 3, 7).flip(0).roll(1, 2).squeeze(0).clone()
    ),
    "more layout": lambda x, y, w: (
        x.view(1, 4, 6, 1).permute(2, 1, 0, 3).squeeze((2, 3)).repeat(1, 2).unsqueeze(0).squeeze()
        + torch.as_strided(y, (6, 8), (1, 2))
    ),
    "pixels": lambda x, y, w: F.pixel_shuffle(x.view(4, 2, 3), 2) + F.pixel_unshuffle(y.view(1, 4, 6), 2).sum(),
    "split": lambda x, y, w: x.split(2)[1] * 3 + x.unbind(0)[1] + x.split([1, 3])[0],
    "pad": lambda x, y, w: F.pad(x, (1, 2)) + F.pad(y, (2, 1), value=0.5),
    "triangles": lambda x, y, w: x.tril() + y.triu() + torch.diagonal(w).sum(),
    "unfold": lambda x, y, w: x.unfold(1, 2, 2),
    "embedding": lambda x, y, w: F.embedding(TARGET, w, padding_idx=0),
    "max": lambda x, y, w: x.max(1).values + y.amax(1) + w.topk(4).values.sum(0).sum(),
    "min": lambda x, y, w: x.min(1).values + y.amin(1) + x.max() - y.min() + w[:4].sort(1).values[:, 2],
    "interpolate": lambda x, y, w: (
        F.interpolate(x.view(1, 1, 4, 6), scale_factor=2, mode="bilinear")
        + F.interpolate(y.view(1, 1, 4, 6), scale_factor=2, mode="bicubic")
    ),
    "dropout": lambda x, y, w: (torch.manual_seed(0), torch.native_dropout(x, 0.5, True)[0])[1],
    "neg, abs": lambda x, y, w: -x.abs() + x.relu() + F.leaky_relu(y),
    "softmax": lambda x, y, w: x.softmax(-1) @ w,
    "log softmax": lambda x, y, w: x.log_softmax(-1),
    "cross entropy": lambda x, y, w: F.cross_entropy(x, TARGET, label_smoothing=0.1),
    "cross entropy, ignored": lambda x, y, w: F.cross_entropy(x, TARGET.masked_fill(TARGET == 2, -100)),
    "cross entropy, summed": lambda x, y, w: F.cross_entropy(x, TARGET, reduction="sum"),
    "cross entropy, of images": lambda x, y, w: F.cross_entropy(x.view(2, 2, 6), (y > 0).long().view(2, 2, 6)[:, 0]),
    "binary cross entropy": lambda x, y, w: F.binary_cross_entropy_with_logits(x, (y > 0).to(x.dtype)),
    "weighted_entropy": lambda x, y, w: F.binary_cross_entropy_with_logits(
        x, (y > 0).to(x.dtype), w[:4].detach().abs(), pos_weight=w[0].detach().abs()
    ),
    "mse": lambda x, y, w: F.mse_loss(x, y),
    "activations": lambda x, y, w: (
        F.gelu(x) + F.gelu(y, approximate="tanh") + F.silu(x) + F.mish(y) + F.elu(x) + F.hardswish(y)
    ),
    "sigmoid": lambda x, y, w: torch.sigmoid(x) + torch.tanh(y) + F.softplus(x),
    "exponentials": lambda x, y, w: torch.exp(x) + torch.log(y * y + 1) + torch.log1p(x * x) + torch.erf(y),
    "waves": lambda x, y, w: torch.sin(x) + torch.cos(y),
    "layer norm": lambda x, y, w: F.layer_norm(x, (6,), w[0], w[1], 1e-5),
    "layer norm, bare": lambda x, y, w: F.layer_norm(x, (6,)) * y,
    "attention": lambda x, y, w: F.scaled_dot_product_attention(
        x.view(1, 2, 2, 6), y.view(1, 2, 2, 6), (x * y).view(1, 2, 2, 6)
    ),
    "attention, masked": lambda x, y, w: F.scaled_dot_product_attention(
        x.view(1, 2, 2, 6), y.view(1, 2, 2, 6), (x * y).view(1, 2, 2, 6), is_causal=True, scale=0.3
    ),
    "logsumexp": lambda x, y, w: x.logsumexp(1),
    "0-dim": lambda x, y, w: x.sum().softmax(0) + y.sum().sum(-1) + w.sum().prod(0),
    "zeros": lambda x, y, w: (
        F.linear(torch.zeros_like(x), w, y[0])
        + F.conv1d(torch.zeros_like(x).view(2, 2, 6), w.view(9, 2, 2)[:4], y[0, :4]).sum()
        + torch.where(MASK, torch.zeros_like(x), 2.0)
    ),
}

SCALES = {
    "static": (2.0**-5, 8.0, 2.0**-3),
    "dynamic": (torch.tensor(2.0**-5), torch.tensor(8.0), torch.tensor(0.5)),
    "mixed": (torch.tensor(2.0**4), 0.25, 1.0),
}


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((4, 6), (4, 6), (6, 6))
    ]


def weights_for(out: Tensor) -> Tensor:
    """1, 2, 3, …: the gradient of the results."""
    return torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape)


def run(function: Callable[..., Tensor], operands: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """The result, and the gradients of Σ result·(1, 2, 3, …), which enter scaled where the result is."""
    leaves = [x.requires_grad_() for x in operands]
    out = function(*leaves)
    weights = weights_for(out)
    is_scaled = isinstance(out, ScaledTensor)
    out.backward(gradient=scaled_tensor(weights * 128, 2.0**-7, numerics=out.numerics) if is_scaled else weights)
    return out.detach(), [x.grad for x in leaves]


def scaled_inputs(scales: str) -> list[Tensor]:
    numerics = Numerics(strict=True)
    return [scaled_tensor(x / s, s, numerics=numerics) for x, s in zip(inputs(), SCALES[scales], strict=True)]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_the_plain_op(name: str, scales: str) -> None:
    plain_out, plain_grads = run(FUNCTIONS[name], inputs())

    out, grads = run(FUNCTIONS[name], scaled_inputs(scales))

    torch.testing.assert_close(dequantized(out), plain_out, rtol=1e-12, atol=1e-13)
    for grad, expected in zip(grads, plain_grads, strict=True):
        assert (grad is None) == (expected is None)
        if grad is not None:
            torch.testing.assert_close(dequantized(grad), expected, rtol=1e-12, atol=1e-13)


def dequantized(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, ScaledTensor) else x


UNIT: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], float]] = {
    "linear": (lambda x, w, b: F.linear(x, w, b[0]), 1),
    "matmul": (lambda x, w, b: x @ w.t(), 1),
    "residual_add": (lambda x, w, b: x + b, math.sqrt(2)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (256,)), 1),
    "gelu": (lambda x, w, b: F.gelu(x), 0.65),
    "sum": (lambda x, w, b: x.sum(0), 1),
    "softmax": (lambda x, w, b: (0.01 * x).softmax(-1), 1),
}


@pytest.mark.parametrize("name", UNIT)
def test_unit_data_stay_within_a_factor_of_two(name: str) -> None:
    function, expected = UNIT[name]
    torch.manual_seed(0)
    x, w, b = (scaled_tensor(torch.randn(256, 256), s).requires_grad_() for s in (4.0, 2.0**-5, 2.0**-5))
    if name == "residual_add":
        b = scaled_tensor(torch.randn(256, 256), 4.0).requires_grad_()
    out = function(x, w, b)
    out.backward(gradient=scaled_tensor(torch.randn(out.shape), 2.0**-9))

    assert expected / 2 <= float(out.data_part.square().mean().sqrt()) <= 2 * expected
    if name not in ("layer_norm", "softmax", "gelu"):
        assert 0.5 <= float(x.grad.data_part.square().mean().sqrt()) <= 2


def test_cross_entropy_gradients_have_unit_data_at_any_vocabulary() -> None:
    for classes in (16, 1000, 30000):
        logits = scaled_tensor(0.01 * torch.randn(64, classes), 1.0).requires_grad_()
        F.cross_entropy(logits, torch.arange(64) % classes).backward(gradient=scaled_tensor(torch.ones(()), 1.0))
        assert 0.4 <= float(logits.grad.data_part.square().mean().sqrt()) <= 2


@pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0)])
def test_infinite_numbers_and_counts_are_those_of_the_value(scale: float | Tensor) -> None:
    x = torch.tensor([-8.0, 0.0, 8.0, torch.inf])
    ours = scaled_tensor(x / 4, scale)
    assert torch.equal(ours.clamp(0, torch.inf).dequantize(), x.clamp(0, torch.inf))
    assert torch.equal(torch.linalg.vector_norm(ours, 0), torch.tensor(3.0))


def test_attention_with_a_fully_masked_row_is_finite() -> None:
    scores = scaled_tensor(torch.randn(2, 4, dtype=torch.float16), 2.0**-4).requires_grad_()
    mask = torch.tensor([[True] * 4, [False] * 4])
    smallest = torch.finfo(torch.float16).min
    for masked in (
        scores.masked_fill(~mask, smallest),
        torch.where(mask, scores, torch.tensor(smallest)),
        scores + torch.where(mask, 0.0, smallest).half(),
    ):
        out = masked.softmax(-1)
        assert out.dequantize().isfinite().all()
        assert torch.equal(out.dequantize()[1], torch.full((4,), 0.25))


def test_scales_saturate_at_the_ends_of_their_range_and_are_counted() -> None:
    numerics = Numerics()
    small, large = (scaled_tensor(torch.tensor([1.5]), s, numerics=numerics) for s in (MIN_SCALE, MAX_SCALE))

    assert (small * small).scale == 1 / MODERATE_SCALE
    assert (large * large).scale == MODERATE_SCALE
    assert numerics.counts["scale saturated"] == 2
    back = small * scaled_tensor(torch.tensor([1.0]), 2.0**-10, numerics=numerics)
    assert float(back) == 1.5 * 2.0**-136  # a subnormal number: the data took over what the scale could not hold


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_recurrence_whose_scale_grows_at_every_step_keeps_its_value(dynamic: bool) -> None:
    scale = torch.tensor(8.0) if dynamic else 8.0
    state = expected = torch.tensor([1.5, -0.25])
    state = scaled_tensor(state, 1.0)
    factor = scaled_tensor(torch.full((2,), 0.125), scale)  # 1, at a scale of 8
    for _ in range(200):
        state = state * factor
    assert torch.equal(state.dequantize(), expected)


@pytest.mark.parametrize(
    "data", [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64), torch.ones(2) > 0]
)
def test_only_floating_point_data_are_scaled(data: Tensor) -> None:
    with pytest.raises(UsageError):
        scaled_tensor(data, 1.0)


@pytest.mark.parametrize(
    "scale",
    [-1.0, 3.0, math.inf, math.nan, 2.0**-127, 2.0**128, torch.ones(1), torch.tensor(1.0, dtype=torch.float16)],
    ids=str,
)
def test_scales_are_powers_of_two_in_range_or_numbers_in_fp32(scale: float | Tensor) -> None:
    with pytest.raises(UsageError):
        scaled_tensor(torch.ones(2), scale)


def test_an_op_without_a_rule_is_an_error_or_is_counted() -> None:
    strict, lenient = Numerics(strict=True), Numerics()
    matrix = torch.eye(3) * 4

    class Inverse(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    root = torch.nn.Sequential(torch.nn.Identity(), Inverse())
    with pytest.raises(UnsupportedError, match=r"linalg_inv_ex.*module `1` \(Inverse\)"):
        root(scaled_tensor(matrix, 2.0, numerics=strict))
    assert torch.equal(root(scaled_tensor(matrix, 2.0, numerics=lenient)), torch.eye(3) / 8)
    assert lenient.counts == {"fallback aten.linalg_inv_ex.default": 1}
    assert copy.deepcopy(lenient).counts is lenient.counts, "a copy of a model counts with the original"


def test_no_op_has_two_rules() -> None:
    assert sum(len(ops) for file in FILES for ops in file.OPS.values()) == len(RULES)


def test_a_gradient_keeps_its_role_through_every_op() -> None:
    grad = scaled_tensor(torch.randn(4, 6), 1.0, role=Role.GRADIENT)
    weight = scaled_tensor(torch.randn(6, 6), 1.0, role=Role.WEIGHT)
    assert ((grad @ weight).relu().t() + 1).role is Role.GRADIENT
    assert (weight.t() @ weight).role is Role.ACTIVATION
