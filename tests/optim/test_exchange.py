"""Starting from fp32 or from a converted checkpoint, and exporting fp32."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError
from lpconv.mcf.split import RESIDUALS
from lpconv.optim import CollageAdamW, LowPrecisionAdamW, fp32_state_dict, start_from_checkpoint, start_from_fp32
from lpconv.plan.options import ConvertOptions


class Tied(nn.Module):
    """An embedding, a norm and an output layer that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight


def fp32_values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Tied()
    nn.init.normal_(model.norm.weight)
    return {n: t.clone() for n, t in model.state_dict().items()}


def bf16_model(values: dict[str, Tensor]) -> Tied:
    model = Tied().bfloat16()
    model.load_state_dict({n: t.bfloat16() for n, t in values.items()})
    return model


@pytest.mark.parametrize(("variant", "bound"), [("plus", 2.0**-17), ("fp32-master", 0.0)])
def test_fp32_goes_in_and_comes_out_within_the_bound(variant: str, bound: float) -> None:
    values = fp32_values()
    model = bf16_model(values)
    optimizer = LowPrecisionAdamW(model.parameters(), variant=variant, compiled=False)
    start_from_fp32(optimizer, model, values)
    actual = fp32_state_dict(optimizer, model)
    assert set(actual) == set(values)
    for name, value in values.items():
        assert actual[name].dtype == torch.float32
        assert bool(((actual[name] - value).abs() <= bound * value.abs()).all())
    assert actual["out.weight"] is actual["embed.weight"], "tied stays tied"


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversions")
    for residual in ("bf16", "exact16", "int8"):
        options = ConvertOptions(method="collage", residual=residual, verify="none")
        convert(str(demo_checkpoint()), folder / residual, options)
    return folder


@pytest.mark.parametrize("form", ["bf16", "exact16", "int8"])
def test_a_conversion_starts_with_what_its_rounding_lost(form: str, conversions: Path) -> None:
    source = LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).state_dict()
    model = LlamaForCausalLM.from_pretrained(conversions / form, dtype=torch.bfloat16)
    optimizer = CollageAdamW(model.parameters(), compiled=False)
    num_set = start_from_checkpoint(optimizer, model, conversions / form)
    assert num_set == len(list(model.parameters()))
    bound = 2.0**-17 + RESIDUALS[form].relative_bound
    for name, t in fp32_state_dict(optimizer, model).items():
        assert bool(((t - source[name]).abs() <= bound * source[name].abs()).all()), name
    assert any(bool(optimizer.state[p]["residual"].any()) for p in model.parameters())


def test_a_conversion_below_a_new_head_starts_the_part_it_holds(conversions: Path) -> None:
    body = LlamaForCausalLM.from_pretrained(conversions / "bf16", dtype=torch.bfloat16)
    head = nn.Linear(8, 2).bfloat16()
    optimizer = CollageAdamW([*body.parameters(), *head.parameters()], compiled=False)
    assert start_from_checkpoint(optimizer, body, conversions / "bf16") == len(list(body.parameters()))
    assert not optimizer.parts(head.weight)[0][1].any()


def test_a_changed_root_is_refused(conversions: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(conversions / "bf16", tmp_path / "tuned")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    nn.init.ones_(model.model.norm.weight)
    model.save_pretrained(folder)
    optimizer = CollageAdamW(model.parameters(), compiled=False)
    with pytest.raises(InputError, match=r"model.safetensors"):
        start_from_checkpoint(optimizer, model, folder)


def test_folders_and_models_that_do_not_fit_are_refused(conversions: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.bfloat16)
    optimizer = CollageAdamW(model.parameters(), compiled=False)
    with pytest.raises(InputError, match="Collage") as caught:
        start_from_checkpoint(optimizer, model, demo_checkpoint())
    assert "--method collage" in str(caught.value.hint)
    other = Tied().bfloat16()
    with pytest.raises(InputError, match="bf16`"):
        start_from_checkpoint(CollageAdamW(other.parameters(), compiled=False), other, conversions / "bf16")


def test_wrong_values_are_refused_and_change_nothing() -> None:
    values = fp32_values()
    model = bf16_model(values)
    optimizer = CollageAdamW(model.parameters(), compiled=False)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    del values["norm.weight"]
    with pytest.raises(InputError, match=r"norm\.weight") as caught:
        start_from_fp32(optimizer, model, {n: t + 1 for n, t in values.items()})
    assert caught.value.hint
    with pytest.raises(InputError, match="shape"):
        start_from_fp32(optimizer, model, values | {"norm.weight": torch.ones(9)})
    with pytest.raises(InputError, match=r"\d of .* \d+ parameters"):
        fp32_state_dict(optimizer, bf16_model(fp32_values()))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_the_low_part_is_used_from_the_first_step() -> None:
    """1 + 2^-10 is 1 in bf16. Seven updates of 2^-11 pass half an ulp only together with what the conversion kept."""
    values = {"weight": torch.full((1, 1), 1 + 2.0**-10)}
    moved = []
    for with_low in (True, False):
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        optimizer = CollageAdamW(model.parameters(), lr=2.0**-11, weight_decay=0.0, compiled=False)
        if with_low:
            start_from_fp32(optimizer, model, values)
        for _ in range(7):
            model.weight.grad = -torch.ones_like(model.weight)
            optimizer.step()
        moved.append(float(model.weight.detach()) > 1)
    assert moved == [True, False]
