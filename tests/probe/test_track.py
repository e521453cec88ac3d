"""Tracking counts what passes through the layers, changes nothing, and leaves nothing behind."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.formats.histogram import exponent_histogram_reference
from lpconv.probe.record import ROLES, ProbeResult
from lpconv.probe.track import probe, track
from lpconv.results import from_json, to_json
from tests.helpers.models import tiny_model


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def test_each_role_is_the_tensor_it_says() -> None:
    model, x = two_layers(), torch.randn(5, 8)
    with track(model, every=1) as t:
        loss = model(x).square().sum()
        loss.backward()
    hidden = torch.tanh(model[0](x))
    y = model[2](hidden)
    grad_y = 2 * y
    expected = {
        "weight": model[2].weight, "input": hidden, "output": y, "grad_output": grad_y,
        "grad_input": grad_y @ model[2].weight, "weight_grad": model[2].weight.grad,
    }  # fmt: skip
    got = {r.role: r.exponents for r in t.result().tensors if r.layer == "2"}
    assert list(got) == list(ROLES)
    for role, tensor in expected.items():
        reference = exponent_histogram_reference(tensor)
        assert torch.equal(got[role].counts, reference.counts), role
        assert got[role].first_exponent == reference.first_exponent


def test_layers_that_share_an_input_get_their_own_gradient() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + 2.0**20 * self.b(x)

    model = Branches()
    with track(model, every=1) as t:
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    seen = {r.layer: r.exponents for r in t.result().tensors if r.role == "grad_input"}
    own = torch.ones(3, 4) @ model.a.weight
    assert seen["a"].exponents == exponent_histogram_reference(own).exponents


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_transformers_train_the_same_while_tracked(kind: str) -> None:
    model = tiny_model(kind).eval()  # no dropout
    plain = model(**batch())
    plain.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with track(model, every=1) as t:
        tracked = model(**batch())
        tracked.loss.backward()
    assert torch.equal(tracked.loss, plain.loss)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters() if p.grad is not None)
    result = t.result()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    assert sum(r.role == "grad_input" for r in result.tensors) == len(linear)
    weights = {id(p) for p in model.parameters() if p.ndim >= 2}
    assert sum(r.role == "weight" for r in result.tensors) == len(weights)  # tied ones once


def test_only_every_nth_training_step_is_recorded() -> None:
    model, x = two_layers(), torch.randn(5, 8)
    with track(model, every=3) as t:
        for _ in range(7):
            with torch.no_grad():
                model(x)  # an evaluation pass is no step
            model(x).sum().backward()
    result = t.result()
    assert (result.steps_seen, result.steps_recorded) == (7, 3)
    assert result.tensors[0].exponents.num_elements == 3 * 16 * 8


def test_weights_are_read_again_unless_promised_fixed() -> None:
    x, weights = torch.randn(5, 8), {}
    for fixed in (False, True):
        layer = nn.Linear(8, 16)
        torch.nn.init.constant_(layer.weight, 1.0)
        with track(layer, every=1, fixed_weights=fixed) as t:
            for _ in range(2):
                layer(x).sum().backward()
                layer.weight.data *= 2  # the version of the parameter does not tell
        weights[fixed] = next(r.exponents.exponents for r in t.result().tensors if r.role == "weight")
    assert weights == {False: {0: 128, 1: 128}, True: {0: 256}}


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_stays_behind(fails: bool) -> None:
    model, x = two_layers(), torch.randn(5, 8)
    try:
        with track(model, every=1) as t:
            model(x).sum().backward()
            if fails:
                raise RuntimeError
    except RuntimeError:
        pass
    before = t.result().tensors
    model(x).sum().backward()
    assert t.result().tensors == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_result_travels_as_json() -> None:
    result = probe(tiny_model("llama"), [batch()])
    back = from_json(ProbeResult, json.loads(json.dumps(to_json(result))))
    assert back == result
    assert back.tensors[0].exponents.rates("e4m3fn") == result.tensors[0].exponents.rates("e4m3fn")


def test_a_probe_runs_its_steps_and_frees_gradients() -> None:
    model = tiny_model("bert")
    result = probe(model, (batch() for _ in range(5)), steps=2)
    assert result.steps_recorded == len(result.losses) == 2
    assert all(math.isfinite(loss) for loss in result.losses)
    assert all(p.grad is None for p in model.parameters())
    assert result.overhead > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: track(two_layers(), every=0),
        lambda: probe(tiny_model("llama"), []),
        lambda: probe(tiny_model("llama"), [{"input_ids": batch()["input_ids"]}]),
    ],
)
def test_bad_requests_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.hint
