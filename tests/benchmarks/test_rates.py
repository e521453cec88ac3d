"""The programs that time finer scales, on what is small enough for a test."""

import dataclasses

import pytest
import torch

from benchmarks import model_free, rates
from benchmarks.convert import Measurement


def test_every_form_that_is_asked_for_is_timed_beside_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_SHAPE", (128, 256))
    found = rates.rates(torch.bfloat16, 1)
    assert [(r.format, r.granularity) for r in found][:2] == [("e4m3fn", "tensor"), ("e4m3fn", "row")]
    assert len(found) == len(rates._ASKED)
    assert found[0].share == 1
    assert all(r.share == pytest.approx(r.per_second / found[0].per_second) for r in found)


def test_a_case_is_told_by_the_medians_and_the_largest_peak_of_its_rounds() -> None:
    one = Measurement(
        size="2GB", dtype="bfloat16", case="ours", round=0, bytes_in=2 * 10**9, bytes_out=10**9, wall_s=2.0, cpu_s=3.0,
        peak_rss_bytes=10**8, reported_s=None,
    )  # fmt: skip
    rounds = [one, *(dataclasses.replace(one, wall_s=w, cpu_s=9.0, peak_rss_bytes=2 * 10**8) for w in (4.0, 9.0))]
    assert model_free.table(rounds).splitlines()[-1] == "| ours | 4.0 | 9.0 | 200 | 1.00 |"
