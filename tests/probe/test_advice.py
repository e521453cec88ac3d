"""Advice agrees with what casting the tensors would have done."""

import re

import pytest
import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.cast import cast
from lpconv.formats.histogram import exponent_histogram_reference
from lpconv.formats.spec import BLOCK_FORMATS
from lpconv.probe.advice import MAX_UNDERFLOW, assess, operands_at_risk, own_scale, recommend_loss_scale, table, what_if
from lpconv.probe.record import ProbedTensor, ProbeResult
from lpconv.report.numbers import ROLE_WORDS
from tests.helpers.block_reference import cast_blocks


def normal(std: float, seed: int = 0) -> Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) * std


def probed(layer: str, role: str, x: Tensor) -> ProbedTensor:
    return ProbedTensor(layer=layer, role=role, histogram=exponent_histogram_reference(x).to_dict())


def result(*tensors: ProbedTensor) -> ProbeResult:
    return ProbeResult(tensors=tensors, steps_seen=1, steps_recorded=1, overhead=0.0)


SMALL, LARGE = normal(2.0**-24), normal(2.0**-3, 1)


def test_a_loss_scale_multiplies_gradients_only() -> None:
    for role, scale in (("grad_input", 10), ("weight_grad", 10), ("weight", 0), ("output", 0)):
        found = what_if(probed("a", role, SMALL), "fp16", log2_loss_scale=10)
        assert found.log2_loss_scale == scale
        assert found.underflow == (cast(SMALL * 2.0**scale, "fp16") == 0).double().mean().item()


def test_the_worst_comes_first() -> None:
    found = assess(result(probed("a", "output", LARGE), probed("b", "output", SMALL)), "fp16")
    assert [t.layer for t, _ in found] == ["b", "a"]
    assert found[0][1].lost > 0.3


def test_the_recommended_scale_is_the_smallest_that_serves_every_gradient() -> None:
    probe = result(probed("a", "grad_output", SMALL), probed("b", "weight_grad", LARGE))
    advice = recommend_loss_scale(probe, "fp16")

    def worst(log2_scale: int) -> float:
        return max((cast(x * 2.0**log2_scale, "fp16") == 0).double().mean().item() for x in (SMALL, LARGE))

    assert worst(advice.log2_scale) <= MAX_UNDERFLOW < worst(advice.log2_scale - 1)
    assert advice.worst_underflow_before == worst(0)
    assert advice.worst_underflow_after == worst(advice.log2_scale)
    top = LARGE.abs().max().item() * 2.0**advice.max_log2_scale
    assert 65504 / 16 < top < 65504 / 2  # two binades of headroom, and not more than three


def test_a_spread_that_no_scale_serves_gets_the_largest_safe_one() -> None:
    probe = result(probed("a", "grad_output", normal(2.0**-60)), probed("b", "grad_output", LARGE))
    advice = recommend_loss_scale(probe, "fp16")
    assert advice.log2_scale == advice.max_log2_scale
    assert advice.worst_underflow_after == 1
    large = recommend_loss_scale(result(probed("a", "grad_output", LARGE * 2.0**18)), "fp16")
    assert large.log2_scale < 0


def test_which_formats_fit() -> None:
    asked = ["bf16", "fp16", "e5m2", "e4m3fn", "e2m1"]
    ready, tiny = ([what_if(probed("a", "weight", x), n) for n in asked] for x in (LARGE * 2.0**3, SMALL * 2.0**-40))
    assert [r.format for r in ready if r.fits] == ["bf16", "fp16", "e5m2", "e4m3fn"]
    assert [r.format for r in tiny if r.fits] == ["bf16"]
    for rates in (ready, tiny):
        assert [r.format for r in rates if r.fits_own_scale] == ["bf16", "fp16", "e5m2", "e4m3fn"]


@pytest.mark.parametrize("format", ["fp16", "e5m2", "e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("top", [1.0, 1.75, 1.8125, 1.8126, 1.9375, 1.99999])
def test_the_own_scale_is_the_largest_without_overflow(format: str, top: float) -> None:
    x = torch.cat([LARGE.clamp(-1, 1), torch.tensor([-top])]) * 2.0**-20
    scale = own_scale(probed("a", "weight", x), format)

    def overflows(log2_scale: int) -> bool:
        return bool(cast(x.double() * 2.0**log2_scale, format, overflow="nan").isnan().any())

    assert not overflows(scale)
    assert overflows(scale + 1)


@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_blocks_flush_no_more_than_a_scale_for_the_whole_tensor(block_format: str) -> None:
    x = (LARGE[:19_968] * 2.0 ** torch.linspace(-12, 0, 19_968)).view(-1, 32)
    element = BLOCK_FORMATS[block_format].element.name
    tensor = probed("a", "weight", x)
    bound = tensor.exponents.num_underflow(element, log2_scale=own_scale(tensor, element))
    assert int((cast_blocks(x, block_format) == 0).sum()) <= bound


def test_the_table_names_the_worst_and_the_scale() -> None:
    text = table(result(probed("good", "output", LARGE), probed("bad", "grad_output", SMALL)), "fp16", limit=1)
    lines = text.splitlines()
    assert lines[1].startswith("bad")
    assert ROLE_WORDS["grad_output"] in lines[1]
    assert " 1 more " in lines[2]
    assert re.search(r"fp16: 2\^", lines[3])
    assert "2^" not in table(result(probed("a", "weight", LARGE)), "fp16")


def test_without_gradients_there_is_no_loss_scale_and_zeros_fit_at_any() -> None:
    nothing = probed("a", "grad_input", torch.zeros(3))
    for found in (result(nothing), result(probed("a", "weight", LARGE))):
        with pytest.raises(UsageError, match="gradients"):
            recommend_loss_scale(found, "fp16")
    assert own_scale(nothing, "e4m3fn") == 0
    assert what_if(nothing, "e2m1").fits_own_scale


def test_operands_with_an_outlier_are_at_risk_and_the_cure_is_named() -> None:
    with_outlier = normal(1.0).clone()
    with_outlier[3] = 5000.0
    found = operands_at_risk(
        result(
            probed("a", "input", normal(1.0)),
            probed("b", "input", with_outlier),
            probed("b", "weight", normal(0.02)),
            probed("b", "grad_output", normal(1e-6)),
            probed("b", "output", with_outlier),  # read by no product as it is
        )
    )
    assert len(found) == 2
    assert re.match("input .* b: .*largest", found[0])
    assert "--recipe unit-fp8" in found[1]
    assert "--critical auto" in found[1]
    assert operands_at_risk(result(probed("a", "input", normal(1.0)))) == ()
