"""Numbers read as a person would write them, at the edges too."""

import math
import re

import pytest
import torch

from lpconv.report.numbers import (
    change_text,
    duration_text,
    error_text,
    kl_text,
    number_text,
    rate_text,
    scale_text,
    shape_text,
    share_text,
    size_text,
    sqnr_text,
    usual_sqnr,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (9_996, "10.0 kB"), (99_960, "100 kB"),
        (999_499, "999 kB"), (999_500, "1.00 MB"), (45_500_000, "45.5 MB"), (140 * 10**9, "140 GB"),
        (5 * 10**15, "5000 TB"), (None, "–"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits(size: int | None, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(200, 100, "2.00x smaller"), (100, 150, "1.50x larger"), (1000, 1001, "same"), (0, 5, "–"), (5, 0, "–")],
)
def test_change(before: int, after: int, text: str) -> None:
    assert change_text(before, after).startswith(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.64, "640 ms"), (0.9999, "1.0 s"), (59.96, "1 min 00 s"), (245, "4 min 05 s"),
     (3599.7, "1 h 00 min"), (90_000, "25 h 00 min"), (math.inf, "–"), (None, "–")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_share_is_never_rounded_to_none_or_all() -> None:
    assert share_text(0, 10**9) == "0 %"
    assert share_text(1, 10**9) == "< 0.01 %"
    assert share_text(10**9 - 1, 10**9) == "> 99.99 %"
    assert share_text(7, 7) == "100 %"
    assert share_text(0, 0) == "0 %"
    assert [share_text(part, 1) for part in (9.994, 9.996, 141.4)] == ["999 %", "1000 %", "14140 %"]


@pytest.mark.parametrize("part", range(1, 1000, 7))
def test_a_share_keeps_the_order_of_parts(part: int) -> None:
    smaller, larger = (float(share_text(p, 1000).split()[0]) for p in (part, part + 7))
    assert smaller <= larger


def test_special_values() -> None:
    assert sqnr_text(math.inf) == "exact"
    assert sqnr_text(None, " dB") == "–"
    assert sqnr_text(31.46, " dB") == "31.5 dB"


def test_a_number_that_is_missing_or_nan_is_a_dash() -> None:
    assert [number_text(x) for x in (1234.5, None, math.nan)] == ["1.23e+03", "–", "–"]
    assert error_text(0.0) == "0"
    assert error_text(4.88e-4) == "4.9e-04"
    assert error_text(1.0) == "1"
    assert rate_text(10**9, 0.0) == "–"
    assert shape_text(()) == "scalar"
    assert shape_text((384, 1536)) == "384 x 1536"


@pytest.mark.parametrize(("scale", "text"), [(2**-5, "2^-5"), (1.0, "2^0"), (0.3, "0.3"), (-0.5, "-0.5"), (0.0, "0")])
def test_scales_that_are_powers_of_two_say_so(scale: float, text: str) -> None:
    assert scale_text(scale) == text


@pytest.mark.parametrize("distribution", [torch.distributions.Normal(0.0, 1.0), torch.distributions.Laplace(0.0, 1.0)])
@pytest.mark.parametrize(
    ("name", "largest", "groups"),
    [
        ("float16", 1, [2**18]), ("bfloat16", 1, [2**18]), ("float8_e5m2", 57344, [2**18, 128]),
        ("float8_e4m3fn", 448, [2**18, 128]), *((f"int{n}", 2 ** (n - 1) - 1, [16, 128, 1024]) for n in range(2, 9)),
    ],
)  # fmt: skip
def test_usual_ratios_are_those_of_torch(
    name: str, largest: int, groups: list[int], distribution: torch.distributions.Distribution
) -> None:
    torch.manual_seed(0)
    x = distribution.sample((2**18,)).double()  # type: ignore[no-untyped-call]
    ours = {"float16": "fp16", "bfloat16": "bf16"}.get(name, name.removeprefix("float8_"))
    for size in groups:
        scales = f"{size} of a row" if size < 1024 else "row"
        low, high = map(int, re.findall(r"\b\d+\b", usual_sqnr(f"{ours} codes with a scale per {scales}")))
        scaled = x.view(-1, size) / x.view(-1, size).abs().amax(1, keepdim=True) * largest
        got = scaled.round() if name.startswith("int") else scaled.float().to(getattr(torch, name)).double()
        step = x.view(-1, size).abs().amax(1, keepdim=True) / largest
        noise = float(((got - scaled) * step).square().sum())
        assert low - 0.5 <= 10 * math.log10(float(x.square().sum()) / noise) <= high + 0.5
        if name.startswith("int"):  # with the best scale of each group
            tried = [(scaled / f).round().clamp(-largest - 1, largest) * f for f in torch.linspace(0.2, 1, 17).double()]
            noise = float(torch.stack([((t - scaled) * step).square().sum(1) for t in tried]).amin(0).sum())
            assert 10 * math.log10(float(x.square().sum()) / noise) <= high + 1
    assert not any(
        map(usual_sqnr, ("F32", "int4 codes, with one scale per row and point", "int8 codes with one scale"))
    )


@pytest.mark.parametrize(("kl", "words"), [(0.0, "none"), (0.0052, "0.0052 "), (0.0052, "(hardly"), (math.nan, "nan")])
def test_a_divergence_says_what_it_means(kl: float, words: str) -> None:
    assert words in kl_text(kl)
