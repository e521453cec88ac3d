"""Energy and clocks, with an NVML and a clock that do what the test says."""

from types import SimpleNamespace
from typing import Any

import pytest

from lpconv.bench.nvml import _REASONS, Nvml, measure_energy
from lpconv.results import GpuRecord


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Monitor(Nvml):
    """Draws `watts` while the clock runs."""

    def __init__(self, clock: Clock, watts: float) -> None:
        self.clock, self.watts = clock, watts

    def energy_mj(self) -> int:
        return int(1000 * self.watts * self.clock.now)


def test_energy_is_that_of_the_window_over_its_steps() -> None:
    clock = Clock()

    def spin(seconds: float) -> int:
        clock.now += seconds
        return 50

    found = measure_energy(Monitor(clock, watts=400), spin, tokens_per_step=1000, clock=clock)

    assert found.window_s == 2.5
    assert found.joules_per_step == pytest.approx(400 * 2.5 / 50)
    assert found.joules_per_token == pytest.approx(400 * 2.5 / 50 / 1000)
    assert found.unavailable is None


@pytest.mark.parametrize(("share", "watts", "reason"), [(1.0, 0, "change"), (0.76, 400, "1.9 s")])
def test_a_counter_that_stands_still_and_a_short_window_are_no_measurement(
    share: float, watts: float, reason: str
) -> None:
    clock = Clock()

    def spin(seconds: float) -> int:
        clock.now += share * seconds
        return 50

    found = measure_energy(Monitor(clock, watts=watts), spin, tokens_per_step=1, clock=clock)

    assert found.joules_per_step is None
    assert reason in (found.unavailable or "")


class NotSupported(Exception):
    pass


def fake_pynvml(**changes: Any) -> Any:
    def unknown(*arguments: Any) -> Any:
        raise NotSupported

    facts = {
        "NVMLError": NotSupported, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2,
        "nvmlClocksThrottleReasonSwPowerCap": 0x4, "nvmlClocksThrottleReasonHwSlowdown": 0x8,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: f"gpu {index}",
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 12345,
        "nvmlDeviceGetPowerUsage": lambda gpu: 650_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=7), SimpleNamespace(pid=8)],
        "nvmlDeviceGetClockInfo": lambda gpu, kind: {1: 1980, 2: 2619}[kind],
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x1 | 0x4,
    }  # fmt: skip
    return SimpleNamespace(**(facts | dict.fromkeys(changes, unknown)))


def test_nvml_tells_clocks_limits_throttling_and_strangers() -> None:
    found = Nvml(fake_pynvml(), 0).state(own_pids={7})

    assert found == GpuRecord(
        sm_clock_mhz=1980, memory_clock_mhz=2619, power_w=650.0, power_limit_w=700.0, foreign_processes=(8,),
        throttle_reasons=(_REASONS["nvmlClocksThrottleReasonSwPowerCap"],),
    )  # fmt: skip
