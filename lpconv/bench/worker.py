"""The child process: one case, or the machine's peaks, measured on command.

A line of JSON on stdin asks, a line of JSON on stdout answers; what libraries print goes to stderr. An answer is
``{"result": …}`` or ``{"error": …}``. The process ends with its stdin.
"""

import dataclasses
import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, TextIO

import torch

import lpconv
from lpconv.bench.cases import Case
from lpconv.bench.peaks import measure_peaks
from lpconv.bench.runner import Runner
from lpconv.errors import LpconvError, ResourceError, UnsupportedError, UsageError

__all__ = ["main"]

_VERSIONS = ("torch", "transformers", "torchao", "transformer-engine", "torch-optimi", "bitsandbytes")


class _Worker:
    def __init__(self) -> None:
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "prepare comes first"
        return self._runner

    def look(self, device: str | None) -> dict[str, Any]:
        """Which device a run would use; UnsupportedError for a GPU that is not there."""
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if chosen not in ("cpu", "cuda") and not chosen.startswith("cuda:"):
            raise UsageError(f"unknown device `{chosen}`", hint="cpu, cuda or cuda:0")
        if chosen == "cpu":
            return {"device": "cpu", "index": None, "name": _device_name("cpu")}
        if not torch.cuda.is_available():
            raise UnsupportedError("torch finds no GPU here", hint="leave --device out, or see `lpconv doctor`")
        index = torch.device(chosen).index or 0
        return {"device": f"cuda:{index}", "index": index, "name": torch.cuda.get_device_name(index)}

    def prepare(self, case: dict[str, Any], memory_share: float) -> dict[str, Any]:
        _use(case["device"])
        runner = self._runner = Runner(Case(**case), memory_share=memory_share)
        return {
            "emulated": runner.emulated,
            "weights": "checkpoint" if runner.has_real_weights else "random",
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
        self.runner.measure(iterations, seconds)

    def measure(self, iterations: int, seconds: float) -> dict[str, Any]:
        times, wall = self.runner.measure(iterations, seconds)
        return {"seconds": times, "wall": wall, "recompiles": self.runner.recompiles}

    def spin(self, seconds: float) -> int:
        return self.runner.spin(seconds)

    def memory(self) -> dict[str, Any]:
        found = self.runner.memory()
        reserved = process = None
        if self.runner.case.device != "cpu":
            reserved = torch.cuda.max_memory_reserved()
            free, total = torch.cuda.mem_get_info()
            process = total - free  # of all processes; NVML tells them apart where it is there
        process = process or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return dataclasses.asdict(found) | {"reserved_bytes": reserved, "process_bytes": process}

    def peaks(self, device: str) -> dict[str, Any]:
        _use(device)
        return dataclasses.asdict(measure_peaks(device))


def _use(device: str) -> None:
    """Let torch's functions that name no GPU mean this one."""
    if device != "cpu":
        torch.cuda.set_device(device)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else f"CPU, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    found = {"lpconv": lpconv.__version__, "python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _answer(worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
    command: Callable[..., Any] = getattr(worker, request.pop("do"))
    try:
        return {"result": command(**request)}
    except LpconvError as e:
        return {"error": e.to_dict()}
    except torch.OutOfMemoryError as e:
        found = ResourceError(str(e).splitlines()[0], hint="take a smaller --batch or --seq, or fewer --layers")
        return {"error": found.to_dict()}
    except Exception as e:  # whatever a model or a peer raises belongs to its row
        first = (str(e).splitlines() or [""])[0]
        return {"error": LpconvError(f"{type(e).__name__}: {first}").to_dict()}


def main() -> None:
    """Answer until stdin ends."""
    answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = _Worker()
    for line in sys.stdin:
        print(json.dumps(_answer(worker, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
