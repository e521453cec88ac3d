"""Taking turns, with subjects that write down when they were asked."""

from typing import Any

import pytest

from lpconv.bench.interleave import interleave, ratio_over_launches, timing_of
from lpconv.bench.options import Effort
from lpconv.bench.team import Team
from lpconv.errors import VerificationError


class Recorded(Team):
    """A subject whose steps take `seconds`; its name goes to `log` whenever it is measured."""

    def __init__(self, name: str, seconds: float, log: list[str], recompiles: int = 0) -> None:
        self.name, self.seconds, self.log, self.recompiles = name, seconds, log, recompiles

    def ask(self, do: str, **arguments: Any) -> Any:
        self.log.append(self.name)
        return {
            "seconds": [self.seconds] * arguments["iterations"],
            "wall": self.seconds,
            "recompiles": self.recompiles,
        }


def effort(iterations: int = 12, rounds: int = 4) -> Effort:
    return Effort(min_iterations=iterations, min_seconds=0, rounds=rounds)


def test_baseline_and_variant_take_turns_and_swap_who_begins() -> None:
    log: list[str] = []

    base, variant = interleave(Recorded("A", 0.2, log), Recorded("B", 0.1, log), effort())

    assert "".join(log) == "AB" + "ABBAABBA"  # after a warm-up
    assert ratio_over_launches([(base.medians, variant.medians)]).value == pytest.approx(2)
    assert timing_of([variant], "cpu").num_samples == 12


def test_launches_share_the_effort() -> None:
    whole = Effort(min_iterations=30, min_seconds=2, rounds=12, launches=3)

    assert whole.of_a_launch() == Effort(min_iterations=10, min_seconds=2 / 3, rounds=4, launches=1)
    assert timing_of([interleave(Recorded("A", 0.1, []), None, whole.of_a_launch())[0]] * 3, "cpu").num_rounds == 12


def test_p99_needs_a_hundred_samples() -> None:
    few, _ = interleave(Recorded("A", 0.1, []), None, effort(iterations=99, rounds=1))
    many, _ = interleave(Recorded("A", 0.1, []), None, effort(iterations=100, rounds=1))

    assert timing_of([few], "cpu").p99_s is None
    assert timing_of([many], "cpu").p99_s == 0.1


def test_a_recompile_after_the_warm_up_ends_the_measurement() -> None:
    with pytest.raises(VerificationError, match="compiled 2 "):
        interleave(Recorded("A", 0.1, []), Recorded("B", 0.1, [], recompiles=2), effort())
