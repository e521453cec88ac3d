"""Scaled tensors and models do what plain torch and transformers do, in cases that once went wrong."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from lpconv.errors import UnsupportedError
from lpconv.scaled import AdamW, ScaledTensor, scaled, scaled_tensor
from lpconv.scaled.pair import Numerics, Role

SCALES = [4.0, torch.tensor(4.0)]
X = torch.tensor([[1.5, -2.0, 0.25, 3.0], [0.5, 1.0, -1.0, 2.0], [4.0, -0.5, 1.25, -3.0]])
MASK, TARGET = torch.tensor([True, False, True, False]), torch.tensor([1, 0, 3])

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": lambda x: F.cross_entropy(x, TARGET, weight=X[0].abs().to(x.dtype)),
    "where, integers": lambda x: torch.where(MASK, x, torch.arange(4)) + torch.where(MASK, torch.arange(4), x),
    "integers": lambda x: (
        torch.maximum(x + torch.arange(4), torch.arange(4)) - torch.cat([x, torch.ones(3, 4) > 0])[3:]
    ),
    "where, 0-dim": lambda x: torch.where(MASK[0], x.sum(), torch.tensor(2.0)),
    "complex number": lambda x: (x.float() * (1 + 2j)).abs() + (x.float() + 2j).real,
    "list": lambda x: torch.tensor(x.tolist()),
    "mv": lambda x: torch.mv(x, x[0]) + torch.dot(x[0], x[1]),
    "slice_scatter": lambda x: x.slice_scatter(x[:1] * 8, 0, 1, 2).select_scatter(x[0].double() / 8, 0, 2),
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 1) + torch.atan2(x, x.abs() + 1),
    "bounds": lambda x: x.clamp_min(0.5) + x.clamp_max(1.0) + F.hardtanh(x),
    "spread": lambda x: x.std(1) + x.var(1) + F.normalize(x, dim=1).sum(1) + F.cosine_similarity(x, x * x, dim=1),
    "0-dim": lambda x: x.sum().softmax(0) + x.sum().sum(-1) + x.sum().prod(0),
    "static zeros": lambda x: (
        F.linear(torch.zeros_like(x), x, x[:, 0])
        + F.conv1d(torch.zeros_like(x).t()[None], x[:, :, None], x[:, 0])[0]
        + F.scaled_dot_product_attention(torch.zeros_like(x), torch.zeros_like(x), x, is_causal=True)[:, :3]
    ),
    "wider": lambda x: torch.cat([x.double() * 2.0**12, X.half()]) + torch.cat([X.half() / 64, X.half()]),
    "number": lambda x: ((x * 0 - 0.3) >= -0.3).to(x.dtype),
    "part of booleans": lambda x: (X > 0).slice_scatter(x[:1], 0, 0, 1).logical_not(),
    "power in place": lambda x: (x * 1).pow_(2),
}


def value(x: Any) -> Any:
    return x.dequantize(x.dtype) if isinstance(x, ScaledTensor) else x.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_the_value_and_dtype_of_plain_torch(
    name: str, scale: float | Tensor, dtype: torch.dtype
) -> None:
    expected = FUNCTIONS[name](X.to(dtype))
    got = FUNCTIONS[name](scaled_tensor((X / 4).to(dtype), scale, numerics=Numerics(strict=True)))

    assert got.dtype == (torch.float32 if name == "weights" else expected.dtype)  # a loss stays in fp32
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(value(got).to(expected.dtype), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def _new_memory_is_nan() -> Iterator[None]:
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _halves_of_complex(x: Tensor) -> Tensor:
    number = torch.view_as_complex((x * 1.5).view(3, 2, 2))
    number.imag.mul_(2)
    number.real[0] = 7
    return torch.view_as_real(number)


def _scale_only(x: Tensor) -> Tensor:
    """A product with a power of two changes the scale and no data."""
    out = x * 1.5
    seen = out.squeeze()
    out.mul_(2)
    return seen


@pytest.mark.usefixtures("_new_memory_is_nan")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("write", [_halves_of_complex, _scale_only])
def test_a_write_reaches_its_elements_only_and_all_views(
    write: Callable[[Tensor], Tensor], scale: float | Tensor
) -> None:
    assert torch.equal(value(write(scaled_tensor(X / 4, scale))), write(X))


def test_writes_whose_gradients_torch_cannot_follow_are_refused() -> None:
    base = scaled_tensor(X, 1.0).requires_grad_() * 3
    _ = base[0]
    with pytest.raises(UnsupportedError, match=r"unsqueeze_.*views.*"):
        base.unsqueeze_(0)
    of_weight = scaled_tensor(X, 1.0, role=Role.WEIGHT).requires_grad_().relu()
    _ = of_weight[0]
    with pytest.raises(UnsupportedError, match=r"unsqueeze_.*views.*"):
        of_weight.unsqueeze_(0)
    view = base.t()[:2].squeeze_(0)
    with pytest.raises(UnsupportedError, match="reshaped"):
        view.fill_(1.0)
    with pytest.raises(UnsupportedError, match="expanded"):
        scaled_tensor(X, 1.0).expand(2, 3, 4).fill_(1.0)


@pytest.mark.parametrize("scale", [2.0**-30, torch.tensor(2.0**-30)])
def test_a_norm_in_pieces_brings_data_back_to_1(scale: float | Tensor) -> None:
    """OLMo2 wrote inf from data at a scale far below their size: epsilon's scale was taken for the variance's."""
    x = scaled_tensor((X * 2.0**10).half(), scale)
    wide = x.float()
    out = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).half()
    plain = X * 2.0**-20
    expected = plain * torch.rsqrt(plain.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(out.dequantize(), expected, rtol=1e-3, atol=0)
    assert float(out.data_part.abs().max()) < 4


class CastingRouter(nn.Linear):
    """Casts itself to its own dtype in each forward pass, as Switch Transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        return super(CastingRouter, self.to(torch.float32)).forward(x)


