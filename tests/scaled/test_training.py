"""A scaled model in the usual PyTorch loop: optimizers, clipping, accumulation, checkpointing, state."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lpconv.errors import InputError, UnsupportedError
from lpconv.scaled import (
    AdamW,
    HyperParameters,
    ScaledTensor,
    equivalent,
    from_disk,
    scaled,
    scaled_tensor,
    to_disk,
    unscaled_state_dict,
)
from lpconv.scaled.pair import Role
from tests.helpers.scaled_models import Batch, build


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int) -> list[Tensor]:
    """The losses of a few steps with gradient clipping."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", ["bert-mlm", "llama"])
def test_fp32_training_follows_the_source_bit_for_bit(name: str) -> None:
    plain, batch = build(name)
    ours = scaled(copy.deepcopy(plain), method="unit")
    settings = {"lr": 1e-2, "weight_decay": 0.1}

    expected = train(plain, torch.optim.AdamW(plain.parameters(), **settings), batch, 5)
    losses = train(ours, AdamW(ours.parameters(), **settings), batch, 5)

    assert torch.equal(torch.stack(losses), torch.stack(expected))
    ours_state = unscaled_state_dict(ours)
    assert all(torch.equal(ours_state[n], p) for n, p in plain.state_dict().items())


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["bert-mlm", "llama"])
def test_rescaling_the_weights_changes_no_step_in_fp32(name: str, state_dtype: torch.dtype) -> None:
    plain, batch = build(name)
    start = scaled(copy.deepcopy(plain), method="scalify")
    ours = scaled(copy.deepcopy(plain), method="scalify", rescale=("layernorm_grad", "every:2"))

    expected = train(start, AdamW(start.parameters(), lr=1e-1, state_dtype=state_dtype), batch, 5)
    losses = train(ours, AdamW(ours.parameters(), lr=1e-1, state_dtype=state_dtype), batch, 5)

    assert torch.equal(torch.stack(losses), torch.stack(expected))


@pytest.mark.parametrize("master", [True, False])
def test_rescaling_the_weights_changes_little_in_fp16(master: bool) -> None:
    plain, batch = build("llama", "sdpa")
    start = scaled(copy.deepcopy(plain), method="scalify", compute="fp16")
    ours = scaled(copy.deepcopy(plain), method="scalify", compute="fp16", rescale=("layernorm_grad", "every:1"))

    expected = train(start, AdamW(start.parameters(), lr=1e-2, master=master), batch, 4)
    losses = train(ours, AdamW(ours.parameters(), lr=1e-2, master=master), batch, 4)

    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-3, atol=0)


def test_weights_that_outgrew_their_scale_get_another_in_training_only() -> None:
    model, batch = build("llama")
    ours = scaled(model, method="scalify", compute="fp16", rescale=("every:1",))
    weight = ours.model.layers[0].mlp.up_proj.weight
    before = weight.scale
    weight.data_part.mul_(64)
    value = weight.dequantize()

    ours.eval()(**batch)
    assert weight.scale == before
    ours.train()(**batch)

    assert float(weight.scale) == 64 * before
    assert torch.equal(weight.dequantize(), value)


def test_a_pass_that_rescales_weights_does_not_change_the_gradients_of_an_earlier_pass() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ours = scaled(copy.deepcopy(plain), method="scalify", rescale=("every:2",))
    for model in (plain, ours):
        state = model.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(64)
        (model(torch.ones(2, 4)) + model(torch.ones(2, 4) / 2)).sum().backward()

    for name, parameter in plain.named_parameters():
        assert torch.equal(ours.get_parameter(name).grad.dequantize(), parameter.grad), name
        assert torch.equal(state[name].dequantize(), parameter), name


def test_sgd_steps_on_parameters_with_a_scale_set_by_data() -> None:
    plain, batch = build("bert-mlm")
    ours = scaled(copy.deepcopy(plain), method="scalify", rescale=("every:1",))

    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batch, 3)
    losses = train(ours, torch.optim.SGD(ours.parameters(), lr=0.1), batch, 3)

    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert isinstance(next(ours.parameters()).scale, Tensor)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_an_optimizer_that_would_drop_the_scale_is_refused(options: dict[str, Any]) -> None:
    model, batch = build("bert-mlm")
    scaled(model)
    model(**batch).loss.backward()

    with pytest.raises((UnsupportedError, RuntimeError)) as refusal:
        torch.optim.AdamW(model.parameters(), **options).step()

    if not options:
        assert "drop" in str(refusal.value)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("compute", ["fp16", "fp8"])
