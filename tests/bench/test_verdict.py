"""The roofline and its words, on peaks that a GPU and a CPU might have."""

import dataclasses
import re

import pytest

from lpconv.bench.roofline import gemm_record, gemm_seconds, roofline_verdict, step_gemm_seconds
from lpconv.results import GpuRecord
from tests.helpers.bench_records import CPU_PEAKS, GEMMS, GPU_PEAKS, row

LARGE, NARROW, HEAD = GEMMS


def test_a_product_takes_as_long_as_the_slower_of_arithmetic_and_traffic() -> None:
    m = 8192
    flops, traffic = 2 * m * LARGE.n * LARGE.k, 2 * (m * LARGE.k + LARGE.n * LARGE.k + m * LARGE.n)

    seconds = gemm_seconds(LARGE, m, GPU_PEAKS, method=None, train=False)

    assert seconds == pytest.approx(max(flops / 7e14, traffic / 3e12))
    assert gemm_record(LARGE, m, GPU_PEAKS, method="static", train=False).bound == "compute"
    assert gemm_record(LARGE, 16, GPU_PEAKS, method="static", train=False).bound == "memory"


def test_fewer_passes_over_the_data_gain_more() -> None:
    gains = {
        m: gemm_record(LARGE, 8192, GPU_PEAKS, method=m, train=True).gain or 0 for m in ("static", "tensor", "row")
    }

    assert 1.0 < gains["row"] < gains["tensor"] < gains["static"] < 1.3e15 / 7e14


def test_small_products_lose_and_say_from_where_they_would_gain() -> None:
    narrow = gemm_record(NARROW, 8192, GPU_PEAKS, method="static", train=True)
    large = gemm_record(LARGE, 8192, GPU_PEAKS, method="static", train=True)

    assert narrow.gain is not None
    assert narrow.gain < 1
    assert narrow.break_even_tokens is None  # its 64 outputs do not pay for casting its input, at any batch
    assert large.break_even_tokens is not None
    at_break_even = gemm_record(LARGE, large.break_even_tokens, GPU_PEAKS, method="static", train=True).gain
    below = gemm_record(LARGE, large.break_even_tokens // 2, GPU_PEAKS, method="static", train=True).gain
    assert (below or 0) <= 1 < (at_break_even or 0)


def test_the_head_stays_in_16_bits() -> None:
    assert gemm_record(HEAD, 8192, GPU_PEAKS, method="static", train=True).gain is None
    with_head = step_gemm_seconds(GEMMS, 8192, GPU_PEAKS, method="static", train=True)
    without = step_gemm_seconds(GEMMS[:2], 8192, GPU_PEAKS, method="static", train=True)
    assert with_head - without == pytest.approx(gemm_seconds(HEAD, 8192, GPU_PEAKS, method=None, train=True))


def test_on_a_gpu_the_verdict_names_winners_and_losers() -> None:
    found = roofline_verdict([row("plain"), row("static"), row("row", ratio=(0.9, 0.8, 0.95))], GEMMS, GPU_PEAKS)

    assert found is not None
    text = " ".join(found.sentences)
    assert re.search(r"fp8 static \w+ faster \w+ bf16", text)
    assert re.search(r"fp8 row \w+ slower \w+ bf16", text)
    assert "emulated" not in text


def test_on_a_cpu_it_says_that_fp8_is_emulated_and_promises_nothing() -> None:
    found = roofline_verdict([row("plain"), row("static", emulated=True)], GEMMS, CPU_PEAKS)

    assert found is not None
    assert "emulates fp8" in found.sentences[0]
    assert not any(" fp8 static" in s for s in found.sentences)
    assert all(g.gain is None for g in found.gemms)


def test_intervals_that_contain_one_decide_nothing() -> None:
    found = roofline_verdict([row("plain"), row("static", ratio=(1.05, 0.98, 1.1))], GEMMS, GPU_PEAKS)

    assert found is not None
    assert "measurably" in " ".join(found.sentences)


def test_a_gpu_that_others_used_or_that_was_throttled_is_told() -> None:
    state = GpuRecord(
        sm_clock_mhz=1980, memory_clock_mhz=2619, power_w=650.0, power_limit_w=700.0, throttle_reasons=("power cap",),
        foreign_processes=(8,),
    )  # fmt: skip

    found = roofline_verdict([row("plain"), row("static", gpu=state)], GEMMS, GPU_PEAKS)

    assert found is not None
    others, throttled = found.sentences[-2:]
    assert "8" in others
    assert "power" in throttled


def test_intervals_of_few_rounds_are_not_to_be_trusted() -> None:
    once, often = row("static"), row("static")
    assert once.timing is not None
    once = dataclasses.replace(once, timing=dataclasses.replace(once.timing, num_rounds=1))

    texts = [
        " ".join(v.sentences) for r in (once, often) if (v := roofline_verdict([row("plain"), r], GEMMS, GPU_PEAKS))
    ]

    assert ["1 round;" in text for text in texts] == [True, False]


@pytest.mark.parametrize(("seconds", "told"), [(0.104, False), (0.2, True), (0.05, True)])
def test_a_baseline_that_did_not_keep_its_pace_is_told(seconds: float, told: bool) -> None:
    found = roofline_verdict([row("plain"), row("static", baseline_median_s=seconds)], GEMMS, GPU_PEAKS)

    assert found is not None
    ratio = f"{seconds / 0.1:.2f}"
    assert any("fp8 static" in s and ratio in s for s in found.sentences) == told


def test_without_a_baseline_there_is_no_verdict() -> None:
    assert roofline_verdict([row("static")], GEMMS, GPU_PEAKS) is None
