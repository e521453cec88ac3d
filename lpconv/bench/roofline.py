"""Predicted time of a Linear's products, from their size and the measured peaks, and the verdict on rows of a bench.

A product takes as long as the slower of its arithmetic and its memory traffic (Williams et al. 2009). In fp8 an operand
takes one byte instead of two and the arithmetic runs at the fp8 peak, but casts are added: each reads two bytes per
element and writes one, and scaling by amax reads the tensor once more before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lpconv.report.bench import verdict_sentences
from lpconv.results import BenchRow, GemmRecord, PeakRecord, VerdictRecord


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """The Linears of one shape: their names, output size `n` and input size `k`. The head stays in 16 bits."""

    names: tuple[str, ...]
    n: int
    k: int
    is_head: bool


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
    enough = (2**i for i in range(4, 21) if gains and _gain(gemm, 2**i, peaks, method, train) > 1)
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
        break_even_tokens=next(enough, None),
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


def roofline_verdict(rows: Sequence[BenchRow], gemms: tuple[Gemm, ...], peaks: PeakRecord) -> VerdictRecord | None:
    """The verdict on rows that share model, mode, batch and sequence length; None if the baseline was not measured."""
    done = [r for r in rows if r.status == "ok" and r.timing is not None]
    base = next((r for r in done if r.is_baseline), None)
    if base is None:
        return None
    method = next((r.method for r in done if r.format == "fp8" and r.method in CASTS), "static")
    m, train = base.batch * base.seq, base.mode == "train"
    return VerdictRecord(
        title=f"{base.model}, {base.place}",
        sentences=tuple(verdict_sentences(base, done, emulates_fp8=peaks.fp8_flops is None)),
        gemms=tuple(gemm_record(g, m, peaks, method=method, train=train) for g in gemms),
    )
