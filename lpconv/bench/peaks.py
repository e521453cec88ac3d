"""What this machine does at best: matrix products and copies, measured, since data sheets promise what none reaches."""

import time
from collections.abc import Callable

import torch

from lpconv.kernels.matmul import matmul
from lpconv.results import PeakRecord

__all__ = ["measure_peaks"]

_GPU_SIZE, _CPU_SIZE = 8192, 1024
_GPU_BYTES, _CPU_BYTES = 1 << 30, 1 << 27
_RUNS = 5
_FP8_CAPABILITY = (8, 9)


def measure_peaks(device: str) -> PeakRecord:
    """Products of square matrices in bf16, fp32 and, if the device has it, fp8; a copy that leaves the caches."""
    is_gpu = device != "cpu"
    n = _GPU_SIZE if is_gpu else _CPU_SIZE
    flops = 2.0 * n**3
    x = torch.randn(n, n, device=device)
    x_bf16 = x.bfloat16()
    fp8 = None
    if is_gpu and torch.cuda.get_device_capability() >= _FP8_CAPABILITY:
        x_fp8 = x.to(torch.float8_e4m3fn)
        fp8 = flops / _seconds(lambda: matmul(x_fp8, x_fp8.t()), device)
    source = torch.zeros(_GPU_BYTES if is_gpu else _CPU_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return PeakRecord(
        bf16_flops=flops / _seconds(lambda: torch.mm(x_bf16, x_bf16), device),
        fp32_flops=flops / _seconds(lambda: torch.mm(x, x), device),
        fp8_flops=fp8,
        bytes_per_s=2 * source.numel() / _seconds(lambda: target.copy_(source), device),
    )


def _seconds(run: Callable[[], object], device: str) -> float:
    """The shortest of a few runs after one that does not count: a peak is what the machine can do undisturbed."""
    times = []
    for _ in range(_RUNS + 1):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
