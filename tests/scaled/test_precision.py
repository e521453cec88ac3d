"""What low-precision compute delivers: accuracy that no factor on the loss changes, and 8-bit saved activations."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from lpconv.scaled import ScaledTensor, fallbacks, saved_bytes, scaled
from tests.helpers.scaled_models import build, loss_and_grads

CANCELLED = ("key.bias", "k_proj.bias")  # these gradients are zero in exact arithmetic


def relative_errors(model: nn.Module, reference: dict[str, Tensor], factor: float = 1.0) -> Tensor:
    """The relative error of each gradient, for a loss that was multiplied by `factor`."""
    errors = []
    for name, p in model.named_parameters():
        if not name.endswith(CANCELLED):
            grad = p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad.float()
            errors.append((grad / factor - reference[name]).norm() / reference[name].norm())
    return torch.stack(errors)


@pytest.mark.parametrize("method", ["unit", "scalify"])
@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "llama", "t5"])
def test_no_factor_on_the_loss_changes_fp16_gradients(name: str, method: str) -> None:
    plain, batch = build(name, "sdpa")
    _, reference = loss_and_grads(plain, batch)
    ours = scaled(copy.deepcopy(plain), method=method, compute="fp16")
    half = copy.deepcopy(plain).half()

    errors = {}
    for power in (-30, -10, 0, 10):
        for key, model in (("ours", ours), ("half", half)):
            model.zero_grad()
            (model(**batch).loss.float() * 2.0**power).backward()
            errors[key, power] = float(relative_errors(model, reference, 2.0**power).median())

    best_constant = min(errors["half", power] for power in (-30, -10, 0, 10))
    for power in (-30, -10, 0, 10):
        assert errors["ours", power] == pytest.approx(errors["ours", 0], rel=0.1)
        assert errors["ours", power] < 1.25 * best_constant
    assert errors["half", -30] > 0.9
    assert fallbacks(ours) == {}


@pytest.mark.parametrize(("compute", "bound"), [("bf16", 0.02), ("fp8", 0.15)])
@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "llama"])
def test_gradients_are_as_accurate_as_the_operands(name: str, compute: str, bound: float) -> None:
    plain, batch = build(name, "sdpa")
    _, reference = loss_and_grads(plain, batch)
    ours = scaled(copy.deepcopy(plain), compute=compute)

    ours(**batch).loss.backward()

    assert relative_errors(ours, reference).median() < bound
    assert fallbacks(ours) == {}


@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "llama"])
def test_fp8_compute_saves_at_most_06_of_the_bytes_of_bf16(name: str) -> None:
    plain, batch = build(name, "sdpa")
    ours = scaled(copy.deepcopy(plain), compute="fp8")

    ratio = saved_bytes(ours, batch) / saved_bytes(plain.bfloat16(), batch)

    assert ratio < 0.6, ratio


@pytest.mark.parametrize("compute", [None, "fp8"])
def test_counting_what_is_saved_leaves_no_model_behind(compute: str | None) -> None:
    """An op that saves its own output through a hook that gives it back would never be freed."""
    model, batch = build("llama", "sdpa")
    if compute is not None:
        model = scaled(model, compute=compute)
    weights = [weakref.ref(p) for p in model.parameters()]

    saved_bytes(model, batch)
    del model
    gc.collect()

    assert [w for w in weights if w() is not None] == []


def test_a_critical_module_multiplies_and_saves_in_the_carrier_dtype() -> None:
    plain, batch = build("bert-cls")
    _, reference = loss_and_grads(plain, batch)
    name = "bert.encoder.layer.1.output.dense.weight"

    def error(*critical: str) -> float:
        ours = scaled(copy.deepcopy(plain), compute="fp8", carrier=torch.float32, critical=critical)
        ours(**batch).loss.backward()
        grad = dict(ours.named_parameters())[name].grad.dequantize()
        return float((grad - reference[name]).norm() / reference[name].norm())

    everything = ("bert.encoder.*", "bert.embeddings.*", "bert.pooler*")
    assert error(*everything) < 0.3 * error()
