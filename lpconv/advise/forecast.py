"""Step time and memory of conversions, which are not run: rooflines of Linears, and estimates of bytes."""

from dataclasses import replace
from typing import Any

from lpconv.advise.options import AdviseOptions
from lpconv.bench.cases import PLAIN, Case
from lpconv.bench.models import gemms_of, running_bytes
from lpconv.bench.roofline import step_gemm_seconds
from lpconv.models.inputs import vocabulary_size
from lpconv.results import AdviceRow, PeakRecord

_NARROW = ("bf16", "fp16", "e4m3fn", "e5m2", "int4", "int8", "e2m1")


class Forecast:
    """What candidates for `model` take on this machine, whose `peaks` were measured."""

    def __init__(self, model: Any, options: AdviseOptions, seq_len: int, peaks: PeakRecord) -> None:
        self._model, self._options, self._seq_len = model, options, seq_len
        self._gemms = gemms_of(model)
        self._peaks = peaks

    def of_inference(self, row: AdviceRow) -> AdviceRow:
        """A conversion with its memory and time: weights opened in 16 bits, or fp32 where they hold more than that."""
        fmt = str(row.settings["format"])
        is_narrow = fmt in _NARROW and "residual" not in row.settings
        case = self._case("bf16" if is_narrow else "fp32")
        memory = running_bytes(self._model, case, vocabulary_size(self._model.config))
        opened = "opened in 16 bits" if is_narrow else "opened in fp32"
        return replace(
            row,
            memory_bytes=memory,
            memory_from=f"estimate, {opened}",
            step_time_s=self._seconds(wide=not is_narrow),
            time_from="roofline of its Linears, measured peaks here",
        )

    def _seconds(self, *, wide: bool) -> float:
        peaks = self._peaks
        if wide:  # products of four-byte numbers
            peaks = replace(peaks, bf16_flops=peaks.fp32_flops, bytes_per_s=peaks.bytes_per_s / 2)
        tokens = self._options.batch_size * self._seq_len
        return step_gemm_seconds(self._gemms, tokens, peaks, method=None, train=False)

    def _case(self, fmt: str) -> Case:
        return Case(
            model="", layers=None, format=fmt, method=PLAIN, mode="infer", optimizer=None, seq=self._seq_len,
            batch=self._options.batch_size, compiled="off", device="cpu",
        )  # fmt: skip
