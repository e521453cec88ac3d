"""`torch.compile` captures a scaled model whole, and loses no accuracy over compiling the plain one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpconv.kernels.compiled import COMPILES_SUBCLASSES
from lpconv.scaled import ScaledTensor, adaptive_scaling, scaled
from tests.helpers.scaled_models import build, loss_and_grads

LOSS = {"bert-mlm": "ForMaskedLM", "gpt2": "ForCausalLM", "llama": "ForCausalLM"}


def prepared(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of one layer and a batch that the plain model compiles whole with."""
    made: tuple[Any, Any] = build(name, "sdpa", num_layers=1)
    plain, batch = made
    plain.loss_type = LOSS[name]  # transformers would log once inside the graph for a class that it does not know
    if name != "bert-mlm":
        batch["use_cache"] = False  # a fresh cache breaks the graph of the plain model too
    return plain, batch


def compiled_grads(model: nn.Module, batch: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Gradients of the model compiled as one graph."""
    torch._dynamo.reset()
    _, grads = loss_and_grads(torch.compile(model, fullgraph=True, backend=backend), batch)
    plain = {n: g.dequantize() if isinstance(g, ScaledTensor) else g for n, g in grads.items()}
    return {n.removeprefix("_orig_mod."): g for n, g in plain.items()}


def test_the_error_of_inductor_is_that_of_the_plain_model() -> None:
    plain, batch = prepared("bert-mlm")
    ours = scaled(copy.deepcopy(plain), strict=True)
    _, reference = loss_and_grads(copy.deepcopy(plain), batch)

    expected, found = compiled_grads(plain, batch, "inductor"), compiled_grads(ours, batch, "inductor")

    for parameter, grad in reference.items():
        own_error = (expected[parameter] - grad).norm()
        error = (found[parameter] - grad).norm()
        assert error <= 1.5 * own_error + 1e-6 * grad.norm() + 1e-9, parameter


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert-mlm", {"method": "scalify"}),
        ("gpt2", {"method": "unit"}),
        ("llama", {"method": "unit"}),
        ("llama", {"method": "scalify"}),
        ("bert-mlm", {"compute": "fp8", "save_codes": False}),
        pytest.param(
            "bert-mlm",
            {"adaptive": "fp16"},
            marks=pytest.mark.skipif(not COMPILES_SUBCLASSES, reason="adaptive layers run eagerly before torch 2.13"),
        ),
    ],
)
def test_the_captured_graph_is_whole_and_computes_what_eager_does(name: str, options: dict[str, Any]) -> None:
    plain, batch = prepared(name)
    adaptive = options.get("adaptive")
    ours = adaptive_scaling(plain, compute=adaptive, strict=True) if adaptive else scaled(plain, strict=True, **options)
    _, eager = loss_and_grads(copy.deepcopy(ours), batch)

    found = compiled_grads(ours, batch, "aot_eager")

    expected = {n: g.dequantize() if isinstance(g, ScaledTensor) else g for n, g in eager.items()}
    errors = {n: (found[n] - g).norm() / (g.norm() + 1e-6) for n, g in expected.items()}
    if adaptive or "compute" in options:  # the compiler keeps fp32 where eager rounds to 16 bits, and single codes flip
        assert torch.stack(list(errors.values())).median() < 1e-2
    else:
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch 2.11, at a break of the graph
def test_adaptive_gradients_are_the_same_compiled() -> None:
    torch.manual_seed(0)
    model = adaptive_scaling(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), compute="fp16")
    other, x = copy.deepcopy(model), torch.randn(4, 16)
    model(x).square().mean().backward()
    torch.compile(other, backend="eager")(x).square().mean().backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert p.grad.norm() > 0
        torch.testing.assert_close(q.grad, p.grad)
