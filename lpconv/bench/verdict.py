"""What the numbers mean, in sentences: per shape of Linear and for the whole model."""

from collections.abc import Iterator, Sequence

from lpconv.bench.roofline import CASTS, Gemm, gemm_record, step_gemm_seconds
from lpconv.report.numbers import plural, share_text
from lpconv.results import BenchRow, GemmRecord, PeakRecord, VerdictRecord

__all__ = ["verdict"]

_ALIGNMENT = 16
_ENOUGH_ROUNDS = 8
_STEADY = 1.1  # how far the baseline's step may move from row to row before we say so


def verdict(rows: Sequence[BenchRow], gemms: tuple[Gemm, ...], peaks: PeakRecord) -> VerdictRecord | None:
    """The verdict on rows that share model, mode, batch and sequence length; None where none of them was measured."""
    done = [r for r in rows if r.status == "ok" and r.timing is not None]
    base = next((r for r in done if r.is_baseline), None)
    if base is None:
        return None
    low = [r for r in done if r.format == "fp8"]
    method = next((r.method for r in low if r.method in CASTS), "static")
    m, train = base.batch * base.seq, base.mode == "train"
    records = tuple(gemm_record(g, m, peaks, method=method, train=train) for g in gemms)
    sentences = [
        *_emulation(low, peaks),
        *(_measured(r) for r in done if not r.is_baseline),
        *_shapes(records, method, peaks),
        _amdahl(base, low, gemms, peaks, method),
        *_padding(low, gemms, m),
        *_few_rounds(done),
        *_unsteady(base, done),
        *_disturbed(done),
    ]
    return VerdictRecord(title=f"{base.model}, {base.place}", sentences=tuple(sentences), gemms=records)


def _emulation(low: Sequence[BenchRow], peaks: PeakRecord) -> Iterator[str]:
    if low and peaks.fp8_flops is None:
        yield (
            "fp8 is emulated here: this device has no fp8 arithmetic, so codes are decoded to bf16 and multiplied "
            "there. The rows show numerics, memory and what the casts cost; they say nothing about speed on a GPU "
            "with fp8 tensor cores (compute capability 8.9 or higher)."
        )


def _measured(row: BenchRow) -> str:
    assert row.ratio is not None
    interval = f"{row.ratio.value:.2f} [{row.ratio.low:.2f}, {row.ratio.high:.2f}]"
    if row.ratio.low > 1:
        outcome = f"{row.name} is faster than {row.baseline}: {interval} times its speed"
    elif row.ratio.high < 1:
        outcome = f"{row.name} is slower than {row.baseline}: {interval} times its speed"
    else:
        outcome = f"{row.name} and {row.baseline} cannot be told apart in speed: {interval}"
    if row.numerics is None:
        return outcome + "."
    errors = f"outputs differ from fp32 by {share_text(row.numerics.output_error, 1)}"
    if row.numerics.gradient_error is not None:
        errors += f", gradients by {share_text(row.numerics.gradient_error, 1)}"
    return f"{outcome}; {errors}."


def _shapes(records: Sequence[GemmRecord], method: str, peaks: PeakRecord) -> Iterator[str]:
    """Which Linears gain and which lose in fp8, and from how many tokens on; nothing where fp8 is emulated."""
    if peaks.fp8_flops is None:
        return
    known = [r for r in records if r.gain is not None]
    gaining = [r for r in known if (r.gain or 0) > 1]
    losing = [r for r in known if (r.gain or 0) <= 1]
    if gaining:
        best = max(gaining, key=lambda r: r.gain or 0)
        yield (
            f"By the roofline of the measured peaks {plural(sum(r.count for r in gaining), 'Linear')} gain from fp8 "
            f"{method}, most of all {best.n} x {best.k}: {best.gain:.2f}."
        )
    for r in losing:
        since = f"it would gain from {r.break_even_tokens:,} tokens on" if r.break_even_tokens else "no batch helps"
        yield (
            f"fp8 {method} will be slower for the {plural(r.count, 'Linear')} of {r.n} x {r.k} at {r.m:,} tokens "
            f"({r.gain:.2f}), because the casts move more bytes than the products save; {since}."
        )


def _amdahl(base: BenchRow, low: Sequence[BenchRow], gemms: tuple[Gemm, ...], peaks: PeakRecord, method: str) -> str:
    """From the speed-up of the products to that of the step."""
    assert base.timing is not None
    m, train, step = base.batch * base.seq, base.mode == "train", base.timing.median_s
    plain = step_gemm_seconds(gemms, m, peaks, method=None, train=train)
    share = plain / step
    if share >= 1:
        return (
            f"At the measured peak the Linears alone would take {share:.2f} times a whole step of {base.name}: the "
            "machine was busy when the peak was measured, so the step cannot be split into products and the rest."
        )
    text = f"At the measured peak the Linears take {share_text(share, 1)} of a step of {base.name}"
    if peaks.fp8_flops is None:
        return f"{text}; were they free, the step would be {1 / (1 - share):.2f} times as fast at most (Amdahl)."
    fast = step_gemm_seconds(gemms, m, peaks, method=method, train=train)
    gain, expected = plain / fast, step / (step - plain + fast)
    measured = next((r.ratio.value for r in low if r.method == method and r.ratio), None)
    found = f"; measured {measured:.2f}" if measured is not None else ""
    return f"{text}; {gain:.2f} times faster Linears make the step {expected:.2f} times as fast (Amdahl){found}."


def _padding(low: Sequence[BenchRow], gemms: tuple[Gemm, ...], m: int) -> Iterator[str]:
    odd = [g for g in gemms if not g.is_head and (g.n % _ALIGNMENT or g.k % _ALIGNMENT)]
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
        yield f"The intervals come from {plural(fewest, 'round')}; with fewer than {_ENOUGH_ROUNDS} do not trust them."


def _unsteady(base: BenchRow, rows: Sequence[BenchRow]) -> Iterator[str]:
    """Rows measured while the machine was slower or faster than for the baseline's own row."""
    assert base.timing is not None
    for r in rows:
        change = (r.baseline_median_s or base.timing.median_s) / base.timing.median_s
        if not 1 / _STEADY < change < _STEADY:
            yield (
                f"While {r.name} was measured, {base.name} took {change:.2f} times as long as in its own row: the "
                "machine's load changed. The speed-up allows for that, step and tokens/s do not."
            )


def _disturbed(rows: Sequence[BenchRow]) -> Iterator[str]:
    """What NVML saw that makes times doubtful."""
    states = [r.gpu for r in rows if r.gpu is not None]
    strangers = sorted({pid for s in states for pid in s.foreign_processes})
    reasons = sorted({reason for s in states for reason in s.throttle_reasons})
    if strangers:
        yield f"Other processes used the GPU meanwhile ({', '.join(map(str, strangers))}): the times are doubtful."
    if reasons:
        yield f"The GPU was throttled ({', '.join(reasons)}): its times are those of a slower one."
