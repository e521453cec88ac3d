"""The page of a probe: where the numbers lie, what each format would lose, and the table of every tensor."""

from collections.abc import Mapping
from pathlib import PurePath

from lpconv.report.numbers import number_text, share_text
from lpconv.report.page import Tile, environment
from lpconv.report.plot import FormatRange
from lpconv.report.printable import printable_record
from lpconv.report.probe.plot import exponent_plots, heatmap
from lpconv.report.probe.words import ALONE_WORDS, FIT_WORDS, capped_words, fit_counts, held_by, loss_scale_text
from lpconv.results import ProbeReport

__all__ = ["html_probe"]


def html_probe(report: ProbeReport, ranges: Mapping[str, FormatRange]) -> str:
    """The page of one probe. `ranges` holds what each format can hold, by the names that the report uses."""
    report = printable_record(report)
    return (
        environment()
        .get_template("probe.html.j2")
        .render(
            report=report,
            name=PurePath(report.name).name or report.name,
            version=None,
            tiles=_tiles(report),
            plots=exponent_plots(report, ranges),
            heat=heatmap(report),
            fits=fit_counts(report),
            fit_words=FIT_WORDS,
            held_by=held_by,
            alone_words=ALONE_WORDS,
            capped=capped_words(report),
            loss_scale=loss_scale_text,
        )
    )


def _tiles(report: ProbeReport) -> tuple[Tile, ...]:
    held = {name: sum(t.scaled[i].fits for t in report.tensors) for i, name in enumerate(report.formats)}
    total = len(report.tensors)
    tiles = [
        Tile(
            label=f"Loss scale for {s.format}",
            figure=loss_scale_text(s.log2_scale),
            detail=f"worst gradient underflow {share_text(s.worst_underflow_before, 1)} at 1, "
            f"{share_text(s.worst_underflow_after, 1)} there",
        )
        for s in report.loss_scales[:1]
    ]
    tiles += [
        Tile(label=f"Held by {name}", figure=f"{n} of {total}", detail="layers and classes of tensor")
        for name, n in held.items()
    ]
    ends = dict.fromkeys(number_text(loss) for loss in (report.losses[0], report.losses[-1])) if report.losses else ()
    recorded = f"of the time of the steps, {report.steps_recorded} of {report.steps_seen} recorded"
    cost = Tile(
        label="Cost of recording",
        figure=share_text(report.overhead, 1),
        detail=f"{recorded}; loss {' to '.join(ends)}" if ends else recorded,
    )
    return (*tiles, cost)
