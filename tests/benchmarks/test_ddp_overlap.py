"""The share of a trace's reductions that lies within the backward pass."""

import pytest

from benchmarks.ddp_overlap import Step


def test_reductions_that_run_at_a_time_count_once() -> None:
    step = Step(backward_ms=10.0, alone_ms=9.0, done_ms=14.0, reductions_ms=((2.0, 6.0), (4.0, 8.0), (9.0, 13.0)))
    assert step.share_within == pytest.approx((6 + 1) / (6 + 4))


@pytest.mark.parametrize(("begin", "share"), [(10.0, 0.0), (8.0, 0.5), (1.0, 1.0)])
def test_what_is_sent_after_the_backward_pass_is_not_within_it(begin: float, share: float) -> None:
    step = Step(backward_ms=10.0, alone_ms=9.0, done_ms=14.0, reductions_ms=((begin, begin + 4),))
    assert step.share_within == share
