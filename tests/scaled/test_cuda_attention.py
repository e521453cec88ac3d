"""The rules of CUDA's attention ops, without CUDA: slow references stand in for the kernels, on the CPU in fp64.

What is tested is that each rule obeys its op's schema, and that autograd's own formulas lead to the right gradients.
The kernels themselves need a GPU.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lpconv.scaled import ScaledTensor, scaled_tensor
from lpconv.scaled.pair import Numerics

aten = torch.ops.aten
NONE = torch.zeros(0)
SEED = torch.zeros((), dtype=torch.long)


def probabilities(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    scores = scores if bias is None else scores + bias
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    return (scores.masked_fill(future, -torch.inf) if is_causal else scores).softmax(-1)


def grads(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, p: Tensor, scale: float | None) -> list[Tensor]:
    """Gradients of Q, K, V and the bias, from the saved result as the kernels do it."""
    scores = p * (g @ v.mT - (g * out).sum(-1, keepdim=True))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return [scale * scores @ k, scale * scores.mT @ q, p.mT @ g, scores]


def efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    return probabilities(q, k, bias, is_causal, scale) @ v, NONE, SEED, SEED


def efficient_backward(g, q, k, v, bias, out, lse, seed, offset, p, mask, is_causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    return tuple(grads(g, q, k, v, out, probabilities(q, k, bias, is_causal, scale), scale))


def cudnn(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
    return probabilities(q, k, bias, is_causal, scale) @ v, NONE, SEED, SEED, 2, 2, SEED, SEED, NONE


def cudnn_backward(g, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, is_causal, *, scale=None):  # type: ignore[no-untyped-def]
    return tuple(grads(g, q, k, v, out, probabilities(q, k, bias, is_causal, scale), scale)[:3])


def flash(q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
    return probabilities(q, k, None, is_causal, scale) @ v, NONE, SEED, SEED, 2, 2, SEED, SEED, NONE


def flash_backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, is_causal, seed, offset, *, scale=None):  # type: ignore[no-untyped-def]
    return tuple(grads(g, q, k, v, out, probabilities(q, k, None, is_causal, scale), scale)[:3])


@pytest.fixture(autouse=True)
def references() -> Iterator[None]:
    """CPU kernels for the three ops and their backward passes, taken away again after the test."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in ("efficient", "cudnn", "flash"):
            library.impl(f"_scaled_dot_product_{name}_attention", globals()[name], "CPU")
            library.impl(f"_scaled_dot_product_{name}_attention_backward", globals()[f"{name}_backward"], "CPU")
        yield


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "efficient": lambda q, k, v, bias: aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=0.3)[0],
    "efficient, causal": lambda q, k, v, bias: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, True
    )[0],
    "cudnn": lambda q, k, v, bias: aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias.detach(), True, is_causal=True
    )[0],
    "flash": lambda q, k, v, bias: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.3)[0],
}

SCALES = {"static": (4.0, 2.0**-3, 8.0, 0.5), "dynamic": tuple(torch.tensor(s) for s in (4.0, 2.0**-3, 8.0, 0.5))}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 4, 6), (2, 3, 4, 6), (2, 3, 4, 6), (2, 3, 4, 4))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_the_plain_kernel(name: str, scales: str) -> None:
    plain = [x.requires_grad_() for x in inputs()]
    expected = CALLS[name](*plain)
    expected.backward(gradient=torch.ones_like(expected))
    numerics = Numerics(strict=True)
    pairs = zip(inputs(), SCALES[scales], strict=True)
    ours = [scaled_tensor(x / s, s, numerics=numerics).requires_grad_() for x, s in pairs]

    out = CALLS[name](*ours)
    out.backward(gradient=scaled_tensor(torch.full(out.shape, 16.0).double(), 2.0**-4, numerics=numerics))

    assert isinstance(out, ScaledTensor)
    torch.testing.assert_close(out.dequantize(), expected.detach())
    for mine, reference in zip(ours, plain, strict=True):
        assert (mine.grad is None) == (reference.grad is None)
        if reference.grad is not None:
            torch.testing.assert_close(mine.grad.dequantize(), reference.grad)
