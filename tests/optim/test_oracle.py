"""What each variant loses against AdamW in fp64: the table of docs/methods/collage.md, as thresholds."""

import pytest

from tests.optim.reference import run_beside_fp64

pytestmark = pytest.mark.filterwarnings("ignore:variant:UserWarning")
BETA2 = pytest.mark.parametrize("beta2", [0.95, 0.99, 0.999])


@BETA2
@pytest.mark.parametrize(("arithmetic", "bound"), [("fused", 1e-3), ("paper", 3e-3), ("compiled", 1e-3)])
def test_plus_follows_fp64(beta2: float, arithmetic: str, bound: float) -> None:
    if arithmetic == "compiled":
        outcome = run_beside_fp64(beta2, "plus", compiled=True)
    else:
        outcome = run_beside_fp64(beta2, "plus", arithmetic)
    assert outcome.displacement_error <= bound
    assert outcome.v_ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_plain_bf16_does_not_or_the_test_would_be_blind(beta2: float) -> None:
    plain = run_beside_fp64(beta2, "bf16").displacement_error
    stochastic = run_beside_fp64(beta2, "stochastic").displacement_error
    assert plain >= 0.3
    assert 1e-3 < stochastic < plain


@pytest.mark.parametrize("arithmetic", ["fused", "paper"])
def test_light_lets_the_second_moment_stick_at_a_high_beta2(arithmetic: str) -> None:
    assert run_beside_fp64(0.95, "light", arithmetic).displacement_error <= 3e-3
    stuck = run_beside_fp64(0.999, "light", arithmetic)
    assert stuck.v_ratio > 1.1
    assert stuck.displacement_error > 0.03


def test_pairs_for_all_three_leave_a_tenth_of_what_plus_leaves() -> None:
    assert run_beside_fp64(0.999, "full").displacement_error <= 1.5e-4


@BETA2
@pytest.mark.parametrize(("variant", "bound"), [("light-int8", 0.01), ("int8-moment", 0.015), ("eco", 0.03)])
def test_fewer_bytes_than_light_follow_fp64_at_any_beta2(variant: str, bound: float, beta2: float) -> None:
    outcome = run_beside_fp64(beta2, variant)
    assert outcome.displacement_error <= bound
    assert outcome.v_ratio == pytest.approx(1, abs=0.01)


def test_rivals_with_fp32() -> None:
    assert run_beside_fp64(0.999, "fp32-master").displacement_error <= 3e-6
    assert run_beside_fp64(0.999, "fp32-moments").displacement_error >= 0.3, "the weight is what bf16 loses"


def test_kahan_equals_light_in_weights() -> None:
    """Both keep 16 bits of the weight; the second moment decides."""
    light = run_beside_fp64(0.95, "light").displacement_error
    assert run_beside_fp64(0.95, "kahan").displacement_error == pytest.approx(light, rel=0.1)
