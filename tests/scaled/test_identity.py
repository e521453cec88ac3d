"""In fp32, scales change nothing: loss and every gradient are those of the plain model, bit for bit."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lpconv.errors import UnsupportedError, UsageError
from lpconv.scaled import ScaledTensor, fallbacks, scaled, scaled_tensor, scaling_of, unscaled_state_dict
from lpconv.scaled.model import weight_scale
from lpconv.scaled.pair import Numerics
from tests.helpers.models import minilm
from tests.helpers.scaled_models import ARCHITECTURES, build, loss_and_grads

METHODS = {"unit": {}, "scalify": {"rescale": ("layernorm_grad", "logits_grad", "softmax_grad", "weight_grad")}}


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


def test_a_real_checkpoint_gives_its_own_embeddings_and_gradients() -> None:
    """A BERT encoder of six layers, on two padded sentences."""
    plain = transformers.BertModel.from_pretrained(minilm(), attn_implementation="sdpa").eval()
    text = ["Scales are powers of two.", "A longer second sentence decides how much of the first one is padding."]
    batch = transformers.AutoTokenizer.from_pretrained(minilm())(text, padding=True, return_tensors="pt")
    ours = scaled(copy.deepcopy(plain), strict=True)

    for model in (plain, ours):
        model(**batch).last_hidden_state.square().mean().backward()

    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert torch.equal(ours(**batch).last_hidden_state, plain(**batch).last_hidden_state)
    assert [n for n, g in grads.items() if not torch.equal(ours.get_parameter(n).grad.dequantize(), g)] == []
    assert all(torch.equal(unscaled_state_dict(ours)[n], p) for n, p in plain.state_dict().items())


@pytest.mark.parametrize("name", ["bert-mlm", "llama", "vit", "whisper"])
def test_inference_mode_computes_the_same_without_fallbacks(name: str) -> None:
    plain, batch = build(name, "sdpa")
    ours = scaled(copy.deepcopy(plain), strict=True)

    with torch.inference_mode():
        assert torch.equal(ours(**batch).logits, plain(**batch).logits)


def test_composite_ops_of_another_dispatch_mode_are_taken_apart() -> None:
    class CallsComposites(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op is torch.ops.aten.mm.default:
                return args[0].double().matmul(args[1].double()).float()
            return op(*args, **(kwargs or {}))

    x, w = (scaled_tensor(torch.randn(4, 4), s, numerics=Numerics(strict=True)) for s in (4.0, 0.5))
    with CallsComposites():
        out = x @ w

    torch.testing.assert_close(out.dequantize(), x.dequantize() @ w.dequantize())


def test_scales_are_powers_of_two_that_give_unit_data() -> None:
    ours = scaled(build("llama")[0])
    scales = scaling_of(ours).scales
    assert scales.keys() == dict(ours.named_parameters()).keys() | {"lm_head.weight"}
    for name, p in ours.named_parameters():
        assert p.scale == scales[name]
        assert 1 <= float(p.data_part.square().mean().sqrt()) < 2


def test_an_all_zero_parameter_gets_a_scale_that_training_can_use() -> None:
    assert weight_scale("w", torch.zeros(4)) == 2.0**-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    model, _ = build("bert-mlm")
    with torch.no_grad():
        model.cls.predictions.bias[0] = bad
    with pytest.raises(UsageError, match=r"cls\.predictions"):
        scaled(model)
    assert not any(isinstance(p, ScaledTensor) for p in model.parameters())


def test_double_backward_is_a_clear_error() -> None:
    model, batch = build("bert-mlm")
    scaled(model)
    loss = model(**batch).loss
    with pytest.raises(UnsupportedError, match="derivatives"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "units"},
        {"compute": "fp2"},
        {"method": "scalify", "rescale": ["layernorm"]},
        {"method": "scalify", "rescale": ["every:0"]},
        {"method": "scalify", "rescale": ["every:many"]},
        {"method": "unit", "rescale": ["layernorm_grad"]},
        {"compute": "fp8", "critical": ["no.such.module"]},
    ],
)
def test_wrong_options_are_refused_before_the_model_is_touched(options: dict[str, object]) -> None:
    model, _ = build("bert-mlm")
    with pytest.raises(UsageError) as error:
        scaled(model, **options)
    assert error.value.hint
    assert not any(isinstance(p, ScaledTensor) for p in model.parameters())


def test_a_model_is_scaled_once() -> None:
    model, _ = build("bert-mlm")
    scaled(model)
    with pytest.raises(UsageError, match="already"):
        scaled(model)


def test_complex_parameters_are_refused_and_integer_ones_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.odd = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    with pytest.raises(UnsupportedError, match="`odd`"):
        scaled(Odd(torch.complex64))
    assert not isinstance(scaled(Odd(torch.int32)).odd, ScaledTensor)
