"""Searched scales: never worse than the usual ones, the best of those tried, and the same however a weight is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.errors import UsageError
from lpconv.formats.grains import get_grain
from lpconv.formats.spec import FORMATS
from lpconv.forms import FORMS, FormSettings
from lpconv.forms.blocks import Workspace
from lpconv.forms.form import Side
from lpconv.forms.tile_scales import best_scales, candidates
from lpconv.forms.tiles import Tiles
from lpconv.layouts import LAYOUTS
from lpconv.plan.options import ConvertOptions
from lpconv.plan.settings import fill_options
from tests.helpers.checkpoints import bits_of, files_of, write_checkpoint

ROWS, COLS = 130, 160  # smaller tiles at the edges of 128 x 128
WEIGHT = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)).pow(3) * 0.02
WEIGHT[5, :32] = 0
ASKED = [
    ("tiles", "int4", "group:32"),
    ("compressed tiles", "int4", "group:160"),
    ("compressed tiles", "int8", "group:32"),
    ("tiles", "e2m1", "mx"),
    ("compressed tiles", "e2m1", "nvfp4"),
    ("fine-grained", "e4m3fn", "128x128"),
    ("tiles", "e5m2", "row"),
    ("tiles", "e4m3fn", "row"),
    ("compressed tiles", "e4m3fn", "128x128"),
]
KINDS = FORMS | {x.form.kind: x.form for x in LAYOUTS.values() if x.form is not None}
asked = pytest.mark.parametrize(("kind", "name", "grain"), ASKED)


def form_of(kind: str, name: str, grain: str, scale: str = "search") -> Tiles:
    form = KINDS[kind].of("w", (ROWS, COLS), FORMATS[name], FormSettings(scale=scale, grain=get_grain(grain)))
    assert isinstance(form, Tiles)
    return form


def usual_of(kind: str, name: str, grain: str) -> Tiles:
    """The form whose scales a search starts from."""
    return form_of(kind, name, grain, "exact" if FORMATS[name].twos_complement else "pow2")


def side_for(form: Tiles, weight: Tensor, *, importance: Tensor | None = None) -> Side:
    """The side tensors of a whole weight in memory."""
    work, flat = Workspace(), weight.reshape(-1)
    form = form if importance is None else form.with_importance(importance)
    return form.measure(lambda job: [job(flat, 0, work)]).side


def errors(form: Tiles, side: Side, x: Tensor = WEIGHT, importance: Tensor | None = None) -> Tensor:
    """Squared error of every tile in fp64, by the slow reference rounding."""
    from lpconv.forms.codes import _reference

    flat = x.reshape(-1)
    got = _reference(flat, form.code_scale(side, 0, flat.numel()), form.format)
    squares = (got - flat).double().square().view(x.shape)
    squares = squares if importance is None else squares * importance
    height, width = form.grain.sizes(ROWS, COLS)
    return torch.stack([torch.stack([t.sum() for t in rows.split(width, 1)]) for rows in squares.split(height)])


@asked
def test_no_tile_gets_worse_and_some_get_better(kind: str, name: str, grain: str) -> None:
    usual, searched = usual_of(kind, name, grain), form_of(kind, name, grain)
    before = errors(usual, side_for(usual, WEIGHT))
    after = errors(searched, side_for(searched, WEIGHT))
    assert bool((after <= before * (1 + 1e-6)).all())
    assert float(after.sum()) < float(before.sum())


@asked
def test_no_scale_that_was_tried_is_better(kind: str, name: str, grain: str) -> None:
    form = form_of(kind, name, grain)
    found, usual = side_for(form, WEIGHT), side_for(usual_of(kind, name, grain), WEIGHT)
    tried = [errors(form, {**found, form.scales.name: s}) for s in candidates(usual[form.scales.name], form.format)]
    least = torch.stack(tried).amin(0)
    assert bool((errors(form, found) <= least * (1 + 1e-6)).all())


@asked
def test_columns_count_by_their_importance(kind: str, name: str, grain: str) -> None:
    importance = torch.logspace(-3, 3, COLS)[torch.randperm(COLS, generator=torch.Generator().manual_seed(1))]
    form = form_of(kind, name, grain)
    plain, weighted = side_for(form, WEIGHT), side_for(form, WEIGHT, importance=importance)
    by_weight = [errors(form, s, importance=importance) for s in (plain, weighted)]
    assert bool((by_weight[1] <= by_weight[0] * (1 + 1e-5)).all())
    assert float(by_weight[1].sum()) < float(by_weight[0].sum())
    assert bits_of(side_for(form, WEIGHT, importance=torch.full((COLS,), 4.0))[form.scales.name]) == bits_of(
        plain[form.scales.name]
    )


@asked
def test_columns_of_each_matrix_count_by_their_own_importance(kind: str, name: str, grain: str) -> None:
    several = torch.logspace(-3, 3, COLS)[torch.stack([torch.arange(COLS), torch.arange(COLS).flip(0)])]
    form = form_of(kind, name, grain)
    found, *alone = (side_for(form, WEIGHT, importance=x)[form.scales.name] for x in (several, *several))
    if form.grain.tile[0] == 1:
        assert not torch.equal(*alone)
        assert torch.equal(found, torch.cat([alone[0][: ROWS // 2], alone[1][ROWS // 2 :]]))
    same = side_for(form, WEIGHT, importance=several[[0, 0]])[form.scales.name]
    assert torch.equal(same, alone[0])


@asked
def test_a_search_does_not_depend_on_how_a_weight_is_cut(kind: str, name: str, grain: str) -> None:
    form, flat, work = form_of(kind, name, grain), WEIGHT.view(-1), Workspace()
    ranges = [(a * COLS, min(a + 33, ROWS) * COLS) for a in range(0, ROWS, 33)]
    found = form.measure(lambda job: (job(flat[a:b], a, work) for a, b in ranges))
    assert all(bits_of(t) == bits_of(found.side[n]) for n, t in side_for(form, WEIGHT).items())


def decoded(form: Tiles, x: Tensor) -> Tensor:
    """What a form keeps of a weight."""
    flat, work = x.reshape(-1), Workspace()
    found = form.measure(lambda job: [job(flat, 0, work)])
    return form.decode(form.encode(flat, 0, found, work).data, 0, len(flat), found.side).view(x.shape)


@asked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_were_quantised_already_are_kept(kind: str, name: str, grain: str, dtype: torch.dtype) -> None:
    """Whatever scales they had: searched ones, powers of two or exact ones. NVFP4 with another factor is not found."""
    if (name, dtype) == ("int8", torch.bfloat16):
        pytest.skip("16 bits are about as coarse as the codes")
    form = form_of(kind, name, grain)
    for made in [
        form,
        usual_of(kind, name, grain),
        *([] if grain == "nvfp4" else [form_of(kind, name, grain, "exact")]),
    ]:
        x = decoded(made, WEIGHT).to(dtype)
        assert torch.equal(decoded(form, x).to(dtype), x)


def test_equals_go_to_the_usual_scale() -> None:
    scales = [torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[2.0, 2.0, 2.0]]), torch.tensor([[3.0, 3.0, 3.0]])]
    error = [torch.tensor([[1.0, 1.0, torch.nan]]), torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([[1.0, 0.5, 0.0]])]
    assert best_scales(scales, error).tolist() == [[1.0, 2.0, 1.0]]
    form = form_of("tiles", "int4", "group:32")
    assert side_for(form, torch.zeros(ROWS, COLS))[form.scales.name].unique().tolist() == [1.0]


def test_numbers_that_are_not_finite_keep_their_usual_scale() -> None:
    x = WEIGHT.clone()
    x[3, 7], x[9, 1] = torch.nan, torch.inf
    searched, usual = form_of("tiles", "e4m3fn", "row"), usual_of("tiles", "e4m3fn", "row")
    found, wanted = (side_for(f, x)[f.scales.name] for f in (searched, usual))
    assert torch.equal(found[[3, 9]], wanted[[3, 9]])
    assert not torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["int4", "int8", "e4m3fn"])
def test_readers_that_keep_scales_in_bf16_change_none(name: str) -> None:
    form = form_of("tiles", name, "row" if name == "e4m3fn" else "group:32")
    scales = side_for(form, WEIGHT)[form.scales.name]
    assert torch.equal(scales, scales.bfloat16().float())
    assert bool((scales.frexp()[0] != 0.5).any())


@pytest.mark.parametrize(("format", "grain"), [("int4", "group:32"), ("e4m3fn", "128x128"), ("e2m1", "nvfp4")])
def test_a_conversion_writes_the_same_bytes_with_any_number_of_workers(format: str, grain: str, tmp_path: Path) -> None:
    layout = "compressed-tensors" if grain == "nvfp4" else "lpconv"
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(2)) * 0.02  # two blocks
    names = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 1,
              "num_attention_heads": 8}  # fmt: skip
    source = write_checkpoint(tmp_path / "source", {n: weight * (i + 1) for i, n in enumerate(names)}, config=config)
    asked: dict[str, Any] = {"format": format, "granularity": grain, "layout": layout, "allow_missing": True}
    for workers in (1, 2):
        options = ConvertOptions(scale="search", verify="weights", workers=workers, **asked)
        convert(str(source), tmp_path / str(workers), options)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


@pytest.mark.parametrize(
    "options",
    [
        {"format": "e4m3fn"},
        {"format": "fp16", "granularity": "row"},
        {"format": "e4m3fn", "granularity": "mx"},
        {"method": "multipoint"},
        {"method": "collage"},
    ],
)
def test_what_has_no_scales_to_search_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"--scale search .*\w+ codes") as caught:
        fill_options(ConvertOptions(scale="search", **options))
    assert "--granularity" in str(caught.value.hint)


def test_other_formats_by_rule_keep_their_scales() -> None:
    assert not form_of("tiles", "bf16", "row").searches
    assert not form_of("tiles", "fp16", "row").searches
