"""One HTML file per result: readable in a browser, on paper and by a screen reader, with nothing to load.

All text is escaped by jinja2; the templates hold the only markup, style and script there is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from lpconv.report.convert.compare import figures, run_names
from lpconv.report.convert.grouping import (
    converted,
    done_groups,
    in_layer_order,
    layer_groups,
    num_elements,
    worst_tensors,
)
from lpconv.report.convert.plot import rms_plot, sqnr_plot
from lpconv.report.convert.words import OUTCOME, checks, method_name, summary, verdict
from lpconv.report.numbers import (
    MISSING,
    change_text,
    count_text,
    duration_text,
    error_text,
    plural,
    rate_text,
    size_text,
    sqnr_text,
)
from lpconv.report.page import Tile, breakable, page
from lpconv.report.plot import FormatRange
from lpconv.report.printable import printable, printable_record
from lpconv.results import ConvertResult, TensorRecord

__all__ = ["html_compare", "html_report"]


@dataclass(frozen=True, kw_only=True)
class _CompareRow:
    """One tensor name and its record in each run, None where a run did not convert it."""

    name: str
    tensors: tuple[TensorRecord | None, ...]


def html_report(result: ConvertResult, ranges: Mapping[str, FormatRange]) -> str:
    """The report of one conversion. `ranges` holds what each format can hold, by the names that the tensors use."""
    result = printable_record(result)
    return page(
        "convert",
        result=result,
        name=_last_part(result.output),
        version=result.versions.get("lpconv"),
        method_name=method_name,
        num_elements=num_elements,
        summary=summary(result),
        tiles=_tiles(result),
        verdict=verdict(result.verify),
        checks=checks(result.verify),
        outcome=OUTCOME,
        rms=rms_plot(result, ranges),
        sqnr=sqnr_plot([(result.output, result)]),
        done=done_groups(result.tensors),
        layers=layer_groups(result.tensors),
        tensors=in_layer_order(result.tensors),
        provenance=_provenance(result),
        files=[("source", f) for f in result.source.files] + [("output", f) for f in result.files],
    )


def html_compare(results: Sequence[ConvertResult], ranges: Mapping[str, FormatRange]) -> str:
    """Several conversions side by side."""
    runs = [printable_record(r) for r in results]
    names = run_names(runs)
    named = list(zip(names, runs, strict=True))
    return page(
        "compare",
        names=names,
        version=None,
        figures=figures(runs),
        sqnr=sqnr_plot(named),
        rms=[(name, rms_plot(r, ranges)) for name, r in named],
        rows=_compare_rows(runs),
        summaries=[(name, summary(r)) for name, r in named],
    )


def _last_part(path: str) -> str:
    return PurePath(path).name or path


def _tiles(result: ConvertResult) -> tuple[Tile, ...]:
    read, written = result.bytes.read, result.bytes.written
    changed = converted(result.tensors)
    return (
        Tile(
            label="Weights", figure=size_text(written), detail=f"from {size_text(read)}: {change_text(read, written)}"
        ),
        Tile(
            label="Tensors converted",
            figure=count_text(len(changed)),
            detail=f"of {plural(len(result.tensors), 'tensor')}",
        ),
        _sqnr_tile(changed),
        _outputs_tile(result),
        Tile(
            label="Time",
            figure=duration_text(result.seconds),
            detail=f"{rate_text(read + written, result.weights_seconds)} read and written",
        ),
        Tile(label="Peak memory", figure=size_text(result.peak_rss_bytes), detail="resident, the whole process"),
    )


def _sqnr_tile(changed: Sequence[TensorRecord]) -> Tile:
    label = "Lowest SQNR of a tensor"
    worst = worst_tensors(changed, 1)
    if worst:
        return Tile(label=label, figure=sqnr_text(worst[0].sqnr_db, " dB"), detail=breakable(worst[0].name))
    if any(t.sqnr_db is not None for t in changed):
        return Tile(label=label, figure="exact", detail="every converted tensor")
    return Tile(label=label, figure=MISSING, detail="not measured")


def _outputs_tile(result: ConvertResult) -> Tile:
    label, logits = "Model outputs", result.verify.logits
    if logits is None or logits.skipped:
        return Tile(label=label, figure=MISSING, detail=logits.skipped if logits and logits.skipped else "not compared")
    if logits.bit_equal:
        return Tile(label=label, figure="bit-equal", detail="to the source's")
    return Tile(label=label, figure=error_text(logits.rel_error), detail="relative error to the source's")


def _provenance(result: ConvertResult) -> dict[str, str]:
    facts = {
        "Source": result.source.name,
        "Resolved to": result.source.resolved,
        "Revision": result.source.revision or MISSING,
        "Architecture": result.architecture or MISSING,
        "Output": result.output,
        "Copied as is": ", ".join(result.side_files) or MISSING,
    }
    facts |= {f"Option {name}": printable(str(value)) for name, value in sorted(result.options.items())}
    return facts | {f"Version of {name}": version for name, version in sorted(result.versions.items())}


def _compare_rows(runs: Sequence[ConvertResult]) -> tuple[_CompareRow, ...]:
    by_name = [{t.name: t for t in converted(r.tensors)} for r in runs]
    tensors = in_layer_order({name: t for run in by_name for name, t in run.items()}.values())
    return tuple(_CompareRow(name=t.name, tensors=tuple(run.get(t.name) for run in by_name)) for t in tensors)
