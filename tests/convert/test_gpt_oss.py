"""`--layout gpt-oss`: experts in MXFP4 on their side. Plain transformers decodes them to our bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import files_of, rehash
from fresh_python import run_script
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import lpconv
from lpconv.checkpoint.contents import read_contents
from lpconv.checkpoint.source import open_source
from lpconv.cli.main import app
from lpconv.convert.inspect import inspect
from lpconv.convert.options import ConvertOptions, VerifyOptions
from lpconv.convert.patterns import FormatRule
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.convert.turned import TurnedMatrices
from lpconv.convert.verify_output import verify_output
from lpconv.errors import UnsupportedError
from lpconv.forms.reader import StoredTensors
from lpconv.progress import Silent

# Runs where lpconv cannot be imported, and saves the weights and what the model says.
SCRIPT = """
import sys
sys.modules["lpconv"] = None
import torch
import transformers
out, path = sys.argv[1:]
asked = transformers.Mxfp4Config(dequantize=True)
asked = {"quantization_config": asked, "output_loading_info": True}
model, info = transformers.AutoModelForCausalLM.from_pretrained(path, **asked)
assert not any(info.values()), info
with torch.no_grad():
    said = model(input_ids=torch.arange(3, 35).view(2, 16)).logits
torch.save((said, {n: p.detach() for n, p in model.named_parameters()}), out)
"""
ASKED: dict[str, Any] = {"format": "e2m1", "granularity": "mx", "layout": "gpt-oss", "verify": "weights"}
WORDS = ["--format", "e2m1", "--granularity", "mx", "--layout", "gpt-oss"]
CODED = [f"model.layers.{i}.mlp.experts.{p}" for i in range(2) for p in ("gate_up_proj", "down_proj")]


def gpt_oss(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Experts with columns of zeros, of both zeros, of ties, of the largest numbers and of tiny ones."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, num_local_experts=3, num_experts_per_tok=2, head_dim=16,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        w = layer.mlp.experts.gate_up_proj.data
        w[0, :, 3], w[1, :, 4], w[2, ::2, 5] = w[0, :, 3] * 1000, 0, -0.0
        w[0, :32, 6] = torch.arange(32) / 4  # halves of steps of e2m1, with a scale of 1 or so
        w[1, :4, 7] = torch.tensor([1e-30, -1e-20, 2.0**-9, 6.0])
        layer.mlp.experts.down_proj.data[2] = 0
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def source(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return gpt_oss(tmp_path_factory.mktemp("gpt-oss") / "source", request.param)


@pytest.fixture(scope="module")
def output(source: Path) -> Path:
    out = source.with_name("out")
    assert convert(str(source), out, ConvertOptions(**ASKED)).verify.passed
    return out


def decoded(path: Path) -> dict[str, Tensor]:
    with StoredTensors.open(path) as stored:
        return {n: stored.tensor(n) for n in stored.forms}


def test_plain_transformers_decodes_to_our_bits(output: Path) -> None:
    saved = output.with_suffix(".pt")
    done = run_script(SCRIPT, saved, output)
    assert done.returncode == 0, done.stderr
    logits, theirs = torch.load(saved)
    ours = decoded(output)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert torch.equal(x.to(theirs[name].dtype).view(torch.uint8), theirs[name].view(torch.uint8)), name
    model = lpconv.load(output, dtype=theirs[CODED[0]].dtype)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=torch.arange(3, 35).view(2, 16)).logits, logits)


def test_only_experts_are_codes_and_the_config_names_the_rest(source: Path, output: Path) -> None:
    stored, plain = load_file(output / "model.safetensors"), load_file(source / "model.safetensors")
    assert {n for n in stored if n not in plain} == {n + s for n in CODED for s in ("_blocks", "_scales")}
    assert all(torch.equal(stored[n].view(torch.uint8), x.view(torch.uint8)) for n, x in plain.items() if n in stored)
    experts, inputs, outputs = plain[CODED[0]].shape
    assert stored[CODED[0] + "_blocks"].shape == (experts, outputs, inputs // 32, 16)
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.router"} < {*config["modules_to_not_convert"]}
    assert not [n for n in config["modules_to_not_convert"] if "experts" in n]
    assert not inspect(output).problems


def test_the_weights_are_those_of_the_layout_of_rows_turned(source: Path, output: Path, tmp_path: Path) -> None:
    """What `--granularity mx` makes of the transpose, in lpconv's own layout."""
    plain = load_file(source / "model.safetensors")
    turned = {n: plain[n].mT.contiguous() for n in CODED}
    (tmp_path / "turned").mkdir()
    save_file(turned, tmp_path / "turned/model.safetensors")
    (tmp_path / "turned/config.json").write_text("{}")
    convert(str(tmp_path / "turned"), tmp_path / "rows", ConvertOptions(format="e2m1", granularity="mx"))
    rows, got = decoded(tmp_path / "rows"), decoded(output)
    for name in CODED:
        assert torch.equal(rows[name].mT, got[name]), name


