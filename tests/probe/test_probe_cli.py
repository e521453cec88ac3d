"""`lpconv probe` and `lpconv report --what-if`, as a user meets them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from lpconv.cli.main import app
from lpconv.data import demo_checkpoint
from lpconv.formats.cast import cast
from lpconv.models.tasks import CLM, MLM
from lpconv.models.tokenizer import Tokens
from lpconv.probe.checkpoint import MASK_RATE, Batches, probe_checkpoint
from lpconv.probe.options import ProbeOptions
from lpconv.probe.record import ProbeResult
from lpconv.storage.staging import Staging

SMALL = ("--steps", "2", "--batch-size", "2", "--seq-len", "32")
BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    monkeypatch.setenv("COLUMNS", "80")


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def refused(code: int, *args: object) -> str:
    result = run(*args)
    assert result.exit_code == code, result.output
    assert "hint: " in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The demo model's probe. The model it read is gone: questions are answered without it."""
    folder = tmp_path_factory.mktemp("probe")
    model = shutil.copytree(demo_checkpoint(), folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LPCONV_COMPILE", "never")
        patch.setenv("COLUMNS", "80")
        result = run("probe", model, *SMALL, "-o", folder / "out")
    assert result.exit_code == 0, result.output
    shutil.rmtree(model)
    return folder / "out", result


def bert(folder: Path, kind: str = "BertForMaskedLM") -> Path:
    torch.manual_seed(0)
    getattr(transformers, kind)(transformers.BertConfig(**BERT)).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "and", "of", "to", "a", "I"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")  # type: ignore[call-arg]
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"
    ).save_pretrained(folder)


def probe_small(model: Path | str, **options: Any) -> ProbeResult:
    return probe_checkpoint(str(model), ProbeOptions(**({"steps": 1, "batch_size": 2, "seq_len": 32} | options)))


def test_the_worst_come_first_and_in_words(probed: tuple[Path, Result]) -> None:
    out, result = probed
    text = result.stdout
    assert re.search(r"underflow .* fp16 .* 1; 2\^", " ".join(text.split()))
    order = [text.index(s) for s in ("in fp16", "in e4m3fn", "Recommended", "holds")]
    assert order == sorted(order)
    assert re.match("model: .* 176 tensors", text)
    assert str(out.parent / "model") in text.replace("\n", "")
    assert "%, " in text
    assert "sample" in text
    tables, message = text.split("\nReport: ")  # paths are as long as they are
    assert max(map(len, tables.splitlines())) <= 80
    assert str(out) in message
    assert sorted(p.name for p in out.iterdir()) == ["probe.json", "report.html"]
    assert all(re.match(r".*: .* (so far|left)$|finishing", line) for line in result.stderr.splitlines())  # if slow


def test_rates_of_weights_equal_casts_of_the_checkpoint(probed: tuple[Path, Result]) -> None:
    document = json.loads(run("report", probed[0], "--what-if", "e4m3fn", "--json").stdout)
    assert (document["kind"], document["formats"]) == ("probe-report", ["e4m3fn"])
    weights = load_file(demo_checkpoint() / "model.safetensors")
    found = [t for t in document["tensors"] if t["role"] == "weight"]
    assert len(found) == 29
    for t in found:
        weight = weights[f"{t['layer']}.weight"]
        flushed = ((cast(weight, "e4m3fn") == 0) & (weight != 0)).sum() / (weight != 0).sum()
        assert t["plain"][0]["underflow"] == pytest.approx(flushed.item(), rel=1e-6)


def test_another_format_later(probed: tuple[Path, Result]) -> None:
    out, _ = probed
    text = run("report", out, "--what-if", "e5m2").stdout
    assert "in e5m2," in text
    listed = text.partition("in e5m2,")[2]
    assert len(re.findall(r"\.3\.mlp\.up_proj", listed)) == 6  # once in each class
    assert max(map(len, text.splitlines())) <= 80
    page = out.parent / "page.html"
    assert run("report", out / "probe.json", "--html", page).exit_code == 0
    assert "<svg" in page.read_text()


def test_unknown_formats_and_mixed_runs_are_refused(probed: tuple[Path, Result], tmp_path: Path) -> None:
    out, _ = probed
    assert "`e5m2`" in refused(2, "report", out, "--what-if", "e5m3")
    assert "e2m1" in refused(4, "report", out, "--what-if", "mxfp4")
    refused(4, "report", out, "--what-if", "fp32")
    refused(2, "report", out, out)
    assert run("convert", "demo", "--verify", "none", "-q", "-o", tmp_path / "converted").exit_code == 0
    assert "`lpconv probe " in refused(2, "report", tmp_path / "converted", "--what-if", "e5m2")
    broken = tmp_path / "probe.json"
    broken.write_text('{"kind": "probe", "tensors": [{"layer": "a"}]}')
    refused(3, "report", tmp_path)
    broken.write_text((out / "probe.json").read_text().replace('"role":"output"', '"role":"outcome"', 1))
    assert "'outcome'" in refused(3, "report", tmp_path, "--what-if", "e5m2")


