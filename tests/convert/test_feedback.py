"""`convert --rounding gptq`: what it writes, that it resumes, that wrong codes are found, and what it refuses."""

import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import lpconv
from lpconv.convert import feedback, run as run_module
from lpconv.convert.gptq import Moment, round_with_feedback
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint, demo_text
from lpconv.errors import InputError, LpconvError, UnsupportedError, VerificationError
from lpconv.formats.spec import FORMATS
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.job import open_model, prepare
from lpconv.plan.options import ConvertOptions, parse_rule
from lpconv.plan.settings import fill_options
from lpconv.progress import Silent
from lpconv.results import ConvertResult, VerifyResult
from lpconv.verify.calibrate import job_windows
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import files_of, published
from tests.helpers.elsewhere import opens_elsewhere
from tests.helpers.models import albert, tiny, with_demo_tokenizer

FILE = "model.safetensors"
COMPRESSED = {"layout": "compressed-tensors"}
KINDS: dict[str, dict[str, Any]] = {
    "int4 group:32": {"format": "int4", "granularity": "group:32"},
    "int3 group:32": {"format": "int3", "granularity": "group:32"},
    "int8 group:32, compressed": {"format": "int8", "granularity": "group:32", **COMPRESSED},
    "mxfp4, compressed": {"format": "e2m1", "granularity": "mx", **COMPRESSED},
    "nvfp4, compressed": {"format": "e2m1", "granularity": "nvfp4", **COMPRESSED},
    "nvfp4 and inputs": {"scheme": "NVFP4"},
    "e4m3fn row": {"format": "e4m3fn", "granularity": "row"},
    "e4m3fn 128x128": {"format": "e4m3fn", "granularity": "128x128"},
    "e4m3fn": {"format": "e4m3fn"},
    "e5m2 mx": {"format": "e5m2", "granularity": "mx"},
    "int4 group:32, mlx": {"format": "int4", "granularity": "group:32", "layout": "mlx"},
    "mixed": {"format": "int4", "granularity": "group:32", "rules": (parse_rule("*.k_proj.*=e4m3fn"),)},
}
INT4 = KINDS["int4 group:32"]


def llama(folder: Path, **changed: Any) -> Path:
    """A random Llama of two layers that reads text as the demo does."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": num_words(), "max_position_embeddings": 32}
    return with_demo_tokenizer(tiny("llama", folder, **{**settings, "tie_word_embeddings": False, **changed}))


def num_words() -> int:
    """The size of the demo's vocabulary."""
    config = json.loads((demo_checkpoint() / "config.json").read_text())
    return int(config["vocab_size"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("feedback") / "plain")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=num_words(), n_positions=32)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("feedback") / "gpt2"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return with_demo_tokenizer(folder)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"d_model": 64, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "vocab_size": num_words()}
    return with_demo_tokenizer(tiny("t5", tmp_path_factory.mktemp("feedback") / "t5", **sizes))


def rounded(model: Path, output: Path, **asked: Any) -> ConvertResult:
    given = {
        "rounding": "gptq", "calibrate": "demo", "calibration_tokens": 512, "verify": "weights", "workers": 1, **asked,
    }  # fmt: skip
    return convert(str(model), output, ConvertOptions(**given))


def verified(output: Path, source: Path) -> VerifyResult:
    return verify_output(output, VerifyOptions(against=str(source), level="weights"), progress=Silent())


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_layers_change_less_and_the_output_verifies(plain: Path, tmp_path: Path, kind: str) -> None:
    result = rounded(plain, tmp_path / "output", **KINDS[kind])
    found = {t.name: t.rounding for t in result.tensors if t.rounding is not None}
    assert found.keys() == {t.name for t in result.tensors if ".layers." in t.name and t.action == "convert"}
    assert len(found) == 14
    assert all(r.output_error < r.nearest_error for r in found.values())
    assert all(r.num_inputs == 512 for r in found.values())
    assert result.calibration is not None
    assert result.calibration.num_tokens == 512
    assert bool(result.calibration.absmax) == ("inputs" in kind)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["output"]
    assert not list((tmp_path / "output").glob("journal*"))
    check = verified(tmp_path / "output", plain)
    assert check.passed, check.problems
    assert check.weights is not None
    assert check.weights.num_elements_checked == check.weights.num_elements
    (limits,) = check.warnings
    assert "14 tensors" in limits


