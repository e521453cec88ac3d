"""GGUF files compute what the model computes that llama.cpp's conversion would have made them of, or are refused.

The reference is that model, opened by transformers. Where transformers' own reading of GGUF is right too, lpconv agrees
with it; it ignores factors and scales of rotary embeddings, soft caps, biases and other keys.
"""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import lpconv
from lpconv.cli.main import app
from lpconv.errors import UnsupportedError
from lpconv.storage.checkpoint import Checkpoint

pytest.importorskip("gguf", reason="needs the package gguf (`lpconv[gguf]`)")
from tests.helpers.gguf_files import model_as_gguf

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KEYS: dict[str, Any] = {
    "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96, "vocab_size": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 5e5, "rope.dimension_count": 16,
}  # fmt: skip
RMS = {**KEYS, "attention.layer_norm_rms_epsilon": 1e-3}
NORM = {**KEYS, "attention.layer_norm_epsilon": 1e-3}
NO_ROPE = {k: v for k, v in NORM.items() if not k.startswith("rope.")}
WIDE = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
LONG = {
    "rope.scaling.original_context_length": 16,
    "rope.scaling.attn_factor": 1.25,
    "tokenizer.ggml.padding_token_id": 0,
}
HARMLESS = {
    "general.name": "mistral", "general.file_type": 0, "tensor_data_layout": "Meta AI original pth",
    "quantize.imatrix.file": "x", "mradermacher.quantized_by": "x", "tokenizer.ggml.eos_token_id": 3,
    "split.count": 1,
}  # fmt: skip


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 5e5, **more}


def rope_llama3(length: int) -> dict[str, Any]:
    return rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=length
    )


def model_of(name: str, **settings: Any) -> Any:
    cls = getattr(hf, f"{name}ForCausalLM")
    return cls(cls.config_class(**settings))


def with_rms(name: str, **more: Any) -> Any:
    return model_of(name, **{**SIZES, "rms_norm_eps": 1e-3, "rope_parameters": rope(), **more})


llama, qwen2, qwen3 = (partial(with_rms, name) for name in ("Llama", "Qwen2", "Qwen3"))
phi3 = partial(with_rms, "Phi3", pad_token_id=0)
gemma2 = partial(
    with_rms, "Gemma2", head_dim=32, sliding_window=4, final_logit_softcapping=3.0, attn_logit_softcapping=2.0
)


def gemma3() -> Any:
    ropes = {
        "full_attention": rope("linear", factor=8.0),
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    sizes = {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4}
    return with_rms("Gemma3", **sizes, rope_parameters=ropes)


def starcoder2() -> Any:
    return model_of("Starcoder2", **SIZES, norm_epsilon=1e-3, rope_parameters=rope())


def stablelm() -> Any:
    return model_of("StableLm", **SIZES, layer_norm_eps=1e-3, rope_parameters=rope(partial_rotary_factor=0.5))


def nemotron() -> Any:
    quarter = rope(partial_rotary_factor=0.25)
    return model_of("Nemotron", **SIZES, head_dim=16, norm_eps=1e-3, rope_parameters=quarter)


def falcon() -> Any:
    sizes = {k: SIZES[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    return model_of("Falcon", **sizes, layer_norm_epsilon=1e-3, rope_parameters=rope())


def lfm2() -> Any:
    more = {"norm_eps": 1e-3, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}
    return model_of("Lfm2", **SIZES, **more, conv_L_cache=4, rope_parameters=rope())


def gpt2() -> Any:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 96, "vocab_size": 96}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, layer_norm_epsilon=1e-3))


def bloom() -> Any:
    return model_of("Bloom", hidden_size=64, n_layer=2, n_head=4, vocab_size=96, layer_norm_epsilon=1e-3)


def mamba() -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8, "expand": 1}
    return model_of("Mamba", **sizes, layer_norm_epsilon=1e-3)


def factors(settings: dict[str, Any], size: int) -> list[float]:
    """What llama.cpp's conversion divides the frequencies by: transformers' frequencies without and with scaling."""
    frequencies = llama(head_dim=size, rope_parameters=settings).model.rotary_emb.inv_freq
    plain: list[float] = (llama(head_dim=size).model.rotary_emb.inv_freq / frequencies).tolist()
    return plain


