"""`--layout mlx`: what mlx decodes, by the formulas of its documentation, is what lpconv decodes.

`benchmarks/serving/mlx.py` compares with mlx itself.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lpconv
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.errors import InputError
from lpconv.formats.spec import FORMATS
from lpconv.inspect.headers import inspect
from lpconv.inspect.values import inspect_with_statistics
from lpconv.layouts.mlx import Mlx
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions, FormatRule
from lpconv.progress import Silent
from lpconv.storage.staging import MARKER
from tests.helpers.models import tiny

GRAINS = {"e2m1": "mx", "e4m3fn": "mx", **{f"int{bits}": "group:32" for bits in (2, 3, 4, 5, 6, 8)}}
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()


def as_mlx(source: Path | str, output: Path, number: str, **more: Any) -> Path:
    options: dict[str, Any] = {"format": number, "granularity": GRAINS[number], "verify": "weights", **more}
    convert(str(source), output, ConvertOptions(layout="mlx", **options))
    return output


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("mlx") / "source", dtype=torch.bfloat16)


def dequantized(words: Tensor, scales: Tensor, biases: Tensor | None, bits: int) -> Tensor:
    """The lowest bits are the first number, across words; affine numbers are q * scale + bias."""
    single = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little").reshape(len(words), -1, bits)
    codes = torch.from_numpy(single @ (1 << np.arange(bits)))
    groups = codes.reshape(*scales.shape, -1)
    if biases is not None:
        return (groups.float() * scales[..., None] + biases[..., None]).flatten(1)
    return ((_E2M1 if bits == 4 else _E4M3)[groups] * torch.exp2(scales.float() - 127)[..., None]).flatten(1)


@pytest.mark.parametrize("number", GRAINS)
def test_weights_of_one_group_per_row_are_sums_of_their_parts(number: str, source: Path, tmp_path: Path) -> None:
    with StoredTensors.open(as_mlx(source, tmp_path / "out", number)) as stored:
        for name, form in stored.forms.items():
            parts = [codes.float() * torch.as_tensor(s).view(-1, 1) for codes, s in stored.summands(name)]
            assert torch.equal(sum(parts, torch.zeros(())).view(form.shape), stored.tensor(name).float())


@pytest.mark.parametrize("number", GRAINS)
def test_statistics_are_those_of_decoded_weights_whoever_wrote_them(number: str, source: Path, tmp_path: Path) -> None:
    output = as_mlx(source, tmp_path / "out", number)
    (output / MARKER).unlink()
    tensors, name = load_file(output / "model.safetensors"), "model.layers.0.mlp.up_proj"
    biases, bits = tensors.get(f"{name}.biases"), FORMATS[number].bits
    value = dequantized(tensors[f"{name}.weight"], tensors[f"{name}.scales"], biases, bits)
    record = next(t for t in inspect_with_statistics(output, Silent()).tensors if t.name == f"{name}.weight")
    assert record.absmax == float(value.abs().max())


@pytest.mark.parametrize("number", GRAINS)
def test_weights_decode_by_the_formulas_of_mlx(number: str, source: Path, tmp_path: Path) -> None:
    rule = FormatRule(pattern="*embed*", format=number)  # also the head
    output = as_mlx(source, tmp_path / "out", number, rules=(rule,))
    settings, tensors = (
        json.loads((output / "config.json").read_text())["quantization"],
        load_file(output / "model.safetensors"),
    )
    assert settings["mode"] == {"e2m1": "mxfp4", "e4m3fn": "mxfp8"}.get(number, "affine")
    with StoredTensors.open(output) as stored:
        coded = [n for n, form in stored.forms.items() if isinstance(form, Mlx)]
        for name in coded:
            scales, biases = (tensors.get(name.replace(".weight", end)) for end in (".scales", ".biases"))
            assert scales is not None
            theirs = dequantized(tensors[name], scales, biases, settings["bits"])
            assert torch.equal(theirs, stored.tensor(name)), name
    assert len(coded) == 15
    assert not inspect(output).problems


@pytest.mark.parametrize("number", GRAINS)
def test_it_is_restored_and_converted_again(number: str, source: Path, tmp_path: Path) -> None:
    output = as_mlx(source, tmp_path / "out", number)
    restore(output, tmp_path / "back", force=False, progress=Silent())
    assert (tmp_path / "back/config.json").read_text() == (source / "config.json").read_text()
    again = as_mlx(output, tmp_path / "again", number, scale="exact" if "int" in number else None)
    with StoredTensors.open(output) as one, StoredTensors.open(again) as other:
        assert all(torch.equal(one.tensor(n), other.tensor(n)) for n in one.forms)
    ids = torch.arange(3, 19).view(1, 16)
    with torch.inference_mode():
        ours, plain = (lpconv.load(p, dtype=torch.float32)(input_ids=ids).logits for p in (output, tmp_path / "back"))
    assert torch.allclose(ours, plain, atol=2e-2)  # bf16 rounds what was restored


def test_modules_in_another_format_are_listed(source: Path, tmp_path: Path) -> None:
    rule = FormatRule(pattern="*down_proj*", format="e4m3fn")
    output = as_mlx(source, tmp_path / "out", "e2m1", rules=(rule,))
    settings = json.loads((output / "config.json").read_text())["quantization"]
    assert settings["model.layers.1.mlp.down_proj"] == {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    with StoredTensors.open(output) as stored:
        form = stored.forms["model.layers.1.mlp.down_proj.weight"]
        assert isinstance(form, Mlx)
        assert form.format.name == "e4m3fn"


def test_rotary_settings_have_the_names_that_mlx_reads(source: Path, tmp_path: Path) -> None:
    config = json.loads((as_mlx(source, tmp_path / "out", "e2m1") / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize(("family", "num_experts"), [("mixtral", 18), ("qwen3-moe", 0)])
def test_experts_are_codes_if_mlx_lm_joins_their_scales(family: str, num_experts: int, tmp_path: Path) -> None:
    source = tiny(family, tmp_path / "source", intermediate_size=64)
    output = as_mlx(source, tmp_path / "out", "int4")
    assert "num_experts" in json.loads((output / "config.json").read_text())  # mlx-lm's name in both families
    names = load_file(output / "model.safetensors").keys()
    scales = [n for n in names if n.endswith(".scales")]
    assert sum(".experts." in n for n in scales) == num_experts
    assert len(scales) == 8 + num_experts


def test_another_bias_is_refused(source: Path, tmp_path: Path) -> None:
    output = as_mlx(source, tmp_path / "out", "int4")
    path = output / "model.safetensors"
    raw = bytearray(path.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin = header["model.layers.0.mlp.up_proj.biases"]["data_offsets"][0] + 8 + int.from_bytes(raw[:8], "little")
    raw[begin + 3] ^= 0x80
    path.write_bytes(raw)
    with pytest.raises(InputError, match="int4"):
        StoredTensors.open(output)