@pytest.mark.parametrize("kind", ["int4 group:32", "e2m1 mx", "e4m3fn 128x128"])
def test_weights_that_are_stored_as_inputs_by_outputs_are_rounded_too(gpt2: Path, tmp_path: Path, kind: str) -> None:
    """GPT-2's Conv1D: groups of numbers with one scale lie along the outputs."""
    asked = {"format": "e2m1", "granularity": "mx"} if kind == "e2m1 mx" else KINDS[kind]
    result = rounded(gpt2, tmp_path / "output", scale="search", **asked)
    records = [t.rounding for t in result.tensors if t.rounding is not None]
    assert len(records) == 8
    assert all(r.output_error < 0.7 * r.nearest_error for r in records)
    assert verified(tmp_path / "output", gpt2).passed


@pytest.mark.parametrize("rounding", ["gptq", "gptaq"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("plain", "model.layers.1.self_attn.q_proj.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight"),
        ("t5", "decoder.block.1.layer.1.EncDecAttention.k.weight"),  # reads what the rounded encoder makes
    ],
)
def test_a_layer_meets_what_the_rounded_layers_before_make_of_the_text(
    kind: str, name: str, rounding: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The codes of the second layer's first weight, found again by plain transformers with the first layer rounded."""
    plain: Path = request.getfixturevalue(kind)
    rounded(plain, tmp_path / "output", rounding=rounding, **INT4)
    with StoredTensors.open(tmp_path / "output") as stored:
        got, form, side = stored.tensor(name), stored.forms[name], stored.side(name)
    weight = load_file(plain / FILE)[name]
    scales = form.scale_of_each(side, 0, weight.numel()).view(weight.shape)
    if kind == "gpt2":
        got, weight, scales = got.t(), weight.t(), scales.t()

    windows = windows_of(plain)
    source_x = inputs_of(lpconv.load(plain, dtype=torch.float32), name, windows)

    def share_of_other_codes(path: Path) -> float:
        x = inputs_of(lpconv.load(path, dtype=torch.float32), name, windows)
        moment = Moment.zero(x.shape[-1])
        moment.add(x, source_x if rounding == "gptaq" else None)
        return float((got != round_with_feedback(weight, moment.factor(), scales, FORMATS["int4"])).float().mean())

    assert share_of_other_codes(tmp_path / "output") < 0.02  # sums are taken in another order
    assert share_of_other_codes(plain) > 0.1


def windows_of(model: Path) -> Tensor:
    """The windows of the sample text that `rounded` reads."""
    options = ConvertOptions(method="unit", rounding="gptq", calibrate="demo", calibration_tokens=512, **INT4)
    options = fill_options(options)
    job = prepare(open_model(model, "output", options), "output", options)
    job.source.close()
    return job_windows(job)[1].windows


def inputs_of(model: Any, name: str, windows: Tensor) -> Tensor:
    """What a linear layer meets when the model reads some windows, [tokens, columns]."""
    seen: list[Tensor] = []
    module = model.get_submodule(name.removesuffix(".weight"))
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        model(input_ids=windows, labels=windows)
    return torch.cat(seen)


@pytest.mark.parametrize("rounding", ["gptq", "gptaq"])
def test_moments_that_fail_in_fp32_are_summed_again_for_fp64(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: str
) -> None:
    rounded(plain, tmp_path / "fp32", rounding=rounding, **INT4)
    cholesky = torch.linalg.cholesky_ex

    def failing(x: Tensor, *, out: tuple[Tensor, Tensor]) -> None:
        cholesky(x, out=out)
        out[1].fill_(x.dtype == torch.float32)
        x.add_(out[1])

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
    rounded(plain, tmp_path / "fp64", rounding=rounding, **INT4)
    got, wanted = (load_file(tmp_path / name / FILE) for name in ("fp64", "fp32"))
    pairs = [(x.view(torch.uint8), wanted[name].view(torch.uint8)) for name, x in got.items()]
    assert sum(int((a != b).sum()) for a, b in pairs) < 0.01 * sum(a.numel() for a, _ in pairs)


def test_the_same_bytes_again_and_other_ones_by_another_seed(plain: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", None), ("c", 1)):
        rounded(plain, tmp_path / name, calibration_seed=seed, **INT4)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert (tmp_path / "a" / FILE).read_bytes() != (tmp_path / "c" / FILE).read_bytes()


@pytest.mark.parametrize(
    ("kind", "layers", "rounding"),
    [("plain", 1, "gptq"), ("plain", 2, "gptq"), ("plain", 1, "gptaq"), ("t5", 1, "gptaq"), ("t5", 3, "gptaq")],
)
def test_a_run_that_ends_is_resumed_layer_by_layer(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    rounding: str,
    request: pytest.FixtureRequest,
) -> None:
    plain: Path = request.getfixturevalue(kind)
    asked = {**INT4, "rounding": rounding}
    rounded(plain, tmp_path / "whole", **asked)
    append, lines = run_module.Staging.append, list[dict[str, Any]]()

    def dying(self: Any, line: dict[str, Any]) -> None:
        append(self, line)
        lines.extend([line] if "rounded_layer" in line else [])
        if len(lines) == layers:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module.Staging, "append", dying)
        with pytest.raises(KeyboardInterrupt):
            rounded(plain, tmp_path / "output", **asked)
    again = list[int]()
    round_layer = feedback._Rounding.round_layer

    def counted(self: Any, index: int) -> Any:
        again.append(index)
        return round_layer(self, index)

    monkeypatch.setattr(feedback._Rounding, "round_layer", counted)
    rounded(plain, tmp_path / "output", resume=True, **asked)
    assert again == [*range(layers, 4 if kind == "t5" else 2)]
    assert files_of(tmp_path / "output") == files_of(tmp_path / "whole")


def test_a_damaged_layer_is_rounded_again(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded(plain, tmp_path / "whole", **INT4)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_carry_out", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rounded(plain, tmp_path / "output", **INT4)
    (layer,) = (tmp_path / "output.partial").glob("journal.rounded/00001*")
    layer.write_bytes(layer.read_bytes()[:-1] + b"\7")
    rounded(plain, tmp_path / "output", resume=True, **INT4)
    assert files_of(tmp_path / "output") == files_of(tmp_path / "whole")


def swap_codes(tensors: dict[str, Tensor], name: str) -> None:
    """Exchange two numbers of a row that have one scale."""
    row = tensors[name].view(torch.uint8).view(-1)
    other = next(i for i in range(1, 16) if row[i] != row[0])
    row[0], row[other] = row[other].clone(), row[0].clone()


def swap_scales(tensors: dict[str, Tensor], name: str) -> None:
    scales = tensors[name + "_scale"].view(-1)
    scales[0], scales[1] = scales[1].clone(), scales[0].clone()


@pytest.mark.parametrize("damage", [swap_codes, swap_scales])
def test_wrong_codes_and_scales_are_found_before_publishing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    write_metadata = run_module.write_metadata

    def damaging(directory: Path, *rest: Any) -> None:
        write_metadata(directory, *rest)
        tensors = load_file(directory / FILE)
        damage(tensors, "model.layers.1.mlp.up_proj.weight")
        save_file(tensors, directory / FILE, metadata=metadata)

    metadata = {"lpconv": lpconv.__version__, "method": "unit"}
    monkeypatch.setattr(run_module, "write_metadata", damaging)
    with pytest.raises(VerificationError, match="up_proj"):
        rounded(plain, tmp_path / "output", **INT4)
    assert not published(tmp_path / "output")


def test_codes_further_from_the_source_than_recorded_are_found(plain: Path, tmp_path: Path) -> None:
    """Whatever hashes say: in another source, of the same shapes."""
    rounded(plain, tmp_path / "output", **INT4)
    other = shutil.copytree(plain, tmp_path / "other")
    tensors = load_file(other / FILE)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] += 1.0
    save_file(tensors, other / FILE, metadata={"format": "pt"})
    assert verified(tmp_path / "output", other).weights is not None
    assert "`model.layers.0.mlp.up_proj.weight`" in verified(tmp_path / "output", other).problems[0]


def test_zeros_that_become_numbers_are_no_overflow(plain: Path, tmp_path: Path) -> None:
    model = shutil.copytree(plain, tmp_path / "zeros")
    tensors = load_file(model / FILE)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][:, ::5] = 0.0
    save_file(tensors, model / FILE, metadata={"format": "pt"})
    result = rounded(model, tmp_path / "output", **INT4)
    record = next(t for t in result.tensors if t.name == name)
    with StoredTensors.open(tmp_path / "output") as stored:
        got = stored.tensor(name)
    assert got[:, ::5].any()
    noise = float((got - tensors[name]).double().square().sum() / tensors[name].double().square().sum())
    assert record.sqnr_db == pytest.approx(-10 * math.log10(noise), abs=1e-3)
    assert record.max_rel_error is not None
    assert math.isfinite(record.max_rel_error)
    assert record.num_saturated == 0
    assert result.warnings == ()
    assert verified(tmp_path / "output", model).passed


