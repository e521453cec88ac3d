"""Scales measured on data: exact as any other, and data near 1 at every edge."""

import copy

import pytest
import torch
from scaled_models import build, loss_and_grads
from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.formats.scale import rms
from lpconv.scaled import apply_factors, calibrate, scaled
from lpconv.scaled.calibrate import edges


@pytest.mark.parametrize("name", ["bert-mlm", "llama"])
def test_calibrated_scales_keep_loss_and_gradients_bit_for_bit(name: str) -> None:
    plain, batch = build(name)
    ours = scaled(copy.deepcopy(plain), strict=True)
    loss, grads = loss_and_grads(plain, batch)

    factors = calibrate(ours, [batch])
    our_loss, our_grads = loss_and_grads(ours, batch)

    assert any(f.forward != 1 for f in factors.values())
    assert any(f.backward != 1 for f in factors.values())
    assert torch.equal(our_loss, loss)
    assert [n for n, g in our_grads.items() if not torch.equal(g.dequantize(), grads[n])] == []


@pytest.mark.parametrize("name", ["bert-mlm", "llama"])
def test_data_at_every_calibrated_edge_has_unit_scale(name: str) -> None:
    plain, batch = build(name)
    ours = scaled(copy.deepcopy(plain))
    calibrate(ours, [batch])
    sizes: dict[tuple[str, str], float] = {}

    def watch(key: str, module: nn.Module) -> None:
        def after_factor(_: nn.Module, __: object, out: Tensor) -> None:
            sizes[key, "forward"] = float(rms(out.data_part))

        def before_factor(_: nn.Module, __: object, out: Tensor) -> None:  # whose gradient is past the factor
            out.register_hook(lambda g: sizes.__setitem__((key, "backward"), float(rms(g.data_part))))

        module.register_forward_hook(after_factor)
        module.register_forward_hook(before_factor, prepend=True)

    for key, module in edges(ours).items():
        watch(key, module)
    ours(**batch).loss.backward()

    assert len(sizes) == 2 * len(edges(ours))
    cancelled = {key for key, size in sizes.items() if size == 0}
    assert all(1 <= size < 2 for key, size in sizes.items() if key not in cancelled), sizes
    assert not cancelled


def test_factors_carry_over_to_another_copy() -> None:
    plain, batch = build("bert-mlm")
    first, second = scaled(copy.deepcopy(plain), compute="fp16"), scaled(copy.deepcopy(plain), compute="fp16")
    factors = calibrate(first, [batch])

    apply_factors(second, factors)

    assert torch.equal(first(**batch).logits, second(**batch).logits)


def test_calibration_refuses_what_it_cannot_measure() -> None:
    plain, batch = build("bert-mlm")
    with pytest.raises(UsageError, match="method unit"):
        calibrate(plain, [batch])
    with pytest.raises(UsageError, match="at least one batch"):
        calibrate(scaled(plain), [])
