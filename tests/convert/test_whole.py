"""Files beside the model that config.json describes: what is missing, renamed, too much or of another shape."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lpconv.errors import InputError, UnsupportedError
from lpconv.layouts.reader import stored_shapes
from lpconv.models.whole import Fit, check_complete, compare_with_model
from lpconv.storage.checkpoint import Checkpoint
from tests.helpers.models import tiny

KINDS = ("clip", "gpt2", "llama", "mixtral", "t5", "vit", "wav2vec2")
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: folder / kind if (folder / kind).exists() else tiny(kind, folder / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_with_the_tensors_of_a_model(kind: str, models: Callable[[str], Path]) -> None:
    contents = Checkpoint.open(models(kind))
    shapes = stored_shapes(contents)
    assert compare_with_model(contents, shapes) == Fit(model=compare_with_model(contents, shapes).model)
    layers = [n for n in shapes if any(x in n for x in (".layer", ".block", ".h."))]
    name = next(n for n in layers if len(shapes[n]) == 2 and "experts" not in n)
    less = {n: s for n, s in shapes.items() if n != name}
    gone = compare_with_model(contents, less)
    assert len(gone.missing) == 1
    assert gone == Fit(model=gone.model, missing=gone.missing)
    renamed = compare_with_model(contents, {**less, f"{name}_old": shapes[name]})
    assert renamed.missing == gone.missing
    assert len(renamed.extra) == 1
    larger = (shapes[name][0] + 1, *shapes[name][1:])
    assert list(compare_with_model(contents, {**shapes, name: larger}).shapes.values()) == [(larger, shapes[name])]


def test_a_single_expert_that_is_missing_is_named(models: Callable[[str], Path]) -> None:
    contents = Checkpoint.open(models("mixtral"))
    shapes = stored_shapes(contents)
    first = next(n for n in shapes if ".experts.2." in n)
    del shapes[first]
    assert compare_with_model(contents, shapes).missing == (first,)


def test_what_sound_checkpoints_have_beside_the_model_is_only_odd(models: Callable[[str], Path]) -> None:
    contents = Checkpoint.open(models("llama"))
    shapes = stored_shapes(contents)
    found = compare_with_model(
        contents, {**shapes, "model.layers.0.self_attn.rotary_emb.inv_freq": (4,), "mtp.fc.weight": (1, 1)}
    )
    assert not found.problems
    assert found.unused == ("mtp.fc.weight",)


def test_names_without_the_prefix_of_the_model_and_tied_weights(models: Callable[[str], Path]) -> None:
    contents = Checkpoint.open(models("llama"))
    bare = {n.removeprefix("model."): s for n, s in stored_shapes(contents).items()}
    assert not compare_with_model(contents, bare).problems
    assert not compare_with_model(contents, {**bare, "lm_head.weight": bare["embed_tokens.weight"]}).problems
    del bare["embed_tokens.weight"]
    assert "model.embed_tokens.weight" in compare_with_model(contents, bare).missing


def changed(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> Path:
    """A copy of a checkpoint with other tensors, and keys in its config."""
    target.mkdir()
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return target


def test_what_is_missing_is_refused_unless_it_is_allowed(models: Callable[[str], Path], tmp_path: Path) -> None:
    contents = Checkpoint.open(changed(models("llama"), tmp_path / "less", lambda state: state.pop(DOWN)))
    with pytest.raises(InputError, match=r" 1 .*`LlamaForCausalLM`.*down_proj") as caught:
        check_complete(contents, allow_missing=False)
    assert caught.value.details["missing"] == [DOWN]
    assert check_complete(contents, allow_missing=True).missing == (DOWN,)


def test_another_shape_is_refused_whatever_is_allowed(models: Callable[[str], Path], tmp_path: Path) -> None:
    contents = Checkpoint.open(changed(models("llama"), tmp_path / "other", lambda state: None, intermediate_size=80))
    with pytest.raises(InputError, match=r"6 weights .* is \((64, 32|32, 64)\), not \((80, 32|32, 80)\)"):
        check_complete(contents, allow_missing=True)


def test_of_a_model_that_transformers_does_not_have_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown", "architectures": ["NoModel"]}))
    save_file({}, tmp_path / "model.safetensors")
    contents = Checkpoint.open(tmp_path)
    assert check_complete(contents, allow_missing=False) == Fit()
    with pytest.raises(UnsupportedError):
        compare_with_model(contents, {})


def test_transformers_says_the_same_of_real_files(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(
        models("llama"), tmp_path / "less", lambda state: [state.pop(n) for n in list(state) if ".1." in n]
    )
    _, report = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    found = compare_with_model(Checkpoint.open(folder), stored_shapes(Checkpoint.open(folder)))
    assert set(found.missing) == set(report["missing_keys"])
    assert len(found.missing) == 9