@pytest.mark.parametrize(("layout", "rounding"), [("lpconv", "gptq"), ("compressed-tensors", "gptaq")])
def test_experts_meet_the_tokens_that_reach_them(tmp_path: Path, layout: str, rounding: str) -> None:
    """And one that none reaches is rounded to nearest, which the result says."""
    model = tiny("mixtral", tmp_path / "plain")
    with_demo_tokenizer(model)
    tensors = load_file(model / FILE)
    words = num_words()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(words, 32, generator=torch.Generator().manual_seed(1))
    tensors["model.layers.1.post_attention_layernorm.weight"].fill_(0.0)  # all tokens choose the first two experts
    save_file(tensors, model / FILE, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": words}))
    asked = {"format": "int4", "granularity": "group:16", "layout": layout, "rounding": rounding}
    result = rounded(model, tmp_path / "output", **asked)
    experts = {t.name: t.rounding for t in result.tensors if ".experts." in t.name}
    first = [r for n, r in experts.items() if ".layers.0." in n]
    assert len(first) == 9
    inputs = {n: r.num_inputs for n, r in experts.items() if r is not None and ".layers.0." in n}
    assert sum(n or 0 for name, n in inputs.items() if ".w1." in name) == 2 * 512  # two experts a token
    left = [n for n, r in experts.items() if r is None]
    assert left == [n for n in experts if ".layers.1." in n and ".experts.2." in n]
    assert [w.split(",")[0] for w in result.warnings if "nearest" in w] == ["1 of 6 experts"]
    assert verified(tmp_path / "output", model).passed


EXPERTS = {
    "GraniteMoe": {},
    "GptOss": {"head_dim": 32},  # experts are stored as inputs by outputs
    "Llama4": {"head_dim": 32, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1},  # and meet zeros, too
}


def with_experts(kind: str, folder: Path) -> Path:
    """A model with three experts in one tensor, of which all tokens choose two in the second layer."""
    cls = getattr(transformers, f"{kind}ForCausalLM")
    config = cls.config_class(
        num_hidden_layers=2, hidden_size=64, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=num_words(), max_position_embeddings=32, num_local_experts=3, num_experts_per_tok=2, **EXPERTS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        router = next(p for n, p in model.model.layers[1].named_parameters() if "router" in n)
        router.zero_()  # all tokens choose the same two experts
    model.save_pretrained(folder)
    with_demo_tokenizer(folder)
    return folder


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_in_one_tensor_meet_the_tokens_that_reach_them(tmp_path: Path, kind: str) -> None:
    """Two of three experts of the second layer are reached. The codes of the other one are the nearest."""
    with_experts(kind, tmp_path / "plain")
    result = rounded(tmp_path / "plain", tmp_path / "output", **INT4)
    records = {t.name: t.rounding for t in result.tensors if len(t.shape) == 3 and t.rounding is not None}
    assert len(records) == 4
    assert all(r.output_error < 0.8 * r.nearest_error for r in records.values())
    assert all(r.num_inputs == 2 * 512 for r in records.values())
    assert [r.num_nearest for r in records.values()] == [0, 0, 1, 1]
    assert all(sum(r.expert_inputs) == 2 * 512 for r in records.values())
    (warning,) = [w for w in result.warnings if "nearest" in w]
    first, _, second, _ = (r.expert_inputs for r in records.values())
    median = round(statistics.median([*first, *second]))
    assert re.findall(r"\d+", warning) == ["1", "6", "1", "2", "0", "512", str(median)]
    assert verified(tmp_path / "output", tmp_path / "plain").passed
    convert(str(tmp_path / "plain"), tmp_path / "nearest", ConvertOptions(verify="none", **INT4))
    with StoredTensors.open(tmp_path / "output") as ours, StoredTensors.open(tmp_path / "nearest") as nearest:
        for name in records:
            is_same = [torch.equal(a, b) for a, b in zip(ours.tensor(name), nearest.tensor(name), strict=True)]
            assert sum(is_same) == (".layers.1." in name)


@pytest.mark.parametrize(("kind", "rounding"), [("GraniteMoe", "gptq"), ("GptOss", "gptaq"), ("Llama4", "gptq")])
def test_entropy_coded_experts_in_one_tensor_share_a_step(tmp_path: Path, kind: str, rounding: str) -> None:
    plain, output = with_experts(kind, tmp_path / "plain"), tmp_path / "output"
    result = rounded(plain, output, budget_bits=3.0, rounding=rounding)
    stacks = {t.name: t for t in result.tensors if len(t.shape) == 3}
    records = [t.rounding for t in stacks.values() if t.rounding is not None]
    assert len(records) == len(stacks) == 4
    assert all(r.output_error is not None and r.nearest_error is not None for r in records)
    assert all((r.output_error or 1) < 0.9 * (r.nearest_error or 0) for r in records)
    assert [r.num_nearest for r in records] == [0, 0, 1, 1]
    assert all(t.bytes_out == int(3 * math.prod(t.shape) / 8) for t in stacks.values())
    assert verified(output, plain).passed
    source, stored = load_file(plain / FILE), load_file(output / FILE)
    with StoredTensors.open(output) as ours:
        for name in stacks:
            step, got, wanted = float(stored[f"{name}_scale"]), ours.tensor(name).double(), source[name].double()
            is_nearest = (got == (wanted / step).round() * step).all((1, 2))
            assert int(is_nearest.sum()) == (".layers.1." in name)  # the one that no token reaches


@pytest.mark.parametrize("rounding", ["gptq", "gptaq"])
def test_activations_that_are_not_held_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: str
) -> None:
    """Each batch reaches some experts only. Each expert meets the tokens that routers of the output send to it."""
    sizes = {"vocab_size": num_words(), "num_experts": 12, "moe_intermediate_size": 32, "max_position_embeddings": 32}
    model = with_demo_tokenizer(tiny("qwen3-moe", tmp_path / "plain", dtype=torch.bfloat16, **sizes))
    monkeypatch.setattr(feedback, "windows_together", lambda *_: 1)
    for name, held in (("usual", 100), ("two", 2), ("one", 1)):
        monkeypatch.setattr(feedback, "held_together", lambda *_, held=held: held)
        asked = {"format": "int4", "granularity": "group:32", "rounding": rounding}
        result = rounded(model, tmp_path / name, **asked)
    assert files_of(tmp_path / "usual") == files_of(tmp_path / "two") == files_of(tmp_path / "one")

    opened, windows = lpconv.load(tmp_path / "one", dtype=torch.float32), windows_of(model)
    counts: dict[str, list[int]] = {}

    def note(name: str, chosen: Tensor) -> None:
        counts[name] = torch.bincount(chosen.flatten(), minlength=12).tolist()

    for name, module in opened.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[1]))
    with torch.no_grad():
        opened(input_ids=windows)
    experts = {t.name: t.rounding.num_inputs for t in result.tensors if ".experts." in t.name and t.rounding}
    expected = {f"{n}.{i}.{m}_proj.weight": c for n, many in counts.items() for i, c in enumerate(many)
                for m in ("gate", "up", "down") if c}  # fmt: skip
    assert experts == expected


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_file_of_rows_calibrates_like_its_texts(plain: Path, tmp_path: Path, suffix: str) -> None:
    texts = demo_text("heldout").read_text()[:30_000].split("\n\n")
    (tmp_path / "rows.txt").write_text("\n\n".join(x for x in texts if x.strip()))
    rows = datasets.Dataset.from_dict({"number": [*range(len(texts))], "text": texts})
    write = {"jsonl": rows.to_json, "parquet": rows.to_parquet, "csv": rows.to_csv}[suffix]
    write(str(tmp_path / f"rows.{suffix}"))
    for name in ("txt", suffix):
        rounded(plain, tmp_path / name, calibrate=str(tmp_path / f"rows.{name}"), **INT4)
    assert (tmp_path / "txt" / FILE).read_bytes() == (tmp_path / suffix / FILE).read_bytes()


