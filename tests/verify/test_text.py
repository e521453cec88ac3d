"""What two models say of a text, their matrices read as they go: equal to running them whole; and what is refused."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from typer.testing import CliRunner

import lpconv
import lpconv.verify.outputs as text_module
from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import LpconvError
from lpconv.models.tokenizer import read_tokenizer, tokenize
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.verify.outputs import compare_on_text, compare_outputs

LENGTH, TOKENS = 24, 120
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 20)
    return path


def source(folder: Path, kind: str) -> Path:
    """A checkpoint with the tokenizer of the demo."""
    if kind == "demo":
        return Path(demo_checkpoint())
    torch.manual_seed(0)
    words = transformers.AutoConfig.from_pretrained(demo_checkpoint()).vocab_size
    models: dict[str, Any] = {
        # Caps its logits after the head.
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**SMALL, vocab_size=words, num_key_value_heads=2, head_dim=8)
        ),
        # Has a layer more between body and head, and predicts no next token.
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=words)),
    }
    models[kind]().save_pretrained(folder / kind)
    for file in Path(demo_checkpoint()).glob("token*"):
        shutil.copyfile(file, folder / kind / file.name)
    return folder / kind


@pytest.mark.parametrize("kind", ["demo", "gemma2", "bert"])
def test_it_is_what_whole_models_say(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies on two windows at once, heads on a few tokens that do not end with a window."""
    monkeypatch.setattr(text_module, "AT_ONCE", 2 * LENGTH)
    monkeypatch.setattr(text_module, "_HEAD_BYTES", 2**17)
    monkeypatch.setattr(text_module, "_SAMPLED", 10**6)
    reference, out = source(tmp_path, kind), tmp_path / "out"
    convert(str(reference), out, ConvertOptions(method="unit", format="e4m3fn", verify="none"))
    got, layers = compare_on_text(out, reference, text(tmp_path), seq_len=LENGTH, max_tokens=TOKENS, progress=Silent())
    models = [lpconv.load(p, dtype=torch.float32) for p in (reference, out)]
    tokenizer, words = read_tokenizer(reference), models[0].config.vocab_size
    ids = tokenize(text(tmp_path), tokenizer, seq_len=LENGTH, vocab_size=words).windows[: TOKENS // LENGTH]
    seen: dict[str, torch.Tensor] = {}
    for name, module in models[1].named_modules():
        if isinstance(module, torch.nn.Linear) and not any(h in name for h in ("head", "pred")):
            module.register_forward_pre_hook(lambda _, x, n=name: seen.update({n: x[0].double()}))
    with torch.no_grad():
        said = [m(ids).logits for m in models]
    for name, x in seen.items():
        y, z = (x @ m.get_submodule(name).weight.detach().double().T for m in models)
        sqnr = 10 * torch.log10(y.square().sum() / (y - z).square().sum())
        inputs, output = layers[f"{name}.weight"]
        assert inputs is None
        assert output == pytest.approx(float(sqnr), abs=1e-3)
    assert len(seen) == len(layers)
    wanted, back = compare_outputs(said[0], said[1], "", ""), compare_outputs(said[1], said[0], "", "")
    # The same products, summed by a BLAS in another order: 1e-4 of a figure is far more than that, and far less than
    # a layer, a window or a token left out.
    close = {"rel": 1e-4, "abs": 1e-9}
    assert got.mean_kl == pytest.approx(wanted.mean_kl, **close)
    assert got.reverse_kl == pytest.approx(back.mean_kl, **close)
    assert got.rel_error == pytest.approx(wanted.rel_error, **close)
    assert got.max_abs_diff == pytest.approx(wanted.max_abs_diff, **close)
    assert got.top1_agreement == wanted.top1_agreement
    assert (got.bit_equal, wanted.bit_equal) == (False, False)
    if kind == "bert":
        assert got.perplexity is None
        return
    losses = [functional.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for x in said]
    assert got.source_perplexity == pytest.approx(float(losses[0].exp()), rel=1e-4)
    assert got.perplexity == pytest.approx(float(losses[1].exp()), rel=1e-4)
    by_window = [functional.cross_entropy(x[:, :-1].mT, ids[:, 1:], reduction="none").mean(1).double() for x in said]
    rises, gap = by_window[1] - by_window[0], got.loss_gap
    assert gap is not None
    assert gap.count == TOKENS // LENGTH
    assert gap.value == pytest.approx(float(rises.mean()), rel=1e-2, abs=1e-6)
    assert gap.high - gap.value == pytest.approx(2.7764 * float(rises.std()) / 5**0.5, rel=1e-2)  # t of 4


def test_no_matrix_is_ever_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.models.coded._BLOCK", 2**12)
    sizes: list[int] = []
    read = lpconv.layouts.reader.StoredTensors.values

    def watched(stored: Any, name: str, start: int, stop: int) -> torch.Tensor:
        sizes.append(stop - start)
        return read(stored, name, start, stop)

    monkeypatch.setattr(lpconv.layouts.reader.StoredTensors, "values", watched)
    demo = Path(demo_checkpoint())
    found, _ = compare_on_text(demo, demo, text(tmp_path), seq_len=LENGTH, max_tokens=LENGTH, progress=Silent())
    assert found.bit_equal
    assert found.mean_kl == 0
    assert sum(sizes) > 4 * max(sizes)
    assert max(sizes) <= 2**13


def test_the_command_says_it_and_gates_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text(tmp_path)
    convert("demo", tmp_path / "out", ConvertOptions(method="unit", format="e4m3fn", verify="none"))
    common = ["verify", "out", "--against", "demo", "--data", "text.txt", "--seq-len", "24", "--max-tokens", "96"]
    said = CliRunner().invoke(app, [*common, "--gate", "kl<=0.01", "--gate", "perplexity<=10", "--detect", "0.5"])
    assert said.exit_code == 0, said.stderr
    assert "perplexity" in said.stdout
    assert re.search(r"needed +\d", said.stdout)
    assert "96 tokens" in said.stdout.replace("\n", " ")
    (without_source := [*common]).remove("--against")
    without_source.remove("demo")
    recorded = CliRunner().invoke(app, [*without_source, "--json"])  # the source that the output records
    assert json.loads(recorded.stdout)["against"] == "demo"
    assert "demo" in recorded.stderr
    for name in ("report.json", "lpconv.json"):
        (tmp_path / "out" / name).write_text((tmp_path / "out" / name).read_text().replace('"demo"', '"gone"'))
    refused = CliRunner().invoke(app, without_source)
    assert refused.exit_code == 2
    assert "lpconv verify out --against gone" in refused.stderr
    shutil.rmtree(tmp_path / "out")
    convert("demo", tmp_path / "out", ConvertOptions(method="unit", format="e4m3fn", verify="none"))
    failed = CliRunner().invoke(app, [*common, "--gate", "kl<=1e-9", "--html", "page.html", "--json"])
    assert failed.exit_code == 5
    (tmp_path / "verify.json").write_text(failed.stdout)
    assert CliRunner().invoke(app, ["report", "verify.json", "--html", "again.html"]).exit_code == 0
    assert (tmp_path / "again.html").read_text() == (tmp_path / "page.html").read_text()
    page = html.unescape((tmp_path / "page.html").read_text())
    tensors = [t for t in json.loads((tmp_path / "out/lpconv.json").read_text())["tensors"] if t["action"] != "tie"]
    rows = re.findall(r'<th scope="row" class="left name">(.*?)</th><td data-sort="(.*?)">', page)
    assert sorted(r[0].replace("<wbr>", "") for r in rows) == sorted(t["name"] for t in tensors)
    decibels = [float(r[1]) for r in rows]
    assert decibels == sorted(decibels)
    assert decibels[0] == min(float(t["sqnr_db"] or "inf") for t in tensors)
    assert all(words in page for words in ("KL", "Perplexity", "kl<=1e-9"))


@pytest.mark.parametrize(
    ("arguments", "gate"),
    [((), "perplexity<=10"), (("--level", "logits"), "reverse_kl<=1"), (("--level", "values"), "kl<=1")],
)
def test_a_gate_that_nothing_measures_is_refused_first(tmp_path: Path, arguments: tuple[str, ...], gate: str) -> None:
    convert("demo", tmp_path / "out", ConvertOptions(method="unit", format="e4m3fn", verify="none"))
    common = ["verify", str(tmp_path / "out"), "--against", "demo", *arguments]
    said = CliRunner().invoke(app, [*common, "--gate", gate])
    assert said.exit_code == 2
    assert gate in said.stderr
    assert "--data" in said.stderr


def bare(folder: Path) -> Path:
    reference = source(folder, "bert")
    transformers.BertModel.from_pretrained(reference).save_pretrained(reference)
    return reference


def speechless(folder: Path) -> Path:
    reference = source(folder, "bert")
    for file in reference.glob("token*"):
        file.unlink()
    return reference


@pytest.mark.parametrize(("make", "code", "said"), [(bare, 4, "head"), (speechless, 3, "tokenizer")])
def test_what_is_refused(tmp_path: Path, make: Any, code: int, said: str) -> None:
    model = make(tmp_path)
    with pytest.raises(LpconvError, match=said) as caught:
        compare_on_text(model, model, text(tmp_path), seq_len=None, max_tokens=64, progress=Silent())
    assert caught.value.exit_code == code


def test_too_little_memory_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "available_memory", lambda: 10**8)
    demo = Path(demo_checkpoint())
    with pytest.raises(LpconvError, match="free") as caught:
        compare_on_text(demo, demo, text(tmp_path), seq_len=24, max_tokens=64, progress=Silent())
    assert caught.value.exit_code == 7


def test_outputs_that_were_asked_for_are_taken_from_the_files_where_models_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ConvertOptions(method="unit", format="fp32", verify="logits")
    convert("demo", tmp_path / "whole", options)
    monkeypatch.setattr("lpconv.plan.memory._models_bytes", lambda plan, contents: 2**60)
    found = convert("demo", tmp_path / "out", options).verify
    assert found.level == "logits"
    assert found.logits is not None
    assert found.logits.bit_equal
