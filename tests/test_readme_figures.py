"""Figures of the table "Measured" in the README, computed from the raw results that they quote; not all rows yet."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def _compiled() -> str:
    rows = json.loads((RESULTS / "scaled.json").read_text())["time"]
    found = [r for r in rows if r["mode"] == "compiled"]
    ratios = [r["ratio"] for r in found]
    low, high = min(r["ratio_low"] for r in found), max(r["ratio_high"] for r in found)
    return f"medians of {min(ratios):.3f} to {max(ratios):.3f} of the time (quartiles {low:.3f} to {high:.3f})"


def _advice() -> str:
    """Rows of the table: case, forecasts inside, left out, recommended, …, time."""
    lines = (RESULTS / "advise" / "table.md").read_text().splitlines()[2:]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    shares = [int(c[-1].rpartition(", ")[2].removesuffix(" %")) for c in cells]
    inside, forecasts = (sum(int(c[1].split(" of ")[i]) for c in cells) for i in (0, 1))
    assert inside == forecasts
    assert f"all {forecasts} forecasts inside" in (ROOT / "README.md").read_text(encoding="utf-8")
    return f"{min(shares)} to {max(shares)} % of their time"


@pytest.mark.parametrize("figure", [_compiled, _advice])
def test_a_figure_of_the_readme_is_that_of_its_results(figure: Callable[[], str]) -> None:
    assert figure() in (ROOT / "README.md").read_text(encoding="utf-8")