def test_rows_without_texts_are_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"number": 1}\n')
    with pytest.raises(InputError, match="column") as caught:
        rounded(plain, tmp_path / "output", calibrate=str(tmp_path / "rows.jsonl"), **INT4)
    assert "number" in str(caught.value.hint)


def test_an_encoder_is_rounded_too(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=num_words(),
        max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "plain")
    with_demo_tokenizer(tmp_path / "plain")
    result = rounded(tmp_path / "plain", tmp_path / "output", **INT4)
    assert sum(t.rounding is not None for t in result.tensors) == 12


@pytest.mark.parametrize("scheme", [{"scheme": "W4A16", "granularity": "group:32"}, {"scheme": "NVFP4"}])
def test_the_text_part_of_a_model_with_images_is_rounded_on_its_own_text(
    scheme: dict[str, str], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    text = {**sizes, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": num_words()}
    config = transformers.Gemma3Config(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8})
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "plain")
    with_demo_tokenizer(tmp_path / "plain")
    result = rounded(tmp_path / "plain", tmp_path / "output", rounding="gptaq", calibrate="self", **scheme)
    names = [t.name for t in result.tensors if t.rounding is not None]
    assert len(names) == 14
    assert all(n.startswith("language_model.") for n in names)
    assert verified(tmp_path / "output", tmp_path / "plain").passed
    (opened,) = opens_elsewhere(tmp_path / "output", cls="AutoModelForImageTextToText", dtype="bfloat16")
    with StoredTensors.open(tmp_path / "output") as stored:
        decoded = [(n.replace("language_model.model.", "model.language_model."), stored.tensor(n)) for n in names]
    assert all(torch.equal(opened.weights[n], x.bfloat16()) for n, x in decoded)


