"""fp16 on a CPU: the mode that makes plain products fast leaves scaled ones, and their scales, alone."""

import torch
from torch import nn

from lpconv.kernels.matmul import HalfProducts
from lpconv.scaled import ScaledTensor, scaled, scaled_tensor


def test_a_scaled_product_keeps_its_scale() -> None:
    torch.manual_seed(0)
    a, b = (scaled_tensor(torch.randn(4, 4).half(), 2.0**-20) for _ in range(2))
    expected = a @ b
    with HalfProducts():
        found = a @ b
    assert isinstance(found, ScaledTensor)
    assert isinstance(expected, ScaledTensor)
    assert float(found.scale) == float(expected.scale)
    assert torch.equal(found.data_part, expected.data_part)


def test_gradients_that_plain_fp16_would_flush_survive() -> None:
    torch.manual_seed(0)
    model = scaled(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), method="unit", compute="fp16")
    with HalfProducts():
        (model(torch.randn(4, 16)).float().mean() * 2.0**-30).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert p.grad.abs().max() > 0, name
