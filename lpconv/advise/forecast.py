"""Step time and memory of a converted model, estimated: from a roofline of its Linears, and from counted bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from lpconv.bench.cases import PLAIN, Case
from lpconv.bench.models import gemms_of, running_bytes
from lpconv.bench.roofline import step_gemm_seconds
from lpconv.models.inputs import vocabulary_size
from lpconv.results import PeakRecord

_NARROW = ("bf16", "fp16", "e4m3fn", "e5m2", "int4", "int8", "e2m1")


def is_narrow(settings: Mapping[str, Any]) -> bool:
    """Whether the output of a conversion opens in 16 bits; in fp32 if its weights hold more than that."""
    return str(settings["format"]) in _NARROW and "residual" not in settings


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The fields of an `AdviceRow` that are estimated: memory and time of a step, and where each comes from."""

    memory_bytes: int
    memory_from: str
    step_time_s: float
    time_from: str

    @classmethod
    def of(cls, model: Any, peaks: PeakRecord, *, seq_len: int, batch_size: int, narrow: bool) -> Self:
        """A step of `model` opened in 16 bits (`narrow`) or in fp32 on this machine, whose peaks were measured."""
        case = Case(
            model="", layers=None, format="bf16" if narrow else "fp32", method=PLAIN, mode="infer", optimizer=None,
            seq=seq_len, batch=batch_size, compiled="off", device="cpu",
        )  # fmt: skip
        if not narrow:  # products of four-byte numbers
            peaks = replace(peaks, bf16_flops=peaks.fp32_flops, bytes_per_s=peaks.bytes_per_s / 2)
        return cls(
            memory_bytes=running_bytes(model, case, vocabulary_size(model.config)),
            memory_from=f"estimate, opened in {'16 bits' if narrow else 'fp32'}",
            step_time_s=step_gemm_seconds(gemms_of(model), batch_size * seq_len, peaks, method=None, train=False),
            time_from="roofline of its Linears, measured peaks here",
        )
