"""The whole path on real and small checkpoints: what converts, how exact it is, and what comes back."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lpconv.convert.restore import restore
from lpconv.convert.run import convert, plan
from lpconv.errors import InputError, ResourceError, UnsupportedError
from lpconv.forms.form import Side, Stored
from lpconv.mcf.split import RESIDUALS
from lpconv.plan.options import ConvertOptions, FormatRule
from lpconv.progress import Silent
from lpconv.verify.options import VerifyOptions
from lpconv.verify.reader import OutputReader
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import albert, minilm, tiny


def run(source: Path | str, out: Path, **options: object):  # type: ignore[no-untyped-def]
    return convert(str(source), out, ConvertOptions(**options))  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def test_unit_fp32_is_the_model_and_restores_to_the_source(tmp_path: Path) -> None:
    result = run(minilm(), tmp_path / "out", method="unit", format="fp32", verify="logits")
    assert result.verify.passed
    assert result.verify.logits is not None
    assert result.verify.logits.bit_equal is True
    assert result.verify.weights is not None
    assert result.verify.weights.max_rel_error == 0
    restored = restore(tmp_path / "out", tmp_path / "back", force=False, progress=Silent())
    assert restored.exact
    source, back = load_file(minilm() / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert source.keys() == back.keys()
    assert all(torch.equal(bits(source[k]), bits(back[k])) for k in source)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((minilm() / "config.json").read_text())


@pytest.mark.parametrize(("fmt", "least"), [("fp16", 70.0), ("e4m3fn", 30.0), ("e5m2", 24.0), ("bf16", 50.0)])
def test_sqnr_of_a_real_model(tmp_path: Path, fmt: str, least: float) -> None:
    result = run(minilm(), tmp_path / "out", method="unit", format=fmt, verify="weights")
    assert result.verify.weights is not None
    assert result.verify.weights.min_sqnr_db >= least
    converted = [t for t in result.tensors if t.action == "convert"]
    assert len(converted) == 40
    assert all(t.scale is not None and math.frexp(t.scale)[0] == 0.5 for t in converted)
    assert all(t.rms is not None and 1 <= t.rms / t.scale < 2 for t in converted if t.scale)


def test_stored_codes_are_the_formats_own_rounding(tmp_path: Path) -> None:
    run(minilm(), tmp_path / "out", method="scalify", format="e5m2", verify="none")
    source, out = load_file(minilm() / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    name = "encoder.layer.3.intermediate.dense.weight"
    scale = out[name + "_scale"]
    rms = source[name].square().mean().sqrt()
    assert scale.shape == (1,)
    assert scale.item() == 2.0 ** math.floor(math.log2(rms))  # Scalify rounds scales down
    assert torch.equal(out[name], (source[name] / scale).to(torch.float8_e5m2)[None])


@pytest.mark.parametrize("residual", ["bf16", "exact16", "int8"])
def test_collage_keeps_its_bound_and_opens_as_bf16(tmp_path: Path, residual: str) -> None:
    run(minilm(), tmp_path / "out", method="collage", residual=residual, verify="weights")
    source, root = load_file(minilm() / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    low = load_file(tmp_path / "out/collage/residual.safetensors")
    floats = [k for k in source if source[k].is_floating_point()]
    assert sorted(low) == sorted(floats)
    form = RESIDUALS[residual]
    for k in floats:
        assert root[k].dtype == torch.bfloat16
        assert root[k].shape == source[k].shape
        error = (form.merge(root[k], low[k]).double() - source[k].double()).abs()
        assert (error <= form.relative_bound * source[k].double().abs() + form.absolute_bound).all(), k
    assert json.loads((tmp_path / "out/config.json").read_text()).get("torch_dtype") == "bfloat16"
    back = restore(tmp_path / "out", tmp_path / "back", force=False, progress=Silent())
    assert back.exact == (residual == "exact16")
    if back.exact:
        restored = load_file(tmp_path / "back/model.safetensors")
        assert all(torch.equal(bits(source[k]), bits(restored[k])) for k in source)


@pytest.mark.parametrize(
    ("method", "fmt"), [("unit", "fp32"), ("unit", "e4m3fn"), ("scalify", "fp16"), ("collage", "bf16")]
)
def test_a_bin_checkpoint_with_shared_layers(tmp_path: Path, method: str, fmt: str) -> None:
    result = run(albert(), tmp_path / "out", method=method, format=fmt, verify="logits")
    assert result.verify.passed
    assert result.verify.logits is not None
    assert result.verify.logits.skipped is None
    assert (tmp_path / "out/vocab.txt").exists()
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize(
    ("kind", "method"),
    [*((kind, "unit") for kind in ("clip", "gpt2", "llama", "mixtral", "t5", "vit", "wav2vec2")),
     ("mixtral", "scalify"), ("llama", "collage"), ("mixtral", "collage")],
)  # fmt: skip
def test_families_convert_and_run(tmp_path: Path, kind: str, method: str) -> None:
    fmt = "bf16" if method == "collage" else "fp32"
    source = tiny(kind, tmp_path / "source")
    result = run(source, tmp_path / "out", method=method, format=fmt, verify="logits")
    assert result.verify.passed
    assert result.verify.logits is not None
    assert result.verify.logits.bit_equal is (method != "collage")


def test_a_model_that_does_not_run_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    own = {"architectures": ["MyLM"], "model_type": "my", "auto_map": {"AutoModelForCausalLM": "my.MyLM"}}
    for changes, words in ((own, "`MyLM`"), ({"head_dim": "x"}, "head_dim': .*expected")):
        (source / "config.json").write_text(json.dumps(config | changes))
        for asked in ({"verify": "logits"}, {"gates": ("top1>=0.5",)}):
            with pytest.raises(UnsupportedError, match=words):
                run(source, tmp_path / "out", **asked)
            assert [p.name for p in tmp_path.iterdir()] == ["source"]
    assert run(source, tmp_path / "out").verify.level == "weights"


def test_transformers_never_asks_to_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", asked.append)
    source = tiny("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]
    (source / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    run(source, tmp_path / "out")
    assert not asked


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MyConfig(LlamaConfig):
    model_type = "my"

class MyLM(LlamaForCausalLM):
    config_class = MyConfig
"""


