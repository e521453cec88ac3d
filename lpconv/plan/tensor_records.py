"""Records of tensors for reports, from plan and measurements."""

import math
from dataclasses import replace

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import BlockError, BlockStats, Measurement
from lpconv.plan.plan import PlannedTensor
from lpconv.results import TensorRecord

_NAMES = {f.safetensors: f.name for f in FORMATS.values() if f.safetensors}


def _format_name(dtype: str) -> str:
    """The format's name for a safetensors dtype; dtypes without a format keep their own name."""
    return _NAMES.get(dtype, dtype)


def sqnr_db(signal: float, noise: float) -> float:
    """10·log10(signal / noise) for two sums of squares; inf without noise, -inf if elements became Inf."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and noise < math.inf else -math.inf


def planned_record(t: PlannedTensor) -> TensorRecord:
    """The planned record of a tensor, from headers alone."""
    return TensorRecord(
        name=t.name,
        shape=t.info.shape,
        source_dtype=t.info.dtype,
        action=t.action,
        format=t.format.name if t.format else _format_name(t.info.dtype),
        reason=t.reason,
        tied_to=t.tied_to,
        bytes_in=t.info.num_bytes,
        bytes_out=t.bytes_out,
        points=t.form.num_points,
        rounding=t.form.rounding,
    )


def tensor_record(
    t: PlannedTensor,
    scale: float | None,
    stats: BlockStats | None,
    error: BlockError | None,
    measured: Measurement | None = None,
) -> TensorRecord:
    """The record of a written tensor. `stats` and `error` are None for tensors that were only copied."""
    record = planned_record(t)
    if stats is None or error is None:
        return record
    return replace(
        record,
        scale=scale,
        rms=stats.rms,
        absmax=stats.absmax,
        sqnr_db=sqnr_db(stats.sum_squares, error.sum_squares),
        max_rel_error=error.max_relative,
        num_nan=stats.num_nan,
        num_inf=stats.num_inf,
        num_saturated=error.num_saturated,
        num_flushed=error.num_flushed,
        on_grid=measured is not None and measured.on_grid,
        grid=measured.grid if measured else None,
    )
