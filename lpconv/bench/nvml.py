"""What a GPU says about itself while it works: energy, clocks, limits, who else is there.

`GpuMonitor` is the seam: NVML behind `nvidia-ml-py` where there is a GPU, something simple in tests.
"""

import importlib
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from lpconv.results import EnergyRecord, GpuRecord

# The counter moves every 20 to 100 ms (NVML), so that a window of two seconds is off by 5 % at most.
_MIN_WINDOW_S = 2.0


class GpuMonitor(Protocol):
    """One GPU, watched from outside."""

    def energy_mj(self) -> int:
        """Millijoules since the driver was loaded."""

    def state(self, own_pids: Collection[int]) -> GpuRecord:
        """Clocks, power and limits now, and the compute processes that are not among `own_pids`."""


class Nvml:
    """A GPU through the `pynvml` module of nvidia-ml-py."""

    def __init__(self, pynvml: Any, index: int) -> None:
        pynvml.nvmlInit()
        self._nvml = pynvml
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(index)

    def energy_mj(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu))

    def state(self, own_pids: Collection[int]) -> GpuRecord:
        nvml, gpu = self._nvml, self._gpu
        power = self._known(nvml.nvmlDeviceGetPowerUsage, gpu)
        limit = self._known(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu)
        processes = self._known(nvml.nvmlDeviceGetComputeRunningProcesses, gpu) or []
        return GpuRecord(
            sm_clock_mhz=self._known(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._known(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_MEM),
            power_w=None if power is None else power / 1e3,
            power_limit_w=None if limit is None else limit / 1e3,
            throttle_reasons=self._throttle_reasons(),
            foreign_processes=tuple(p.pid for p in processes if p.pid not in own_pids),
        )

    def _known(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """A figure, or None where this GPU or this user may not have it."""
        try:
            return read(*arguments)
        except self._nvml.NVMLError:
            return None

    def _throttle_reasons(self) -> tuple[str, ...]:
        bits = self._known(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._gpu) or 0
        return tuple(words for name, words in _REASONS.items() if bits & getattr(self._nvml, name, 0))


# Reasons that make a measurement doubtful; an idle GPU or clocks set by an application are none.
_REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal slowdown (software)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal slowdown (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}


def find_monitor(index: int) -> GpuMonitor | None:
    """NVML's view of GPU `index`; None without nvidia-ml-py or a driver that answers."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        return Nvml(pynvml, index)
    except pynvml.NVMLError:
        return None


def measure_energy(
    monitor: GpuMonitor,
    spin: Callable[[float], int],
    tokens_per_step: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> EnergyRecord:
    """Energy of steps run without a pause. `spin` runs them for so many seconds and says how many there were.

    Nothing is subtracted for an idle GPU. A window under two seconds is no measurement, nor is a counter that did not
    move.
    """
    before, start = monitor.energy_mj(), clock()
    steps = spin(1.25 * _MIN_WINDOW_S)
    joules, window = (monitor.energy_mj() - before) / 1e3, clock() - start
    if window < _MIN_WINDOW_S:
        return EnergyRecord(window_s=window, unavailable=f"the window was {window:.1f} s, under {_MIN_WINDOW_S:.0f} s")
    if joules <= 0 or steps < 1:
        return EnergyRecord(window_s=window, unavailable="the GPU's energy counter did not move")
    return EnergyRecord(
        joules_per_step=joules / steps, joules_per_token=joules / steps / tokens_per_step, window_s=window
    )
