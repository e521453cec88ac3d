"""Step time and memory of candidates where nothing measured them: rooflines of Linears, and estimates of bytes."""

from dataclasses import replace
from typing import Any

from lpconv.advise.options import AdviseOptions
from lpconv.bench.cases import PLAIN, Case
from lpconv.bench.models import gemms_of, running_bytes
from lpconv.bench.roofline import CASTS, step_gemm_seconds
from lpconv.devices import DEVICES, HERE
from lpconv.models.inputs import vocabulary_size
from lpconv.results import AdviceRow, PeakRecord
from lpconv.train.recipes import RECIPES

__all__ = ["Forecast"]

_NARROW = ("bf16", "fp16", "e4m3fn", "e5m2", "int4", "int8", "e2m1")
_CODES = ("e4m3fn", "e5m2")


class Forecast:
    """What candidates for `model` take on the device named: peaks of its data sheet, or those measured here."""

    def __init__(self, model: Any, options: AdviseOptions, seq_len: int, here: PeakRecord) -> None:
        self._model, self._options, self._seq_len = model, options, seq_len
        self._gemms = gemms_of(model)
        device = DEVICES.get(options.device)
        self._peaks = here if device is None else device.peaks
        self._whose = "measured peaks here" if device is None else f"data sheet of {device.title}"
        self.memory_bytes = None if device is None else device.memory_bytes

    def of_inference(self, row: AdviceRow) -> AdviceRow:
        """A conversion with its memory and time: weights opened in 16 bits, or fp32 where they hold more than that."""
        fmt = str(row.settings["format"])
        is_narrow = fmt in _NARROW and "residual" not in row.settings
        case = self._case("bf16" if is_narrow else "fp32")
        memory = running_bytes(self._model, case, vocabulary_size(self._model.config))
        opened = "opened in 16 bits" if is_narrow else "opened in fp32"
        method = "static" if fmt in _CODES and self._peaks.fp8_flops is not None else None
        seconds = self._seconds(method, train=False, wide=not is_narrow)
        return replace(
            row, memory_bytes=memory, memory_from=f"estimate, {opened}", step_time_s=seconds, time_from=self._source
        )

    def of_training(self, row: AdviceRow) -> AdviceRow:
        """A recipe with the time of a step on the device named; what was measured here stays where that is meant."""
        if self._options.device == HERE:
            return row
        precision = RECIPES[row.name].arithmetic.precision
        method = "static" if precision == "fp8" and self._peaks.fp8_flops is not None else None
        seconds = self._seconds(method, train=True, wide=precision == "fp32")
        return replace(row, step_time_s=seconds, time_from=self._source)

    @property
    def _source(self) -> str:
        return f"roofline of its Linears, {self._whose}"

    def _seconds(self, method: str | None, *, train: bool, wide: bool) -> float:
        assert method is None or method in CASTS
        peaks = self._peaks
        if wide:  # products of four-byte numbers
            peaks = replace(peaks, bf16_flops=peaks.fp32_flops, bytes_per_s=peaks.bytes_per_s / 2)
        tokens = self._options.batch_size * self._seq_len
        return step_gemm_seconds(self._gemms, tokens, peaks, method=method, train=train)

    def _case(self, fmt: str) -> Case:
        return Case(
            model="", layers=None, format=fmt, method=PLAIN, mode="infer", optimizer=None, seq=self._seq_len,
            batch=self._options.batch_size, compiled="off", device="cpu",
        )  # fmt: skip