def test_a_layer_may_be_cast_to_its_own_dtype_while_a_graph_holds_it() -> None:
    plain = nn.Sequential(CastingRouter(4, 4))
    ours = scaled(copy.deepcopy(plain))
    for model in (plain, ours):
        (model(X) * model(2 * X)).sum().backward()
    assert torch.equal(ours[0].weight.grad.dequantize(), plain[0].weight.grad)
    assert ours.double()[0].weight.dtype == torch.float64


def tiny_llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, **settings)).train()


def test_a_compiled_model_with_a_cache_trains() -> None:
    plain = tiny_llama(use_cache=True)
    ours = scaled(copy.deepcopy(plain))
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    for model in (plain, torch.compile(ours, backend="aot_eager")):
        model(**batch).loss.backward()
    for name, p in plain.named_parameters():
        assert torch.equal(ours.get_parameter(name).grad.dequantize(), p.grad), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_scaled_model_saves_a_plain_checkpoint(tmp_path: Path, tied: bool) -> None:
    plain = tiny_llama(tie_word_embeddings=tied)
    scaled(copy.deepcopy(plain)).save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


def test_trainer_saves_and_resumes_a_scaled_model(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8

    def train(folder: Path, steps: int, **options: Any) -> dict[str, Tensor]:
        model = scaled(tiny_llama())
        arguments = hf.TrainingArguments(
            str(folder), max_steps=steps, save_steps=1, report_to=[], use_cpu=True, lr_scheduler_type="constant"
        )
        optimizer = AdamW(model.parameters(), lr=1e-2)
        hf.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train(**options)
        return {name: value(x) for name, x in model.state_dict().items()}

    whole = train(tmp_path / "whole", 4)
    half = train(tmp_path / "parts", 2)
    opened = hf.LlamaForCausalLM.from_pretrained(tmp_path / "parts/checkpoint-2").state_dict()
    resumed = train(tmp_path / "parts", 4, resume_from_checkpoint=str(tmp_path / "parts/checkpoint-2"))
    for name, x in whole.items():
        assert torch.equal(opened[name], half[name])
        assert torch.equal(resumed[name], x)
