"""Devices that time and memory are foretold for: their data sheets' peaks. Imports no torch.

Dense products, no sparsity. No device reaches its sheet, so that times made of them are the least that a step can take;
peaks measured where the command runs (`lpconv.bench.worker.measure_peaks`) are not in here.
"""

from dataclasses import dataclass

from lpconv.results import PeakRecord

__all__ = ["DEVICES", "HERE", "Device"]

HERE = "here"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device by its full name, what it does at most, and its memory."""

    title: str
    peaks: PeakRecord
    memory_bytes: int


def _device(title: str, *, bf16: float, fp32: float, fp8: float | None, memory_gb: int, bytes_per_s: float) -> Device:
    """Products in 10^12 operations a second, memory in 10^9 bytes, its rate in 10^12 bytes a second."""
    peaks = PeakRecord(
        bf16_flops=bf16 * 1e12,
        fp32_flops=fp32 * 1e12,
        fp8_flops=None if fp8 is None else fp8 * 1e12,
        bytes_per_s=bytes_per_s * 1e12,
    )
    return Device(title=title, peaks=peaks, memory_bytes=memory_gb * 10**9)


# fp32 is that of the CUDA cores: torch leaves TF32 off unless it is told otherwise.
DEVICES: dict[str, Device] = {
    "a100": _device("NVIDIA A100 SXM 80 GB", bf16=312, fp32=19.5, fp8=None, memory_gb=80, bytes_per_s=2.039),
    "l40s": _device("NVIDIA L40S", bf16=362, fp32=91.6, fp8=733, memory_gb=48, bytes_per_s=0.864),
    "h100": _device("NVIDIA H100 SXM", bf16=989, fp32=67, fp8=1979, memory_gb=80, bytes_per_s=3.35),
    "h200": _device("NVIDIA H200 SXM", bf16=989, fp32=67, fp8=1979, memory_gb=141, bytes_per_s=4.8),
    "b200": _device("NVIDIA B200 (HGX)", bf16=2250, fp32=80, fp8=4500, memory_gb=180, bytes_per_s=7.7),
}
