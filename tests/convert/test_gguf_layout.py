"""`--layout gguf`: the package gguf decodes what lpconv decodes, transformers opens the file, and metadata fit.

`benchmarks/serving/llama_cpp.py` runs llama.cpp itself.
"""

import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import lpconv
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.errors import InputError, LpconvError, UnsupportedError, VerificationError
from lpconv.gguf.arranged import arranged
from lpconv.gguf.model import gguf_model
from lpconv.inspect.headers import inspect
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.storage.checkpoint import Checkpoint
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.faults.mutations import odd_value
from tests.helpers.checkpoints import keep_layers
from tests.helpers.gguf_files import demo_with_merges
from tests.helpers.models import minilm, tiny

TYPES = {
    "F16": {"format": "fp16"}, "BF16": {"format": "bf16"}, "Q8_0": {"format": "int8", "granularity": "group:32"},
    "Q4_0": {"format": "int4", "granularity": "group:32"}, "MXFP4": {"format": "e2m1", "granularity": "mx"},
}  # fmt: skip
_LENGTH = "original_max_position_embeddings"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def as_gguf(source: Path | str, output: Path, kind: str, **more: Any) -> Path:
    options: dict[str, Any] = {**TYPES[kind], "verify": "weights", **more}
    convert(str(source), output, ConvertOptions(layout="gguf", **options))
    return output


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family, with rows that blocks of 32 fill."""
    folder, sizes = tmp_path_factory.mktemp("gguf"), {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    made: dict[str, Any] = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "mistral": transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=None)),
        "qwen2": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)),
        "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=128)),
    }
    for name, model in made.items():
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder / name)
    return {**{n: folder / n for n in made}, "gpt2": tiny("gpt2", folder / "gpt2")}


def by_gguf(output: Path) -> dict[str, Tensor]:
    """The tensors of the file, decoded by the package, by their names in GGUF."""
    tensors = gguf.GGUFReader(output / "model.gguf").tensors
    shapes = {t.name: [int(n) for n in reversed(t.shape)] for t in tensors}
    return {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)).float().view(shapes[t.name]) for t in tensors}


def test_overflow_in_fp16_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    name, source = "model.layers.0.mlp.up_proj.weight", tmp_path / "source"
    shutil.copytree(sources["llama"], source)
    tensors = load_file(source / "model.safetensors")
    tensors[name][3, 5] = 70_000.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    options = ConvertOptions(layout="gguf", format="fp16", verify="weights")
    with pytest.raises(VerificationError, match=rf"`{name}`: 1 number .* became Inf"):
        convert(str(source), tmp_path / "output", options)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_package_decodes_the_same_numbers(family: str, kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    output = as_gguf(sources[family], tmp_path / "out", kind)
    theirs, table = by_gguf(output), json.loads((output / "config.json").read_text())["quantization_config"]["tensors"]
    with StoredTensors.open(output) as stored:
        assert {t["name"] for t in table.values()} == theirs.keys()
        for name in stored.forms:
            wanted = stored.tensor(name)
            order = table[name]["order"]
            wanted = arranged(wanted, order) if order else wanted
            assert torch.equal(theirs[table[name]["name"]], wanted), name
    assert kind in {t["type"] for t in table.values()}
    assert not inspect(output).problems


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_opens_the_file_as_the_same_model(family: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """It has its own idea of the order of rows, which it undoes."""
    output = as_gguf(sources[family], tmp_path / "out", "Q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(output, gguf_file="model.gguf", dtype=torch.float32)
    ours = lpconv.load(output, dtype=torch.float32)
    ids = torch.arange(3, 35).view(2, 16)
    with torch.inference_mode():
        assert torch.equal(theirs(input_ids=ids).logits, ours(input_ids=ids).logits)


@pytest.mark.parametrize(("family", "kind"), [("llama", "F16"), ("gpt2", "Q8_0"), ("llama", "Q4_0")])
def test_it_is_restored_verified_and_converted_again(
    family: str, kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    output = as_gguf(sources[family], tmp_path / "out", kind)
    against = VerifyOptions(level="weights", against=str(sources[family]))
    assert verify_output(output, against, progress=Silent()).passed
    restore(output, tmp_path / "back", force=False, progress=Silent())
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (sources[family] / "config.json").read_text()
    )
    source, back = (load_file(p / "model.safetensors") for p in (sources[family], tmp_path / "back"))
    assert {n: x.shape for n, x in back.items()} == {n: x.shape for n, x in source.items()}
    assert all((x - back[n]).norm() <= 0.1 * x.norm() for n, x in source.items())
    again = as_gguf(output, tmp_path / "again", kind)
    assert (again / "model.gguf").read_bytes() == (output / "model.gguf").read_bytes()


def test_a_search_is_better_and_two_runs_give_the_same_bytes(sources: dict[str, Path], tmp_path: Path) -> None:
    outputs = [
        as_gguf(sources["llama"], tmp_path / str(i), "Q4_0", scale=scale, workers=i + 1)
        for i, scale in enumerate((None, "search", "search"))
    ]
    source = load_file(sources["llama"] / "model.safetensors")
    errors = []
    for output in outputs:
        with StoredTensors.open(output) as stored:
            errors.append(sum(float((x - stored.tensor(n)).square().sum()) for n, x in source.items()))
    assert errors[1] < 0.95 * errors[0]
    assert (outputs[1] / "model.gguf").read_bytes() == (outputs[2] / "model.gguf").read_bytes()


def test_error_feedback_writes_the_same_layout(tmp_path: Path) -> None:
    more: dict[str, Any] = {"rounding": "gptq", "calibrate": "demo", "calibration_tokens": 256}
    source = demo_with_merges(tmp_path / "source")
    keep_layers(source, 1)
    output, nearest = as_gguf(source, tmp_path / "out", "Q4_0", **more), as_gguf(source, tmp_path / "nearest", "Q4_0")
    assert (output / "model.gguf").read_bytes() != (nearest / "model.gguf").read_bytes()
    against = VerifyOptions(level="weights", against=str(source))
    assert verify_output(output, against, progress=Silent()).passed


def test_transposed_matrices_get_no_error_feedback(tmp_path: Path) -> None:
    """GPT-2's square ones were rounded along the wrong axis."""
    source = tiny("gpt2", tmp_path / "source", vocab_size=300, n_positions=128)
    for file in demo_with_merges(tmp_path / "demo").glob("*token*"):
        shutil.copy(file, source)
    with pytest.raises(UnsupportedError, match="linear"):
        as_gguf(source, tmp_path / "out", "Q4_0", rounding="gptq", calibrate="demo")


