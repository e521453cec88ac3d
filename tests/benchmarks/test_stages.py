"""`benchmarks/stages.py` says where the processor time of a conversion goes."""

import shutil
from pathlib import Path

import pytest

from benchmarks.stages import STAGES, _child, table
from lpconv.data import demo_checkpoint


@pytest.mark.parametrize("grain", ["tensor", "row"])
def test_the_stages_of_a_conversion_are_timed_and_add_up(grain: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo_checkpoint(), source)
    found = _child(source, "e4m3fn", grain)
    assert all(found[stage] > 0 for stage in STAGES if stage not in {"guess scales", "write back to the disk"})
    assert found["in"] > found["out"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    lines = table(found, {"copy": 1e-10, "hash": 1e-9}).splitlines()
    assert len(lines) == len(STAGES) + 3
    assert lines[-1].startswith(f"| all | {sum(found[s] for s in STAGES):.2f} |")
