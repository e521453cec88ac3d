"""Native unit scaling: factors against Gaussian samples and the authors' package, sizes of fresh models, refusals."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from lpconv.data import demo_checkpoint
from lpconv.errors import UnsupportedError, UsageError
from lpconv.scaled import AdamW, ScaledTensor, fallbacks, native, native_groups, scaled, scaled_tensor
from lpconv.scaled.native import data_sizes, initialise
from lpconv.scaled.pair import Numerics
from lpconv.scaled.rules.native import ACTIVATIONS, averaged_size, averaged_size_alike
from tests.helpers.scaled_models import build

NATIVE = Numerics(native=True, strict=True)
Function = Callable[..., Tensor]


def rms(x: Tensor) -> float:
    data = x.data_part if isinstance(x, ScaledTensor) else x
    return float(data.detach().double().square().mean().sqrt())


def data_and_grads(function: Function, operands: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Data of the result and of every gradient, for a gradient that enters as it is."""
    leaves = [x.detach().requires_grad_() for x in operands]
    out = function(*leaves)
    out.backward(gradient=scaled_tensor(grad, 1.0, numerics=NATIVE) if isinstance(out, ScaledTensor) else grad)
    found = [out.detach(), *(x.grad for x in leaves)]
    return [x.data_part if isinstance(x, ScaledTensor) else x for x in found if x is not None]


def at_unit(shape: Sequence[int], scale: float = 1.0) -> ScaledTensor:
    return scaled_tensor(torch.randn(shape), scale, numerics=NATIVE)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_factors_are_the_inverse_sizes_over_gaussian_samples(name: str) -> None:
    torch.manual_seed(0)
    x = at_unit((400_000,)).requires_grad_()
    out = getattr(F, name)(x)
    out.backward(gradient=scaled_tensor(torch.randn(400_000), 1.0, numerics=NATIVE))
    size = rms(out) if name == "sigmoid" else float(out.data_part.std())  # a gate multiplies by its mean too
    assert size == pytest.approx(1, rel=0.02)
    assert rms(x.grad) == pytest.approx(1, rel=0.02)
    torch.testing.assert_close(out.dequantize(), getattr(F, name)(x.data_part), rtol=1e-5, atol=1e-6)