def test_blocks_are_no_worse_than_those_of_the_package() -> None:
    """The package rounds with scales that are not yet fp16, and has the same scales."""
    from lpconv.formats.grains import get_grain
    from lpconv.formats.spec import FORMATS
    from lpconv.forms import FormSettings
    from lpconv.forms.blocks import Workspace
    from lpconv.forms.facts import Measurement
    from lpconv.gguf.blocks import GgufBlocks

    torch.manual_seed(0)
    x = torch.randn(64, 256)
    x[3], x[4, :32], x[6, 0], x[7, 40] = 0.0, -0.0, 50.0, -50.0
    for number, kind, first in (("int8", "Q8_0", 2), ("int4", "Q4_0", 2)):
        form = GgufBlocks.of("w", (64, 256), FORMATS[number], FormSettings(scale="exact", grain=get_grain("group:32")))
        raw = form.encode(x.view(-1), 0, Measurement(), Workspace()).data[0].numpy().reshape(64, -1)
        theirs = gguf.quantize(x.numpy(), gguf.GGMLQuantizationType[kind])
        blocks = [b.reshape(512, -1)[np.abs(x.numpy()).reshape(512, 32).max(1) > 0] for b in (raw, theirs)]
        assert np.array_equal(blocks[0][:, :first], blocks[1][:, :first])
        ours, other = (
            np.square(x.numpy() - gguf.dequantize(b, gguf.GGMLQuantizationType[kind])).sum() for b in (raw, theirs)
        )
        assert ours <= other


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "`MixtralForCausalLM`"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}}, "attention_factor 1.5"),
        ({"architectures": ["Qwen2ForCausalLM"], "rope_scaling": {"type": "llama3"}}, "rope_type 'llama3'"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window 4096"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "full_attention"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    changed: dict[str, Any], words: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    config = json.loads((sources["llama"] / "config.json").read_text()) | changed
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    shutil.copy(sources["llama"] / "model.safetensors", tmp_path / "source")
    with pytest.raises(UnsupportedError, match=words):
        as_gguf(tmp_path / "source", tmp_path / "out", "F16")


def with_config(source: Path, output: Path, **changed: Any) -> Path:
    """A copy of a checkpoint with another config."""
    shutil.copytree(source, output)
    config = json.loads((source / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | changed))
    return output


THETA, LLAMA3 = {"rope_theta": 3e4}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _LENGTH: 32}
ROPES: dict[str, dict[str, Any]] = {
    "none": {},
    "outside": {"rope_theta": 1e10},
    "both": {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "scaling": {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "two tables": {"rope_theta": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0, **THETA},
                   "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "empty table": {"rope_scaling": {}, "rope_parameters": {"rope_type": "default", **THETA}},
    "yarn": {"rope_theta": 1e4, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, **THETA}},
    "length": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, _LENGTH: 16}},
    "length outside": {_LENGTH: 16, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, _LENGTH: 32, **THETA}},
    "llama3": {"rope_theta": 1e4, "rope_parameters": {"rope_type": "llama3", "factor": 8.0, **THETA, **LLAMA3}},
    "llama3 outside": {"rope_theta": 3e4, _LENGTH: 16,
                       "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}},
}  # fmt: skip


