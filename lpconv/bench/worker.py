"""The child process: measures one case, or the machine's peaks, on command.

It reads requests from stdin and writes answers or errors to stdout, pickled; output of libraries goes to stderr. The
process ends when its stdin closes.

Peaks are the best measured speeds of matrix products and copies, because no program reaches the numbers of data sheets.
"""

import contextlib
import dataclasses
import os
import pickle
import platform
import re
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lpconv.bench.models import join
from lpconv.bench.options import Case, parse_device
from lpconv.bench.roofline import Gemm
from lpconv.bench.runner import CaseRunner
from lpconv.errors import LpconvError, ResourceError, UnsupportedError, UsageError, first_line, peer_lost, typed_line
from lpconv.kernels.matmul import matmul
from lpconv.machine import own_stdout, read_text
from lpconv.report.numbers import plural
from lpconv.results import PeakRecord
from lpconv.version import __version__

_GPU_SIZE, _CPU_SIZE = 8192, 1024
_GPU_BYTES, _CPU_BYTES = 1 << 30, 1 << 27
_RUNS, _ENOUGH_S = 5, 1.0  # bf16 products of 1,024 take over a second on a CPU without AVX-512
_FP8_CAPABILITY = (8, 9)


def measure_peaks(device: str) -> PeakRecord:
    """Measure products of square matrices in bf16, fp32 and, if supported, fp8, and a copy larger than the caches."""
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
    """The shortest of several runs after a warm-up, because a peak is the undisturbed speed; fewer if they are slow."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= _RUNS and sum(times) < _ENOUGH_S):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


_ALL_THREADS = torch.get_num_threads()
_VERSIONS = ("torch", "transformers", "torchao", "transformer-engine", "torch-optimi", "bitsandbytes")


class Worker:
    """The commands of a process without a case; those with one are the methods of `runner`, which `prepare` makes."""

    runner: CaseRunner

    def look(self, device: str | None, processes: int) -> dict[str, Any]:
        """The device that a run would use (the first of several). Raises UnsupportedError if there is no such GPU."""
        chosen = parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if chosen == "cpu":
            return {"device": "cpu", "index": None, "name": _device_name("cpu")}
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "torch finds no GPU on this machine", hint="leave --device out, or see `lpconv doctor`"
            )
        index = torch.device(chosen).index or 0
        _check_gpus(chosen, index, processes)
        return {"device": f"cuda:{index}", "index": index, "name": torch.cuda.get_device_name(index)}

    def prepare(
        self, case: Case, memory_share: float, rank: int, meeting: str
    ) -> tuple[tuple[Gemm, ...], dict[str, Any]]:
        """Build this process's part of a case. Returns its linear layers and the fields of its row."""
        if case.processes > 1 and case.device != "cpu":
            case = dataclasses.replace(case, device=f"cuda:{rank}")
        _use(case.device, case.threads, case.processes)
        join(case, rank, meeting)
        runner = self.runner = CaseRunner(case, memory_share=memory_share)
        return runner.gemms, runner.facts | {"device": _device_name(case.device), "versions": _versions()}

    def peaks(self, device: str, threads: int | None, processes: int) -> PeakRecord:
        """Peak speeds of the device."""
        _use(device, threads, processes)
        return measure_peaks(device)


def _check_gpus(device: str, index: int, processes: int) -> None:
    num_gpus = torch.cuda.device_count()
    if processes > 1 and device != "cuda":
        raise UsageError(
            f"{processes} processes cannot share the one GPU `{device}`",
            hint="pass --device cuda, which gives each process its own",
        )
    if processes > num_gpus:
        raise UnsupportedError(
            f"{processes} processes need one GPU each, but torch finds {num_gpus}", hint=f"pass --processes {num_gpus}"
        )
    if index >= num_gpus:
        raise UnsupportedError(
            f"device `{device}` does not exist: torch finds {plural(num_gpus, 'GPU')}", hint="pass cuda:0"
        )


def _use(device: str, threads: int | None, processes: int) -> None:
    """Make this GPU torch's default, and divide a CPU's cores among processes."""
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, _ALL_THREADS // processes)
    if threads is not None:
        torch.set_num_threads(threads)
    if device != "cpu":
        torch.cuda.set_device(device)


def _device_name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    model = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    name = model[1].strip() if model else platform.machine() or "CPU"  # the family of processors if not on Linux
    return f"{name}, {plural(torch.get_num_threads(), 'thread')}"


def _versions() -> dict[str, str]:
    versions = {"lpconv": __version__, "python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def answer(worker: Worker, do: str, arguments: dict[str, Any]) -> Any:
    """Run one command of the worker or its runner, and return the answer or the error."""
    try:
        return getattr(worker if hasattr(worker, do) else worker.runner, do)(**arguments)
    except LpconvError as e:
        return e
    except torch.OutOfMemoryError as e:
        return ResourceError(first_line(e), hint="take a smaller --batch-size or --seq-len, or fewer --layers")
    except Exception as e:  # errors of a model, compiler or peer belong to its row
        return peer_lost(e) or LpconvError(typed_line(e))


def main() -> None:
    """Answer requests until stdin closes."""
    answers = own_stdout()
    worker = Worker()
    with contextlib.suppress(EOFError):
        while True:
            pickle.dump(answer(worker, *pickle.load(sys.stdin.buffer)), answers.buffer)
            answers.flush()


if __name__ == "__main__":
    main()
