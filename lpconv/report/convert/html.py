"""The pages of a conversion and of several: a file that browsers, paper and screen readers show, with nothing to load.

All text is escaped by jinja2; the templates hold the only markup, style and script there is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from lpconv.report.compare import run_names
from lpconv.report.convert.compare import figures
from lpconv.report.convert.plot import flat_words, rms_plot, sqnr_plot
from lpconv.report.convert.words import DONE_COLUMNS, done_row, headline, method_name, summary
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
from lpconv.report.page import Tile, breakable, html_runs, page
from lpconv.report.plot import FormatRange
from lpconv.report.printable import printable, printable_record
from lpconv.report.tensors import (
    converted,
    done_groups,
    in_layer_order,
    layer_groups,
    num_elements,
    worst_tensors,
)
from lpconv.report.verify import checks, outcome_of
from lpconv.results import ConvertResult, TensorRecord

_MOST = 1000  # tensors and layers on a page


def html_report(result: ConvertResult, ranges: Mapping[str, FormatRange]) -> str:
    """The report of one conversion. `ranges` holds what each format can hold, by the names that the tensors use."""
    result = printable_record(result)
    listed, layers = _listed(result.tensors), layer_groups(result.tensors)
    drawn, flat = replace(result, tensors=listed), flat_words(converted(result.tensors))
    ratios = None if flat else sqnr_plot([(result.output, converted(listed))])
    return page(
        "convert",
        result=result,
        name=PurePath(result.output).name or result.output,
        version=result.versions.get("lpconv"),
        method_name=method_name,
        num_elements=num_elements,
        headline=headline(result),
        summary=summary(result),
        tiles=_tiles(result),
        verdict=outcome_of(result.verify),
        checks=checks(result.verify),
        flat=flat,
        plots=[p for p in (ratios, rms_plot(drawn, ranges)) if p],
        done_columns=[*DONE_COLUMNS, "<For example"],
        done=[(*done_row(g), breakable(g.example)) for g in done_groups(result.tensors)],
        layers=layers[:_MOST],
        num_layers=len(layers),
        tensors=in_layer_order(listed),
        inputs={f"{m}.weight": x for m, x in result.calibration.absmax.items()} if result.calibration else {},
        provenance=_provenance(result),
        files=[("source", f) for f in result.source.files] + [("output", f) for f in result.files],
    )


def _listed(tensors: tuple[TensorRecord, ...]) -> tuple[TensorRecord, ...]:
    """The tensors that a page draws and lists: of very many the worst ones, and an even sample of the others."""
    if len(tensors) <= _MOST:
        return tensors
    worst, step = {t.name for t in worst_tensors(tensors, _MOST // 2)}, -(-len(tensors) // (_MOST // 2))
    return tuple(t for i, t in enumerate(tensors) if i % step == 0 or t.name in worst)


def html_compare(results: Sequence[ConvertResult], ranges: Mapping[str, FormatRange]) -> str:
    """Several conversions side by side."""
    runs = [printable_record(r) for r in results]
    names = run_names([r.output for r in runs])
    named = list(zip(names, runs, strict=True))
    rms = [(name, rms_plot(r, ranges)) for name, r in named]
    of_runs = [replace(p, title=f"{name}: {p.title[:1].lower()}{p.title[1:]}") for name, p in rms if p]
    plots = [sqnr_plot([(name, converted(r.tensors)) for name, r in named]), *of_runs]
    return html_runs(names, figures(runs), plots, [summary(r) for r in runs], rows=_compare_rows(runs))


def _tiles(result: ConvertResult) -> tuple[Tile, ...]:
    read, written = result.bytes.read, result.bytes.written
    changed, rate = converted(result.tensors), rate_text(read + written, result.weights_seconds)
    return (
        ("Weights", size_text(written), f"from {size_text(read)}: {change_text(read, written)}"),
        ("Tensors converted", count_text(len(changed)), f"of {plural(len(result.tensors), 'tensor')}"),
        _sqnr_tile(changed),
        _outputs_tile(result),
        ("Time", duration_text(result.seconds), f"{rate} read and written"),
        ("Peak memory", size_text(result.peak_rss_bytes), "resident, the whole process"),
    )


def _sqnr_tile(changed: Sequence[TensorRecord]) -> Tile:
    label = "Lowest SQNR of a tensor"
    worst = worst_tensors(changed, 1)
    if worst:
        return label, sqnr_text(worst[0].sqnr_db, " dB"), breakable(worst[0].name)
    if any(t.sqnr_db is not None for t in changed):
        return label, "exact", "every converted tensor"
    return label, MISSING, "not measured"


def _outputs_tile(result: ConvertResult) -> Tile:
    label, logits = "Model outputs", result.verify.logits
    if logits is None or logits.skipped:
        return label, MISSING, logits.skipped if logits and logits.skipped else "not compared"
    if logits.bit_equal:
        return label, "bit-equal", "to the source's"
    as_they_are = ", inputs not rounded" if result.calibration else ""
    return label, error_text(logits.rel_error), f"relative error to the source's{as_they_are}"


def _provenance(result: ConvertResult) -> dict[str, str]:
    facts = {
        "Source": result.source.name,
        "Resolved to": result.source.resolved,
        "Revision": result.source.revision or MISSING,
        "Architecture": result.architecture or MISSING,
        "Output": result.output,
        "Copied as is": ", ".join(result.side_files) or MISSING,
    }
    if (found := result.calibration) is not None:
        windows = f"{count_text(found.num_tokens)} tokens in windows of {found.seq_len}"
        facts["Inputs calibrated on"] = f"{found.text}, {windows}, SHA-256 {found.sha256}"
    facts |= {f"Option {name}": _option_text(value) for name, value in sorted(result.options.items())}
    return facts | {f"Version of {name}": version for name, version in sorted(result.versions.items())}


def _option_text(value: object) -> str:
    """The value of an option as a person would write it; a dash for none."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_option_text, value)) or MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return MISSING if value is None or value == "" else printable(str(value))


def _compare_rows(runs: Sequence[ConvertResult]) -> list[tuple[str, list[TensorRecord | None]]]:
    """Each tensor name and its record in each run, None where a run did not convert it."""
    by_name = [{t.name: t for t in converted(r.tensors)} for r in runs]
    tensors = in_layer_order({name: t for run in by_name for name, t in run.items()}.values())
    return [(t.name, [run.get(t.name) for run in by_name]) for t in tensors]
