"""`lpconv init`: fresh checkpoints of unit size, what they can do, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner, Result

import lpconv.hf
from lpconv.cli.main import app
from lpconv.data import demo_checkpoint
from lpconv.init.architecture import resize_config
from lpconv.scaled.native import initialise

SMALL = ("--width", "64", "--layers", "1")
SHORT = ("--steps", "2", "--batch-size", "2", "--seq-len", "16", "--eval-batches", "1", "-q")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")


def lpconv_(*words: object) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def fresh(out: Path, *words: object) -> Path:
    done = lpconv_("init", "demo", "--reinit", *SMALL, "-q", "-o", out, *words)
    assert done.exit_code == 0, done.stderr
    return out


def refused(*words: object) -> tuple[int, str]:
    done = lpconv_(*words)
    assert done.exit_code, done.stdout
    return done.exit_code, done.stderr


def test_a_fresh_checkpoint_holds_what_the_library_draws_and_verifies(tmp_path: Path) -> None:
    (tmp_path / ".lpconv-init-out-killed").mkdir()  # as SIGKILL leaves it
    out = fresh(tmp_path / "out", "--seed", 3)
    config = json.loads((out / "config.json").read_text())
    assert config["lpconv_native"] == {"seed": 3, "head_norm": "model.norm"}
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (64, 2, 1)
    drawn = hf.LlamaForCausalLM(hf.LlamaConfig.from_dict({k: v for k, v in config.items() if "lpconv" not in k}))
    initialise(drawn, seed=3)
    found = lpconv.hf.load(out).state_dict()
    assert all(torch.equal(found[name], x) for name, x in drawn.state_dict().items())
    assert lpconv_("verify", out).exit_code == 0
    assert not list(tmp_path.glob(".lpconv-init-*"))


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    sums = [
        (fresh(tmp_path / str(i) / "out", "--seed", seed) / "SHA256SUMS").read_text() for i, seed in enumerate("001")
    ]
    assert sums[0] == sums[1] != sums[2]
    for name in ("report.json", "report.html"):
        assert ".lpconv-init-" not in (tmp_path / "0" / "out" / name).read_text()


def test_it_trains_natively_and_goes_on_from_there(tmp_path: Path) -> None:
    out = fresh(tmp_path / "out")
    done = lpconv_("finetune", out, "--recipe", "native-fp8", *SHORT, "--json", "-o", tmp_path / "tuned")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["recipe"], document["twin"]) == ("native-fp8", "native")
    assert document["saved_as"] == "unit e4m3fn"
    assert "lr 0.25" in document["facts"]["Optimizer"]
    before, after = document["runs"][0]["losses"]["values"]
    assert after < before
    further = ("finetune", tmp_path / "tuned", "--recipe", "native-fp16", *SHORT, "--twin", "none")
    assert lpconv_(*further, "-o", tmp_path / "further").exit_code == 0


def test_a_step_is_that_of_the_library_by_the_named_rule(tmp_path: Path) -> None:
    """Adam's first step is the rate, so that the two rules part by √K."""
    out, moved = fresh(tmp_path / "out"), []
    before = lpconv.hf.load(out).state_dict()
    for rule in ("unit", "u-mup"):
        how = ("--lr", "0.01", "--lr-rule", rule, "--steps", "1", "--warmup", "0", "--weight-decay", "0")
        words = ("finetune", out, "--recipe", "native", *how, *SHORT[2:], "--twin", "none", "-o", tmp_path / rule)
        done = lpconv_(*words)
        assert done.exit_code == 0, done.stderr
        name = "model.layers.0.self_attn.q_proj.weight"  # of fan-in 64
        moved.append(float((lpconv.hf.load(tmp_path / rule).state_dict()[name] - before[name]).abs().max()) * 64**0.5)
    assert moved == pytest.approx([0.01, 0.01 / 8], rel=0.02)


