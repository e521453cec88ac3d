"""Predicted time of a Linear's products, from their size and the measured peaks, and the verdict on rows of a bench.

A product takes as long as the slower of its arithmetic and its memory traffic (Williams et al. 2009). In fp8 an operand
takes one byte instead of two and the arithmetic runs at the fp8 peak, but casts are added: each reads two bytes per
element and writes one, and scaling by amax reads the tensor once more before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lpconv.report.numbers import plural, ratio_text, share_text
from lpconv.results import BenchRow, GemmRecord, PeakRecord, VerdictRecord


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """The Linears of one shape: their names, output size `n` and input size `k`. The head stays in 16 bits."""

    names: tuple[str, ...]
    n: int
    k: int
    is_head: bool


_ALIGNMENT = 16
_ENOUGH_ROUNDS = 8
_STEADY = 1.1  # largest ratio between the baseline's step times in different rows that goes unmentioned
# Number of casts of each element of an operand, and of passes over it that look for amax before, by method.
CASTS: dict[str, tuple[int, int]] = {
    "static": (1, 0),
    "delayed": (1, 0),
    "tensor": (1, 1),
    "row": (2, 1),
    "torchao-tensorwise": (1, 1),
    "torchao-rowwise": (2, 1),
    "te": (1, 0),
}


def gemm_record(gemm: Gemm, m: int, peaks: PeakRecord, *, method: str, train: bool) -> GemmRecord:
    """The roofline of all Linears of one shape, for `m` tokens."""
    products = 3 if train else 1
    count = len(gemm.names)
    flops = 2.0 * m * gemm.n * gemm.k
    traffic = 2.0 * (m * gemm.k + gemm.n * gemm.k + m * gemm.n)
    gains = peaks.fp8_flops is not None and not gemm.is_head
    return GemmRecord(
        names=gemm.names,
        count=count,
        m=m,
        n=gemm.n,
        k=gemm.k,
        flops=products * count * flops,
        bytes_moved=products * count * traffic,
        bound="compute" if flops / peaks.bf16_flops > traffic / peaks.bytes_per_s else "memory",
        gain=_gain(gemm, m, peaks, method, train) if gains else None,
        break_even_tokens=_break_even(gemm, peaks, method, train) if gains else None,
    )


def gemm_seconds(gemm: Gemm, m: int, peaks: PeakRecord, *, method: str | None, train: bool) -> float:
    """Predicted seconds of one such Linear in a step: in 16 bits if `method` is None, else in fp8 including casts."""
    products = 3 if train else 1
    flops = 2.0 * m * gemm.n * gemm.k
    x, w, y = m * gemm.k, gemm.n * gemm.k, m * gemm.n
    if method is None or peaks.fp8_flops is None:
        return products * max(flops / peaks.bf16_flops, 2 * (x + w + y) / peaks.bytes_per_s)
    # Two operands of one byte each and a result of two; the roles of the tensors change from product to product.
    traffic = [x + w + 2 * y, y + w + 2 * x, y + x + 2 * w][:products]
    multiply = sum(max(flops / peaks.fp8_flops, t / peaks.bytes_per_s) for t in traffic)
    num_casts, amax_passes = CASTS[method]
    cast_elements = x + w + y if train else x  # weights are cast in advance
    transposed = cast_elements if train and num_casts == 1 else 0  # written in the same pass as the cast
    cast_bytes = (3 * num_casts + 2 * amax_passes) * cast_elements + transposed
    return multiply + cast_bytes / peaks.bytes_per_s


def peaks_in(format: str, peaks: PeakRecord) -> PeakRecord:
    """The peaks of products without fp8 whose operands are in `format`: in fp32 they have four bytes."""
    if format != "fp32":
        return peaks
    return replace(peaks, bf16_flops=peaks.fp32_flops, bytes_per_s=peaks.bytes_per_s / 2)


def step_gemm_seconds(gemms: tuple[Gemm, ...], m: int, peaks: PeakRecord, *, method: str | None, train: bool) -> float:
    """Predicted seconds of all Linears of a step; the head stays in 16 bits."""
    return sum(
        len(g.names) * gemm_seconds(g, m, peaks, method=None if g.is_head else method, train=train) for g in gemms
    )


def _gain(gemm: Gemm, m: int, peaks: PeakRecord, method: str, train: bool) -> float:
    plain = gemm_seconds(gemm, m, peaks, method=None, train=train)
    return plain / gemm_seconds(gemm, m, peaks, method=method, train=train)


def _break_even(gemm: Gemm, peaks: PeakRecord, method: str, train: bool) -> int | None:
    """The smallest number of tokens, among powers of two from 16 to 2^20, at which fp8 gains; None if none does."""
    return next((2**i for i in range(4, 21) if _gain(gemm, 2**i, peaks, method, train) > 1), None)


@dataclass(frozen=True, kw_only=True)
class _StepRoofline:
    """Predicted seconds of the Linears of a step at the measured peaks: in the baseline, and in fp8 with `method`.

    `fp8_s` is None if fp8 is emulated. `gemms` are all Linears by shape, `inner` those that fp8 would compute.
    """

    method: str
    plain_s: float
    fp8_s: float | None
    gemms: tuple[GemmRecord, ...]
    inner: tuple[GemmRecord, ...]


def roofline_verdict(rows: Sequence[BenchRow], gemms: tuple[Gemm, ...], peaks: PeakRecord) -> VerdictRecord | None:
    """The verdict on rows that share model, mode, batch and sequence length; None if the baseline was not measured."""
    done = [r for r in rows if r.status == "ok" and r.timing is not None]
    base = next((r for r in done if r.is_baseline), None)
    if base is None:
        return None
    method = next((r.method for r in done if r.format == "fp8" and r.method in CASTS), "static")
    m, train = base.batch * base.seq, base.mode == "train"
    records = tuple(gemm_record(g, m, peaks, method=method, train=train) for g in gemms)
    native = peaks.fp8_flops is not None
    roofline = _StepRoofline(
        method=method,
        plain_s=step_gemm_seconds(gemms, m, peaks_in(base.format, peaks), method=None, train=train),
        fp8_s=step_gemm_seconds(gemms, m, peaks, method=method, train=train) if native else None,
        gemms=records,
        inner=tuple(r for r, g in zip(records, gemms, strict=True) if not g.is_head),
    )
    return VerdictRecord(title=f"{base.model}, {base.place}", sentences=_sentences(base, done, roofline), gemms=records)


def _sentences(base: BenchRow, done: Sequence[BenchRow], roofline: _StepRoofline) -> tuple[str, ...]:
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


def _emulation(low: Sequence[BenchRow], roofline: _StepRoofline) -> Iterator[str]:
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


def _shapes(roofline: _StepRoofline) -> Iterator[str]:
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


def _amdahl(base: BenchRow, low: Sequence[BenchRow], roofline: _StepRoofline) -> str:
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
