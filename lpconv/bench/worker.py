"""The child process: measures one case, or the machine's peaks, on command.

It reads requests from stdin and writes answers to stdout, as lines of JSON; output of libraries goes to stderr. An
answer is ``{"result": …}`` or ``{"error": …}``. The process ends when its stdin closes.

Peaks are the best measured speeds of matrix products and copies, because no program reaches the numbers of data sheets.
"""

import dataclasses
import json
import os
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
from lpconv.bench.runner import CaseRunner
from lpconv.errors import LpconvError, ResourceError, UnsupportedError, UsageError, first_line, peer_lost, typed_line
from lpconv.kernels.matmul import matmul
from lpconv.machine import own_stdout, peak_rss_bytes, read_text
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
    """One method per command; holds one case at a time."""

    def __init__(self) -> None:
        self._runner: CaseRunner | None = None

    @property
    def runner(self) -> CaseRunner:
        """The prepared case."""
        assert self._runner is not None, "prepare comes first"
        return self._runner

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

    def prepare(self, case: dict[str, Any], memory_share: float, rank: int, meeting: str) -> dict[str, Any]:
        """Build this process's part of a case, and describe it."""
        if case["processes"] > 1 and case["device"] != "cpu":
            case["device"] = f"cuda:{rank}"
        _use(case["device"], case["threads"], case["processes"])
        join(Case(**case), rank, meeting)
        runner = self._runner = CaseRunner(Case(**case), memory_share=memory_share)
        return {
            "emulated": runner.emulated,
            "weights": runner.weights,
            "num_layers": runner.num_layers,
            "num_parameters": runner.num_parameters,
            "estimate_bytes": runner.estimate_bytes,
            "compile_s": runner.compile_s,
            "numerics": dataclasses.asdict(runner.numerics),
            "gemms": [dataclasses.asdict(g) for g in runner.gemms],
            "device": _device_name(runner.case.device),
            "versions": _versions(),
        }

    def warm_up(self, iterations: int, seconds: float) -> None:
        """Run steps without recording them."""
        self.runner.measure(iterations, seconds)

    def measure(self, iterations: int, seconds: float) -> dict[str, Any]:
        """Step times in seconds, the wall time of a step, and the number of recompiles since the warm-up."""
        times, wall = self.runner.measure(iterations, seconds)
        return {"seconds": times, "wall": wall, "recompiles": self.runner.recompiles}

    def spin(self, seconds: float) -> int:
        """Run steps back to back for `seconds` and return their number."""
        return self.runner.spin(seconds)

    def memory(self) -> dict[str, Any]:
        """Memory of one step: the fields of a MemoryRecord."""
        record = self.runner.memory()
        reserved = process = None
        if self.runner.case.device != "cpu":
            reserved = torch.cuda.max_memory_reserved()
            free, total = torch.cuda.mem_get_info()
            process = total - free  # of all processes; only NVML can tell them apart
        process = process or peak_rss_bytes()
        return dataclasses.asdict(dataclasses.replace(record, reserved_bytes=reserved, process_bytes=process))

    def peaks(self, device: str, threads: int | None, processes: int) -> dict[str, Any]:
        """Peak speeds of the device: the fields of a PeakRecord."""
        _use(device, threads, processes)
        return dataclasses.asdict(measure_peaks(device))


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


def answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Run one request and return the answer, or the error as an answer."""
    command: Callable[..., Any] = getattr(worker, request.pop("do"))
    try:
        return {"result": command(**request)}
    except LpconvError as e:
        return {"error": e.to_dict()}
    except torch.OutOfMemoryError as e:
        error = ResourceError(first_line(e), hint="take a smaller --batch-size or --seq-len, or fewer --layers")
        return {"error": error.to_dict()}
    except Exception as e:  # errors of a model, compiler or peer belong to its row
        return {"error": (peer_lost(e) or LpconvError(typed_line(e))).to_dict()}


def main() -> None:
    """Answer requests until stdin closes."""
    answers = own_stdout()
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(answer(worker, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