def test_codes_of_tensors_that_are_no_linear_weights_are_refused(plain: Path, tmp_path: Path) -> None:
    rules = parse_rule("*embed_tokens*=e4m3fn"), parse_rule("*=keep")
    with pytest.raises(UnsupportedError, match="linear"):
        rounded(plain, tmp_path / "output", format="e4m3fn", rules=rules)
    assert not published(tmp_path / "output")


@pytest.mark.parametrize(
    ("kind", "named", "calibrate"),
    [("albert", "Albert", "demo"), ("vit", "ViT", "demo"), ("wav2vec2", "Wav2Vec2", "demo"), ("t5", "T5", "self")],
)
def test_models_that_cannot_be_calibrated_are_refused_by_name(
    kind: str, named: str, calibrate: str, tmp_path: Path
) -> None:
    """A layer that runs several times, images, sound, an encoder without a text to begin with."""
    source = albert() if kind == "albert" else tiny(kind, tmp_path / "source")
    with pytest.raises(UnsupportedError, match=named) as caught:
        rounded(source, tmp_path / "output", format="e4m3fn", calibrate=calibrate)
    assert ("--calibrate FILE" if kind == "t5" else "--rounding nearest") in str(caught.value.hint)
    assert not published(tmp_path / "output")


def test_inputs_that_are_not_finite_are_named(plain: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(plain, tmp_path / "broken")
    tensors = load_file(broken / FILE)
    tensors["model.layers.1.input_layernorm.weight"][3] = torch.inf
    save_file(tensors, broken / FILE, metadata={"format": "pt"})
    with pytest.raises(LpconvError, match=r"layers\.1\.self_attn"):
        rounded(broken, tmp_path / "output", **INT4)