def test_trained_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = refused("init", "demo", "-o", out)
    assert code == 2
    assert "trained" in said
    assert "--reinit" in said
    code, said = refused("finetune", "demo", "--recipe", "native-fp8", "-o", out)
    assert code == 4
    assert "trained" in said
    plain = fresh(tmp_path / "plain", "--method", "plain")
    assert refused("finetune", plain, "--recipe", "native", *SHORT, "-o", out)[0] == 4
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--task", "mlm"), 4, "head"),
        (("--optimizer", "collage-plus"), 2, "updates unit-scale weights"),
        (("--calibrate",), 2, "theory"),
        (("--loss-scale", "dynamic"), 2, "`native`"),
    ],
)
def test_what_does_not_go_with_native_recipes(words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    out = fresh(tmp_path / "out")
    found = refused("finetune", out, "--recipe", "native-fp8", *words, *SHORT, "-o", tmp_path / "no")
    assert found[0] == code
    assert said in found[1]
    assert not (tmp_path / "no").exists()
    assert refused("finetune", out, "--lr-rule", "unit", *SHORT, "-o", tmp_path / "no")[0] == 2


def test_shares_of_unit_size_are_reported_and_few_are_a_warning(tmp_path: Path) -> None:
    done = lpconv_("init", "demo", "--reinit", *SMALL, "--json", "-q", "-o", tmp_path / "fine")
    document = json.loads(done.stdout)
    assert len(document["unit_shares"]) == 3
    assert min(document["unit_shares"].values()) > 0.9
    assert document["warnings"] == []
    config = hf.PersimmonConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                intermediate_size=128, architectures=["PersimmonForCausalLM"])  # fmt: skip
    config.save_pretrained(tmp_path)  # squares of relu have no rule that predicts their size
    done = lpconv_("init", tmp_path / "config.json", "--json", "-q", "-o", tmp_path / "few")
    assert done.exit_code == 0, done.stderr
    assert "[1/2, 2]" in json.loads(done.stdout)["warnings"][0]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (hf.FNetConfig(intermediate_size=64, architectures=["FNetForMaskedLM"]), "FourierTransform)"),
        (hf.MambaConfig(architectures=["MambaForCausalLM"]), "A_log"),
        (hf.T5Config(d_kv=16, num_layers=1, architectures=["T5ForConditionalGeneration"]), "1/√d"),
    ],
)
def test_what_has_no_rule_is_named_before_anything_is_published(
    config: hf.PreTrainedConfig, named: str, tmp_path: Path
) -> None:
    config.update({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1})
    config.save_pretrained(tmp_path)
    code, said = refused("init", tmp_path / "config.json", "-q", "-o", tmp_path / "out")
    assert code == 4
    assert named in said
    assert "--method plain" in said
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_positions_that_read_a_shape_or_a_length_are_drawn() -> None:
    sizes = {"d_model": 16, "vocab_size": 64, "encoder_layers": 1, "decoder_layers": 1, "bos_token_id": 0}
    sizes |= {
        f"{part}_{kind}": n for part in ("encoder", "decoder") for kind, n in (("attention_heads", 2), ("ffn_dim", 32))
    }
    positions = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
    for config in (hf.LEDConfig(**sizes, **positions, attention_window=4), hf.PegasusConfig(**sizes)):
        model = hf.AutoModelForSeq2SeqLM.from_config(config)
        initialise(model, seed=1)
        assert float(model.get_input_embeddings().weight.detach().square().mean()) == pytest.approx(1, rel=0.1)


def test_a_config_that_builds_no_model_is_an_error_of_the_config(tmp_path: Path) -> None:
    config = hf.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, pad_token_id=99,
                           architectures=["BertForMaskedLM"])  # fmt: skip
    config.save_pretrained(tmp_path)
    code, said = refused("init", tmp_path / "config.json", "-q", "-o", tmp_path / "out")
    assert code == 4
    assert "Padding_idx" in said


def test_a_config_may_hold_infinity(tmp_path: Path) -> None:
    config = hf.Mamba2Config(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, n_groups=1,
                             state_size=8, architectures=["Mamba2ForCausalLM"])  # fmt: skip
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    done = lpconv_("init", tmp_path / "config.json", "--method", "plain", "-q", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").time_step_limit[1] == float("inf")


def test_a_preset_needs_no_checkpoint_and_takes_a_tokenizer(tmp_path: Path) -> None:
    words = ("init", "bert-base", "--width", "64", "--layers", "1", "-q")
    assert lpconv_(*words, "-o", tmp_path / "bare").exit_code == 0
    code, said = refused("finetune", tmp_path / "bare", "--recipe", "native-fp8", "-o", tmp_path / "no")
    assert code == 3
    assert "tokenizer" in said
    assert lpconv_(*words, "--tokenizer", "demo", "-o", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_config_of_another_size() -> None:
    settings = json.loads((demo_checkpoint() / "config.json").read_text())
    wide = resize_config(settings, width=256, layers=6)
    assert (wide["hidden_size"], wide["intermediate_size"], wide["num_attention_heads"]) == (256, 768, 8)
    assert (wide["num_key_value_heads"], wide["head_dim"], wide["num_hidden_layers"]) == (4, 32, 6)
    kinds = resize_config({**settings, "layer_types": ["a", "b"]}, width=None, layers=5)["layer_types"]
    assert kinds == ["a", "b", "a", "b", "a"]


def test_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    code, said = refused("init", "demo", "--reinit", "--width", "100", "-q", "-o", tmp_path / "out")
    assert code == 2
    assert " 64" in said
    assert refused("init", "demo", "--reinit", "--layers", "0", "-o", tmp_path / "out")[0] == 2
    assert refused("init", "demo", "--reinit", "--tokenizer", tmp_path, "-q", "-o", tmp_path / "out")[0] == 3
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    code, said = refused("init", tmp_path, "-q", "-o", tmp_path / "out")
    assert (code, "architecture" in said) == (4, True)
    assert not (tmp_path / "out").exists()
    taken = fresh(tmp_path / "taken")
    assert refused("init", "demo", "--reinit", "-q", "-o", taken)[0] == 8
