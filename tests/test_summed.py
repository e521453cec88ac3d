"""Records that add up."""

from dataclasses import dataclass

from lpconv.summed import Summed, joined


@dataclass(frozen=True, kw_only=True)
class Counts(Summed):
    num: int = 0
    largest: float = joined(max, 0.0)
    names: tuple[str, ...] = ()


def test_fields_add_up_unless_they_are_joined_otherwise() -> None:
    one, other = Counts(num=2, largest=3.0, names=("a",)), Counts(num=5, largest=1.0, names=("b",))
    assert one + other == Counts(num=7, largest=3.0, names=("a", "b"))
    assert sum([one, other], Counts()) == one + other