def test_data_of_a_gated_recurrence_do_not_drift() -> None:
    torch.manual_seed(0)
    x, w = at_unit((60, 16, 64)).requires_grad_(), at_unit((64, 64), 1 / 8).requires_grad_()
    hidden = torch.tanh(x[0])
    for step in x[1:]:
        gate = torch.sigmoid(hidden @ w)
        hidden = (1 - gate) * hidden + gate * torch.tanh(step)
    hidden.backward(gradient=scaled_tensor(torch.randn(hidden.shape), 1.0, numerics=NATIVE))
    assert 0.5 < rms(hidden) < 2
    assert 0.5 < rms(w.grad) < 4
    assert 0.5 < rms(x.grad) < 2  # of all steps, most of it in the last


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_factors_over_gaussian_samples(is_causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (at_unit((16, 4, 96, 32)).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    out.backward(gradient=scaled_tensor(torch.randn(out.shape), 1.0, numerics=NATIVE))
    # To a quarter: short rows are not as the formula has them. Forward there is room for values that are alike.
    assert rms(out) == pytest.approx(averaged_size(96, is_causal) / averaged_size_alike(96, is_causal), rel=0.25)
    for x in (q, k, v):
        assert rms(x.grad) == pytest.approx(1, rel=0.25)


# Ours, theirs, and the shapes; sizes whose roots are no powers of two.
SAME: dict[str, tuple[Function, Callable[[Any], Function], Sequence[tuple[int, ...]]]] = {
    "linear": (F.linear, lambda u: lambda x, w: u.linear(x, w, None, constraint=None), [(60, 96), (20, 96)]),
    "matmul": (torch.matmul, lambda u: lambda a, b: u.matmul(a, b, constraint=None), [(60, 96), (96, 20)]),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (48,), w, b),
        lambda u: lambda x, w, b: u.layer_norm(x, (48,), w, b),
        [(60, 48), (48,), (48,)],
    ),
    "embedding": (
        lambda w: F.embedding(torch.arange(90) % 7, w),
        lambda u: lambda w: u.embedding(torch.arange(90) % 7, w),
        [(50, 12)],
    ),
    "convolution": (
        lambda x, w: F.conv1d(x, w, None, stride=2, groups=3),
        lambda u: lambda x, w: u.conv1d(x, w, None, stride=2, groups=3, constraint=None),
        [(4, 12, 41), (15, 4, 5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_data_are_those_of_the_unit_scaling_package(name: str) -> None:
    ours, theirs, shapes = SAME[name]
    torch.manual_seed(0)
    plain = [torch.randn(shape) for shape in shapes]
    grad = torch.randn(ours(*plain).shape)
    expected = data_and_grads(theirs(pytest.importorskip("unit_scaling.functional")), plain, grad)
    found = data_and_grads(ours, [scaled_tensor(x, 1.0, numerics=NATIVE) for x in plain], grad)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


class Answer(NamedTuple):
    loss: Tensor
    features: Tensor


class ConvolutionalModel(nn.Module):
    """A causal convolution of embedded ids in groups, and its prediction; it is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(50, 32), nn.Conv1d(32, 32, 5, groups=4), nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Answer:
        features = self.inner(F.pad(self.table(ids[:, :-1]).transpose(1, 2), (4, 0))).transpose(1, 2)
        return Answer(F.cross_entropy(self.head(F.relu(features)).flatten(0, 1), ids[:, 1:].flatten()), features)


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_model_of_convolutions_is_drawn_and_has_data_of_unit_size(compute: str) -> None:
    plain = ConvolutionalModel()
    initialise(plain, seed=0)
    drawn = plain.inner.weight.detach()
    assert float(drawn.sum((1, 2)).abs().max()) < 1e-5  # an activation's mean is multiplied by zero
    assert float(drawn.std()) == pytest.approx((8 * 5) ** -0.5, rel=0.05)
    model = scaled(plain, method="native", compute=compute, strict=True)
    answer = model(torch.randint(0, 50, (16, 40)))
    answer.loss.backward()
    assert type(answer) is Answer
    assert not isinstance(answer.features, ScaledTensor)
    for name, parameter in model.named_parameters():
        assert 0.5 < rms(parameter.grad) < 2, name


@pytest.mark.parametrize(("transposed", "weight"), [(False, (12, 6, 4, 4)), (True, (24, 6, 4, 4))])
def test_data_of_strided_convolutions_of_groups_have_unit_size(transposed: bool, weight: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    function = F.conv_transpose2d if transposed else F.conv2d
    x, w = at_unit((8, 24, 20, 20)).requires_grad_(), at_unit(weight).requires_grad_()
    out = function(x, w, stride=2, groups=4)
    out.backward(gradient=scaled_tensor(torch.randn(out.shape), 1.0, numerics=NATIVE))
    assert rms(out) == pytest.approx(1, rel=0.1)  # fewer terms at the borders
    assert rms(x.grad) == pytest.approx(1, rel=0.1)
    assert rms(w.grad) == pytest.approx(1, rel=0.1)


def test_the_loss_hands_down_the_gradient_of_the_unit_scaling_package() -> None:
    functional = pytest.importorskip("unit_scaling.functional")
    torch.manual_seed(0)
    logits, target = torch.randn(60, 37), torch.randint(0, 37, (60,))
    (expected,) = data_and_grads(lambda x: functional.cross_entropy(x, target), [logits], torch.tensor(1.0))[1:]
    ours = scaled_tensor(logits, 1.0, numerics=NATIVE)
    (found,) = data_and_grads(lambda x: F.cross_entropy(x, target), [ours], torch.tensor(1.0))[1:]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def tiny(kind: str, layers: int = 6) -> nn.Module:
    sizes = {"hidden_size": 96, "num_hidden_layers": layers, "num_attention_heads": 3, "vocab_size": 200}
    if kind == "bert":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertForMaskedLM(hf.BertConfig(intermediate_size=384, **sizes, **quiet))
    if kind == "gpt2":
        config = hf.GPT2Config(vocab_size=200, n_embd=96, n_layer=layers, n_head=3, n_positions=48, resid_pdrop=0,
                               embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)  # fmt: skip
        return hf.GPT2LMHeadModel(config)
    return hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=240, **sizes))


def observed(model: nn.Module, **inputs: Tensor) -> dict[str, list[float]]:
    """Sizes over a step on random tokens, none of them for padding, or on other inputs."""
    ids = torch.randint(3, 200, (8, 48), generator=torch.Generator().manual_seed(0))
    given = inputs or {"input_ids": ids, "labels": ids}
    return data_sizes(model, lambda: model(**given).loss.backward())


@pytest.mark.parametrize(("kind", "share"), [("gpt2", 1.0), ("llama", 1.0), ("bert", 0.97)])
def test_a_fresh_model_has_data_of_unit_size_in_both_passes(kind: str, share: float) -> None:
    for what, sizes in observed(native(tiny(kind))).items():
        assert sum(0.5 <= s <= 2 for s in sizes) >= share * len(sizes), (what, min(sizes), max(sizes))


TEXT = {"vocab_size": 200, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3,
        "intermediate_size": 240, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
# Families that need more than BERT, GPT-2 and Llama do, by what that is.
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "table with a factor, norms of 1 + weight, tied": lambda **k: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED, **k)),
    "norms at the end of branches": lambda **k: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**GROUPED, query_pre_attn_scalar=24, **k)
    ),
    "factors of scores, branches and the table": lambda **k: hf.GraniteForCausalLM(
        hf.GraniteConfig(
            **TEXT, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=1 / 32,
            logits_scaling=8.0, tie_word_embeddings=False, **k,
        )
    ),
    "a matrix for Q, K and V that is listed last": lambda **k: hf.Phi3ForCausalLM(hf.Phi3Config(**TEXT, **k)),
    "a norm that subtracts its mean": lambda **k: hf.CohereForCausalLM(hf.CohereConfig(**TEXT, **k)),
    "half of each head rotated": lambda **k: hf.StableLmForCausalLM(
        hf.StableLmConfig(**TEXT, num_key_value_heads=3, partial_rotary_factor=0.5, **k)
    ),
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("what", FAMILIES)
def test_families_have_data_of_unit_size_and_gradients_of_the_plain_model(what: str, attention: str) -> None:
    torch.manual_seed(0)
    plain = FAMILIES[what](attn_implementation=attention)
    initialise(plain)
    ours = scaled(copy.deepcopy(plain), method="native", strict=True)
    for kind, sizes in observed(ours).items():
        assert sum(0.5 <= s <= 2 for s in sizes) >= 0.95 * len(sizes), (kind, min(sizes), max(sizes))
    observed(plain)
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        if float(p.grad.norm()) > 1e-7:  # that of a key's bias is zero
            assert float((q.grad.dequantize() - p.grad).norm() / p.grad.norm()) < 1e-4, name


@pytest.mark.parametrize("what", ["class", "image"])
def test_gradients_that_enter_at_one_token_have_unit_size(what: str) -> None:
    torch.manual_seed(0)
    sizes = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 50}
    labels = torch.randint(0, 50, (16,))
    if what == "class":
        model = native(hf.BertForSequenceClassification(hf.BertConfig(**sizes)))
        found = observed(model, input_ids=torch.randint(3, 200, (16, 40)), labels=labels)
    else:
        del sizes["vocab_size"]
        model = native(hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=24, patch_size=4)))
        found = observed(model, pixel_values=torch.randn(16, 3, 24, 24), labels=labels)
    for kind, of_kind in found.items():  # but for what is added to that token alone, or to all others
        assert sum(0.4 <= s <= 2.5 for s in of_kind) >= len(of_kind) - 2, (kind, of_kind)


def test_dropout_leaves_the_scale() -> None:
    torch.manual_seed(0)
    out, grad = data_and_grads(
        lambda x: torch.native_dropout(x, 0.1, True)[0], [at_unit((200, 300))], torch.randn(200, 300)
    )
    assert [rms(out), rms(grad)] == [pytest.approx(1, rel=0.02)] * 2


def test_parts_of_a_gradient_have_the_size_of_the_whole() -> None:
    torch.manual_seed(0)
    x, ids = at_unit((40, 60)).requires_grad_(), torch.randint(0, 40, (25,))
    parts: dict[str, Function] = {
        "slice": lambda x: x[:, 50:], "row": lambda x: x[3], "rows": lambda x: x[ids],
        "gather": lambda x: x.gather(1, torch.randint(0, 60, (40, 7))),
        "index_select": lambda x: x.index_select(0, ids),
        "chunks": lambda x: torch.cat([2 * c for c in x.chunk(3, dim=1)], dim=1),
    }  # fmt: skip
    for name, part in parts.items():
        _, found = data_and_grads(part, [x], torch.randn(part(x).shape))
        assert rms(found) == pytest.approx(1, rel=0.1), name


def test_scales_of_the_residual_stream_are_those_of_the_formulas() -> None:
    layers, length = 3, 48
    model = native(tiny("llama", layers))
    seen: list[float] = []
    norm = model.get_submodule("model.norm")
    norm.register_forward_pre_hook(lambda _, args: seen.append(float(args[0].scale)))
    model(input_ids=torch.zeros((1, length), dtype=torch.long))
    stream = 1.0  # the embedding
    for _ in range(layers):
        attention = averaged_size_alike(length, is_causal=True) / math.sqrt(layers)
        stream = math.hypot(stream, attention)
        stream = math.hypot(stream, 1 / ACTIVATIONS["silu"][0])  # silu(gate) · up, gate and up of unit size
    assert seen == [pytest.approx(stream, rel=1e-6)]


@pytest.mark.parametrize("compute", ["fp16", "fp8"])
def test_it_learns_without_a_loss_scale(compute: str) -> None:
    torch.manual_seed(0)
    model = native(tiny("llama", 1), compute=compute)
    optimizer = AdamW(native_groups(model.parameters(), 0.3, rule="u-mup"))
    ids = torch.arange(16).repeat(4, 2) % 11
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 5
    assert losses[-1] < 0.5
    assert not any(key.startswith("fallback") for key in fallbacks(model))


def test_a_step_moves_every_unit_weight_by_the_learning_rate() -> None:
    model = native(tiny("llama", 1))
    before = {n: p.data_part.clone() for n, p in model.named_parameters()}
    observed(model)
    AdamW(native_groups(model.parameters(), 0.01), weight_decay=0).step()  # Adam's first step is lr·sign(g)
    for name, p in model.named_parameters():
        assert float((p.data_part - before[name]).abs().max()) == pytest.approx(0.01, rel=0.02), name
    rates = sorted(g["lr"] for g in native_groups(model.parameters(), 0.01, rule="u-mup"))
    assert rates == pytest.approx([0.01 / 240, 0.01 / 96, 0.01 / 96**0.5, 0.01])


class Block(nn.Module):
    """Attention with one head, gelu and a norm, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.out, self.norm = nn.Linear(24, 72), nn.Linear(24, 24), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.gelu(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def test_compiled_whole() -> None:
    model, x = native(Block()), torch.randn(2, 8, 24)
    grads = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(x).square().mean().backward()
        grads.append([p.grad.dequantize() for p in model.parameters()])
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_loaded_weights_are_refused() -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(demo_checkpoint())
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(UsageError, match="lose"):
        native(model)
    with pytest.raises(UsageError, match="drew"):
        scaled(model, method="native")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_what_has_no_native_rule_is_named() -> None:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(self.layer(x)).real

    with pytest.raises(UnsupportedError, match=r"fft_r2c.*module `root` \(Fourier\)"):
        native(Fourier())(torch.randn(2, 8))
    with pytest.raises(UnsupportedError, match=r"parameter `weight_ih_l0` of LSTM"):
        native(nn.LSTM(4, 4))
    whisper, _ = build("whisper")
    with pytest.raises(UnsupportedError, match="tied"):
        native(whisper)
    config = hf.T5Config(vocab_size=64, d_model=32, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
    with pytest.raises(UnsupportedError, match="size 8"):
        native(hf.T5ForConditionalGeneration(config))(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long())
