"""A comparison of several conversions, and the figures that it compares."""

import statistics
from collections.abc import Callable, Sequence

from lpconv.report.compare import compare_document
from lpconv.report.convert_words import summary
from lpconv.report.document import Cell, Document, Section, Table, Verdict, section
from lpconv.report.numbers import (
    MISSING,
    change_text,
    count_text,
    duration_text,
    error_text,
    rate_text,
    size_text,
    sqnr_text,
)
from lpconv.report.tensor_charts import rms_chart, sqnr_chart
from lpconv.report.tensors import converted_tensors, in_layer_order, worst_tensors
from lpconv.report.verify import outcome_of
from lpconv.results import ConvertResult, LogitsCheck, TensorRecord

# Figures that differ between runs of the same conversion.
RUN_FIGURES = frozenset({"time", "speed", "peak memory"})


def compare_conversions(results: Sequence[ConvertResult], names: Sequence[str]) -> Document:
    """Several conversions: the SQNR of every tensor in one chart, and their figures side by side."""
    charts = [sqnr_chart([(name, converted_tensors(r.tensors)) for name, r in zip(names, results, strict=True)])]
    charts += [rms_chart(r, f"{name}: weight RMS") for name, r in zip(names, results, strict=True)]
    verdicts = [Verdict(outcome=outcome_of(r.verify), text=summary(r)) for r in results]
    return compare_document(
        names, list(map(figures, results)), verdicts, charts=charts, table=_sqnr_section(results, names)
    )


def figures(result: ConvertResult) -> dict[str, str]:
    """The figures for comparing conversions; a dash if a conversion does not have one."""
    return {label: value(result) for label, value in _FIGURES.items()}


def _sqnr_section(results: Sequence[ConvertResult], names: Sequence[str]) -> Section | None:
    by_name = [{t.name: t for t in converted_tensors(r.tensors)} for r in results]
    tensors = in_layer_order({name: t for run in by_name for name, t in run.items()}.values())
    table = Table(
        columns=("Tensor", *names),
        rows=tuple((t.name, *(_sqnr_cell(run.get(t.name)) for run in by_name)) for t in tensors),
        has_names=True,
        sortable=True,
        filter="attention",
    )
    return section("SQNR of every tensor, dB", table, only="page")


def _sqnr_cell(t: TensorRecord | None) -> str | Cell:
    return MISSING if t is None else Cell(text=f"{t.format}, {sqnr_text(t.sqnr_db)}", sort=t.sqnr_db)


def _median_sqnr(r: ConvertResult) -> float | None:
    measured = [t.sqnr_db for t in converted_tensors(r.tensors) if t.sqnr_db is not None]
    return statistics.median(measured) if measured else None


def _min_sqnr(r: ConvertResult) -> float | None:
    measured = [t.sqnr_db for t in converted_tensors(r.tensors) if t.sqnr_db is not None]
    worst = worst_tensors(converted_tensors(r.tensors), 1)
    return worst[0].sqnr_db if worst else min(measured, default=None)


def _max_rel_error(r: ConvertResult) -> float | None:
    return max((t.max_rel_error for t in converted_tensors(r.tensors) if t.max_rel_error is not None), default=None)


def _logits(r: ConvertResult, read: Callable[[LogitsCheck], str]) -> str:
    return read(r.verify.logits) if r.verify.logits and not r.verify.logits.skipped else MISSING


def _equal(check: LogitsCheck) -> str:
    return {True: "yes", False: "no", None: MISSING}[check.bit_equal]


def _top1(check: LogitsCheck) -> str:
    return MISSING if check.top1_agreement is None else f"{check.top1_agreement:.2%}".replace("%", " %")


_FIGURES: dict[str, Callable[[ConvertResult], str]] = {
    "source": lambda r: r.source.name,
    "method": lambda r: r.method,
    "format": lambda r: r.format,
    "granularity": lambda r: MISSING if r.residual else str(r.options.get("granularity", MISSING)),
    "layout": lambda r: str(r.options.get("layout", MISSING)),
    "residual": lambda r: r.residual or MISSING,
    "size before": lambda r: size_text(r.bytes.read),
    "size after": lambda r: size_text(r.bytes.written),
    "change": lambda r: change_text(r.bytes.read, r.bytes.written),
    "tensors converted": lambda r: count_text(len(converted_tensors(r.tensors))),
    "tensors kept": lambda r: count_text(sum(t.action == "keep" for t in r.tensors)),
    "smallest SQNR, dB": lambda r: sqnr_text(_min_sqnr(r)),
    "median SQNR, dB": lambda r: sqnr_text(_median_sqnr(r)),
    "largest rel. error": lambda r: error_text(_max_rel_error(r)),
    "elements saturated": lambda r: count_text(sum(t.num_saturated for t in r.tensors)),
    "elements to zero": lambda r: count_text(sum(t.num_flushed for t in r.tensors)),
    "outputs bit-equal": lambda r: _logits(r, _equal),
    "outputs rel. error": lambda r: _logits(r, lambda c: error_text(c.rel_error)),
    "outputs max diff.": lambda r: _logits(r, lambda c: error_text(c.max_abs_diff)),
    "same top prediction": lambda r: _logits(r, _top1),
    "KL, nats": lambda r: _logits(r, lambda c: error_text(c.mean_kl)),
    "verification": lambda r: outcome_of(r.verify),
    "level": lambda r: r.verify.level,
    "time": lambda r: duration_text(r.seconds),
    "speed": lambda r: rate_text(r.bytes.read + r.bytes.written, r.weights_seconds),
    "peak memory": lambda r: size_text(r.peak_rss_bytes),
    "warnings": lambda r: count_text(len(r.warnings)),
}
