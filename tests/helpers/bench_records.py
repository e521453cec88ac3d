"""Example records of `lpconv bench`."""

from lpconv.bench.roofline import Gemm
from lpconv.results import (
    BenchResult,
    BenchRow,
    MemoryParts,
    MemoryRecord,
    NumericsRecord,
    PeakRecord,
    RatioRecord,
    TimingRecord,
)

# Figures as a large GPU might have: fp8 twice as fast as bf16.
GPU_PEAKS = PeakRecord(bf16_flops=7e14, fp32_flops=5e13, fp8_flops=1.3e15, bytes_per_s=3e12)
CPU_PEAKS = PeakRecord(bf16_flops=3e11, fp32_flops=1e11, fp8_flops=None, bytes_per_s=2e10)
GEMMS = (
    Gemm(names=("layers.0.up", "layers.0.gate"), n=14336, k=4096, is_head=False),
    Gemm(names=("layers.0.k",), n=64, k=4096, is_head=False),
    Gemm(names=("lm_head",), n=128256, k=4096, is_head=True),
)


def row(method: str = "static", *, ratio: tuple[float, float, float] = (1.3, 1.2, 1.4), **changes: object) -> BenchRow:
    """A row of a training bench; `plain` is its baseline."""
    is_baseline = method == "plain"
    value, low, high = (1.0, 1.0, 1.0) if is_baseline else ratio
    parts = MemoryParts(weights=100, gradients=50, optimizer=200, activations=600, other=50)
    facts: dict[str, object] = {
        "model": "llama-8b", "weights": "random", "layers": 4, "format": "bf16" if is_baseline else "fp8",
        "method": method, "optimizer": "adamw", "compiled": "blocks", "mode": "train", "batch": 2, "seq": 4096,
        "device": "GPU", "emulated": False, "baseline": "bf16 compiled by block", "is_baseline": is_baseline,
        "status": "ok", "ratio": RatioRecord(value=value, low=low, high=high), "tokens_per_s": 8192 / 0.1,
        "peak_memory": 1000,
        "timing": TimingRecord(
            num_samples=120, num_rounds=12, clock="CUDA events", median_s=0.1 / value, p10_s=0.09, p90_s=0.12,
            p99_s=0.13, wall_median_s=0.1,
        ),
        "memory": MemoryRecord(
            peak_bytes=1000, saved_bytes=600, reserved_bytes=2000, process_bytes=3000, parts=parts
        ),
        "numerics": NumericsRecord(output_error=0.06, gradient_error=0.1),
    }  # fmt: skip
    return BenchRow(**(facts | changes))  # type: ignore[arg-type]  # facts has the fields of a row


def result(*rows: BenchRow) -> BenchResult:
    """A bench with these rows."""
    return BenchResult(rows=rows, peaks=GPU_PEAKS, command="lpconv bench llama-8b")