def test_damage_is_seen_and_what_is_sound_is_restored(source: Path, output: Path, tmp_path: Path) -> None:
    assert verify_output(output, VerifyOptions(against=str(source), level="weights"), progress=Silent()).passed
    restore(output, tmp_path / "back", force=False, progress=Silent())
    back, values = load_file(tmp_path / "back/model.safetensors"), decoded(output)
    assert all(torch.equal(x.float(), values[n].to(x.dtype).float()) for n, x in back.items())
    for part in ("_blocks", "_scales"):
        damaged = tmp_path / part
        damaged.mkdir()
        for file, data in files_of(output, without=set()).items():
            (damaged / file).write_bytes(data)
        stored = load_file(damaged / "model.safetensors")
        stored[CODED[3] + part].view(-1)[7] ^= 1
        save_file(stored, damaged / "model.safetensors", metadata={"format": "pt"})
        rehash(damaged)
        found = verify_output(damaged, VerifyOptions(against=str(source), level="weights"), progress=Silent())
        assert not found.passed
        assert any(CODED[3] in p for p in found.problems)


def test_a_run_in_parts_and_a_source_of_codes_write_the_same(source: Path, output: Path, tmp_path: Path) -> None:
    names = ["config.json", "model.safetensors"]
    again = ConvertOptions(**ASKED)
    convert(str(output), tmp_path / "again", again)
    found = load_file(tmp_path / "again/model.safetensors")
    assert all(
        torch.equal(x.view(torch.uint8), found[n].view(torch.uint8)) for n, x in load_file(output / names[1]).items()
    )
    whole = tmp_path / "whole"
    convert(str(source), whole, ConvertOptions(**ASKED, max_shard_size=60_000))
    common = ["convert", str(source), *WORDS, "--max-shard-size", "60KB", "-o", str(tmp_path / "parts"), "-q"]
    for part in ("1/2", "2/2"):
        assert CliRunner().invoke(app, [*common, "--shard", part]).exit_code == 0
    done = CliRunner().invoke(app, [*common, "--resume"])
    assert done.exit_code == 0, done.stderr
    names = ["config.json", *(p.name for p in whole.glob("*.safetensors*"))]
    assert len(names) > 3
    assert {n: files_of(whole)[n] for n in names} == {n: files_of(tmp_path / "parts")[n] for n in names}


def test_experts_that_are_kept_are_named(tmp_path: Path) -> None:
    path, kept = gpt_oss(tmp_path / "source"), "model.layers.1.mlp.experts"
    rules = (FormatRule(pattern=f"{kept}.*", format="keep"),)
    convert(str(path), tmp_path / "out", ConvertOptions(**ASKED, rules=rules))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert kept in config["modules_to_not_convert"]
    with pytest.raises(UnsupportedError, match=f"of `{kept}` only one projection"):
        convert(str(path), tmp_path / "half", ConvertOptions(**ASKED, exclude=(f"{kept}.down_proj",)))
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (WORDS, "the model is `llama`", 4),
        ([*WORDS[2:], "--format", "e4m3fn"], "does not hold unit in e4m3fn", 2),
        (["--format", "e2m1", "--layout", "gpt-oss", "--granularity", "nvfp4"], "does not hold unit in e2m1", 2),
        (["--method", "collage", "--layout", "gpt-oss"], "does not hold collage", 2),
        ([*WORDS, "--rule", "*experts*=e4m3fn"], "does not hold that", 2),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(words: list[str], said: str, code: int, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", "demo", *words, "-o", str(tmp_path / "out")])
    assert done.exit_code == code
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_blocks_end_anywhere_in_a_matrix(source: Path) -> None:
    """Of any range, through the ends of experts, and whoever asks first."""
    opened = open_source(read_contents(source))
    turned, whole = TurnedMatrices(opened), load_file(source / "model.safetensors")[CODED[0]].mT.reshape(-1)
    size = 64 * 192
    for start, stop in ((0, 5), (size - 3, size + 3), (2 * size - 1, 3 * size), (7, 3 * size), (0, 3 * size)):
        buffer = torch.empty(3 * size * 4, dtype=torch.uint8)
        assert torch.equal(turned.read(CODED[0], start, stop, buffer), whole[start:stop])
    opened.close()


def test_large_experts_are_written_by_many_workers(tmp_path: Path) -> None:
    """Matrices of more than a block, with whichever worker comes first: the same bytes."""
    (tmp_path / "source").mkdir()
    x = torch.randn(2, 512, 1100, generator=torch.Generator().manual_seed(0)).bfloat16()
    names = [f"model.layers.0.mlp.experts.{p}" for p in ("gate_up_proj", "down_proj")]
    save_file({names[0]: x, names[1]: -x}, tmp_path / "source/model.safetensors")
    (tmp_path / "source/config.json").write_text('{"model_type": "gpt_oss"}')
    for workers in (1, 3):
        options = ConvertOptions(**ASKED, workers=workers)
        assert convert(str(tmp_path / "source"), tmp_path / str(workers), options).verify.passed
    assert files_of(tmp_path / "1")["model.safetensors"] == files_of(tmp_path / "3")["model.safetensors"]
    got = decoded(tmp_path / "1")
    assert torch.equal(got[names[0]], -got[names[1]])
    assert float((got[names[0]] - x.float()).square().sum() / x.float().square().sum()) < 0.02
