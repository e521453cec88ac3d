"""`--layout compressed-tensors`: plain transformers with that package opens it, and so do lpconv's own commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lpconv
import lpconv.hf
from lpconv.cli.main import app
from lpconv.convert.run import convert, plan
from lpconv.data import demo_checkpoint
from lpconv.errors import UnsupportedError
from lpconv.formats.grains import GRAINS
from lpconv.formats.spec import FORMATS
from lpconv.forms.blocks import Workspace
from lpconv.forms.facts import FormSettings
from lpconv.inspect.headers import inspect
from lpconv.inspect.values import judge_scales
from lpconv.layouts.compressed_tensors import Compressed, CompressedTiles
from lpconv.layouts.reader import StoredTensors
from lpconv.models.empty import linear_modules
from lpconv.plan.options import ConvertOptions, FormatRule, matches
from lpconv.plan.policy import CONV1D, UNPACKABLE
from lpconv.storage.checkpoint import Checkpoint
from tests.helpers.elsewhere import opens_elsewhere
from tests.helpers.models import minilm, tiny, tiny_model

# The package's name of each layout with several scales in a tensor, and how it is asked for.
PRESETS = {
    "FP8_DYNAMIC": {"granularity": "row"},
    "FP8_BLOCK": {"granularity": "128x128"},
    "MXFP8": {"granularity": "mx"},
    "W8A8": {"granularity": "row", "format": "int8", "inputs": "dynamic"},
    "MXFP4A16": {"granularity": "mx", "format": "e2m1"},
    "MXFP4": {"granularity": "mx", "format": "e2m1", "inputs": "dynamic"},
    "NVFP4A16": {"granularity": "nvfp4", "format": "e2m1"},
    **{f"W{bits}A16": {"granularity": "group:32", "format": f"int{bits}"} for bits in range(2, 8)},
    "W8A16": {"granularity": "group:128", "format": "int8"},
    "W3A16 rows": {"granularity": "row", "format": "int3"},
}

# Several in one file, by rules; one of them may ask for rounded inputs.
MIXED: dict[str, dict[str, Any]] = {
    "MXFP4 and MXFP8": {"granularity": "mx", "format": "e2m1", "rules": {"*down_proj*": "e4m3fn"}},
    "NVFP4A16 and FP8A16": {"granularity": "nvfp4", "format": "e2m1", "rules": {"*self_attn*": "e4m3fn"}},
    "W4A16, W8A16 and FP8A16": {
        "granularity": "group:32", "format": "int4", "rules": {"*o_proj*": "int8", "*down_proj*": "e4m3fn"}
    },
}  # fmt: skip
# Of seven matrices: 288 inputs are no whole groups of 128, in which one asks for inputs and one has its scales.
NUM_CODED = {**dict.fromkeys((*PRESETS, *MIXED), 7), "FP8_BLOCK": 6, "W8A16": 6}


def test_a_known_family_is_converted_without_transformers(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "source")
    program = "import sys\nsys.modules['transformers'] = None\nfrom lpconv.cli.main import app\napp()"
    words = ["--format", "e4m3fn", "--layout", "compressed-tensors", "--verify", "weights"]
    command = [sys.executable, "-c", program, "convert", str(tmp_path / "source"), "-o", str(tmp_path / "out"), *words]
    subprocess.run(command, check=True, capture_output=True)
    quantised = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert quantised["ignore"] == ["lm_head"]


def compressed(source: Path, output: Path, **options: object) -> Path:
    given: dict[str, Any] = {"format": "e4m3fn", "layout": "compressed-tensors", "verify": "weights", **options}
    rules = dict(given.get("rules", ()))
    given["rules"] = tuple(FormatRule(pattern=p, format=f) for p, f in rules.items())
    convert(str(source), output, ConvertOptions(**given))  # type: ignore[arg-type]  # options by name
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scales_of_integers_are_bf16_and_read_in_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """lpconv wrote fp32 before, and the package writes the dtype of the model."""
    out = compressed(demo_checkpoint(), tmp_path / "out", format="int4", granularity="group:32")
    tensors = load_file(out / "model.safetensors")
    scales = {n: x for n, x in tensors.items() if n.endswith("_scale")}
    assert {x.dtype for x in scales.values()} == {torch.bfloat16}
    with StoredTensors.open(out) as stored:
        wanted = {n: stored.tensor(n) for n in stored.forms}
    save_file({**tensors, **{n: x.to(dtype) for n, x in scales.items()}}, out / "model.safetensors")
    with StoredTensors.open(out) as stored:
        assert all(torch.equal(stored.tensor(n), x) for n, x in wanted.items())


@pytest.fixture(scope="module")
def presets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama some of whose matrices end within a tile, in every layout; one row is much larger than the others."""
    folder = tmp_path_factory.mktemp("presets")
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=256, intermediate_size=288, tie_word_embeddings=False)
    model.model.layers[0].mlp.up_proj.weight.data[7] *= 1000
    model.model.layers[0].mlp.up_proj.weight.data[9] = 0
    model.save_pretrained(folder / "source")
    return {n: compressed(folder / "source", folder / n, **asked) for n, asked in (PRESETS | MIXED).items()}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_package_means(name: str, presets: dict[str, Path]) -> None:
    """Its decompressor gives what we decode, and its own preset has the settings that we write."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    written = json.loads((presets[name] / "config.json").read_text())["quantization_config"]
    scheme, theirs = QuantizationConfig.model_validate(written).config_groups["group_0"], None
    known = preset_name_to_scheme(name.split()[0], ["Linear"])
    if written["format"] == "pack-quantized":  # its own groups are of 128
        scale_of = {"group_size": scheme.weights.group_size, "strategy": scheme.weights.strategy}
        known.weights = known.weights.model_copy(update=scale_of)
    for ours, wanted in ((scheme.weights, known.weights), (scheme.input_activations, known.input_activations)):
        assert (ours is None) == (wanted is None)
        assert ours is None or ours.model_dump(exclude={"observer"}) == wanted.model_dump(exclude={"observer"})
    state = load_file(presets[name] / "model.safetensors")
    with StoredTensors.open(presets[name]) as stored:
        coded = [n for n, form in stored.forms.items() if form.format is not None]
        for weight in coded:
            stem = weight.removesuffix("weight")
            parts = {n.removeprefix(stem): x for n, x in state.items() if n.startswith(stem)}
            theirs = BaseCompressor.get_value_from_registry(written["format"]).decompress(parts, scheme)["weight"]
            assert torch.equal(stored.tensor(weight).to(theirs.dtype), theirs)
    assert len(coded) == NUM_CODED[name]


def test_weights_that_readers_fuse_share_their_one_scale(presets: dict[str, Path]) -> None:
    """That of the largest of them; one row of `up_proj` is a thousand times larger than those of `gate_proj`."""
    state = load_file(presets["NVFP4A16"] / "model.safetensors")
    found = {n.split(".")[-2]: float(x) for n, x in state.items() if n.endswith("_global_scale")}
    assert found["q_proj"] == found["k_proj"] == found["v_proj"]
    assert found["gate_proj"] == found["up_proj"] < found["down_proj"] / 100
    told = judge_scales(inspect(presets["NVFP4A16"]), presets["NVFP4A16"])
    assert not [w for w in (*told.problems, *told.warnings) if "unequal" in w]


def test_nvfp4_is_what_torchao_makes() -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, 512).unsqueeze(1)
    form = CompressedTiles.of("w", (512, 256), FORMATS["e2m1"], FormSettings(scale="exact", grain=GRAINS["nvfp4"]))
    work = Workspace()
    found = form.measure(lambda job: [job(x.view(-1), 0, work)])
    (codes,) = form.encode(x.view(-1), 0, found, work).data
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
    same = theirs.scale.float().view(512, 16) == found.side["w_scale"].float()
    assert same.float().mean() > 0.99, "theirs are rounded once more, and none is below 2^-6"
    codes, wanted = (c.view(torch.uint8).view(512, 16, 8) for c in (codes, theirs.qdata))
    assert (codes[same] == wanted[same]).float().mean() > 0.999


def test_plain_transformers_opens_every_preset(presets: dict[str, Path]) -> None:
    """It computes with the weights that we decode; where the config asks for it, inputs are rounded besides."""
    found = opens_elsewhere(*presets.values(), dtype="bfloat16")
    for (name, path), (logits, num_codes, weights) in zip(presets.items(), found, strict=True):
        ours = lpconv.hf.load(path, dtype=torch.bfloat16)
        assert num_codes == NUM_CODED[name]
        assert all(torch.equal(x, ours.get_parameter(n)) for n, x in weights.items() if n.endswith("proj.weight"))
        with torch.inference_mode():
            wanted = ours(input_ids=torch.arange(3, 35).view(2, 16)).logits
        assert torch.isfinite(logits).all()
        assert torch.equal(logits, wanted) == ("A16" in name), "keep inputs"


@pytest.mark.parametrize("name", MIXED)
def test_formats_by_rule_are_read_as_they_were_written(name: str, presets: dict[str, Path], tmp_path: Path) -> None:
    """Each weight in its own, by lpconv's own forms, sound to `inspect`; and saved again with the same bytes."""
    path, asked = presets[name], MIXED[name]
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert len(config["config_groups"]) == 1 + len(asked["rules"])
    with StoredTensors.open(path) as stored:
        found = {n: form for n, form in stored.forms.items() if form.format is not None}
    assert len(found) == 7
    assert all(isinstance(form, Compressed | CompressedTiles) for form in found.values())
    for weight, form in found.items():
        fmt = next((f for p, f in asked["rules"].items() if matches(p, weight)), asked["format"])
        assert form.format is not None
        assert form.format.name == fmt
    told = judge_scales(inspect(path), path)
    assert not told.problems
    lpconv.load(path, resident=True).save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path))
    assert before.keys() == after.keys()
    assert all(
        torch.equal(x.view(-1).view(torch.uint8), after[n].view(-1).view(torch.uint8)) for n, x in before.items()
    )


