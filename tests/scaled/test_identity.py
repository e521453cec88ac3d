"""In fp32, scales change nothing: loss and every gradient are those of the plain model, bit for bit."""

import copy

import pytest
import torch
from models import ARCHITECTURES, build, loss_and_grads

from lpconv.scaled import fallbacks, scaled
from lpconv.scaled.tensor import ScaledTensor

METHODS = {"unit": {}, "scalify": {"rescale": ("layernorm_grad", "logits_grad", "weight_grad")}}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_are_bitwise_those_of_the_plain_model(name: str, attention: str, method: str) -> None:
    plain, batch = build(name, attention)
    ours = scaled(copy.deepcopy(plain), method=method, strict=True, **METHODS[method])
    loss, grads = loss_and_grads(plain, batch)

    our_loss, our_grads = loss_and_grads(ours, batch)

    assert torch.equal(our_loss, loss)
    assert our_grads.keys() == grads.keys()
    assert all(isinstance(g, ScaledTensor) for g in our_grads.values())
    assert [n for n, g in our_grads.items() if not torch.equal(g.dequantize(), grads[n])] == []
    assert fallbacks(ours) == {}
