"""Defects planted in checkpoints of others' layouts: `inspect --strict` or `verify --against` names each; healthy ones
are silent."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.inspect.headers import inspect
from lpconv.inspect.values import inspect_with_statistics, judge_scales
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.report.verify import checks, verify_document
from lpconv.results import Verification
from lpconv.storage.resolve import directory_of
from lpconv.verify.compare import compare
from tests.helpers.checkpoints import shallow_demo, write_checkpoint
from tests.helpers.foreign_files import AWQ_ORDER, MAKERS, Tensors, make_foreign, pack_words

Config = dict[str, Any]
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
Q, K, GATE, DOWN = f"{ATTENTION}q_proj.", f"{ATTENTION}k_proj.", f"{MLP}gate_proj.", f"{MLP}down_proj."


@dataclasses.dataclass(frozen=True)
class Planted:
    """What is done to the tensors and the settings of a layout, and a word of what has to be said of it."""

    layout: str
    what: str
    word: str
    do: Callable[[Tensors, Config], object]

    def __str__(self) -> str:
        return f"{self.layout}: {self.what}"


def times(name: str, factor: float) -> Callable[[Tensors, Config], None]:
    def do(t: Tensors, c: Config) -> None:
        t[name] = (t[name].float() * factor).to(t[name].dtype)

    return do


def put(name: str, value: float, at: int | None = 0) -> Callable[[Tensors, Config], None]:
    """One element, or all of them where `at` is None."""

    def do(t: Tensors, c: Config) -> None:
        flat = t[name].reshape(-1).clone()
        flat[slice(None) if at is None else slice(at, at + 1)] = value
        t[name] = flat.view(t[name].shape)

    return do


def put_times(name: str, factor: float = 1e-3) -> Callable[[Tensors, Config], None]:
    """The same factor on the first element only."""

    def do(t: Tensors, c: Config) -> None:
        put(name, float(t[name].reshape(-1)[0]) * factor)(t, c)

    return do


def cut_at(largest: float, name: str) -> Callable[[Tensors, Config], None]:
    """All elements 1000 times larger, if the dtype can represent them."""
    return change(name, lambda x: (x.float() * 1e3).clamp_max(largest).to(x.dtype))


def drop(name: str) -> Callable[[Tensors, Config], object]:
    return lambda t, c: t.pop(name)


def change(name: str, to: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Config], None]:
    def do(t: Tensors, c: Config) -> None:
        t[name] = to(t[name]).contiguous()

    return do


def config(**settings: Any) -> Callable[[Tensors, Config], None]:
    return lambda t, c: c.update(settings)


def both(*steps: Callable[[Tensors, Config], object]) -> Callable[[Tensors, Config], None]:
    def do(t: Tensors, c: Config) -> None:
        for step in steps:
            step(t, c)

    return do


def swap_halves(x: Tensor) -> Tensor:
    return x << 4 | x >> 4


def reverse_words(x: Tensor) -> Tensor:
    return sum((x >> (4 * i) & 15) << (28 - 4 * i) for i in range(8)).to(torch.int32)  # type: ignore[union-attr]


def repack(order: tuple[int, ...] | None, axis: int) -> Callable[[Tensor], Tensor]:
    """Eight 4-bit numbers to a word in one order, put into another: AWQ's into the plain one, or the other way."""

    def do(x: Tensor) -> Tensor:
        places = [AWQ_ORDER.index(i) for i in range(8)] if order is None else range(8)
        numbers = torch.stack([x >> (4 * i) & 15 for i in places], dim=axis + 1).flatten(axis, axis + 1)
        return pack_words(numbers, 4, axis, order)

    return do


