"""Defects planted in checkpoints of others, and repaired: what is sound again, what it cost, and what is refused."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_files import Tensors
from safetensors.torch import load_file, save_file
from test_foreign_damage import GATE, HALVED, K, Q, both, change, drop, made, put, shallow_demo, times
from typer.testing import CliRunner, Result

from lpconv.cli.main import app
from lpconv.convert.inspect import inspect
from lpconv.convert.repair import repair
from lpconv.forms.reader import StoredTensors
from lpconv.progress import Silent
from lpconv.results import RepairResult

Plant = Callable[[Tensors, dict[str, Any]], object]
SECOND, SECOND_2 = "weight_global_scale", "weight_scale_2"
LAYOUTS = ("ct FP8", "ct NVFP4", "modelopt NVFP4", "modelopt NVFP4_AWQ", "modelopt FP8", "fp8", "ct W4A16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repairs")
    shallow_demo(folder / "plain")
    for layout in LAYOUTS:
        made(folder, layout)
    return folder


def planted(folder: Path, layout: str, target: Path, plant: Plant) -> Path:
    """A damaged copy of a sound checkpoint, in two files."""
    tensors = {n: x.clone() for n, x in load_file(folder / layout / "model.safetensors").items()}
    config = json.loads((folder / layout / "config.json").read_text())
    plant(tensors, config["quantization_config"])
    target.mkdir()
    files = [f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")]
    parts = {f: {n: x.contiguous() for n, x in tensors.items() if ("mlp" in n) == (f == files[1])} for f in files}
    for file, part in parts.items():
        save_file(part, target / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f for f, part in parts.items() for n in part}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_text("{}")
    return target


def mended(source: Path, **options: Any) -> RepairResult:
    return repair(source, source.with_name("out"), force=False, progress=Silent(), **options)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def values(path: Path) -> dict[str, torch.Tensor]:
    with StoredTensors.open(path) as stored:
        return {n: stored.tensor(n) for n in stored.forms}


def all_inverted(t: Tensors, c: dict[str, Any]) -> None:
    for name in [n for n in t if n.endswith(SECOND)]:
        t[name] = 1 / t[name]


# What is planted, whether it is repaired without changing a number, and how many weights change.
REPAIRED: Mapping[str, tuple[str, Plant, bool, int]] = {
    "a scale for a tensor, twice as large": ("ct FP8", HALVED, False, 2),
    "a scale for a tensor, three times as large": (
        "ct FP8", both(times(K + "weight_scale", 3.0), times(K + "weight", 1 / 3)), False, 2,
    ),
    "a second scale, four times as large": (
        "ct NVFP4", both(times(K + SECOND, 0.25), times(K + "weight_scale", 0.25)), True, 2,
    ),
    "a second scale, three times as large": (
        "ct NVFP4", both(times(K + SECOND, 1 / 3), times(K + "weight_scale", 1 / 3)), False, 2,
    ),
    "a second scale that multiplies, half as large": (
        "modelopt NVFP4", both(times(K + SECOND_2, 0.5), times(GATE + SECOND_2, 0.5)), True, 2,
    ),
    "a second scale beside factors of columns, half as large": (
        "modelopt NVFP4_AWQ", both(times(K + SECOND_2, 0.5), times(GATE + SECOND_2, 0.5)), True, 2,
    ),
    "one second scale inverted": ("ct NVFP4", change(Q + SECOND, lambda x: 1 / x), True, 1),
    "one second scale that multiplies inverted": ("modelopt NVFP4", change(Q + SECOND_2, lambda x: 1 / x), True, 1),
    "scales of blocks inverted": ("fp8", change(GATE + "weight_scale_inv", lambda x: 1 / x), True, 1),
    "a second scale inverted, and another three times as large": (
        "ct NVFP4",
        both(change(Q + SECOND, lambda x: 1 / x), times(K + SECOND, 1 / 3), times(K + "weight_scale", 1 / 3)),
        False,
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REPAIRED)
def test_what_is_repaired_is_sound_and_says_what_changed(folder: Path, tmp_path: Path, what: str) -> None:
    layout, plant, exact, count = REPAIRED[what]
    source, out = planted(folder, layout, tmp_path / "in", plant), tmp_path / "out"
    assert run("inspect", source, "--strict").exit_code == 5
    result = mended(source)
    assert result.left == inspect(folder / layout).warnings  # of the demo's small k, of no scale
    assert run("inspect", out, *([] if result.left else ["--strict"])).exit_code == 0
    assert result.exact == exact
    assert len(result.tensors) == count
    before, after = values(source), values(out)
    for t in result.tensors:
        if t.what == "rescaled":
            assert t.num_changed == int((before[t.name] != after[t.name]).sum())
            noise = (before[t.name] - after[t.name]).double().square().sum()
            energy = before[t.name].double().square().sum()
            assert t.sqnr_db == pytest.approx(10 * math.log10(energy / noise) if noise else math.inf, abs=0.01)
            assert t.sqnr_db > 20
    others = before.keys() - {t.name for t in result.tensors}
    assert all(torch.equal(before[n], after[n]) for n in others)


@pytest.mark.parametrize("what", [w for w in REPAIRED if "half as large" not in w])
def test_what_is_repaired_is_what_was_quantised(folder: Path, tmp_path: Path, what: str) -> None:
    layout, plant, _, _ = REPAIRED[what]
    source = planted(folder, layout, tmp_path / "in", plant)
    mended(source, against=folder / "plain")
    assert run("verify", tmp_path / "out", "--against", folder / "plain").exit_code == 0
    sound, after = values(folder / layout), values(tmp_path / "out")
    for name, x in sound.items():
        if "large" not in what:
            assert torch.allclose(x, after[name], rtol=3e-7, atol=0), name


def test_all_else_lies_as_it_lay(folder: Path, tmp_path: Path) -> None:
    layout, plant, _, _ = REPAIRED["a second scale, four times as large"]
    source, out = planted(folder, layout, tmp_path / "in", plant), tmp_path / "out"
    done = run("repair", source, "-o", out, "--json")
    assert done.exit_code == 0, done.stderr
    assert {t["name"] for t in json.loads(done.stdout)["tensors"]} == {Q + "weight", Q.replace("q_", "v_") + "weight"}
    assert "unequal" not in json.dumps(json.loads(done.stdout)["left"])
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    a, b = (load_file(p / "model-00001-of-00002.safetensors") for p in (source, out))
    other = {n for n in a if not torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))}
    assert other == {f"{m}{x}" for m in (Q, Q.replace("q_", "v_")) for x in ("weight_scale", SECOND)}
    assert run("restore", out, "-o", tmp_path / "plain", "-q").exit_code == 0
    assert run("convert", out, "--format", "fp16", "-o", tmp_path / "fp16", "-q", "--verify", "weights").exit_code == 0
    assert run("verify", out).exit_code == 4
    assert run("repair", out, "-o", tmp_path / "again").exit_code == 4
    assert run("repair", source, "-o", out).exit_code == 8
    assert run("repair", source, "-o", out, "--force", "-q").exit_code == 0


def test_scales_that_are_all_inverted_need_the_model(folder: Path, tmp_path: Path) -> None:
    source = planted(folder, "ct NVFP4", tmp_path / "in", all_inverted)
    alone = run("repair", source, "-o", tmp_path / "out")
    assert (alone.exit_code, "--against" in alone.stderr) == (4, True)
    assert len(mended(source, against=folder / "plain").tensors) == 7
    assert run("verify", tmp_path / "out", "--against", folder / "plain").exit_code == 0


@pytest.mark.parametrize(
    ("layout", "plant", "word"),
    [
        ("ct FP8", put(Q + "weight_scale", torch.nan), "no number"),
        ("ct FP8", put(Q + "weight_scale", 0.0), "scales are zero"),
        ("ct FP8", put(Q + "weight_scale", 1.0), "dropped"),
        ("ct FP8", drop(Q + "weight_scale"), "no whole weight"),
        ("ct NVFP4", put(Q + SECOND, 0.0), "no number"),
        ("ct NVFP4", drop(Q + SECOND), "no whole weight"),
        ("ct NVFP4", put(Q + SECOND, 1e-30), "lost"),
        ("modelopt FP8", put(Q + "weight_scale", -1.0), "negative"),
        ("ct W4A16", put(Q + "weight_shape", 127), "says (127, 128)"),
        ("ct FP8", lambda t, c: None, "nothing to repair"),
        ("ct FP8", lambda t, c: c.update(quant_method="hqq"), "hqq"),
    ],
)
def test_what_is_lost_is_refused(folder: Path, tmp_path: Path, layout: str, plant: Plant, word: str) -> None:
    source = planted(folder, layout, tmp_path / "in", plant)
    done = run("repair", source, "-o", tmp_path / "out")
    assert done.exit_code == 4, done.stderr
    assert word in done.stderr
    assert "hint: " in done.stderr
    assert not list(tmp_path.glob("out*"))


def test_a_plain_checkpoint_has_nothing_to_repair(folder: Path, tmp_path: Path) -> None:
    done = run("repair", folder / "plain", "-o", tmp_path / "out")
    assert (done.exit_code, "no scales" in done.stderr) == (4, True)
