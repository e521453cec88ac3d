"""Noise and bias of rounded gradients, against many draws of the same recipe."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from lpconv.advise.train import drop_noisy_recipes
from lpconv.cli.main import app
from lpconv.kernels.linear import FP4_RECIPES, use_recipe
from lpconv.probe import gradient_noise
from lpconv.probe.noise import NOISE_RECIPES
from lpconv.results import AdviceRow, GradientNoise, RecipeNoise
from lpconv.scaled.places import heads


class Small(nn.Module):
    """Three linear layers, the last of which counts as a head; the output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x).square().mean()
        return found


BATCH = {"x": torch.randn(48, 64, generator=torch.Generator().manual_seed(1))}


def gradients(model: nn.Module) -> Tensor:
    """The gradients of the rounded weights for the batch, as one vector."""
    model.zero_grad()
    model(**BATCH).backward()
    found = (model.get_parameter(f"layers.{i}.weight").grad for i in (0, 2))
    return torch.cat([g.flatten() for g in found if g is not None]).double()


def as_loss(output: Tensor) -> Tensor:
    return output


def test_nearest_rounding_has_bias_only() -> None:
    model = Small()
    (found,) = gradient_noise(model, [BATCH], recipes={"mxfp8": NOISE_RECIPES["mxfp8"]}, loss=as_loss)
    rounded = copy.deepcopy(model)
    layers = use_recipe(rounded, NOISE_RECIPES["mxfp8"], keep=heads(rounded))
    exact, other = gradients(model), gradients(rounded)
    assert found.noise == 0
    assert found.ratio == math.inf
    assert found.gradient == pytest.approx(exact.norm().item())
    assert found.bias == pytest.approx((other - exact).norm().item())
    assert found.bias > 0
    assert [x.name for x in found.layers] == layers == ["layers.0", "layers.2"]


def test_noise_and_bias_are_those_of_many_draws() -> None:
    """The variance of 300 draws, and the distance of their mean from the exact gradient."""
    model = Small()
    (found,) = gradient_noise(model, [BATCH] * 60, recipes={"nvfp4": FP4_RECIPES["nvfp4"]}, loss=as_loss)
    rounded = copy.deepcopy(model)
    use_recipe(rounded, FP4_RECIPES["nvfp4"], keep=heads(rounded))
    torch.manual_seed(5)
    draws = torch.stack([gradients(rounded) for _ in range(300)])
    exact = gradients(model)
    variance = draws.var(0).sum().item()
    bias_sq = ((draws.mean(0) - exact).square().sum() - variance / 300).item()
    assert found.noise / 60**0.5 == pytest.approx(variance**0.5, rel=0.05)
    assert found.bias / 60**0.5 == pytest.approx(bias_sq**0.5, rel=0.05)
    assert found.gradient / 60**0.5 == pytest.approx(exact.norm().item())


def test_the_model_and_the_generator_stay_as_they_were() -> None:
    model = Small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(3)
    wanted = torch.rand(())
    torch.manual_seed(3)
    gradient_noise(model, [BATCH], loss=as_loss)
    assert torch.equal(torch.rand(()), wanted)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert type(model.layers[0]) is nn.Linear


def test_the_seed_decides_the_noise() -> None:
    first, again, other = (gradient_noise(Small(), [BATCH], loss=as_loss, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


class Routed(nn.Module):
    """Two experts; rounded products route the batch to the first one, exact products to the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(64, 16), nn.Linear(64, 16)])
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.experts[type(self.experts[0]) is nn.Linear]
        found: Tensor = self.last(chosen(x)).square().mean()
        return found


def test_an_expert_that_rounding_skips_or_adds_has_a_gradient_of_zero() -> None:
    (found,) = gradient_noise(Routed(), [BATCH], recipes={"mxfp8": NOISE_RECIPES["mxfp8"]}, loss=as_loss)
    skipped, added = found.layers[1], found.layers[0]
    assert (skipped.name, added.name) == ("experts.1", "experts.0")
    assert skipped.bias == skipped.gradient > 0
    assert added.bias > added.gradient == 0


def test_gradients_that_are_not_finite_have_no_figures() -> None:
    model = Small()
    model.layers[0].weight.data[0, 0] = math.inf
    assert gradient_noise(model, [BATCH], loss=as_loss) == ()


@pytest.mark.parametrize(("noise", "drowned"), [(0.0, False), (0.57, False), (0.58, True)])
def test_a_gradient_drowns_below_root_three_of_its_noise(noise: float, drowned: bool) -> None:
    assert GradientNoise(name="a", gradient=1.0, noise=noise, bias=9.0).is_drowned is drowned


def test_advice_leaves_out_recipes_whose_gradients_are_noise() -> None:
    rows = [AdviceRow(purpose="train", name=n, settings={}, status="unmeasured") for n in ("nvfp4", "bf16")]
    noise = [RecipeNoise(name="nvfp4", gradient=1.0, noise=0.8, bias=0.0, layers=())]
    four_bits, other = drop_noisy_recipes(rows, noise)
    assert (four_bits.status, other) == ("pruned", rows[1])
    assert "1.2 times" in four_bits.why


def test_the_command_measures_noise_on_demand(tmp_path: Path) -> None:
    asked = ["probe", "demo", "--noise", "--steps", "1", "--batch-size", "2", "--seq-len", "16", "--json"]
    result = CliRunner().invoke(app, [*asked, "-o", str(tmp_path / "p")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["noise"]
    assert [n["name"] for n in found] == ["mxfp8", "nvfp4", "quartet2", "mxfp4"]
    assert all(n["gradient"] > n["bias"] > 0 for n in found)
    assert [n["noise"] > 0 for n in found] == [False, True, True, True]
    page = (tmp_path / "p" / "report.html").read_text()
    assert "√3" in page