@pytest.mark.parametrize(("method", "fmt"), [("unit", "fp32"), ("collage", "bf16")])
def test_python_code_of_a_checkpoint_runs_where_it_is_trusted(tmp_path: Path, method: str, fmt: str) -> None:
    source = tiny("llama", tmp_path / "source")
    (source / "my.py").write_text(OWN_CODE)
    config = json.loads((source / "config.json").read_text())
    own = {"AutoConfig": "my.MyConfig", "AutoModelForCausalLM": "my.MyLM"}
    config |= {"architectures": ["MyLM"], "model_type": "my", "auto_map": own}
    (source / "config.json").write_text(json.dumps(config))
    result = run(source, tmp_path / "out", method=method, format=fmt, trust_remote_code=True)
    assert result.verify.logits is not None
    assert result.verify.logits.model_class == "MyLM"
    assert result.verify.logits.bit_equal is (method == "unit")


def test_a_tied_weight_written_twice_is_stored_once(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "source")
    from safetensors.torch import save_file

    state = load_file(source / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    result = run(source, tmp_path / "out", method="unit", format="fp32", verify="logits")
    tied = {t.name: t.tied_to for t in result.tensors if t.action == "tie"}
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert result.verify.logits is not None
    assert result.verify.logits.bit_equal

    state["lm_head.weight"][0, 0] += 1
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    kept = run(source, tmp_path / "other", method="unit", format="fp32")  # as transformers keeps it
    assert not [t for t in kept.tensors if t.action == "tie"]
    assert any("`lm_head.weight`" in w and "`model.embed_tokens.weight`" in w for w in kept.warnings)


def test_modules_that_sentence_transformers_runs_after_the_model_keep_their_weights(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    for name in ("2_Dense", "onnx"):
        (source / name).mkdir()
        save_file({"linear.weight": torch.ones(2, 2)}, source / name / "model.safetensors")
    (source / "modules.json").write_text('[{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}]')
    run(source, tmp_path / "out")
    dense = "2_Dense/model.safetensors"
    assert (tmp_path / "out" / dense).read_bytes() == (source / dense).read_bytes()
    assert dense in (tmp_path / "out/SHA256SUMS").read_text()
    assert not (tmp_path / "out/onnx").exists()
    checked = verify_output(tmp_path / "out", VerifyOptions(against=str(source)), progress=Silent())
    assert checked.passed
    restore(tmp_path / "out", tmp_path / "back", force=False, progress=Silent())
    assert (tmp_path / "back" / dense).exists()


def test_shards_rules_and_plan(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "source", dtype=torch.bfloat16, max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").exists()
    options = ConvertOptions(
        method="unit", format="e4m3fn", rules=(FormatRule(pattern="*down_proj*", format="bf16"),),
        exclude=("re:layers\\.1\\.mlp\\.up_proj",), max_shard_size=10_000, verify="logits",
    )  # fmt: skip
    planned = plan(str(source), tmp_path / "out", options)
    result = convert(str(source), tmp_path / "out", options)
    assert {s.name: s.size_bytes for s in planned.shards} == {f.name: f.size_bytes for f in result.files}
    assert sum(f.size_bytes for f in result.files) == result.bytes.written
    formats = {t.name: t.format for t in result.tensors}
    assert formats["model.layers.0.mlp.down_proj.weight"] == "bf16"
    assert formats["model.layers.0.mlp.gate_proj.weight"] == "e4m3fn"
    assert {t.name for t in result.tensors if "excluded" in t.reason} == {"model.layers.1.mlp.up_proj.weight"}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights(tmp_path / "out"))
    assert sorted(set(index["weight_map"].values())) == sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("options", [{"format": "e4m3fn"}, {"method": "collage"}])
def test_a_plan_says_how_large_codes_are_that_it_starts_from(options: dict[str, str], tmp_path: Path) -> None:
    run("demo", tmp_path / "codes", verify="none", **options)
    size = sum(p.stat().st_size for p in (tmp_path / "codes").rglob("*.safetensors"))
    assert plan(str(tmp_path / "codes"), tmp_path / "out", ConvertOptions(method="collage")).bytes.read == size


def test_a_format_that_no_tensor_gets_is_named_in_the_plan_and_the_result(tmp_path: Path) -> None:
    options = ConvertOptions(format="e4m3fn", rules=(FormatRule(pattern="*", format="fp16"),), verify="none")
    (planned,) = plan("demo", tmp_path / "out", options).warnings
    (made,) = convert("demo", tmp_path / "out", options).warnings
    assert "would" in planned
    assert "was" in made


def test_the_figures_in_the_result_are_what_the_files_say(tmp_path: Path) -> None:
    result = run(minilm(), tmp_path / "out", method="unit", format="e4m3fn", verify="weights")
    source, out = load_file(minilm() / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    for t in result.tensors:
        if t.action != "convert":
            continue
        x = source[t.name].double()
        error = x - out[t.name][0].double() * out[t.name + "_scale"].double()
        assert t.sqnr_db == pytest.approx(10 * math.log10(x.square().sum() / error.square().sum()), abs=1e-3)
        assert t.max_rel_error == pytest.approx(float((error / x).nan_to_num(0).abs().max()), rel=1e-5)
        assert t.num_flushed == int(((out[t.name][0].float() == 0) & (x != 0)).sum())
        assert t.rms == pytest.approx(float(x.square().mean().sqrt()), rel=1e-5)
        assert t.absmax == float(x.abs().max())
    formats = {t.name: t.format if t.action == "convert" else t.action for t in result.tensors}
    assert formats["embeddings.word_embeddings.weight"] == "fp16", "eight bits keep embeddings in sixteen"
    assert formats["encoder.layer.0.output.dense.weight"] == "e4m3fn"
    assert formats["encoder.layer.0.output.dense.bias"] == formats["embeddings.position_ids"] == "keep"


def test_outputs_of_a_model_that_lacks_weights_are_never_compared(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 102}))
    with pytest.raises(InputError, match=r"900 .*`LlamaForCausalLM`"):
        run(source, tmp_path / "auto", verify="auto")
    result = run(source, tmp_path / "auto", verify="auto", allow_missing=True)
    assert any("900" in warning for warning in result.warnings)
    assert result.verify.logits is not None
    assert result.verify.logits.skipped
    assert result.verify.level == "weights"
    with pytest.raises(UnsupportedError):
        run(source, tmp_path / "asked", verify="logits", allow_missing=True)
    with pytest.raises(UnsupportedError):
        verify_output(tmp_path / "auto", VerifyOptions(against=str(source), level="logits"), progress=Silent())


def test_models_that_memory_does_not_hold_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.models.empty.available_memory", lambda: 1000)
    source = tiny("gpt2", tmp_path / "source")
    result = run(source, tmp_path / "auto", verify="auto")
    assert result.verify.logits is not None
    assert result.verify.logits.skipped
    with pytest.raises(ResourceError):
        run(source, tmp_path / "asked", verify="logits")


@pytest.mark.parametrize("options", [{"method": "unit"}, {"method": "multipoint", "format": "int8"}])
def test_verifying_reads_every_element_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    read: dict[str, int] = {}
    plain = OutputReader.read

    def counting(self: OutputReader, form: Stored, start: int, stop: int, side: Side) -> tuple[torch.Tensor, ...]:
        read[form.name] = read.get(form.name, 0) + stop - start
        return plain(self, form, start, stop, side)

    result = run("demo", tmp_path / "out", verify="none", **options)
    monkeypatch.setattr(OutputReader, "read", counting)
    found = verify_output(tmp_path / "out", VerifyOptions(against="demo", level="weights"), progress=Silent())
    assert found.passed
    assert read == {t.name: math.prod(t.shape) for t in result.tensors if t.action != "tie"}


def test_an_output_has_no_hidden_files_and_no_paths_of_its_author(tmp_path: Path) -> None:
    config = {"_name_or_path": "/home/me/model", "text_config": {"_name_or_path": "./model"}, "tokenizer": "own/er"}
    source = write_checkpoint(tmp_path / "source", config=config)
    names = (".env", ".ssh/key", "notes/.token", ".gitattributes", "notes/text")
    for name in names:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("/home/me")
    result = run(source, tmp_path / "out", format="fp16", verify="none")
    assert result.side_files == (".gitattributes", "notes/text")
    assert [[n for n in (".env", ".ssh", ".token") if n in w] for w in result.warnings] == [[".env", ".ssh", ".token"]]
    written = {
        p.name: p.read_text() for p in (tmp_path / "out").iterdir() if p.is_file() and p.suffix != ".safetensors"
    }
    assert {n for n, text in written.items() if str(tmp_path) in text} <= {"report.json", "report.html"}
    assert json.loads(written["config.json"])["text_config"] == {}
    assert json.loads(written["config.json"])["tokenizer"] == "own/er"
    assert {n for n, text in written.items() if "/home/me" in text} == {".gitattributes"}
