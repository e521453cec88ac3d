"""`--layout compressed-tensors`: plain transformers with that package opens it, and so do lpconv's own commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import files_of
from convert_models import minilm, tiny
from safetensors.torch import load_file
from typer.testing import CliRunner

import lpconv.hf
from lpconv.cli.main import app
from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert, plan
from lpconv.forms.reader import StoredTensors

# Runs where lpconv cannot be imported, and saves what the model says.
SCRIPT = """
import sys
sys.modules["lpconv"] = None
import torch
import transformers
path, name, dtype, out = sys.argv[1:]
cls = getattr(transformers, name)
model, info = cls.from_pretrained(path, dtype=getattr(torch, dtype), output_loading_info=True)
assert not any(info.values()), info
linear = [m for n, m in model.named_modules() if type(m) is torch.nn.Linear]
num_codes = sum(m.weight.dtype == torch.float8_e4m3fn for m in linear)
assert num_codes > 0, "nothing is quantised"
with torch.no_grad():
    found = model(input_ids=torch.arange(3, 35).view(2, 16))
torch.save((found[0], num_codes), out)
"""


def opened_without_lpconv(path: Path, name: str, dtype: str) -> tuple[torch.Tensor, int]:
    out = path.with_suffix(".pt")
    command = [sys.executable, "-c", SCRIPT, str(path), name, dtype, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: tuple[torch.Tensor, int] = torch.load(out)
    return found


def compressed(source: Path, output: Path, **options: object) -> Path:
    given = {"format": "e4m3fn", "layout": "compressed-tensors", "verify": "weights", **options}
    convert(str(source), output, ConvertOptions(**given))  # type: ignore[arg-type]  # options by name
    return output


def test_plain_transformers_gives_the_outputs_that_lpconv_gives(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "llama")
    ours = compressed(source, tmp_path / "ours", layout="lpconv", exclude=("*embed*",))
    theirs = compressed(source, tmp_path / "theirs", exclude=("*embed*",))
    logits, num_codes = opened_without_lpconv(theirs, "LlamaForCausalLM", "bfloat16")
    assert num_codes == 14  # the matrices of two layers, and not the head
    model = lpconv.hf.load(ours, dtype=torch.bfloat16)
    with torch.inference_mode():
        wanted = model(input_ids=torch.arange(3, 35).view(2, 16)).logits
    bound = 2.0**-8 * wanted.abs().max()  # one rounding to bf16
    assert (logits - wanted).abs().max() <= bound


def test_rows_are_fp8_dynamic_to_their_package(tmp_path: Path) -> None:
    """Its decompressor gives what we decode, its config asks for inputs by token, and every row has its own scale."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy

    output = compressed(tiny("llama", tmp_path / "llama"), tmp_path / "out", granularity="row")
    written = json.loads((output / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(written).config_groups["group_0"]
    assert scheme.weights.strategy == QuantizationStrategy.CHANNEL
    assert (scheme.input_activations.strategy, scheme.input_activations.dynamic) == (QuantizationStrategy.TOKEN, True)
    state, name = load_file(output / "model.safetensors"), "model.layers.0.mlp.down_proj."
    parts = {n.removeprefix(name): x for n, x in state.items() if n.startswith(name)}
    theirs = BaseCompressor.get_value_from_registry(written["format"]).decompress(parts, scheme)["weight"]
    with StoredTensors.open(output) as stored:
        assert torch.equal(stored.tensor(name + "weight"), theirs)
    assert parts["weight_scale"].shape == (len(theirs), 1)
    logits, num_codes = opened_without_lpconv(output, "LlamaForCausalLM", "bfloat16")
    assert num_codes == 14
    assert torch.isfinite(logits).all()


def test_a_real_encoder_with_excluded_layers(tmp_path: Path) -> None:
    output = compressed(minilm(), tmp_path / "minilm", exclude=("*.layer.0.*",), rules=())
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert {n.split(".")[2] for n in config["ignore"]} == {"0"}
    assert len(config["ignore"]) == 6
    found, num_codes = opened_without_lpconv(output, "BertModel", "float32")
    assert num_codes == 5 * 6 + 1  # five of six layers, and the pooler
    with torch.inference_mode():
        wanted = lpconv.hf.load(output, dtype=torch.float32)(input_ids=torch.arange(3, 35).view(2, 16))[0]
    assert (found - wanted).abs().max() <= 2.0**-8 * wanted.abs().max()


def test_only_linear_weights_become_codes(tmp_path: Path) -> None:
    """GPT-2's matrices belong to `Conv1D`: codes in them would be read as numbers."""
    planned = plan(str(tiny("gpt2", tmp_path / "gpt2")), tmp_path / "out", ConvertOptions(
        format="e4m3fn", layout="compressed-tensors", verify="none",
    ))  # fmt: skip
    assert {t.action for t in planned.tensors} <= {"keep", "tie"}
    assert any("no Linear weight" in t.reason for t in planned.tensors)
    assert any("no tensor is converted" in w for w in planned.warnings)


def test_the_other_commands_understand_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = tiny("llama", Path("llama"))
    runner = CliRunner()
    convert_it = ["convert", "llama", "--format", "e4m3fn", "--layout", "compressed-tensors", "--verify", "logits"]
    for command in (
        [*convert_it, "-o", "out", "-q"],
        ["inspect", "out"],
        ["inspect", "out", "--stats"],
        ["verify", "out", "--against", "llama", "--level", "logits"],
        ["restore", "out", "-o", "back"],
        ["report", "out"],
    ):
        done = runner.invoke(app, command)
        assert done.exit_code == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert not Path("out/lpconv_loader.py").exists()
    assert "compressed-tensors" in Path("out/README.md").read_text()
    state = load_file("out/model.safetensors")
    assert all(not n.endswith("_scale") or state[n].shape == (1,) for n in state)
    plain = transformers.AutoModelForCausalLM.from_pretrained("back").state_dict()
    ours = lpconv.hf.load("out").state_dict()
    assert all(torch.equal(x, plain[n]) for n, x in ours.items())
    assert json.loads(Path("back/config.json").read_text()) == json.loads((source / "config.json").read_text())
    again = runner.invoke(app, ["convert", "out", "-o", "twice"])
    assert again.exit_code == 0, again.stderr


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "llama")
    first, second = (compressed(source, tmp_path / n, workers=w) for n, w in (("a", 1), ("b", 2)))
    assert files_of(first) == files_of(second)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--format", "fp16"], 2, "--format e4m3fn"),
        (["--format", "e5m2"], 2, "--format e4m3fn"),
        (["--method", "collage"], 2, "--format e4m3fn"),
        (["--format", "e4m3fn", "--rule", "*=fp16"], 2, "=keep"),
        (["--format", "e4m3fn", "--layout", "compresed-tensors"], 2, "compressed-tensors"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(tmp_path: Path, options: list[str], code: int, words: str) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["convert", "demo", "--layout", "compressed-tensors", *options, "-o", str(out)])
    assert done.exit_code == code, done.stderr
    assert words in done.stderr
    assert "hint:" in done.stderr
    assert not out.exists()


def test_a_config_that_builds_no_model_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "llama")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "no-such-model"}
    (source / "config.json").write_text(json.dumps(config))
    arguments = ["convert", str(source), "--format", "e4m3fn", "--layout", "compressed-tensors"]
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "out")])
    assert done.exit_code == 4
    assert "no-such-model" in done.stderr