def doubled_half(x: Tensor) -> Tensor:
    """The first half doubled."""
    return torch.cat([x[: len(x) // 2] * 2, x[len(x) // 2 :]])


def all_times(end: str, factor: float) -> Callable[[Tensors, Config], None]:
    """The same factor on all scales of a name."""

    def do(t: Tensors, c: Config) -> None:
        for name in [n for n in t if n.endswith(end)]:
            t[name] = t[name] * factor

    return do


def scheme(c: Config) -> Config:
    return c["config_groups"]["group_0"]["weights"]


def with_byte(x: Tensor, byte: int) -> Tensor:
    flat = x.view(torch.uint8).clone()
    flat.view(-1)[3] = byte
    return flat.view(x.dtype)


def plus_one(words: Tensor) -> Tensor:
    """Every 4-bit number plus one, the largest left alone."""
    numbers = torch.stack([words >> (4 * i) & 15 for i in range(8)], dim=1).flatten(0, 1)
    return pack_words((numbers + 1).clamp_max(15), 4, 0)


def reverse_bytes(words: Tensor) -> Tensor:
    return words.view(torch.uint8).view(*words.shape, 4).flip(-1).contiguous().view(torch.int32).squeeze(-1)


def double_first(exponents: Tensor) -> Tensor:
    """The scale of the first row of blocks doubled."""
    return torch.cat([exponents[:1].view(torch.uint8) + 1, exponents[1:].view(torch.uint8)]).view(exponents.dtype)


HALVED = both(times(K + "weight_scale", 2.0), times(K + "weight", 0.5))
# By layout: what is wrong, a word of what has to be said of it, and how it is done.
_PLANTED = {
    "ct FP8": [
        ("unequal scales of q, k, v", "unequal", HALVED),
        ("a scale that is NaN", "finite", put(Q + "weight_scale", torch.nan)),
        ("a negative scale", "negative", times(Q + "weight_scale", -1.0)),
        ("a scale of 1", "scales are 1", put(Q + "weight_scale", 1.0)),
        ("a scale that was dropped", "incomplete", drop(Q + "weight_scale")),
        ("a scale of inputs of zero", "zero", put(Q + "input_scale", 0.0)),
        ("a scale of inputs that is NaN", "zero", put(Q + "input_scale", torch.nan)),
        ("a scale of inputs that was dropped", "missing", drop(Q + "input_scale")),
        ("a weight without rows", Q + "weight", change(Q + "weight", lambda x: x[:0])),
        ("codes that are NaN", "NaN", change(Q + "weight", lambda x: with_byte(x, 0x7F))),
    ],
    "ct FP8_DYNAMIC": [
        ("one row's scale doubled", "factor", lambda t, c: t[Q + "weight_scale"][5].mul_(2)),
        ("infinite scale", "finite", put(Q + "weight_scale", torch.inf)),
        ("one row's scale 1000 times too small", "1 of 128 scales", put_times(Q + "weight_scale")),
        (
            "scales that grow from row to row",
            "factor",
            change(K + "weight_scale", lambda x: x * torch.linspace(1, 3, len(x)).unsqueeze(1)),
        ),
        ("a zero scale", "zero", put(Q + "weight_scale", 0.0, 7)),
        (
            "a module that is not quantised",
            "different",
            both(drop(Q + "weight_scale"), change(Q + "weight", Tensor.float)),
        ),
        ("a module that config.json ignores", "config.json", config(ignore=["lm_head", Q[:-1]])),
    ],
    "ct FP8_BLOCK": [
        ("one block's scale doubled", "factor", lambda t, c: t[GATE + "weight_scale"][1].mul_(2)),
        ("a transposed grid of scales", "incomplete", change(GATE + "weight_scale", lambda x: x.t())),
        ("another block in config.json", "blocks of 64", lambda t, c: scheme(c).update(block_structure=[64, 64])),
    ],
    "ct W8A8": [
        ("flipped signs of codes", "dB", change(Q + "weight", lambda x: -x)),
        ("codes of another module's rows", "dB", change(Q + "weight", lambda x: x.roll(1, 0))),
    ],
    "ct MXFP8": [
        ("exponents off by one", "factor", change(Q + "weight_scale", lambda x: x + 1)),
        ("an exponent of 255", "finite", put(Q + "weight_scale", 255)),
    ],
    "ct MXFP4": [
        ("swapped nibbles", "packing", change(Q + "weight_packed", swap_halves)),
        ("scales of 1", "scales are 1", put(Q + "weight_scale", 127, None)),
        ("rows off by one", "packing", change(Q + "weight_packed", lambda x: x.roll(1, 0))),
        ("one exponent off by one", "factor", lambda t, c: t[Q + "weight_scale"][3, 1:2].add_(1)),
    ],
    "ct NVFP4": [
        ("an inverted second scale", "inverted", change(Q + "weight_global_scale", lambda x: 1 / x)),
        ("unequal second scales", " 4 ", both(times(K + "weight_global_scale", 0.25), times(K + "weight_scale", 0.25))),
        ("a second scale that was dropped", "incomplete", drop(Q + "weight_global_scale")),
        ("a second scale of zero", "finite", put(Q + "weight_global_scale", 0.0)),
        ("a second scale 1000 times too small", "lost", times(Q + "weight_global_scale", 1e-3)),
        ("a second scale 1000 times too large", "lost", times(Q + "weight_global_scale", 1e3)),
        ("all second scales 1000 times too small", "trained", all_times("weight_global_scale", 1e-3)),
        ("all second scales 1000 times too large", "trained", all_times("weight_global_scale", 1e3)),
        ("swapped nibbles", "packing", change(GATE + "weight_packed", swap_halves)),
        ("one group's scale doubled", "factor", lambda t, c: t[Q + "weight_scale"].view(torch.uint8)[3, 2:4].add_(8)),
        ("a scale that is NaN", "finite", change(Q + "weight_scale", lambda x: with_byte(x, 0x7F))),
        ("an infinite second scale", "negative", put(Q + "weight_global_scale", torch.inf)),
        ("scales cut at their dtype's end", "1024 of 1024 scales", cut_at(448.0, Q + "weight_scale")),
        ("one scale 1000 times too small", "1 of 1024 scales", put_times(Q + "weight_scale")),
        ("another format in config.json", "mxfp8-quantized", config(format="mxfp8-quantized")),
    ],
    "ct NVFP4, inputs": [
        ("unequal input scales", "unequal", times(K + "input_global_scale", 3.0)),
        ("a negative scale of inputs", "negative", times(GATE + "input_global_scale", -1.0)),
        ("an infinite scale of inputs", "negative", put(Q + "input_global_scale", torch.inf)),
        ("a scale of inputs that was dropped", "missing", drop(GATE + "input_global_scale")),
    ],
    "ct W4A16": [
        ("nibbles from the other end", "packing", change(Q + "weight_packed", reverse_words)),
        ("codes without their offset", "packing", change(Q + "weight_packed", lambda x: x ^ 0x08080808 ^ -0x7F7F7F80)),
        ("different shape", "says (127, 128)", put(Q + "weight_shape", 127)),
        ("another group in config.json", "incomplete", lambda t, c: scheme(c).update(group_size=64)),
    ],
    "ct W4A16_ASYM": [
        ("zero points that were dropped", "zero", drop(Q + "weight_zero_point")),
        ("zero points off by one", "zero", change(Q + "weight_zero_point", plus_one)),
    ],
    "ct W8A16": [("bytes of words from the other end", "dB", change(Q + "weight_packed", reverse_bytes))],
    "fp8": [
        ("an inverted scale", "inverted", change(Q + "weight_scale_inv", lambda x: 1 / x)),
        ("a scale that was dropped", "incomplete", drop(Q + "weight_scale_inv")),
        ("another block in config.json", "blocks of 64", config(weight_block_size=[64, 64])),
        ("no quantization_config", "no quantization_config", lambda t, c: c.clear()),
    ],
    "fp8 ue8m0": [("a block's scale doubled", "factor", change(GATE + "weight_scale_inv", double_first))],
    "mxfp8": [("a block's scale lost", "1 of 512 scales", put(Q + "weight_scale_inv", 0, 9))],
    "modelopt FP8": [
        ("a scale of 1", "scales are 1", put(Q + "weight_scale", 1.0)),
        ("the other algorithm in config.json", "`NVFP4`", config(quant_algo="NVFP4")),
    ],
    "modelopt NVFP4": [
        ("an inverted second scale", "inverted", change(Q + "weight_scale_2", lambda x: 1 / x)),
        ("unequal second scales", " 2 ", both(times(K + "weight_scale_2", 2.0), times(K + "weight_scale", 0.5))),
        ("a second scale that was dropped", "incomplete", drop(Q + "weight_scale_2")),
        ("a second scale of zero", "negative", put(Q + "weight_scale_2", 0.0)),
        ("scales cut at their dtype's end", "1024 of 1024 scales", cut_at(448.0, Q + "weight_scale")),
        ("a second scale 1000 times too small", "lost", times(Q + "weight_scale_2", 1e-3)),
        ("a second scale 1000 times too large", "lost", times(Q + "weight_scale_2", 1e3)),
        ("swapped nibbles", "packing", change(Q + "weight", swap_halves)),
    ],
    "modelopt W4A16_AWQ": [
        ("swapped rows", "packing", change(GATE + "weight", swap_halves)),
        ("factors of half of the columns doubled", "factor", change(DOWN + "pre_quant_scale", doubled_half)),
        ("factors of columns that were dropped", "factor", drop(DOWN + "pre_quant_scale")),
        ("a factor of a column of zero", "negative", put(DOWN + "pre_quant_scale", 0.0)),
        ("a factor 1000 times too small", "factors", put_times(DOWN + "pre_quant_scale")),
        ("a factor that is NaN", "negative", put(DOWN + "pre_quant_scale", torch.nan)),
        ("factors of other columns", "incomplete", change(DOWN + "pre_quant_scale", lambda x: x[1:])),
        ("a scale that was dropped", "incomplete", drop(Q + "weight_scale")),
        ("another group in config.json", "groups of 64", config(group_size=64)),
        ("the other algorithm in config.json", "`NVFP4_AWQ`", config(quant_algo="NVFP4_AWQ")),
    ],
    "modelopt W4A8_AWQ": [
        ("a second scale that was dropped", "incomplete", drop(Q + "weight_scale_2")),
        ("a second scale of zero", "negative", put(Q + "weight_scale_2", 0.0)),
        ("a second scale 1000 times too large", "larger", times(Q + "weight_scale_2", 1e3)),
        ("unequal input scales", "unequal", times(K + "input_scale", 3.0)),
        ("unequal second scales", " 2 in `model.layers.0.self_attn`: TensorRT-LLM", times(K + "weight_scale_2", 2.0)),
    ],
    "modelopt NVFP4_AWQ": [("factors of columns that were dropped", "factor", drop(Q + "pre_quant_scale"))],
    "gptq": [
        ("zero points of the other version", "zero", config(checkpoint_format="gptq_v2")),
        ("codes in AWQ's order", "dB", change(Q + "qweight", repack(AWQ_ORDER, 0))),
        ("one group for all", "dB", put(Q + "g_idx", 0, None)),
        ("a group that is not there", "scale", put(Q + "g_idx", 99)),
        ("scales that were dropped", "incomplete", drop(Q + "scales")),
        ("other bits in config.json", "incomplete", config(bits=8)),
    ],
    "gptq desc_act": [("groups of the wrong order", "dB", change(Q + "g_idx", lambda x: x.sort().values))],
    "awq": [
        ("codes in plain order", "dB", change(Q + "qweight", repack(None, 1))),
        ("zero points of zero", "dB", put(Q + "qzeros", 0, None)),
        ("one group's scales doubled", "factor", lambda t, c: t[Q + "scales"][1].mul_(2)),
        ("no quantization_config", "no quantization_config", lambda t, c: c.clear()),
    ],
}
WITH_BLOCKS = ("modelopt FP8 blocks", "ct FP8_BLOCK", "fp8", "fp8 bf16", "fp8 ue8m0")
PLANTED = [Planted(layout, *found) for layout, several in _PLANTED.items() for found in several]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    shallow_demo(folder / "plain")
    return folder


def made(folder: Path, layout: str) -> Path:
    target = folder / layout
    return target if target.exists() else make_foreign(layout, folder / "plain", target)


def said_of(path: Path, plain: Path) -> str:
    """All that inspect and verify say against a checkpoint, but of k of the demo: a block of 128 has twice its rows."""
    found = inspect(path)
    if found.layout and not found.problems:
        found = judge_scales(found, path)
    said = [w for w in (*found.problems, *found.warnings) if "multiple" not in w]
    return "; ".join(said or compare(path, plain, gates=(), progress=Silent()).problems)


@pytest.mark.parametrize("layout", MAKERS)
def test_a_healthy_checkpoint_is_silent(folder: Path, layout: str) -> None:
    path = made(folder, layout)
    assert said_of(path, folder / "plain") == ""
    wide = [w for w in inspect(path).warnings if "k_proj.weight`: 64 rows" in w and "128" in w]
    assert bool(wide) == (layout in WITH_BLOCKS)


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_defect_is_named(folder: Path, tmp_path: Path, planted: Planted) -> None:
    source = made(folder, planted.layout)
    tensors = {n: x.clone() for n, x in load_file(source / "model.safetensors").items()}
    found = json.loads((source / "config.json").read_text())
    planted.do(tensors, found["quantization_config"])
    if not found["quantization_config"]:
        del found["quantization_config"]
    save_file({n: x.contiguous() for n, x in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(found))
    said = said_of(tmp_path, folder / "plain")
    assert planted.word in said


def test_plain_tensors_that_differ_are_not_said_to_have_codes(folder: Path, tmp_path: Path) -> None:
    """A norm that has taken factors of columns, as AWQ's do, beside a matrix whose codes are damaged."""
    norm = "model.layers.0.input_layernorm.weight"
    tensors = load_file(made(folder, "ct W4A16") / "model.safetensors")
    tensors[norm] = tensors[norm] * (torch.arange(len(tensors[norm])) % 3 + 1)
    tensors[Q + "weight_packed"] = reverse_words(tensors[Q + "weight_packed"])
    save_file({n: x.contiguous() for n, x in tensors.items()}, tmp_path / "model.safetensors")
    shutil.copyfile(folder / "ct W4A16" / "config.json", tmp_path / "config.json")
    found = compare(tmp_path, folder / "plain", gates=(), progress=Silent())
    said = {t.name: t.problem for t in found.tensors if t.problem}
    assert said.keys() == {norm, Q + "weight"}
    assert "unquantised" in said[norm]
    assert "packing" not in said[norm]
    assert "packing" in said[Q + "weight"]


@pytest.mark.parametrize("other", [torch.tensor([[1.0, math.nan]]), torch.tensor([[math.inf, 1.0]]), torch.ones(2, 1)])
@pytest.mark.parametrize("is_reference", [False, True])
def test_numbers_in_only_one_of_both_are_not_equal(other: Tensor, is_reference: bool, tmp_path: Path) -> None:
    """NaN, Inf or another shape for the reference's ones, or ones for those of the reference."""
    pair = [write_checkpoint(tmp_path / "a", {"w": torch.ones(1, 2)}), write_checkpoint(tmp_path / "b", {"w": other})]
    found = compare(*(pair if is_reference else pair[::-1]), gates=(), progress=Silent())
    assert not found.passed
    assert found.weights is not None
    assert found.weights.mismatched == ("w",)
    assert {c.name: c.outcome for c in checks(found)}["weights"] == "failed"
    fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    page = verify_document(Verification(path="a", command="verify a", version="1", **fields))
    assert not any("exact" in tile.figure for tile in page.tiles)


@pytest.mark.parametrize("kind", ["collage", "gguf"])
def test_two_parts_and_ggufs_floats_are_no_codes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    norm, changed = "model.layers.0.input_layernorm.weight", tmp_path / "changed"
    shutil.copytree(folder / "plain", changed)
    tensors = load_file(changed / "model.safetensors")
    save_file(tensors | {norm: tensors[norm] * 1.5}, changed / "model.safetensors", metadata={"format": "pt"})
    if kind == "collage":
        convert(str(changed), tmp_path / "out", ConvertOptions(method="collage", format="bf16", verify="none"))
    else:
        pytest.importorskip("gguf", reason="needs the package gguf (`lpconv[gguf]`)")
        from tests.helpers.gguf_files import rewrite_as_gguf

        rewrite_as_gguf(changed, tmp_path / "out")
    directory = directory_of(tmp_path / "out" if kind == "collage" else tmp_path / "out" / "model.gguf")
    (said,) = compare(directory, folder / "plain", gates=(), progress=Silent()).problems
    assert norm in said
    assert "unquantised" in said
    assert "packing" not in said


def test_codes_of_ours_that_use_few_of_their_numbers_are_not_odd(folder: Path, tmp_path: Path) -> None:
    """Unit scaling gives large weights a scale of their RMS, with which the largest code would be far larger."""
    shutil.copytree(folder / "plain", tmp_path / "large")
    weights = load_file(folder / "plain" / "model.safetensors")
    save_file({n: x * 20 for n, x in weights.items()}, tmp_path / "large" / "model.safetensors")
    options = ConvertOptions(format="e4m3fn", layout="compressed-tensors", granularity="row", verify="none")
    convert(str(tmp_path / "large"), tmp_path / "out", options)
    assert judge_scales(inspect(tmp_path / "out"), tmp_path / "out").warnings == ()


def test_statistics_of_a_scale_of_zero_are_a_verdict(folder: Path, tmp_path: Path) -> None:
    """Who reads values is not asked for those of a weight whose scale is none."""
    shutil.copytree(made(folder, "modelopt NVFP4"), tmp_path / "zero")
    tensors = load_file(tmp_path / "zero" / "model.safetensors")
    tensors[Q + "weight_scale_2"].zero_()
    save_file(tensors, tmp_path / "zero" / "model.safetensors", metadata={"format": "pt"})
    (problem,) = inspect_with_statistics(tmp_path / "zero", Silent()).problems
    assert f"`{Q}weight_scale_2`" in problem


@pytest.mark.parametrize("layout", ["ct FP8_DYNAMIC", "ct W4A16"])
def test_scales_that_are_too_small_show_in_the_codes(folder: Path, tmp_path: Path, layout: str) -> None:
    """Scales of a quarter of the size cut the larger half of the weights to the last code."""
    plain, target = folder / "plain", tmp_path / "cut"
    make_foreign(layout, plain, target)
    healthy = inspect_with_statistics(target, Silent())
    assert not healthy.warnings
    weights = load_file(plain / "model.safetensors")
    limit, bits = (448.0, 8) if "FP8" in layout else (7.0, 4)
    tensors = load_file(target / "model.safetensors")
    scale = tensors[Q + "weight_scale"] / 4
    codes = weights[Q + "weight"] / scale.repeat_interleave(weights[Q + "weight"].shape[1] // scale.shape[1], 1)
    codes = codes.clamp(-limit, limit)
    stored = codes.to(torch.float8_e4m3fn) if bits == 8 else pack_words(codes.round() + 8, 4, 1)
    tensors |= {Q + "weight_scale": scale, Q + ("weight" if bits == 8 else "weight_packed"): stored}
    save_file(tensors, target / "model.safetensors")
    (warning,) = inspect_with_statistics(target, Silent()).warnings
    assert Q + "weight" in warning
    assert "largest" in warning


@pytest.mark.parametrize(
    ("planted", "form"),
    [
        ("ct FP8: unequal scales of q, k, v", {"format": "e4m3fn", "calibrate": "demo"}),
        ("ct NVFP4: unequal second scales", {"format": "e2m1", "granularity": "nvfp4"}),
    ],
)
def test_converting_again_makes_unequal_scales_equal(
    folder: Path, tmp_path: Path, planted: str, form: dict[str, Any]
) -> None:
    """Codes of fused weights are written anew with the scale that readers take for all of them."""
    layout, _, what = planted.partition(": ")
    source = make_foreign(layout, folder / "plain", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    next(do for label, _, do in _PLANTED[layout] if label == what)(tensors, {})
    save_file(tensors, source / "model.safetensors")
    assert any("unequal" in w for w in judge_scales(inspect(source), source).warnings)

    convert(str(source), tmp_path / "out", ConvertOptions(layout="compressed-tensors", verify="weights", **form))

    assert not any("unequal" in w for w in judge_scales(inspect(tmp_path / "out"), tmp_path / "out").warnings)
    assert not compare(tmp_path / "out", folder / "plain", gates=(), progress=Silent()).problems