def frequencies(file: Path, architecture: str) -> tuple[Tensor, float]:
    """What llama.cpp multiplies positions by, and the result of the rotation (ggml, `rope_yarn`)."""
    reader = gguf.GGUFReader(file)
    said = {name.removeprefix(f"{architecture}.rope."): field.contents() for name, field in reader.fields.items()}
    size, theta = said["dimension_count"], said["freq_base"]
    found = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    kind, factor = said.get("scaling.type", "none"), said.get("scaling.factor", 1.0)
    if kind == "yarn":
        turns = [said["scaling.original_context_length"] / (n * 2 * np.pi) for n in (32, 1)]
        low, high = (size * np.log(n) / (2 * np.log(theta)) for n in turns)
        low, high = max(0, np.floor(low)), min(size - 1, np.ceil(high))
        ramp = 1 - ((torch.arange(size // 2) - low) / max(0.001, high - low)).clamp(0, 1)
        return found / factor * (1 - ramp) + found * ramp, 1 + 0.1 * np.log(factor)
    divisors = [t.data for t in reader.tensors if t.name == "rope_freqs.weight"]
    return found / factor / (torch.tensor(divisors[0]) if divisors else 1.0), 1.0


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("family", "architecture"), [(f, "llama" if f == "mistral" else f) for f in FAMILIES[:4]])
def test_rotary_embeddings_are_those_of_transformers(
    family: str, architecture: str, rope: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    plain = dict.fromkeys(("rope_theta", "rope_parameters"))
    source = with_config(sources[family], tmp_path / "source", **plain)
    config = {k: v for k, v in json.loads((source / "config.json").read_text()).items() if k not in plain}
    (source / "config.json").write_text(json.dumps(config | ROPES[rope]))
    if "llama3" in rope and architecture != "llama":
        with pytest.raises(UnsupportedError, match="rope_type 'llama3'"):
            as_gguf(source, tmp_path / "out", "F16")
        return
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(source))
    wanted = model.model.rotary_emb
    got, factor = frequencies(as_gguf(source, tmp_path / "out", "F16") / "model.gguf", architecture)
    torch.testing.assert_close(got.float(), wanted.inv_freq, rtol=1e-5, atol=0)
    assert factor == pytest.approx(wanted.attention_scaling)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_odd_values_end_in_errors(file: str, kind: str, tmp_path: Path) -> None:
    plain = (demo_with_merges if kind == "bytes" else sentencepiece)(tmp_path / "plain")
    rope = {"rope_type": "llama3", "factor": 8.0, **THETA, **LLAMA3}
    source = with_config(plain, tmp_path / "source", rope_parameters=rope)
    with StoredTensors.open(source) as stored:
        shapes = {name: form.shape for name, form in stored.forms.items()}
    sound, rng, codes = (source / file).read_bytes(), random.Random(0), set()
    for _ in range(150):
        (source / file).write_bytes(odd_value(rng, sound))
        try:
            codes.add(int(len(gguf_model(Checkpoint.open(source), shapes).header([], "fp16")) < 100))
        except LpconvError as e:
            codes.add(e.exit_code if e.hint else 1)
    assert codes <= {0, 3, 4}
    assert 0 in codes


@pytest.mark.parametrize(
    ("file", "changed", "said"),
    [
        ("config.json", {"rope_parameters": {"rope_theta": "x", "rope_type": "default"}}, "rope_theta 'x'"),
        ("config.json", {"num_attention_heads": 0}, "num_attention_heads 0"),
        ("config.json", {"num_attention_heads": 3}, "num_attention_heads|3"),
        ("config.json", {"hidden_size": 7}, "hidden_size|7"),
        ("config.json", {"head_dim": 0.5}, "head_dim 0.5"),
        ("config.json", {"rms_norm_eps": float("inf")}, "rms_norm_eps inf"),
        ("tokenizer.json", {"model": 3}, r"tokenizer\.json"),
        ("tokenizer.json", {"added_tokens": [{"content": 3, "id": 1, "special": True}]}, r"tokenizer\.json"),
    ],
)
def test_odd_values_are_named(file: str, changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = demo_with_merges(tmp_path / "source")
    (source / file).write_text(json.dumps(json.loads((source / file).read_text()) | changed))
    with pytest.raises((InputError, UnsupportedError), match=said):
        as_gguf(source, tmp_path / "out", "F16")
    assert not (tmp_path / "out").exists()


def test_the_package_is_asked_for_by_name(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gguf" else find(name, *more))
    with pytest.raises(UnsupportedError, match="gguf") as refused:
        as_gguf(sources["llama"], tmp_path / "out", "F16")
    assert "lpconv[gguf]" in str(refused.value.hint)


_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _WORDS
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


@pytest.mark.parametrize(
    ("first", "rule"),
    [
        (None, "gpt-2"),
        ({"type": "Digits", "individual_digits": True}, "smollm"),
        ({"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False}, "llama-bpe"),
        ({"type": "Split", "pattern": {"Regex": _LLAMA3.replace("{1,3}", "")}, "behavior": "Isolated"}, "qwen2"),
        ({"type": "Digits", "individual_digits": False}, None),
        ({"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated"}, None),
    ],
)
def test_the_rule_that_splits_text_is_named_or_refused(first: Any, rule: str | None, tmp_path: Path) -> None:
    source = demo_with_merges(tmp_path / "source")
    document = json.loads((source / "tokenizer.json").read_text())
    is_split = first is not None and first["type"] == "Split"
    both = [first, {**_BYTES, "use_regex": not is_split}]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both} if first else {**_BYTES, "use_regex": True}
    (source / "tokenizer.json").write_text(json.dumps(document))
    if rule is None:
        with pytest.raises(UnsupportedError, match="split"):
            as_gguf(source, tmp_path / "out", "F16")
        return
    fields = gguf.GGUFReader(as_gguf(source, tmp_path / "out", "F16") / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == rule
    assert fields["tokenizer.ggml.tokens"].contents()[254:257] == ["þ", "th", "<|endoftext|>"]
    assert fields["tokenizer.ggml.merges"].contents() == [" ".join("th")]
    assert fields["tokenizer.ggml.token_type"].contents()[255:257] == [gguf.TokenType.NORMAL, gguf.TokenType.CONTROL]
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 256
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False


def sentencepiece(folder: Path, **changed: Any) -> Path:
    """A checkpoint with a tokenizer of SentencePiece, as transformers writes it for Llama 2."""
    source, space = demo_with_merges(folder), "\u2581"
    words = [
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(200)),
        space,
        "t",
        "h",
        "e",
        "th",
        space + "th",
        "the",
        space + "the",
    ]
    model = {
        "type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": {w: i for i, w in enumerate(words)},
        "merges": [["t", "h"], [space, "th"], [space + "th", "e"], [space, "the"], ["th", "e"]],
    }  # fmt: skip
    steps = [{"type": "Prepend", "prepend": space}, {"type": "Replace", "pattern": {"String": " "}, "content": space}]
    document = json.loads((source / "tokenizer.json").read_text()) | {
        "model": model | {k: v for k, v in changed.items() if k == "merges"}, "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": steps},
    }  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(document | {k: v for k, v in changed.items() if k != "merges"}))
    return source


@pytest.mark.parametrize(
    ("changed", "space"),
    [
        ({}, True),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}, False),
        ({"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "split": False}}, True),
    ],
)
def test_sentencepiece_has_scores_in_the_order_of_its_merges(
    changed: dict[str, Any], space: bool, tmp_path: Path
) -> None:
    source = sentencepiece(tmp_path / "source", **changed)
    fields = gguf.GGUFReader(as_gguf(source, tmp_path / "out", "F16") / "model.gguf").fields
    said = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    assert (said["model"], said["add_space_prefix"]) == ("llama", space)
    scores = dict(zip(said["tokens"], said["scores"], strict=True))
    assert scores["th"] > scores["\u2581th"] > scores["\u2581the"] > scores["the"]
    kinds = dict(zip(said["tokens"], map(gguf.TokenType, said["token_type"]), strict=True))
    assert [kinds[t].name for t in ("<unk>", "<0x0A>", "the")] == ["UNKNOWN", "BYTE", "NORMAL"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"merges": [["t", "h"], ["th", "e"]]}, "merges"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "split": True}}, "Metaspace"),
        ({"normalizer": {"type": "NFKC"}}, "NFKC"),
    ],
)
def test_what_sentencepiece_would_split_otherwise_is_refused(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        as_gguf(sentencepiece(tmp_path / "source", **changed), tmp_path / "out", "F16")


def test_an_encoder_has_its_words_and_lacks_its_pooler(tmp_path: Path) -> None:
    result = convert(str(minilm()), tmp_path / "out", ConvertOptions(layout="gguf", format="fp16", verify="weights"))
    assert "pooler.dense.weight" in "".join(result.warnings)
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    words = fields["tokenizer.ggml.tokens"].contents()
    assert [words[i] for i in (101, 1996, 2015)] == ["[CLS]", "\u2581the", "s"]
    assert fields["bert.pooling_type"].contents() == gguf.PoolingType.MEAN
    with StoredTensors.open(tmp_path / "out") as stored, StoredTensors.open(minilm()) as source:
        assert source.forms.keys() - stored.forms.keys() == {
            "embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias",
        }  # fmt: skip
        assert all(torch.allclose(stored.tensor(n), source.tensor(n).float(), atol=1e-3) for n in stored.forms)