LONG_FACTORS = {"short_factor": [1.0 + i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
HEADS_64 = {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64}
MAMBA = {"block_count": 2, "context_length": 2**20, "embedding_length": 64, "feed_forward_length": 0,
         "attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-3, "ssm.conv_kernel": 4,
         "vocab_size": 96, "ssm.inner_size": 64, "ssm.state_size": 8, "ssm.time_step_rank": 4}  # fmt: skip
CAPS = {"attention.sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
# Models by name, and the keys and more tensors of their files; transformers' own reading of the first ones is right.
CASES: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "llama": (llama, "llama", RMS | HARMLESS | {"general.name": "x"}, {"blk.0.attn_rot_embd.weight": [1.0]}),
    "qwen2": (qwen2, "qwen2", RMS, {}),
    "qwen3": (lambda: qwen3(head_dim=128), "qwen3", RMS | dict.fromkeys(WIDE, 128), {}),
    "phi3": (phi3, "phi3", RMS | {"tokenizer.ggml.padding_token_id": 0}, {}),
    "mistral": (llama, "llama", RMS | HARMLESS, {}),
    "untied": (lambda: llama(tie_word_embeddings=True), "llama", RMS, {}),
    "llama-biases": (lambda: llama(attention_bias=True, mlp_bias=True), "llama", RMS, {}),
    "llama-linear": (lambda: llama(rope_parameters=rope("linear", factor=4.0)), "llama", RMS | LINEAR, {}),
    "llama-old-linear": (
        lambda: llama(rope_parameters=rope("linear", factor=4.0)), "llama", RMS | {"rope.scale_linear": 4.0}, {},
    ),
    "llama-none": (llama, "llama", RMS | {**LINEAR, "rope.scaling.type": "none"}, {}),
    "llama-yarn": (
        lambda: llama(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16)), "llama",
        RMS | YARN | {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_ext_factor": 1.0}, {},
    ),
    "llama-3": (
        lambda: llama(head_dim=64, rope_parameters=rope_llama3(8192)), "llama", RMS | HEADS_64,
        {"rope_freqs.weight": factors(rope_llama3(8192), 64)},
    ),
    "llama-3-short": (
        lambda: llama(head_dim=64, rope_parameters=rope_llama3(32)), "llama", RMS | HEADS_64,
        {"rope_freqs.weight": factors(rope_llama3(32), 64)},
    ),
    "qwen2-heads": (
        lambda: qwen2(num_key_value_heads=4, rope_parameters=rope(rope_theta=1e4)), "qwen2",
        {k: v for k, v in RMS.items() if k != "attention.head_count_kv" and not k.startswith("rope.")},
        {},
    ),
    "qwen3-narrow": (lambda: qwen3(head_dim=16, attention_bias=True), "qwen3", RMS, {}),
    "phi3-window": (
        lambda: phi3(sliding_window=4), "phi3",
        RMS | {"attention.sliding_window": 4, "tokenizer.ggml.padding_token_id": 0}, {},
    ),
    "phi3-part": (
        lambda: phi3(rope_parameters=rope(partial_rotary_factor=0.5)), "phi3",
        RMS | {"rope.dimension_count": 8, "tokenizer.ggml.padding_token_id": 0}, {},
    ),
    "phi3-long": (
        lambda: phi3(
            original_max_position_embeddings=16, rope_parameters=rope("longrope", attention_factor=1.25, **LONG_FACTORS)
        ),
        "phi3", RMS | LONG, {f"rope_factors_{k[:-7]}.weight": v for k, v in LONG_FACTORS.items()},
    ),
    "gemma2": (lambda: gemma2(query_pre_attn_scalar=32), "gemma2", RMS | WIDE | CAPS, {}),
    "gemma2-27b": (
        lambda: gemma2(num_hidden_layers=46, query_pre_attn_scalar=16), "gemma2",
        RMS | WIDE | CAPS | {"block_count": 46}, {},
    ),
    "gemma3": (
        gemma3, "gemma3",
        RMS | WIDE | {"block_count": 7, "attention.sliding_window": 4, **LINEAR, "rope.scaling.factor": 8.0}, {},
    ),
    "starcoder2": (starcoder2, "starcoder2", NORM, {}),
    "stablelm": (stablelm, "stablelm", NORM | {"rope.dimension_count": 8, "use_parallel_residual": False}, {}),
    "nemotron": (nemotron, "nemotron", NORM | {"rope.dimension_count": 4, "rope.scaling.type": "none"}, {}),
    "falcon": (falcon, "falcon", NORM | {"attention.head_count_kv": 1, "feed_forward_length": 256}, {}),
    "lfm2": (lfm2, "lfm2", RMS | {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 4}, {}),
    "gpt2": (gpt2, "gpt2", NO_ROPE, {}),
    "bloom": (bloom, "bloom", NO_ROPE | {"feed_forward_length": 256}, {}),
    "mamba": (mamba, "mamba", MAMBA, {}),
}  # fmt: skip
THEIRS = ("llama", "qwen2", "qwen3", "phi3", "bloom", "mamba")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_numbers(model: Any) -> Any:
    torch.manual_seed(0)
    for x in model.parameters():
        x.data = 0.1 * torch.randn_like(x) if x.dim() > 1 else x.data + 0.1 * torch.randn_like(x)
    model.tie_weights()
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    """For a text longer than the windows and the shorter contexts."""
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(3, 51).view(2, 24)).logits
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_model_computes(name: str, tmp_path: Path) -> None:
    make, architecture, keys, tensors = CASES[name]
    model = random_numbers(make())
    file = model_as_gguf(model, tmp_path / "file", architecture, keys, tensors)
    wanted = logits(model)
    assert wanted.std() > 0.05
    torch.testing.assert_close(logits(lpconv.load(file, dtype=torch.float32)), wanted, rtol=1e-5, atol=1e-5)
    if name in THEIRS:
        theirs = hf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        torch.testing.assert_close(logits(theirs), wanted, rtol=1e-5, atol=1e-5)


def wrong_file(folder: Path, key: str, value: Any) -> Path:
    """A sound Llama with one more key, or with one more tensor."""
    tensors = {key: value} if isinstance(value, list) else {}
    return model_as_gguf(random_numbers(llama()), folder, "llama", RMS | ({} if tensors else {key: value}), tensors)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.scale", 0.5, "llama.attention.scale"),
        ("attention.sliding_window", 4, "llama.attention.sliding_window"),
        ("attention.causal", False, "llama.attention.causal"),
        ("attention.max_alibi_bias", 8.0, "llama.attention.max_alibi_bias"),
        ("expert_count", 4, "llama.expert_count"),
        ("rope.scaling.yarn_ext_factor", 0.5, "llama.rope.scaling.yarn_ext_factor"),
        ("attention.value_length", 32, "32"),
        ("rope.dimension_count", 8, "8"),
        ("rope.scaling.attn_factor", 2.0, "2.0"),
        ("rope.scaling.type", "longrope", "longrope"),
        ("rope_factors_short.weight", [1.0] * 8, "rope_factors_short.weight"),
        ("blk.0.attn_q_norm.weight", [1.0] * 16, "blk.0.attn_q_norm.weight"),
        ("blk.0.attn_q.scale.weight", [1.0], "blk.0.attn_q.scale.weight"),
        ("blk.0.attn_q.bias", [1.0] * 64, "k_proj.bias"),
        ("output.bias", [1.0] * 96, "output.bias"),
        ("blk.2.attn_norm.weight", [1.0] * 64, "blk.2.attn_norm.weight"),
    ],
)
def test_what_changes_the_computation_is_refused_by_name(key: str, value: Any, said: str, tmp_path: Path) -> None:
    file, runner = str(wrong_file(tmp_path / "file", key, value)), CliRunner()
    for command in (["inspect", file], ["convert", file, "-o", "out"], ["restore", file, "-o", "out"]):
        done = runner.invoke(app, command)
        assert done.exit_code == 4, (done.output, done.exception)
        assert said in done.stderr
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        lpconv.load(file)


SPLIT = {"split.count": 2, "split.no": 0, "split.tensors.count": 21}


def test_parts_of_a_split_file_name_the_command_that_joins_them(tmp_path: Path) -> None:
    first = model_as_gguf(llama(), tmp_path / "file", "llama", RMS | SPLIT)
    first = first.rename(first.with_name("x-00001-of-00002.gguf"))
    (tmp_path / "file/x-00002-of-00002.gguf").write_bytes(first.read_bytes())
    for path in (first, first.parent):
        with pytest.raises(UnsupportedError, match=r"x-00001-of-00002.gguf` .* 2 ") as refused:
            Checkpoint.open(path)
        assert "llama-gguf-split --merge" in str(refused.value.hint)


def test_metadata_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    file = wrong_file(tmp_path / "file", "attention.scale", 0.5)
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from pathlib import Path
from lpconv.errors import UnsupportedError
from lpconv.storage.checkpoint import Checkpoint
try:
    Checkpoint.open(Path(sys.argv[1]))
except UnsupportedError as e:
    assert "attention.scale" in str(e)
    sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == 7
