"""Weights of one byte that the matmul reads as they are, with the rest of them in the optimizer."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.kernels.linear import LinearRecipe
from lpconv.optim import (
    CollageAdamW,
    CollageSGD,
    Fp8WeightLinear,
    LowPrecisionAdamW,
    fp32_state_dict,
    start_from_fp32,
    use_fp8_weights,
)
from lpconv.optim.storage import stored_value

E4M3FN = torch.float8_e4m3fn


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))


def fp8_network(**options: object) -> tuple[nn.Sequential, LowPrecisionAdamW, dict[str, Tensor]]:
    """The network in bf16 with fp8 weights, its optimizer at the fp32 values, and these."""
    values = {n: t.clone() for n, t in network().state_dict().items()}
    model = network().bfloat16()
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "compiled": False} | options
    optimizer = LowPrecisionAdamW(use_fp8_weights(model), **({"variant": "plus"} | options))  # type: ignore[arg-type]  # options of several types
    start_from_fp32(optimizer, model, values)
    return model, optimizer, values


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16(), torch.sin(x.sum(1, keepdim=True))


def train(model: nn.Module, optimizer: LowPrecisionAdamW, steps: int = 150) -> float:
    """Mean loss over the last 20 steps."""
    losses = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / 20


def test_the_product_reads_the_bytes_and_the_gradient_is_theirs() -> None:
    torch.manual_seed(0)
    layer = Fp8WeightLinear(torch.randn(8, 16) * 0.02, torch.randn(8).bfloat16(), recipe=LinearRecipe())
    x = torch.randn(5, 16).to(E4M3FN).bfloat16().requires_grad_()
    assert float(layer.weight_scale) == 2.0**-6
    assert layer.bias is not None
    y = layer(x)
    w = layer.weight.detach().float() * 2.0**-6
    torch.testing.assert_close(y.float(), x.detach().float() @ w.T + layer.bias.float(), rtol=2**-7, atol=2**-8)
    grad = torch.randn(5, 8).to(torch.float8_e5m2).bfloat16()
    y.backward(grad)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.bfloat16
    expected = 2.0**-6 * grad.float().T @ x.detach().float()
    torch.testing.assert_close(layer.weight.grad.float(), expected, rtol=2**-7, atol=2**-12)


def test_a_copy_and_a_saved_layer_train_on() -> None:
    layer = Fp8WeightLinear(torch.randn(4, 16) * 0.02)
    twin = copy.deepcopy(layer)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    twin.load_state_dict(torch.load(saved))
    twin(torch.randn(2, 16).bfloat16()).sum().backward()
    assert twin.weight.dtype == E4M3FN
    assert twin.weight.grad is not None
    assert twin.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("residual", "relative", "absolute"), [(torch.bfloat16, 2.0**-13, 2.0**-19), (E4M3FN, 2.0**-9, 2.0**-14)]
)
def test_fp32_weights_come_back_within_the_bound(residual: torch.dtype, relative: float, absolute: float) -> None:
    model, optimizer, values = fp8_network(fp8_residual=residual)
    exported = fp32_state_dict(optimizer, model)
    for name in ("0.weight", "2.weight"):
        allowed = torch.maximum(relative * values[name].abs(), absolute * exported[f"{name}_scale"])
        assert bool(((exported[name] - values[name]).abs() <= allowed).all())
    assert model.get_parameter("0.weight").dtype == E4M3FN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_scale_is_exact(dtype: torch.dtype) -> None:
    """Options for W act on W / 2^-5 as on W, bit for bit, where state has the range."""
    torch.manual_seed(0)
    w, g = torch.randn(300).to(dtype), torch.randn(20, 300).to(dtype)
    plain, unit = nn.Parameter(w.clone()), nn.Parameter(w * 2.0**5)
    options = {"lr": 1e-2, "weight_decay": 0.1, "compiled": False}
    first = CollageAdamW([plain], **options)  # type: ignore[arg-type]  # options of several types
    second = CollageAdamW([{"params": [unit], "weight_scale": 2.0**-5}], **options)  # type: ignore[arg-type]
    for gradient in g:
        plain.grad, unit.grad = gradient, gradient * 2.0**-5
        first.step()
        second.step()
    assert torch.equal(plain, unit * 2.0**-5)


def displacement_error(variant: str, residual: torch.dtype, lr: float) -> float:
    """Of 4,000 e4m3fn weights after 300 steps, beside AdamW in fp64 on the same gradients."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4000, generator=generator).to(E4M3FN)
    mean = torch.randn(4000, generator=generator)
    p = nn.Parameter(start.clone(), requires_grad=True)
    p.grad_dtype = torch.bfloat16
    group = {"params": [p], "weight_scale": 2.0**-6}
    optimizer = LowPrecisionAdamW(
        [group], lr=lr, betas=(0.9, 0.95), weight_decay=0.1, variant=variant, fp8_residual=residual, compiled=False
    )
    twin = nn.Parameter(start.double() * 2.0**-6)
    reference = torch.optim.AdamW([twin], lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(300):
        p.grad = (mean + torch.randn(4000, generator=generator)).bfloat16()
        twin.grad = p.grad.double() * 2.0**6
        optimizer.step()
        reference.step()
    kept = stored_value(optimizer.storages(p)[0], optimizer.parts(p)[0]).double() * 2.0**-6
    moved, wanted = kept - start.double() * 2.0**-6, twin.detach() - start.double() * 2.0**-6
    return float((moved - wanted).norm() / wanted.norm())


def test_small_updates_are_kept_beside_fp64() -> None:
    assert displacement_error("fp32-master", torch.bfloat16, 1e-4) < 1e-5
    assert displacement_error("full", torch.bfloat16, 1e-4) < 5e-3
    assert displacement_error("plus", torch.bfloat16, 1e-4) < 5e-3
    assert displacement_error("bf16", torch.bfloat16, 1e-4) > 0.3  # e4m3fn alone


def test_training_follows_fp32_masters() -> None:
    losses = {}
    for variant, residual in (("fp32-master", torch.bfloat16), ("plus", torch.bfloat16), ("plus", E4M3FN)):
        model, optimizer, _ = fp8_network(variant=variant, fp8_residual=residual)
        losses[variant, residual] = train(model, optimizer)
    base = losses["fp32-master", torch.bfloat16]
    assert losses["plus", torch.bfloat16] == pytest.approx(base, rel=0.05)
    assert losses["plus", E4M3FN] == pytest.approx(base, rel=0.1)


def test_compiled_steps_are_the_eager_ones() -> None:
    models = []
    for compiled in (True, False):
        model, optimizer, _ = fp8_network(compiled=compiled)
        train(model, optimizer, 3)
        models.append(fp32_state_dict(optimizer, model))
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=2**-7, atol=1e-5)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    model, optimizer, _ = fp8_network()
    train(model, optimizer, 5)
    twin, resumed, _ = fp8_network()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 5)
    train(twin, resumed, 5)
    assert resumed.param_groups[1]["weight_scale"] == optimizer.param_groups[1]["weight_scale"]
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.float(), b.float())
    other = fp8_network(fp8_residual=E4M3FN)[1]
    with pytest.raises(InputError, match="fit"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("variant", "residual", "expected"),
    [("light", torch.bfloat16, 9), ("plus", torch.bfloat16, 11), ("plus", E4M3FN, 10), ("light", E4M3FN, 8)],
)
@pytest.mark.filterwarnings("ignore:variant 'light'")
def test_bytes_per_parameter(variant: str, residual: torch.dtype, expected: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    optimizer = LowPrecisionAdamW(use_fp8_weights(model), variant=variant, fp8_residual=residual, compiled=False)
    model(torch.randn(2, 64).bfloat16()).sum().backward()
    optimizer.step()
    assert optimizer.bytes_per_parameter() == expected


def test_a_language_model_is_replaced_but_for_its_head() -> None:
    model = LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.bfloat16)
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    groups = use_fp8_weights(model, exclude=["*.layers.0.mlp.*"])
    replaced = [n for n, m in model.named_modules() if isinstance(m, Fp8WeightLinear)]
    assert set(names) - set(replaced) == {"lm_head", *(n for n in names if ".layers.0.mlp." in n)}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    values = LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).state_dict()
    optimizer = CollageAdamW(groups, lr=1e-4, compiled=False)
    start_from_fp32(optimizer, model, values)
    tokens = torch.randint(0, 64, (2, 16))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:variant")
def test_what_cannot_be_is_refused() -> None:
    model = network().bfloat16()
    groups = use_fp8_weights(model)
    with pytest.raises(UnsupportedError, match="sgd"):
        CollageSGD([{"params": g["params"]} for g in groups])
    with pytest.raises(UnsupportedError, match="weight_scale"):
        CollageSGD([{"params": [nn.Parameter(torch.ones(2))], "weight_scale": 0.5}])
    for options in ({"arithmetic": "paper"}, {"variant": "kahan"}, {"variant": "stochastic"}):
        with pytest.raises(UnsupportedError, match="e4m3fn"):
            LowPrecisionAdamW([dict(g) for g in groups], **({"variant": "plus"} | options))  # type: ignore[arg-type]  # strings all
    with pytest.raises(UnsupportedError, match="float16"):
        CollageAdamW(groups, fp8_residual=torch.float16)
    with pytest.raises(UsageError, match="power"):
        CollageAdamW([{"params": list(model.parameters()), "weight_scale": 0.3}])
    with pytest.raises(UsageError, match="no Linear"):
        use_fp8_weights(model)
    broken = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(broken.get_parameter("0.weight"), float("inf"))
    with pytest.raises(UsageError, match="NaN"):
        use_fp8_weights(broken)