def test_low_precision_training_lowers_the_loss_as_fp32_does(compute: str, state_dtype: torch.dtype) -> None:
    plain, batch = build("llama", "sdpa")
    ours = scaled(copy.deepcopy(plain), method="scalify", compute=compute)

    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), batch, 12)
    losses = train(ours, AdamW(ours.parameters(), lr=1e-2, state_dtype=state_dtype), batch, 12)

    assert expected[-1] < 0.75 * expected[0]
    assert abs(losses[-1] - expected[-1]) < 0.05 * expected[0]


def test_16_bit_state_is_stored_in_16_bits_and_survives_a_checkpoint() -> None:
    model, batch = build("bert-mlm")
    scaled(model, compute="fp16")
    optimizer = AdamW(model.parameters(), lr=1e-2, state_dtype=torch.float16)
    train(model, optimizer, batch, 2)
    other = copy.deepcopy(model)
    resumed = AdamW(other.parameters(), lr=1e-2, state_dtype=torch.float16)

    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    state = resumed.state[next(iter(other.parameters()))]
    assert (state["exp_avg"].dtype, state["master"].dtype) == (torch.float16, torch.float32)
    assert torch.equal(train(other, resumed, batch, 2)[-1], train(model, optimizer, batch, 2)[-1])


def test_updates_below_half_an_ulp_need_a_master_copy_or_stochastic_rounding() -> None:
    def final(**options: Any) -> float:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
        optimizer = AdamW([weight], lr=1e-4, weight_decay=0, **options)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return float(weight.detach().float().mean())

    assert final(master=False) == 1.0
    assert final(master=False, rounding="stochastic") == pytest.approx(0.99, abs=1e-3)
    assert final(master=True) == pytest.approx(0.99, abs=4e-3)


@pytest.mark.parametrize(
    ("options", "is_seen"), [({}, False), ({"rounding": "stochastic"}, True), ({"start": True}, True)]
)
def test_updates_below_half_an_ulp_reach_the_data_at_once(options: dict[str, Any], is_seen: bool) -> None:
    """The mean of many weights moves with their fp32 copies, unless all begin on the grid of bf16 and round to it."""
    torch.manual_seed(0)
    values = 1 + torch.rand(20_000)
    weight = nn.Parameter(scaled_tensor(values.bfloat16(), 1.0, role=Role.WEIGHT))
    start = {"start": {weight: values}} if "start" in options else options
    optimizer = AdamW([weight], lr=1e-4, weight_decay=0, **start)
    before = weight.dequantize().double().mean()
    for _ in range(5):
        weight.grad = scaled_tensor(torch.ones(20_000, dtype=torch.bfloat16), 1.0, role=Role.GRADIENT)
        optimizer.step()
    moved = float(before - weight.dequantize().double().mean())
    assert moved == (pytest.approx(5e-4, abs=1e-4) if is_seen else 0)


def test_accumulated_gradients_are_those_of_the_plain_model() -> None:
    plain, batch = build("gpt2")
    ours = scaled(copy.deepcopy(plain))
    halves = [{k: v[rows] for k, v in batch.items()} for rows in (slice(0, 1), slice(1, 3))]

    for half in halves:
        (plain(**half).loss / 3).backward()
        (ours(**half).loss / 3).backward()

    grads = {n: p.grad for n, p in plain.named_parameters()}
    assert [n for n, p in ours.named_parameters() if not torch.equal(p.grad.dequantize(), grads[n])] == []


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.*:FutureWarning")  # newer releases have another name
def test_activation_checkpointing_changes_nothing() -> None:
    plain, batch = build("llama", "sdpa")
    ours = scaled(copy.deepcopy(plain), compute="fp16")
    checkpointed = copy.deepcopy(ours)
    checkpointed.gradient_checkpointing_enable()

    for model in (ours, checkpointed):
        model(**batch).loss.backward()

    grads = {n: p.grad for n, p in ours.named_parameters()}
    assert all(torch.equal(p.grad.dequantize(), grads[n].dequantize()) for n, p in checkpointed.named_parameters())


