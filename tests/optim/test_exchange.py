"""Starting from fp32 or from a converted checkpoint, and exporting fp32."""

import pytest
import torch
from torch import Tensor, nn

from lpconv.errors import InputError
from lpconv.mcf.split import RESIDUALS
from lpconv.optim import CollageAdamW, fp32_state_dict, start_from_fp32, start_from_residual


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


def test_fp32_goes_in_and_comes_out_within_the_bound() -> None:
    values = fp32_values()
    model = bf16_model(values)
    optimizer = CollageAdamW(model.parameters(), compiled=False)
    start_from_fp32(optimizer, model, values)
    found = fp32_state_dict(optimizer, model)
    assert set(found) == set(values)
    for name, value in values.items():
        assert found[name].dtype == torch.float32
        assert bool(((found[name] - value).abs() <= 2.0**-17 * value.abs()).all())
    assert found["out.weight"] is found["embed.weight"], "tied stays tied"


def test_fp32_master_is_exact() -> None:
    values = fp32_values()
    model = bf16_model(values)
    optimizer = CollageAdamW(model.parameters(), variant="fp32-master", compiled=False)
    start_from_fp32(optimizer, model, values)
    assert all(torch.equal(t, values[n]) for n, t in fp32_state_dict(optimizer, model).items())


@pytest.mark.parametrize("kind", ["bf16", "exact16", "int8"])
def test_starting_from_a_conversion_equals_starting_from_its_fp32(kind: str) -> None:
    values = fp32_values()
    pairs = {n: RESIDUALS[kind].split(t) for n, t in values.items()}
    model = Tied().bfloat16()
    model.load_state_dict({n: hi for n, (hi, _) in pairs.items()})
    optimizer = CollageAdamW(model.parameters(), compiled=False)
    del pairs["out.weight"]  # a conversion writes a tied weight once
    start_from_residual(optimizer, model, {n: rest for n, (_, rest) in pairs.items()}, kind)
    bound = 2.0**-17 + RESIDUALS[kind].relative_bound
    for name, t in fp32_state_dict(optimizer, model).items():
        assert bool(((t - values[name]).abs() <= bound * values[name].abs()).all()), name


def test_parameters_without_a_residual_start_at_their_bf16_value() -> None:
    values = fp32_values()
    model = bf16_model(values)
    optimizer = CollageAdamW(model.parameters(), compiled=False)
    start_from_residual(optimizer, model, {})
    assert not any(bool(optimizer.state[p]["residual"].any()) for p in model.parameters())
    assert all(torch.equal(t, values[n].bfloat16().float()) for n, t in fp32_state_dict(optimizer, model).items())


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
    with pytest.raises(InputError, match="unknown residual"):
        start_from_residual(optimizer, model, {}, "bf61")
    with pytest.raises(InputError, match="not in this model"):
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
