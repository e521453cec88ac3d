"""The planted faults can still be planted."""

from tests.faults.planted import FAULTS, ROOT, place_of


def test_every_planted_fault_has_a_place_and_tests() -> None:
    for fault in FAULTS.values():
        assert place_of(fault, ROOT).is_file()
        assert all((ROOT / test).exists() for test in fault.tests), fault
