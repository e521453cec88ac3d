"""The page of a fine-tuning: both curves with their gap, what was lost where and when, memory, and how it was run."""

import math
from pathlib import PurePath

from lpconv.report.finetune.plot import curve_plots, loss_heatmap
from lpconv.report.finetune.words import (
    METRIC_WORDS,
    diagnostics,
    figure_text,
    gap_rows,
    gate_lines,
    layer_rows,
    main_run,
    noise_text,
    title,
    twin_run,
    verdict,
    worst_tracked,
)
from lpconv.report.numbers import ROLE_WORDS, duration_text, plural, size_text
from lpconv.report.page import Tile, environment
from lpconv.report.printable import printable_record
from lpconv.results import FinetuneResult

__all__ = ["html_finetune"]


def html_finetune(result: FinetuneResult) -> str:
    """The page of one fine-tuning."""
    result = printable_record(result)
    return (
        environment()
        .get_template("finetune.html.j2")
        .render(
            result=result,
            name=PurePath(result.output).name,
            title=title(result),
            version=result.versions.get("lpconv"),
            verdict=verdict(result),
            tiles=_tiles(result),
            gaps=gap_rows(result),
            gates=gate_lines(result),
            plots=curve_plots(result),
            heat=loss_heatmap(result),
            worst=worst_tracked(result),
            diagnostics=diagnostics(result),
            layers=layer_rows(result),
            memory=main_run(result).memory,
            role_words=ROLE_WORDS,
        )
    )


def _tiles(result: FinetuneResult) -> tuple[Tile, ...]:
    run, twin = main_run(result), twin_run(result)
    tiles = [
        Tile(
            label=f"{METRIC_WORDS.get(g.metric, g.metric)}: gap to {result.twin}",
            figure=noise_text(g),
            detail=f"{figure_text(g.metric, g.run)} and {figure_text(g.metric, g.twin)}",
        )
        for g in result.gaps
    ]
    tiles.append(
        Tile(
            label="Time per step",
            figure=duration_text(run.step_time_s),
            detail=f"twin {duration_text(twin.step_time_s)}" if twin is not None else "median",
        )
    )
    if run.memory is not None:
        tiles.append(Tile(label="Memory of a step", figure=size_text(run.memory.measured_bytes), detail="at its peak"))
    skipped = f"{plural(run.num_skipped, 'step')} left out"
    ends = [v for v in (run.losses.values[0], run.losses.values[-1]) if math.isfinite(v)]
    tiles.append(Tile(label="Training loss", figure=" → ".join(f"{v:.4g}" for v in ends), detail=skipped))
    return tuple(tiles)