def test_what_is_not_a_probe_is_never_replaced(probed: tuple[Path, Result], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused(8, "probe", "demo", *SMALL, "-o", tmp_path, "--force")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    refused(8, "probe", "demo", *SMALL, "-o", probed[0])


def test_a_killed_probe_is_begun_anew_and_a_running_one_is_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Staging(out, {"probe": "demo"}, force=False, marker="probe.json") as other:
        (other.directory / "report.html").write_text("half a page")
        assert "another" in refused(8, "probe", "demo", *SMALL, "-o", out, "--force")
    assert "--resume" not in refused(8, "probe", "demo", *SMALL, "-o", out)
    assert run("probe", "demo", *SMALL, "-o", out, "--force", "-q").exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert sorted(p.name for p in out.iterdir()) == ["probe.json", "report.html"]


def test_a_converted_output_is_probed_as_the_model_it_is(tmp_path: Path) -> None:
    for method, name in (("unit", "fp32"), ("collage", "bf16")):
        args = ("--residual", "exact16") if method == "collage" else ()
        out = tmp_path / method
        done = run("convert", "demo", "--method", method, "--format", name, *args, "--verify", "none", "-q", "-o", out)
        assert done.exit_code == 0, done.output
        assert probe_small(out).tensors == probe_small("demo").tensors


def test_without_a_tokenizer_ids_are_random_and_the_output_says_so(tmp_path: Path) -> None:
    model = bert(tmp_path / "model")
    facts = probe_small(model).options["facts"]
    assert facts["Text"].startswith("random")
    first = run("probe", model, *SMALL, "-o", tmp_path / "first", "-q").stdout.splitlines()[0]
    assert re.match("model: .*random .*tokenizer", first)
    assert "15 % masked" in facts["Steps"]
    assert probe_small(model, seed=1).losses != probe_small(model, seed=2).losses
    assert "tokenizer" in refused(2, "probe", model, "--data", __file__, "-o", tmp_path / "out")


def test_a_masked_model_reads_text_between_its_special_tokens(tmp_path: Path) -> None:
    model = bert(tmp_path / "model")
    add_tokenizer(model)
    text = tmp_path / "text.txt"
    text.write_text("the and of to a I " * 20)
    result = probe_small(model, data=text)
    assert result.options["facts"]["Text"] == "text.txt"
    embedded = next(
        t for t in result.tensors if t.layer == "bert.embeddings.word_embeddings" and t.role == "weight_grad"
    )
    assert embedded.exponents.num_nonzero > 0


@pytest.mark.parametrize("mask_id", [3, None])
def test_masks_spare_special_tokens_and_follow_the_seed(mask_id: int | None) -> None:
    windows = torch.full((64, 40), 9)
    windows[:, 0], windows[:, -1] = 1, 2
    tokens = Tokens(windows=windows, num_prefix=1, num_suffix=1, mask_id=mask_id)

    def first(seed: int) -> dict[str, torch.Tensor]:
        return next(iter(Batches(tokens=tokens, task=MLM, batch_size=64, vocab_size=64, seed=seed)))

    batch = first(0)
    masked = batch["labels"] != -100
    assert not masked[:, [0, -1]].any()
    assert masked.any(1).all()
    assert masked[:, 2:-1].double().mean() == pytest.approx(MASK_RATE, abs=4 * (0.15 * 0.85 / (64 * 37)) ** 0.5)
    assert torch.equal(batch["labels"][masked], windows[masked])
    assert torch.equal(batch["input_ids"][~masked], windows[~masked])
    if mask_id is not None:
        assert (batch["input_ids"][masked] == mask_id).all()
    assert torch.equal(first(0)["labels"], batch["labels"])
    assert not torch.equal(first(1)["labels"], batch["labels"])


def test_a_short_text_is_repeated() -> None:
    tokens = Tokens(windows=torch.arange(6).view(3, 2))
    batches = iter(Batches(tokens=tokens, task=CLM, batch_size=2, vocab_size=6, seed=0))
    assert [next(batches)["input_ids"].tolist() for _ in range(2)] == [[[0, 1], [2, 3]], [[4, 5], [0, 1]]]


def test_every_other_step_is_recorded() -> None:
    found = probe_small("demo", steps=3, every=2)
    assert (found.steps_seen, found.steps_recorded, len(found.losses)) == (3, 2, 3)


def test_a_bare_encoder_gets_a_loss_whose_gradient_reaches_every_layer(tmp_path: Path) -> None:
    result = probe_small(bert(tmp_path / "model", "BertModel"))
    assert result.options["facts"]["Loss"].startswith("mean")
    gradients = {t.layer: t for t in result.tensors if t.role == "weight_grad"}
    top = max(gradients["encoder.layer.1.output.dense"].exponents.exponents)
    assert top > -14  # not the 2^-24 of rounding that the mean square behind a layer norm gives


def test_a_head_that_the_checkpoint_lacks_is_not_invented(tmp_path: Path) -> None:
    model = bert(tmp_path / "model", "BertModel")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    result = probe_small(model, allow_missing=True)
    assert "`BertForMaskedLM`" in result.options["warnings"][0]
    assert not any(t.layer.startswith("cls") for t in result.tensors)


def test_a_model_with_nan_is_probed_with_one_warning(tmp_path: Path) -> None:
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    done = run("probe", tmp_path / "model", *SMALL, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["losses"] == ["nan", "nan"]
    (warning,) = document["warnings"]
    assert "NaN" in warning
    noisy = json.loads(run("probe", tmp_path / "model", *SMALL, "--noise", "-o", tmp_path / "noise", "--json").stdout)
    assert noisy["noise"] == []
    assert any("quartet2" in w for w in noisy["warnings"])
