"""LoRA over codes: what is trained, the files that PEFT reads, resuming, and refusals."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils.quantization_config import CompressedTensorsConfig

import lpconv
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, ResourceError, UnsupportedError, UsageError
from lpconv.models.coded import CodedTensor
from lpconv.options import make
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import read_json
from lpconv.train.lora import add_adapters, bytes_by_part, layers_without_adapter, save_adapter
from lpconv.train.options import FinetuneOptions, check_options
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune, plan
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import converted_demo
from tests.helpers.models import IDS, WIDE, tiny_model

FORMS: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4", "granularity": "group:32", "layout": "compressed-tensors"},
    "NVFP4": {"scheme": "NVFP4A16"},
    "MXFP4, ours": {"format": "e2m1", "granularity": "mx"},
    "int8 groups, ours": {"format": "int8", "granularity": "group:128"},
    "fp8": {"format": "e4m3fn", "layout": "compressed-tensors"},
}
MODELS = [name for name in WIDE if name != "t5"]  # adapters train no encoder-decoder


pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture(scope="module")
def outputs(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return converted_demo(tmp_path_factory.mktemp("forms"), FORMS)


def _options(rank: int = 4, **more: Any) -> FinetuneOptions:
    small: dict[str, Any] = {
        "steps": 2, "batch_size": 2, "seq_len": 16, "eval_batches": 2, "eval_every": 0, "warmup": 0.0, "lr": 1e-2
    }  # fmt: skip
    return FinetuneOptions(arithmetic=arithmetic(lora=rank, precision="fp32"), **(small | more))


def _adapted(path: Path, adapter: Path) -> Any:
    """The model with the adapter of a file, both as they are stored."""
    model = lpconv.load(path, dtype=torch.float32, resident=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    add_adapters(model, read_json(adapter / "adapter_config.json")["r"], seed=9)
    model.load_state_dict({n.removeprefix("base_model.model."): x for n, x in tensors.items()})
    return model


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("form", FORMS)
def test_adapters_learn_and_nothing_else_is_published(outputs: dict[str, Path], form: str, tmp_path: Path) -> None:
    result = finetune(str(outputs[form]), tmp_path / "out", _options(steps=12, batch_size=8, seq_len=64, lr=3e-3))
    run, twin = result.runs
    assert run.losses.values[-1] < run.losses.values[0]
    assert result.recipe == "lora-4 fp32"
    assert str(result.twin).endswith(" demo")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "README.md", "SHA256SUMS", "adapter_config.json", "adapter_model.safetensors", "finetune.json", "metrics.jsonl",
        "report.html", "report.json", "runs",
    }  # fmt: skip
    assert twin.losses.values[0] != run.losses.values[0]  # the source has other weights
    figures = {s.name: s.values[-1] for s in run.evaluations}
    assert figures["eval_loss_published"] == figures["eval_loss"] == figures["eval_loss_fp32"]


def test_the_published_adapter_is_the_trained_one(outputs: dict[str, Path], tmp_path: Path) -> None:
    out, start = tmp_path / "out", outputs["int4"]
    finetune(str(start), out, _options(save_every=2, twin="none"))
    names = {f"model.layers.{i}.{m}" for i in range(2) for m in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )}  # fmt: skip
    config = read_json(out / "adapter_config.json")
    assert set(config["target_modules"]) == names
    assert (config["r"], config["lora_alpha"], config["peft_type"], config["task_type"]) == (4, 8, "LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(start)

    stored = load_file(out / "adapter_model.safetensors")
    assert set(stored) == {f"base_model.model.{n}.lora_{x}.weight" for n in names for x in "AB"}
    assert all(x.dtype == torch.float32 and x.count_nonzero() for x in stored.values())
    model = lpconv.load(start, resident=True)
    for name in names:
        rows, cols = model.get_submodule(name).weight.shape
        assert stored[f"base_model.model.{name}.lora_A.weight"].shape == (4, cols)
        assert stored[f"base_model.model.{name}.lora_B.weight"].shape == (rows, 4)


@pytest.mark.parametrize("form", ["int4", "NVFP4"])
def test_steps_are_those_of_the_decoded_weights(
    shallow: Path, outputs: dict[str, Path], form: str, tmp_path: Path
) -> None:
    """A plain checkpoint with the decoded weights gives the same losses and adapters, but for the order of sums."""
    finetune(str(outputs[form]), tmp_path / "codes", _options(twin="none"))
    shutil.copytree(shallow, tmp_path / "plain")
    model = lpconv.load(outputs[form], dtype=torch.float32)
    transformers.LlamaForCausalLM.from_pretrained(
        None, config=transformers.AutoConfig.from_pretrained(shallow), state_dict=model.state_dict()
    ).save_pretrained(tmp_path / "plain")
    finetune(str(tmp_path / "plain"), tmp_path / "dense", _options(twin="none"))
    codes, dense = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("codes", "dense"))
    texts = ((tmp_path / n / "metrics.jsonl").read_text() for n in ("codes", "dense"))
    for a, b in zip(*(map(json.loads, text.splitlines()[1:]) for text in texts), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    # AdamW's steps have the size of lr whatever the gradient's, so some of nearly no gradient go the other way.
    differing = sum(int(((codes[n] - dense[n]).abs() > 1e-4).sum()) for n in codes)
    assert differing < 1e-3 * sum(x.numel() for x in codes.values())


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_adapters_over_codes(tmp_path: Path, model: str) -> None:
    torch.manual_seed(0)
    tiny_model(model, **WIDE[model]).save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "out", ConvertOptions(verify="none", format="e2m1", granularity="mx"))
    found: list[dict[str, Tensor]] = []
    for resident in (True, False):
        adapted = lpconv.load(tmp_path / "out", dtype=torch.float32, resident=resident, experts_implementation="eager")
        add_adapters(adapted, 4, seed=0)
        for name, p in adapted.named_parameters():
            if name.endswith("lora_B.weight"):
                nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        assert any(isinstance(p, CodedTensor) for p in adapted.parameters()) is resident
        assert list(adapted.state_dict()) == [n for n, p in adapted.named_parameters() if p.grad is not None]
        found.append({n: p.grad for n, p in adapted.named_parameters() if p.grad is not None})
        frozen = layers_without_adapter(adapted)
        assert len(frozen) == (4 if model == "mixtral" else 0)  # experts in one tensor
    got, wanted = found
    largest = max(float(x.abs().max()) for x in wanted.values())
    assert got.keys() == wanted.keys()
    for name, x in got.items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-4, atol=1e-6 * largest, msg=name)


def test_an_adapter_of_rank_r_and_alpha_2r_adds_twice_its_product(tmp_path: Path) -> None:
    plain = tiny_model("llama", **WIDE["llama"])
    plain.save_pretrained(tmp_path / "plain")
    ours = lpconv.load(tmp_path / "plain", dtype=torch.float32)
    add_adapters(ours, 4, seed=0)
    for module in (m for m in ours.modules() if hasattr(m, "lora_B")):
        nn.init.normal_(module.lora_B.weight, std=0.1)
    adapters = ours.state_dict()
    for name in (n.removesuffix(".lora_A.weight") for n in adapters if n.endswith(".lora_A.weight")):
        product = adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
        plain.get_submodule(name).weight.data.add_(2 * product)
    torch.testing.assert_close(_logits(ours), _logits(plain.eval()), rtol=1e-4, atol=1e-5)


def test_weights_that_mambas_kernels_read_get_no_adapter() -> None:
    """PEFT refuses files with adapters of `out_proj`."""
    config = transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = transformers.MambaForCausalLM(config)
    add_adapters(model, 4, seed=0)
    assert {n.split(".")[-3] for n in model.state_dict()} == {"in_proj", "x_proj", "dt_proj"}
    assert layers_without_adapter(model) == ("backbone.layers.0.mixer.out_proj.weight",)


def test_memory_is_that_of_codes_and_adapters(outputs: dict[str, Path]) -> None:
    model = lpconv.load(outputs["int4"], dtype=torch.float32, resident=True)
    plain = sum(p.nbytes for p in model.parameters() if not isinstance(p, CodedTensor))
    add_adapters(model, 4, seed=0)
    parts = bytes_by_part(model)
    stored = load_file(outputs["int4"] / "model.safetensors")
    codes = sum(x.nbytes for n, x in stored.items() if n.endswith(("weight_packed", "weight_scale", "weight_shape")))
    assert parts["weights"] == codes + plain
    assert parts["adapters, gradients and optimizer"] == 16 * sum(x.numel() for x in model.state_dict().values())


def test_a_resumed_run_publishes_the_same_bytes(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, options = str(outputs["NVFP4"]), _options(steps=6, save_every=3, twin="none")
    finetune(start, tmp_path / "whole", options)
    with monkeypatch.context() as patch:
        patch.setattr("lpconv.train.study.publish_model", _fail)
        with pytest.raises(KeyboardInterrupt):
            finetune(start, tmp_path / "cut", options)
    assert not (tmp_path / "cut" / "adapter_config.json").exists()
    folder = tmp_path / "cut" / "runs" / "run-seed0"
    size = sum(p.stat().st_size for p in (folder / "checkpoint-3").rglob("*"))
    assert size < Path(start, "model.safetensors").stat().st_size  # adapters and their moments, no codes
    shutil.rmtree(folder / "checkpoint-6")
    finetune(start, tmp_path / "cut", replace(options, resume=True))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def _fail(*_: Any) -> None:
    raise KeyboardInterrupt


def test_adapters_of_bf16_products_are_close_to_those_of_fp32(outputs: dict[str, Path], tmp_path: Path) -> None:
    options = replace(_options(twin="none"), arithmetic=arithmetic(lora=4))
    result = finetune(str(outputs["int4"]), tmp_path / "out", options)
    figures = {s.name: s.values[-1] for s in result.runs[0].evaluations}
    assert figures["eval_loss"] != figures["eval_loss_fp32"]
    assert math.isclose(figures["eval_loss"], figures["eval_loss_fp32"], rel_tol=1e-2)
    assert result.recipe == "lora-4 bf16"


def test_a_plain_checkpoint_gets_adapters_too(tmp_path: Path) -> None:
    result = finetune("demo", tmp_path / "out", _options())
    run, twin = result.runs
    assert run.losses == twin.losses
    assert result.twin == "lora-4 fp32"


def test_an_adapter_is_no_model(outputs: dict[str, Path], tmp_path: Path) -> None:
    finetune(str(outputs["int4"]), tmp_path / "out", _options(steps=1, twin="none"))
    with pytest.raises(InputError, match="adapter"):
        Checkpoint.open(tmp_path / "out")
    for against in (None, "demo"):
        with pytest.raises(InputError, match="adapter"):
            verify_output(tmp_path / "out", VerifyOptions(against=against), progress=Silent())


def test_the_source_of_the_twin_must_fit(outputs: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    tiny_model("llama", **WIDE["llama"]).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="tensor"):
        finetune(str(outputs["int4"]), tmp_path / "out", _options(source=str(tmp_path / "other")))
    shutil.copytree(demo_checkpoint(), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "coded", ConvertOptions(verify="none", format="e4m3fn"))
    with pytest.raises(InputError) as raised:
        finetune(str(tmp_path / "coded"), tmp_path / "out", _options())
    assert "--source" in str(raised.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more",
    [
        {"lca": True},
        {"compile": True},
        {"parallel": "fsdp2"},
        {"save": "plain"},
        {"task": "seq2seq"},
    ],
)
def test_options_that_do_not_apply_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--lora"):
        check_options(_options(**more))


@pytest.mark.parametrize("rank", [0, -3])
def test_ranks_below_one_are_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="--lora"):
        make(FinetuneOptions, {"lora": rank})


def test_ranks_above_the_width_of_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="129 exceeds 128"):
        finetune("demo", tmp_path / "out", _options(129))


def test_plans_and_too_little_memory_are_refused(outputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dry-run"):
        plan("demo", _options())
    with pytest.raises(ResourceError):
        finetune(str(outputs["int4"]), tmp_path / "out", _options(max_memory=100_000))


def test_a_head_that_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    shutil.copytree(demo_checkpoint(), tmp_path / "bare")
    model = transformers.AutoModel.from_pretrained(demo_checkpoint())
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(UnsupportedError, match="adapters"):
        finetune(str(tmp_path / "bare"), tmp_path / "out", _options(task="clm", twin="none"))


@pytest.mark.filterwarnings("ignore")  # of peft and transformers
@pytest.mark.parametrize("form", ["int4", "NVFP4"])
def test_peft_computes_our_logits(outputs: dict[str, Path], form: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("compressed_tensors")
    if form == "NVFP4" and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 decodes NVFP4 to bf16, whatever dtype is asked for")
    out = tmp_path / "out"
    finetune(str(outputs[form]), out, _options(twin="none"))
    # compressed-tensors decodes at the first forward pass, in the dtype of the scales, or while it opens a model: it
    # then rounds int4 to bf16. Without a decoded weight PEFT finds no layers.
    asked = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if form == "NVFP4" else {}
    base = transformers.AutoModelForCausalLM.from_pretrained(outputs[form], dtype=torch.float32, **asked)
    before = _logits(base)
    after = _logits(peft.PeftModel.from_pretrained(base, out).eval())
    ours = _logits(_adapted(outputs[form], out))
    decoded = _logits(peft.PeftModel.from_pretrained(lpconv.load(outputs[form], dtype=torch.float32), out).eval())
    assert (after - before).abs().max() > 1e-2
    assert torch.equal(decoded, after)
    torch.testing.assert_close(ours, after, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of peft and transformers
@pytest.mark.parametrize("model", MODELS)
def test_peft_writes_the_same_files_and_computes_our_logits(tmp_path: Path, model: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = tiny_model(model, **WIDE[model])
    task = "mlm" if model == "bert" else "clm"
    plain.save_pretrained(tmp_path / "plain")
    ours = lpconv.load(tmp_path / "plain", dtype=torch.float32)
    before = _logits(ours)
    add_adapters(ours, 4, seed=3)
    for name, p in ours.named_parameters():
        if name.endswith("lora_B.weight"):
            nn.init.normal_(p, std=0.1)
    save_adapter(tmp_path / "ours", Checkpoint.open(tmp_path / "plain"), task, ours, ours.state_dict())
    base = lpconv.load(tmp_path / "plain", dtype=torch.float32)
    theirs = _logits(peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval())
    assert (theirs - before).abs().max() > 1e-2
    torch.testing.assert_close(_logits(ours), theirs, rtol=1e-5, atol=1e-5)
    if model == "mixtral":  # whose experts PEFT adapts, too
        return

    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM" if task == "clm" else None
    )
    peft.get_peft_model(plain, settings).save_pretrained(tmp_path / "theirs")
    got, wanted = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("ours", "theirs"))
    assert {n: (x.shape, x.dtype) for n, x in got.items()} == {n: (x.shape, x.dtype) for n, x in wanted.items()}
    config, reference = (read_json(tmp_path / n / "adapter_config.json") for n in ("ours", "theirs"))
    assert set(config.pop("target_modules")) == set(reference.pop("target_modules"))
    assert config.pop("base_model_name_or_path") == str(tmp_path / "plain")
    assert config == {name: reference[name] for name in config}
