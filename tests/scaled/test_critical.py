"""Layers that stay in 16 bits: those with an outlier in their input, within the budget, and no others."""

import pytest
import torch
from torch import Tensor, nn

from lpconv.scaled.critical import InputRisk, critical_modules, input_risks


def test_a_layer_whose_input_has_an_outlier_is_found_and_costs_its_share() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 8))  # the last is the head
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))

    def found(x: Tensor) -> tuple[InputRisk, ...]:
        return critical_modules(input_risks(model, [{"input": x}]), max_share=0.5)

    assert found(x) == ()
    x[5, 3] = 1e4
    (first,) = found(x)
    assert first.layer == "0"
    assert first.share == pytest.approx(0.5)
    assert first.crest == pytest.approx(1e4 / float(x.square().mean().sqrt()))


def risk(layer: str, crest: float, sqnr_db: float, share: float) -> InputRisk:
    return InputRisk(layer=layer, crest=crest, sqnr_db=sqnr_db, share=share)


def test_the_budget_goes_to_the_largest_crests() -> None:
    risks = [risk("a", 200, 30, 0.06), risk("b", 9000, 10, 0.06), risk("c", 150, 30, 0.04), risk("d", 20, 31, 0.01)]
    assert [r.layer for r in critical_modules(risks)] == ["b", "c"]
    assert [r.layer for r in critical_modules(risks, max_share=1.0)] == ["b", "a", "c"]
    assert critical_modules(risks, max_share=0.0) == ()


def test_what_is_small_beside_the_rest_counts_too() -> None:
    assert critical_modules([risk("a", 90, 24, 0.05)])