def test_a_real_encoder_with_excluded_layers(tmp_path: Path) -> None:
    output = compressed(minilm(), tmp_path / "minilm", exclude=("*.layer.0.*",), rules=())
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert {n.split(".")[2] for n in config["ignore"]} == {"0"}
    assert len(config["ignore"]) == 6
    ((found, num_codes, _),) = opens_elsewhere(output, cls="BertModel", dtype="float32")
    assert num_codes == 5 * 6 + 1  # five of six layers, and the pooler
    with torch.inference_mode():
        wanted = lpconv.hf.load(output, dtype=torch.float32)(input_ids=torch.arange(3, 35).view(2, 16))[0]
    assert (found - wanted).abs().max() <= 2.0**-8 * wanted.abs().max()


@pytest.mark.parametrize("family", [*CONV1D, *UNPACKABLE])
def test_what_would_convert_nothing_is_refused(family: str, tmp_path: Path) -> None:
    """Codes in GPT-2's `Conv1D` would be read as numbers. `Linear` weights of others are needed by transformers."""
    source = tiny("gpt2", tmp_path / family)
    config = transformers.AutoConfig.for_model(family).to_dict()
    cls = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES[family]
    (source / "config.json").write_text(json.dumps({**config, "architectures": [cls]}))
    with pytest.raises(UnsupportedError, match=r"Linear.*compressed-tensors|packed"):
        plan(str(source), tmp_path / "out", ConvertOptions(scheme="W4A16"))
    modules = linear_modules(Checkpoint.open(source), ())
    assert modules.weights == modules.unpackable


def test_transformers_opens_the_packed_weights_that_it_does_not_need(tmp_path: Path) -> None:
    source = tmp_path / "source"
    settings = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**settings)).save_pretrained(source)
    out = compressed(source, tmp_path / "out", format="int4", granularity="group:64")
    coded = {n.rpartition(".")[0] for n in load_file(out / "model.safetensors") if n.endswith("_packed")}
    assert coded == {f"transformer.h.0.{name}" for name in ("attn.c_attn", "mlp.c_fc")}
    (opened,) = opens_elsewhere(out)
    with StoredTensors.open(out) as stored:
        assert all(torch.equal(opened.weights[n], stored.tensor(n)) for n in stored.forms)


def test_a_config_that_builds_no_model_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "llama")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "no-such-model"}
    (source / "config.json").write_text(json.dumps(config))
    arguments = ["convert", str(source), "--format", "e4m3fn", "--layout", "compressed-tensors"]
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "out")])
    assert done.exit_code == 4
    assert "no-such-model" in done.stderr