def test_state_loads_into_a_scaled_model_from_scaled_and_plain_sources() -> None:
    plain, batch = build("bert-mlm")
    ours = scaled(copy.deepcopy(plain))
    other, _ = build("bert-mlm")
    nn.init.normal_(other.bert.embeddings.word_embeddings.weight, std=3.0)
    scaled(other)

    for state in (plain.state_dict(), ours.state_dict()):
        other.load_state_dict(state)
        assert torch.equal(other(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_the_disk_layout_brings_a_model_back(compute: str, tmp_path: Path) -> None:
    plain, batch = build("gpt2")
    ours = scaled(copy.deepcopy(plain), compute=compute)
    save_file(to_disk(ours), tmp_path / "model.safetensors")
    other, _ = build("gpt2")
    if compute == "fp32":
        nn.init.normal_(other.transformer.wte.weight, std=3.0)  # another scale; in fp16 small numbers would round
    scaled(other, compute=compute)
    for parameter in other.parameters():
        parameter.data_part.zero_()

    stored = load_file(tmp_path / "model.safetensors")
    from_disk(other, stored)

    assert stored["transformer.wte.weight"].shape == (1, 64, 32)
    assert float(stored["transformer.wte.weight_scale"]) == ours.lm_head.weight.scale
    assert torch.equal(other(**batch).logits, ours(**batch).logits)
    with pytest.raises(InputError, match=r"transformer\.wte\.weight"):
        from_disk(other, {})


def test_names_ties_and_modes_are_those_of_the_source() -> None:
    plain, batch = build("gpt2")
    ours = scaled(copy.deepcopy(plain), compute="fp16")

    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert ours.lm_head.weight is ours.transformer.wte.weight
    assert isinstance(ours, type(plain))
    assert type(ours).__name__ == type(plain).__name__
    assert isinstance(ours.lm_head.weight, ScaledTensor)
    ours.eval()
    with torch.no_grad():
        tokens = ours.generate(batch["input_ids"][:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 7)


def test_tied_weights_collect_both_gradients() -> None:
    plain, batch = build("bert-mlm")
    ours = scaled(copy.deepcopy(plain), method="scalify", compute="fp16")
    plain(**batch).loss.backward()

    ours(**batch).loss.backward()

    grad = plain.bert.embeddings.word_embeddings.weight.grad
    error = (ours.bert.embeddings.word_embeddings.weight.grad.dequantize() - grad).norm() / grad.norm()
    assert error < 3e-3


SOURCE = HyperParameters(lr=1e-2, eps=1e-3, weight_decay=0.1)


@pytest.mark.parametrize(("sigma", "c"), [(0.02, 1.0), (0.034, 0.034), (37.0, 0.3)])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_equivalent_settings_give_the_same_trajectory(optimizer: str, sigma: float, c: float) -> None:
    def run(scale: float, factor: float, settings: HyperParameters) -> Tensor:
        torch.manual_seed(0)
        weight = (torch.randn(8, 4, dtype=torch.float64) / scale).requires_grad_()
        x, y = torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
        kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        rest = {"momentum": 0.9} if optimizer == "sgd" else {"eps": settings.eps}
        stepper = kinds[optimizer]([weight], lr=settings.lr, weight_decay=settings.weight_decay, **rest)
        for _ in range(30):
            stepper.zero_grad()
            (torch.tanh(x @ (weight * scale).T) - y).square().mean().backward()
            assert weight.grad is not None
            weight.grad *= factor / scale  # autograd gives σ·∂L/∂W
            stepper.step()
        return weight.detach() * scale

    ours = equivalent(optimizer, SOURCE, weight_scale=sigma, gradient_factor=c)

    torch.testing.assert_close(run(sigma, c, ours), run(1.0, 1.0, SOURCE), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(run(sigma, c, SOURCE), run(1.0, 1.0, SOURCE), rtol=1e-3)
