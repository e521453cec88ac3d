"""`--layout transformers`: its own fp8 and mxfp8. Plain transformers decodes them to our bits, and finds each part.

Without a GPU it decodes on loading. What it would run on one is asked of the modules that it then puts in: they are
made on the meta device, and must have the tensors of the file, by name, dtype and shape.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import lpconv
from lpconv.convert.run import convert
from lpconv.errors import UnsupportedError
from lpconv.forms import grid_of
from lpconv.forms.facts import ConvertedFacts
from lpconv.inspect.headers import inspect
from lpconv.layouts.reader import StoredTensors
from lpconv.layouts.transformers_fp8 import FineGrained
from lpconv.plan.options import ConvertOptions
from tests.helpers.elsewhere import opens_elsewhere
from tests.helpers.models import tiny_model

LAYOUTS = {"fp8": "128x128", "mxfp8": "mx"}
# Of seven matrices: with blocks of 128 x 128 those with 288 rows or columns are kept.
NUM_CODED = {"fp8": 4, "mxfp8": 7}


def fine_grained(source: Path | str, output: Path, method: str = "fp8", **more: Any) -> Path:
    asked: dict[str, Any] = {"format": "e4m3fn", "verify": "weights", "granularity": LAYOUTS[method], **more}
    convert(str(source), output, ConvertOptions(layout="transformers", **asked))
    return output


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def outputs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """A Llama with rows of zeros, of both zeros, of ties, of the largest and the least numbers, in both layouts."""
    folder = tmp_path_factory.mktemp("fine")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=256, intermediate_size=288, **heads)
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].mlp.up_proj):
        w = projection.weight.data
        w[7] *= 1000
        w[9] = 0
        w[10, ::2] = -0.0
        w[11, :32] = torch.arange(32) / 16 + 1  # halves of steps of e4m3fn, with a scale of 1 or so
        w[128:256, :128] = 0
        w[12, 0], w[13, 0], w[14, :4] = 448.0, 2.0**-126, torch.tensor([1e-40, -1e-45, 2.0**-9, -(2.0**-10)])
    model.to(request.param).save_pretrained(folder / "source")
    return {m: fine_grained(folder / "source", folder / m, m) for m in LAYOUTS}


def test_plain_transformers_decodes_to_our_bits(outputs: dict[str, Path]) -> None:
    found = [opens_elsewhere(path, decodes=method == "mxfp8")[0] for method, path in outputs.items()]
    for (method, path), (logits, _, theirs) in zip(outputs.items(), found, strict=True):
        with StoredTensors.open(path) as stored:
            coded = [n for n, form in stored.forms.items() if isinstance(form, FineGrained)]
            for name in stored.forms:
                ours = stored.tensor(name).to(theirs[name].dtype)
                assert torch.equal(ours.view(torch.uint8), theirs[name].view(torch.uint8)), (method, name)
        assert len(coded) == NUM_CODED[method]
        model = lpconv.load(path)
        with torch.inference_mode():
            assert torch.equal(model(input_ids=torch.arange(3, 35).view(2, 16)).logits, logits)


@pytest.mark.parametrize("method", LAYOUTS)
def test_the_reader_of_others_decodes_the_same(method: str, outputs: dict[str, Path]) -> None:
    """Codes and scales mean what they do when others wrote them, and `inspect` has nothing to say of either."""
    with StoredTensors.open(outputs[method]) as stored:
        for name, form in stored.forms.items():
            theirs = grid_of(form)
            assert (theirs is not None) == isinstance(form, FineGrained), name
            if theirs is not None:
                got = theirs.decode(theirs.read(stored._fetch, 0, form.num_elements, {}), 0, form.num_elements, {})
                assert torch.equal(got.view(form.shape), stored.tensor(name))
    found = inspect(outputs[method])
    assert not found.problems
    assert all(".weight`" in w for w in found.warnings), found.warnings


def modules_of(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The parameters of the model that transformers would fill on a GPU."""
    config = transformers.AutoConfig.from_pretrained(path)
    asked = transformers.FineGrainedFP8Config(**config.quantization_config)
    cls = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = cls(config)
    quantizer = FineGrainedFP8HfQuantizer(asked)
    ignored = quantizer.get_modules_to_not_convert(
        model, asked.modules_to_not_convert, getattr(model, "_keep_in_fp32_modules", None)
    )
    replace_with_fp8_linear(model, ignored, asked, pre_quantized=True)
    return {n: (p.dtype, tuple(p.shape)) for n, p in model.named_parameters()}


@pytest.mark.parametrize("method", LAYOUTS)
def test_the_modules_of_a_gpu_have_the_tensors_of_the_file(method: str, outputs: dict[str, Path]) -> None:
    wanted = modules_of(outputs[method])
    with safe_open(outputs[method] / "model.safetensors", "pt") as file:
        found = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118  # no mapping
    assert {n: s for n, (_, s) in wanted.items()} == {n: tuple(x.shape) for n, x in found.items()}
    codes = {n for n, (dtype, _) in wanted.items() if dtype == torch.float8_e4m3fn}
    assert codes == {n for n, x in found.items() if x.dtype == torch.float8_e4m3fn}
    assert len(codes) == NUM_CODED[method]


@pytest.mark.parametrize(
    ("name", "sizes", "kept", "exclude"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 2, "intermediate_size": 64}, ".gate", ()),
        ("MixtralForCausalLM", {"num_local_experts": 2, "intermediate_size": 64}, ".mlp.experts", ("*.experts.*",)),
        (
            "T5ForConditionalGeneration",
            {"d_model": 64, "d_ff": 64, "d_kv": 32, "num_heads": 2, "num_layers": 1},
            ".wo",
            (),
        ),
    ],
)
def test_what_a_gpu_keeps_is_kept(
    name: str, sizes: dict[str, int], kept: str, exclude: tuple[str, ...], tmp_path: Path
) -> None:
    """Experts are codes, stacked there, or named; what a model's class has in fp32 is not quantised."""
    common = {"vocab_size": 96}
    if name.startswith("Mixtral"):
        common |= {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    cls(cls.config_class(**common, **sizes)).save_pretrained(tmp_path / "source")
    path = fine_grained(tmp_path / "source", tmp_path / "out", "mxfp8", exclude=exclude)
    ignored = json.loads((path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert any(n.endswith(kept) for n in ignored)
    wanted = modules_of(path)
    found = load_file(path / "model.safetensors")
    codes = {n for n, (dtype, _) in wanted.items() if dtype == torch.float8_e4m3fn}
    assert codes
    coded = {n for n, x in found.items() if x.dtype == torch.float8_e4m3fn}
    assert {n for n in codes if "experts" not in n} == {n for n in coded if "experts" not in n}
    assert sum("experts" in n for n in codes) == (2 if any("experts" in n for n in coded) else 0)
    assert all(n + "_scale_inv" in found for n in coded)


def test_a_name_that_would_take_another_one_with_it_is_refused(tmp_path: Path) -> None:
    settings = {"method": "unit", "format": "e4m3fn", "scale": "pow2", "granularity": "mx"}
    made = ConvertedFacts(config={}, settings=settings, formats={"model.up.weight": "e4m3fn"}, ignored=["model.down"])
    assert FineGrained.config_entries(made)
    for ignored in ("up", "model"):
        with pytest.raises(UnsupportedError, match=rf"`model\.up`.* `{ignored}`"):
            FineGrained.config_entries(replace(made, ignored=[ignored]))
