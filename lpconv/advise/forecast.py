"""Estimate step time and memory of a converted model, from a roofline of its Linears and from byte counts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lpconv.advise.subject import Subject
from lpconv.bench.models import gemms_of, running_bytes
from lpconv.bench.options import PLAIN, Case
from lpconv.bench.roofline import step_gemm_seconds
from lpconv.models.inputs import vocabulary_size
from lpconv.results import PeakRecord

_NARROW = ("bf16", "fp16", "e4m3fn", "e5m2", "int4", "int8", "e2m1")


def opened_in(settings: Mapping[str, Any]) -> str:
    """The format in which a conversion opens: bf16, or fp32 if its weights have more than 16 bits."""
    return "bf16" if str(settings["format"]) in _NARROW and "residual" not in settings else "fp32"


def forecast(subject: Subject, batch_size: int, peaks: PeakRecord, *, opened: str) -> dict[str, Any]:
    """Estimated fields of an `AdviceRow`: memory and time of a step of a model opened in bf16 or fp32."""
    model, seq_len = subject.model, subject.prepared.seq_len
    case = Case(
        model="", layers=None, format=opened, method=PLAIN, mode="infer", optimizer=None, seq=seq_len,
        batch=batch_size, compiled="off", device="cpu",
    )  # fmt: skip
    if opened == "fp32":  # operands have four bytes
        peaks = replace(peaks, bf16_flops=peaks.fp32_flops, bytes_per_s=peaks.bytes_per_s / 2)
    return {
        "memory_bytes": running_bytes(model, case, vocabulary_size(model.config)),
        "memory_from": f"estimate, opened in {'fp32' if opened == 'fp32' else '16 bits'}",
        "step_time_s": step_gemm_seconds(gemms_of(model), batch_size * seq_len, peaks, method=None, train=False),
        "time_from": "roofline of its Linear layers, from measured peaks",
    }
