"""Sentences that interpret the rows of a bench, per shape of Linear and for the whole model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lpconv.report.numbers import plural, ratio_text, share_text
from lpconv.results import BenchRow, GemmRecord

_ALIGNMENT = 16
_ENOUGH_ROUNDS = 8
_STEADY = 1.1  # largest ratio between the baseline's step times in different rows that goes unmentioned


@dataclass(frozen=True, kw_only=True)
class StepRoofline:
    """Predicted seconds of the Linears of a step at the measured peaks: in 16 bits, and in fp8 with `method`.

    `fp8_s` is None if fp8 is emulated. `gemms` are all Linears by shape, `inner` those that fp8 would compute.
    """

    method: str
    plain_s: float
    fp8_s: float | None
    gemms: tuple[GemmRecord, ...]
    inner: tuple[GemmRecord, ...]


def verdict_sentences(base: BenchRow, done: Sequence[BenchRow], roofline: StepRoofline) -> tuple[str, ...]:
    """The verdict on measured rows, including `base`, with the same model, mode and sizes."""
    low = [r for r in done if r.format == "fp8"]
    return (
        *_emulation(low, roofline),
        *(_row_sentence(r) for r in done if not r.is_baseline),
        *_shapes(roofline),
        _amdahl(base, low, roofline),
        *_padding(low, roofline.inner, base.batch * base.seq),
        *_few_rounds(done),
        *_load_changes(base, done),
        *_disturbances(done),
    )


def _emulation(low: Sequence[BenchRow], roofline: StepRoofline) -> Iterator[str]:
    if low and roofline.fp8_s is None:
        yield (
            "This device emulates fp8: it has no fp8 arithmetic, so codes are decoded to bf16 and multiplied "
            "in bf16. The rows show numerics, memory and the cost of casts, but not the speed on a GPU "
            "with fp8 tensor cores (compute capability 8.9 or higher)."
        )


def _row_sentence(row: BenchRow) -> str:
    assert row.ratio is not None
    interval = ratio_text(row.ratio)
    if row.ratio.low > 1:
        outcome = f"{row.name} is faster than {row.baseline}: {interval} times its speed"
    elif row.ratio.high < 1:
        outcome = f"{row.name} is slower than {row.baseline}: {interval} times its speed"
    else:
        outcome = f"{row.name} and {row.baseline} do not differ measurably in speed: {interval}"
    if row.numerics is None:
        return outcome + "."
    errors = f"outputs differ from fp32 by {share_text(row.numerics.output_error, 1)}"
    if row.numerics.gradient_error is not None:
        errors += f", gradients by {share_text(row.numerics.gradient_error, 1)}"
    return f"{outcome}; {errors}."


def _shapes(roofline: StepRoofline) -> Iterator[str]:
    """Which Linears gain and which lose in fp8, and the break-even number of tokens; nothing if fp8 is emulated."""
    method, known = roofline.method, [r for r in roofline.gemms if r.gain is not None]
    gaining = [r for r in known if (r.gain or 0) > 1]
    losing = [r for r in known if (r.gain or 0) <= 1]
    if gaining:
        best = max(gaining, key=lambda r: r.gain or 0)
        yield (
            f"By the roofline of the measured peaks, {plural(sum(r.count for r in gaining), 'Linear layer')} gain from "
            f"fp8 {method}, most of all {best.n} x {best.k}: {best.gain:.2f} times."
        )
    for r in losing:
        tokens = r.break_even_tokens
        since = f"it would gain with {tokens:,} tokens or more" if tokens else "no batch size helps"
        yield (
            f"Expect fp8 {method} to be slower in {plural(r.count, 'Linear layer')} of {r.n} x {r.k} at {r.m:,} tokens "
            f"({r.gain:.2f}), because the casts move more bytes than the products save; {since}."
        )


def _amdahl(base: BenchRow, low: Sequence[BenchRow], roofline: StepRoofline) -> str:
    """The speed-up of the step that follows from the speed-up of the products (Amdahl)."""
    assert base.timing is not None
    step, plain, fast = base.timing.median_s, roofline.plain_s, roofline.fp8_s
    share = plain / step
    if share >= 1:
        return (
            f"At the measured peak, Linear layers alone would take {share:.2f} times a step of {base.name}: the "
            "machine was busy when the peak was measured, so the step cannot be split into products and the rest."
        )
    text = f"At the measured peak, the Linear layers take {share_text(share, 1)} of a step of {base.name}"
    if fast is None:
        return f"{text}; if they took no time, the step would be {1 / (1 - share):.2f} times as fast (Amdahl)."
    gain, expected = plain / fast, step / (step - plain + fast)
    measured = next((r.ratio.value for r in low if r.method == roofline.method and r.ratio), None)
    comparison = f"; measured {measured:.2f}" if measured is not None else ""
    return (
        f"{text}; making them {gain:.2f} times faster makes the step {expected:.2f} times as fast (Amdahl){comparison}."
    )


def _padding(low: Sequence[BenchRow], gemms: Sequence[GemmRecord], m: int) -> Iterator[str]:
    odd = [g for g in gemms if g.n % _ALIGNMENT or g.k % _ALIGNMENT]
    if low and (odd or m % _ALIGNMENT):
        what = [f"{g.n} x {g.k}" for g in odd] + ([f"{m} tokens"] if m % _ALIGNMENT else [])
        yield (
            f"Not a multiple of 16: {', '.join(what)}. fp8 tensor cores need that, so such operands are copied and "
            "padded with zeros, which costs time."
        )


def _few_rounds(rows: Sequence[BenchRow]) -> Iterator[str]:
    timings = [r.timing for r in rows if r.timing and not r.is_baseline and r.timing.num_launches == 1]
    fewest = min((t.num_rounds for t in timings), default=_ENOUGH_ROUNDS)
    if fewest < _ENOUGH_ROUNDS:
        yield f"The intervals come from {plural(fewest, 'round')}; do not trust them with fewer than {_ENOUGH_ROUNDS}."


def _load_changes(base: BenchRow, rows: Sequence[BenchRow]) -> Iterator[str]:
    """Rows measured while the machine was slower or faster than for the baseline's own row."""
    assert base.timing is not None
    for r in rows:
        change = (r.baseline_median_s or base.timing.median_s) / base.timing.median_s
        if not 1 / _STEADY < change < _STEADY:
            yield (
                f"While {r.name} was measured, {base.name} took {change:.2f} times as long as in its own row: the "
                "machine's load changed. The speed-up accounts for that, but step times and tokens/s do not."
            )


def _disturbances(rows: Sequence[BenchRow]) -> Iterator[str]:
    """NVML observations that make times doubtful."""
    states = [r.gpu for r in rows if r.gpu is not None]
    strangers = sorted({pid for s in states for pid in s.foreign_processes})
    reasons = sorted({reason for s in states for reason in s.throttle_reasons})
    if strangers:
        yield f"Other processes used the GPU meanwhile ({', '.join(map(str, strangers))}): do not trust the times."
    if reasons:
        yield f"The GPU was throttled ({', '.join(reasons)}), so the times are too long."
