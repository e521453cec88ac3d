"""Energy, clocks, limits and other processes of a GPU during a measurement, from NVML through `nvidia-ml-py`."""

import importlib
import time
from collections.abc import Callable, Collection
from typing import Any

from lpconv.results import EnergyRecord, GpuRecord

# NVML updates the counter every 20 to 100 ms, so a window of two seconds is off by at most 5 %.
_MIN_WINDOW_S = 2.0


class Nvml:
    """A GPU monitored through the `pynvml` module of nvidia-ml-py."""

    def __init__(self, pynvml: Any, index: int) -> None:
        pynvml.nvmlInit()
        self._nvml = pynvml
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(index)

    def energy_mj(self) -> int:
        """Energy in millijoules since the driver was loaded."""
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu))

    def state(self, own_pids: Collection[int]) -> GpuRecord:
        """Current clocks, power and limits, and the compute processes that are not in `own_pids`."""
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
        """Read a value; None if this GPU or user has no access to it."""
        try:
            return read(*arguments)
        except self._nvml.NVMLError:
            return None

    def _throttle_reasons(self) -> tuple[str, ...]:
        bits = self._known(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._gpu) or 0
        return tuple(words for name, words in _REASONS.items() if bits & getattr(self._nvml, name, 0))


# Reasons that make a measurement doubtful; idling and clocks set by an application do not.
_REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal slowdown (software)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal slowdown (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}


def find_monitor(index: int) -> Nvml | None:
    """Monitor of GPU `index` through NVML; None without nvidia-ml-py or a working driver."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        return Nvml(pynvml, index)
    except pynvml.NVMLError:
        return None


def measure_energy(
    monitor: Nvml,
    spin: Callable[[float], int],
    tokens_per_step: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> EnergyRecord:
    """Energy per step of back-to-back steps. `spin` runs steps for the given seconds and returns their number.

    Idle power is not subtracted. A window under two seconds, or a counter that did not move, gives no value.
    """
    before, start = monitor.energy_mj(), clock()
    steps = spin(1.25 * _MIN_WINDOW_S)
    joules, window = (monitor.energy_mj() - before) / 1e3, clock() - start
    if window < _MIN_WINDOW_S:
        return EnergyRecord(
            window_s=window, unavailable=f"the measurement took {window:.1f} s, less than {_MIN_WINDOW_S:.0f} s"
        )
    if joules <= 0 or steps < 1:
        return EnergyRecord(window_s=window, unavailable="the GPU's energy counter did not change")
    return EnergyRecord(
        joules_per_step=joules / steps, joules_per_token=joules / steps / tokens_per_step, window_s=window
    )
