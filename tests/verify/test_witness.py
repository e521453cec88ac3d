"""transformers is asked what it opens: files, ties, values; and comparisons that could not fail do not pass."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from lpconv.convert.run import convert
from lpconv.errors import InputError, UnsupportedError, VerificationError
from lpconv.models.load import load, load_from_files
from lpconv.models.witness import open_with_transformers
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.report.verify import doubts, outcome_of, verify_headline
from lpconv.results import ConvertResult
from lpconv.storage.checkpoint import Checkpoint
from lpconv.verify.options import VerifyOptions
from lpconv.verify.outputs import compare_outputs
from lpconv.verify.run import verify_output

CONFIG = transformers.LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
UP = "model.layers.1.mlp.up_proj.weight"


def model(seed: int = 0) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(CONFIG)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_threads_open_models_at_the_same_time(source: Path) -> None:
    tie = transformers.PreTrainedModel.tie_weights
    with ThreadPoolExecutor(3) as pool:
        opened = [*pool.map(open_with_transformers, [Checkpoint.open(source)] * 6)]
        loaded = [*pool.map(load, [source] * 3)]
    assert transformers.PreTrainedModel.tie_weights is tie
    assert not any(o.different or o.missing for o in opened)
    assert all(torch.equal(m.state_dict()[UP], model().state_dict()[UP]) for m in loaded)


def changed(source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    state = load_file(source / "model.safetensors")
    change(state)
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    return source


def in_fp8(source: Path, *gates: str) -> ConvertResult:
    return convert(source, source.with_name("out"), ConvertOptions(format="e4m3fn", gates=gates))


FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@pytest.mark.parametrize("present", [c for n in range(1, 5) for c in itertools.combinations(FILES, n)])
def test_of_several_weight_files_the_one_that_transformers_reads_is_read(
    tmp_path: Path, present: tuple[str, ...]
) -> None:
    CONFIG.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for seed, name in enumerate(present):
        state = {n: x.detach().clone() for n, x in model(seed).state_dict().items()}
        file = name.replace(".safetensors.index.json", "-00001-of-00001.safetensors").replace(
            ".bin.index.json", "-00001-of-00001.bin"
        )
        save = torch.save if file.endswith(".bin") else save_file
        save(state, tmp_path / file)
        if file != name:
            index = {"metadata": {}, "weight_map": dict.fromkeys(state, file)}
            (tmp_path / name).write_text(json.dumps(index))
    wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()[UP]
    checkpoint = Checkpoint.open(tmp_path)
    chosen = tmp_path / checkpoint.weight_files[0]
    read = torch.load(chosen) if chosen.suffix == ".bin" else load_file(chosen)
    assert torch.equal(read[UP], wanted)


def test_both_models_are_opened_by_transformers_and_every_tensor_is_compared(source: Path) -> None:
    opened = in_fp8(source).verify.opened
    assert opened is not None
    for one in (opened.source, opened.result):
        assert one is not None
        assert (one.model_class, one.num_tensors, one.different, one.missing) == ("LlamaForCausalLM", 21, (), ())


@pytest.mark.parametrize("layout", ["lpconv", "compressed-tensors"])
def test_a_value_that_lpconv_reads_otherwise_is_named(
    source: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = source.with_name("out")
    convert(source, out, ConvertOptions(format="e4m3fn", layout=layout, scale="exact", granularity="row"))

    def load(*args: Any, **kwargs: Any) -> Any:
        ours, missing = load_from_files(*args, **kwargs)
        wrong = ours.get_parameter(UP).decode()
        wrong[3, 4] *= 1.125  # the next number of e4m3fn
        ours.get_submodule(UP.removesuffix(".weight")).weight = torch.nn.Parameter(wrong)
        return ours, missing

    assert open_with_transformers(Checkpoint.open(out)).different == ()
    monkeypatch.setattr("lpconv.models.witness.load_from_files", load)
    assert open_with_transformers(Checkpoint.open(out)).different == (UP,)


def test_layouts_without_a_reader_in_transformers_are_named(source: Path) -> None:
    out = source.with_name("out")
    result = convert(source, out, ConvertOptions(format="int4", layout="mlx", granularity="group:32"))
    assert result.verify.opened is not None
    assert result.verify.opened.result is None
    assert "mlx" in result.verify.opened.not_asked[0]
    with pytest.raises(UnsupportedError, match="mlx"):
        open_with_transformers(Checkpoint.open(out))


@pytest.mark.parametrize(
    "break_it",
    [
        lambda state: state[UP].view(-1)[3:4].fill_(float("nan")),
        lambda state: state["lm_head.weight"].zero_(),
        lambda state: state["model.norm.weight"].zero_(),
    ],
    ids=["NaN in a weight", "zero head", "zero norm"],
)
def test_outputs_that_could_not_differ_pass_no_gate_and_are_not_green(
    source: Path, break_it: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    result = in_fp8(changed(source, break_it))
    assert result.verify.logits is not None
    assert "measurable" in (result.verify.logits.skipped or "")
    assert outcome_of(result.verify) != "passed"
    assert "bit-equal" not in verify_headline(result.verify)
    for gate in ("top1>=0.99", "logits_rel_error<=0.01", "kl<=1"):
        with pytest.raises(VerificationError):
            convert(source, source.with_name("gated"), ConvertOptions(format="e4m3fn", gates=(gate,)))


def test_figures_of_outputs_equal_plain_torch() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(2, 3, 5)
    got = wanted + 0.1 * torch.randn(2, 3, 5)
    check = compare_outputs(wanted, got)
    kl = torch.nn.functional.kl_div(got.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none")
    assert check.mean_kl == pytest.approx(float(kl.sum(-1).mean()), rel=1e-5)
    assert check.rel_error == pytest.approx(float((wanted - got).norm() / wanted.norm()), rel=1e-5)
    wanted[..., 0] = got[..., 0] = -torch.inf  # a word that is never said
    assert torch.isfinite(torch.tensor(compare_outputs(wanted, got).mean_kl))
    assert compare_outputs(torch.ones(2, 3, 5), torch.ones(2, 3, 5)).skipped
    assert compare_outputs(torch.zeros(0, 5), torch.zeros(0, 5)).skipped


def test_outputs_as_far_apart_as_two_models_are_not_green(source: Path) -> None:
    result = in_fp8(source)
    a, b = (model(seed)(torch.arange(64).view(2, 32)).logits.detach() for seed in (0, 1))
    far = compare_outputs(a, b)
    verify = dataclasses.replace(result.verify, logits=far)
    assert doubts(verify)
    assert outcome_of(verify) == "not run"


def test_a_bias_of_zeros_that_was_trained_has_no_signal_to_lose(source: Path) -> None:
    verify = in_fp8(source).verify
    assert verify.weights is not None
    lost = [
        dataclasses.replace(verify, weights=dataclasses.replace(verify.weights, min_sqnr_db=x)) for x in (-9.0, 0.0)
    ]
    zeros = dataclasses.replace(verify, weights=dataclasses.replace(verify.weights, min_sqnr_db=-math.inf))
    assert all(map(doubts, lost))
    assert not doubts(zeros)


def test_weights_of_another_model_are_problems_once_and_not_warnings_too(source: Path, tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path / "other")
    result = verify_output(source, VerifyOptions(against=str(tmp_path / "other")), progress=Silent())
    assert len([p for p in result.problems if UP in p]) == 1
    assert not result.warnings


def test_an_adapter_beside_full_weights_is_refused(source: Path) -> None:
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        Checkpoint.open(source)


@pytest.mark.parametrize("value", ["auto", "torch.bfloat16", "fp8"])
def test_a_dtype_that_transformers_cannot_open_is_refused(source: Path, value: str) -> None:
    config = json.loads((source / "config.json").read_text()) | {"dtype": value}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=r".+"):
        transformers.LlamaForCausalLM.from_pretrained(source)
    with pytest.raises(InputError, match="dtype"):
        Checkpoint.open(source)


def test_files_that_are_not_read_are_named(source: Path) -> None:
    save_file({"mtp.weight": torch.zeros(2)}, source / "mtp.safetensors")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"x")
    left_out = [w for w in in_fp8(source).warnings if "mtp.safetensors" in w]
    assert len(left_out) == 1
    assert all(name in left_out[0] for name in ("mtp.safetensors", "onnx/model.onnx"))


def test_modules_that_are_put_into_their_parent_without_registration_are_compared(tmp_path: Path) -> None:
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16] * 4, depths=[1] * 4, layer_type="basic", out_indices=[2, 3, 4]
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_in_channels=[16] * 3, decoder_in_channels=[32] * 3, d_model=32,
        encoder_hidden_dim=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=8,
    )  # fmt: skip
    model = transformers.RTDetrForObjectDetection(config)  # sets its frozen batch norms in `_modules`
    model.save_pretrained(tmp_path / "source")
    opened = open_with_transformers(Checkpoint.open(tmp_path / "source"))
    assert (opened.num_tensors, opened.different, opened.missing) == (len(model.state_dict()), (), ())


@pytest.mark.parametrize("layout", ["lpconv", "compressed-tensors"])
def test_numbers_of_64_bits_are_compared_as_fp32(source: Path, layout: str) -> None:
    wide = {n: torch.randn(x.shape, dtype=torch.float64) for n, x in load_file(source / "model.safetensors").items()}
    save_file(wide, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float64"}
    (source / "config.json").write_text(json.dumps(config))
    out = source.with_name("out")
    convert(source, out, ConvertOptions(format="e4m3fn", layout=layout, granularity="row", scale="exact"))
    kept = transformers.LlamaForCausalLM.from_pretrained(out).get_parameter("model.norm.weight")
    assert torch.equal(kept.float(), wide["model.norm.weight"].float())


@pytest.mark.parametrize("resident", [False, True])
def test_a_head_of_its_own_is_kept_although_the_config_declares_a_tie(tmp_path: Path, resident: bool) -> None:
    """transformers writes that config for every T5 1.1, such as FLAN-T5."""
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32))
    model.save_pretrained(tmp_path / "source")
    stored = load_file(tmp_path / "source" / "model.safetensors")
    assert {"lm_head.weight", "shared.weight"} < stored.keys()
    result = convert(tmp_path / "source", tmp_path / "out", ConvertOptions(format="e4m3fn", granularity="row"))
    assert any("`lm_head.weight` to `shared.weight`" in w for w in result.warnings)
    opened = load(tmp_path / "out", resident=resident, dtype=torch.float32)
    for name in ("lm_head.weight", "shared.weight"):
        weight = opened.get_parameter(name)
        error = (weight.decode() if resident else weight) - stored[name]
        assert 20 * torch.log10(stored[name].norm() / error.norm()) > 25


def test_the_output_runs_without_a_cache_like_the_source(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformers.LlamaForCausalLM.forward

    def without_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert not self.config.use_cache
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", without_cache)
    assert in_fp8(source).verify.passed


def test_models_that_draw_random_numbers_draw_the_same_ones(tmp_path: Path) -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTMAEConfig(**size, image_size=32, patch_size=8)
    transformers.ViTMAEModel(config).save_pretrained(tmp_path / "source")  # masks random patches
    result = convert(tmp_path / "source", tmp_path / "out", ConvertOptions(format="fp32"))
    assert result.verify.logits is not None
    assert result.verify.logits.bit_equal


def test_a_gguf_file_that_only_transformers_cannot_open_is_sound(tmp_path: Path) -> None:
    """transformers reads no head size from the file, and takes 128; llama.cpp does."""
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen3Config(vocab_size=96, num_key_value_heads=1, head_dim=64, **size)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    result = convert(tmp_path / "source", tmp_path / "out", ConvertOptions(format="bf16", layout="gguf"))
    fields = GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["qwen3.attention.key_length"].contents() == 64
    assert result.verify.opened is not None
    assert result.verify.opened.result or "transformers" in result.verify.opened.not_asked[0]  # 5.17 reads it


def test_rounding_may_shift_weights_that_are_alike(source: Path) -> None:
    changed(source, lambda state: state[UP].copy_(1 + 0.02 * torch.randn(state[UP].shape)))
    out = source.with_name("out")
    convert(source, out, ConvertOptions(format="int4", granularity="group:16", scale="exact"))
    checked = verify_output(out, VerifyOptions(against=str(source), level="values"), progress=Silent())
    assert checked.passed, checked.problems
