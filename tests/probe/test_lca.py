"""Loss change allocation: it adds up to the change of the loss, and tells what rounding cost."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lpconv.data import demo_checkpoint, demo_text
from lpconv.errors import UsageError
from lpconv.optim import CollageAdamW, LowPrecisionAdamW
from lpconv.probe.lca import LossChange, LossChangeStep, by_layer, intended_updates, summarise, weight_value
from lpconv.scaled import AdamW, scaled


def demo(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=dtype)


def batch(seed: int) -> dict[str, Tensor]:
    text = torch.frombuffer(bytearray(demo_text("heldout").read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(0, len(text) - 48, (4,), generator=torch.Generator().manual_seed(seed))
    ids = torch.stack([text[s : s + 48] for s in starts.tolist()])
    return {"input_ids": ids, "labels": ids}


def follow(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 4, twin: nn.Module | None = None
) -> LossChangeStep:
    lca = LossChange(model, optimizer, [batch(100)], twin=twin)
    for step in range(steps):
        optimizer.zero_grad()
        model(**batch(step)).loss.backward()
        with lca.measure():
            optimizer.step()
    return summarise(lca.steps)


def collage(variant: str) -> LossChangeStep:
    model = demo()
    return follow(
        model, LowPrecisionAdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.95), variant=variant, compiled=False)
    )


def test_collage_plus_loses_nothing_to_rounding_and_the_allocation_closes() -> None:
    plus = collage("plus")
    assert plus.loss_after < plus.loss_before
    assert plus.closure_error < 0.01
    assert abs(plus.rounding_share) < 1e-3
    assert {a.name for a in plus.parameters} == {n for n, _ in demo().named_parameters()}
    layers = by_layer(plus)
    assert [a.name for a in layers.parameters] == [
        "model.embed_tokens", *(f"model.layers.{i}" for i in range(len(demo().model.layers))), "model.norm"
    ]  # fmt: skip
    assert layers.change == pytest.approx(plus.change)


def test_pure_bf16_loses_most_of_it_whoever_takes_the_step() -> None:
    ours = collage("bf16")
    model = demo()
    stock = follow(model, torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.95), weight_decay=0.0))
    for found in (ours, stock):
        assert found.closure_error < 0.01
        assert found.rounding > 0
        assert 0.3 < found.rounding_share < 1
    assert ours.rounding_share == pytest.approx(stock.rounding_share, rel=0.05)


@pytest.mark.parametrize(("master", "least", "most"), [(True, 0.0, 1e-3), (False, 0.02, 1.0)])
def test_scaled_models_are_followed_on_their_twin(master: bool, least: float, most: float) -> None:
    plain = demo(torch.float32)
    ours = scaled(copy.deepcopy(plain), method="unit", compute="bf16")
    found = follow(ours, AdamW(ours.parameters(), lr=5e-5, master=master), twin=plain)
    assert found.closure_error < 0.01
    assert least <= found.rounding_share < most


class Well(nn.Module):
    """The loss Σ (w·x)^power, whose gradient is a polynomial, beside a weight that is frozen and one out of use."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.w.float() * self.frozen * x).pow(self.power).sum())


X = torch.tensor([1.0, 1.5, 2.0])


def one_step(model: Well, optimizer: torch.optim.Optimizer, **options: float) -> LossChangeStep:
    lca = LossChange(model, optimizer, [{"x": X}], **options)
    model(X).loss.backward()
    with lca.measure():
        optimizer.step()
    return lca.steps[0]


def test_each_weight_is_allotted_what_it_changed() -> None:
    model = Well(4)  # Simpson's rule is exact for the cubic gradient
    before = (model.w.detach() * X).pow(4).sum()
    step = one_step(model, torch.optim.SGD(model.parameters(), lr=0.02))
    after = (model.w.detach() * X).pow(4).sum()

    assert step.segments == 1
    assert step.change == pytest.approx(float(after - before), rel=1e-5)
    assert [a.name for a in step.parameters] == ["w", "unused"]
    assert step.parameters[0].num_moved == 3
    assert step.parameters[1].num_moved == 0
    assert math.isnan(step.parameters[1].helped)
    assert step.rounding == pytest.approx(0, abs=1e-6 * abs(step.change))


def test_a_step_that_one_segment_cannot_follow_is_refined() -> None:
    steps = {}
    for max_segments in (1, 8):
        model = Well(10)  # the largest weight moves by half of itself
        optimizer = torch.optim.SGD([model.w], lr=2.5e-6)
        steps[max_segments] = one_step(model, optimizer, max_segments=max_segments, tolerance=0.001)
    assert steps[1].segments == 1
    assert steps[1].closure_error > 0.01
    assert steps[8].segments > 1
    assert steps[8].closure_error < 0.001


def test_a_step_that_was_left_out_allots_nothing() -> None:
    model = Well(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lca = LossChange(model, optimizer, [{"x": X}])
    model(X).loss.backward()
    model.w.grad[0] = math.inf
    with lca.measure():
        pass
    assert (lca.steps[0].change, lca.steps[0].rounding, lca.steps[0].closure_error) == (0, 0, 0)


def make_optimizers(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
        torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
        torch.optim.Adafactor(parameters, lr=0.01),
        AdamW(parameters, lr=0.01),
        CollageAdamW(parameters, lr=0.01, compiled=False),
    ]


@pytest.mark.parametrize("index", range(7))
def test_in_fp32_every_optimizer_goes_where_it_means_to_and_looking_changes_nothing(index: int) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))]
    optimizer = make_optimizers(weights)[index]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        for w in weights[:2]:
            w.grad = torch.randn_like(w)
        before = [weight_value(optimizer, w) for w in weights]
        state = copy.deepcopy(optimizer.state_dict())

        meant = intended_updates(optimizer)

        assert set(meant) == set(weights[:2])
        after_looking = optimizer.state_dict()
        assert str(after_looking) == str(state)
        optimizer.step()
        schedule.step()
        for w, start in zip(weights[:2], before, strict=False):
            torch.testing.assert_close(weight_value(optimizer, w) - start, meant[w], rtol=1e-5, atol=1e-7)


def test_wrong_uses_are_refused() -> None:
    model = Well(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="batch"):
        LossChange(model, optimizer, [])
    with pytest.raises(UsageError, match="before_step"):
        LossChange(model, optimizer, [{"x": X}]).after_step()
    with pytest.raises(UsageError, match="max_segments"):
        LossChange(model, optimizer, [{"x": X}], max_segments=0)
    with pytest.raises(UsageError, match="none"):
        LossChange(model, torch.optim.SGD(Well(2).parameters(), lr=0.1), [{"x": X}])
    with pytest.raises(UsageError, match="`w`"):
        LossChange(model, optimizer, [{"x": X}], twin=nn.Linear(2, 2))
    ours = scaled(nn.Sequential(nn.Linear(3, 3)), method="unit", compute="fp16")
    with pytest.raises(UsageError, match="twin"):
        LossChange(ours, AdamW(ours.parameters(), lr=0.1), [{"x": X}])


def test_only_steps_in_a_row_have_a_sum() -> None:
    model = Well(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lca = LossChange(model, optimizer, [{"x": X}])
    for step in range(4):
        optimizer.zero_grad()
        model(X).loss.backward()
        if step == 2:
            optimizer.step()
            continue
        with lca.measure():
            optimizer.step()
    assert summarise(lca.steps[:2]).closure_error < 1e-4
    for wrong in ([], lca.steps):
        with pytest.raises(UsageError, match="consecutive"):
            summarise(wrong)
