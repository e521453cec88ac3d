"""The page of a fine-tuning: both curves with their gap, what was lost where and when, memory, and how it was run."""

import math
from collections.abc import Sequence
from pathlib import PurePath

from lpconv.report.charts_old import Line, line_plot
from lpconv.report.finetune.words import (
    HELD_OUT_COLUMNS,
    diagnostics,
    figure_text,
    gap_rows,
    guess,
    held_out_rows,
    held_out_words,
    layer_rows,
    main_run,
    memory_rows,
    metric_name,
    noise_text,
    title,
    twin_run,
    verdict,
    worst_tracked,
)
from lpconv.report.heat import Heatmap, Loss, loss_map
from lpconv.report.numbers import ROLE_WORDS, duration_text, plural, share_text, size_text
from lpconv.report.page import Tile, page
from lpconv.report.plot import Plot
from lpconv.report.printable import printable_record
from lpconv.results import FinetuneResult, GapRecord, RunRecord, Series, TrackedRecord

_HEAT_HEAD = 60.0  # room for the numbers of the steps, in page units of the heatmap
_MAX_COLUMNS = 24


def html_finetune(result: FinetuneResult) -> str:
    """The page of one fine-tuning."""
    result = printable_record(result)
    return page(
        "finetune",
        result=result,
        name=PurePath(result.output).name,
        title=title(result),
        version=result.versions.get("lpconv"),
        verdict=verdict(result),
        outcome=_outcome(result),
        tiles=_tiles(result),
        gaps=gap_rows(result),
        held_out_columns=HELD_OUT_COLUMNS,
        held_out=held_out_rows(result),
        held_out_words=held_out_words(result),
        plots=_plots(result),
        heat=_loss_heatmap(result),
        worst=worst_tracked(result),
        diagnostics=diagnostics(result),
        layers=layer_rows(result),
        memory=[row[:2] for row in memory_rows(result)],
        facts=result.facts | {"Saved as": result.saved_as} | result.versions,
    )


def _outcome(result: FinetuneResult) -> str:
    """ "failed" if a gate does not hold, "not run" if the gap says nothing about precision, else "passed"."""
    if not all(g.passed for g in result.gates):
        return "failed"
    return "passed" if result.gaps and result.learned("twin") is not False else "not run"


def _tiles(result: FinetuneResult) -> tuple[Tile, ...]:
    run, twin = main_run(result), twin_run(result)
    beside = f"twin {duration_text(twin.step_time_s)}" if twin is not None else "median"
    tiles = [
        (f"{metric_name(g.metric).capitalize()}: gap to {result.twin}", noise_text(g), _both(g)) for g in result.gaps
    ]
    tiles.append(("Time per step", duration_text(run.step_time_s), beside))
    if run.memory is not None:
        tiles.append(("Memory of a step", size_text(run.memory.measured_bytes), "at its peak"))
    skipped = f"{plural(run.num_skipped, 'step')} left out"
    ends = [v for v in (run.losses.values[0], run.losses.values[-1]) if math.isfinite(v)]
    tiles.append(("Training loss", " → ".join(f"{v:.4g}" for v in ends), skipped))
    return tuple(tiles)


def _both(g: GapRecord) -> str:
    return f"{figure_text(g.metric, g.run)} and {figure_text(g.metric, g.twin)}"


def _plots(result: FinetuneResult) -> list[Plot]:
    """Held-out metrics first, which say what precision cost; then losses, their gap, loss scale and update quality."""
    run, twin = main_run(result), twin_run(result)
    plots = [_evaluation_plot(result, s.name) for s in reversed(run.evaluations) if len(s.steps) > 1]
    losses = [Line(series=run.losses, colour=0, label=result.recipe)]
    if twin is not None:
        losses.append(Line(series=twin.losses, colour=1, label=result.twin or ""))
    plots.append(line_plot("loss", "Training loss", "The loss of every step, before it.", losses))
    if twin is not None:
        words = "Training loss of the run less that of its twin at every step; above zero the twin is ahead."
        plots.append(line_plot("gap", "The gap", words, _gap_lines(result)))
    if len(set(run.loss_scales.values)) > 1:
        logs = tuple(math.log2(v) for v in run.loss_scales.values)
        series = Series(name="loss scale", steps=run.loss_scales.steps, values=logs)
        words = "It falls where gradients overflowed and a step was left out."
        plots.append(line_plot("scale", "Loss scale, log2", words, [Line(series=series, colour=2)]))
    if run.updates:
        plots.append(_update_plot(run))
    return [p for p in plots if p is not None]


def _gap_lines(result: FinetuneResult) -> list[Line]:
    twins = {r.seed: r for r in result.runs if r.role == "twin"}
    lines: list[Line] = []
    for run in result.runs:
        if run.role != "run" or run.seed not in twins:
            continue
        values = tuple(a - b for a, b in zip(run.losses.values, twins[run.seed].losses.values, strict=False))
        series = Series(name="gap", steps=run.losses.steps[: len(values)], values=values)
        lines.append(Line(series=series, colour=len(lines), label=f"seed {run.seed}"))
    return lines


def _evaluation_plot(result: FinetuneResult, metric: str) -> Plot | None:
    """Run and twin, and the guess of who knows no more than the shares in training."""
    lines: list[Line] = []
    seen: set[str] = set()
    for run in result.runs:
        series = next((s for s in run.evaluations if s.name == metric), None)
        if series is not None:
            label = (result.recipe if run.role == "run" else result.twin or "") if run.role not in seen else ""
            seen.add(run.role)
            error = next((h.standard_error for h in result.held_out if (h.role, h.metric) == (run.role, metric)), None)
            lines.append(Line(series=series, colour=0 if run.role == "run" else 1, label=label, error=error or 0.0))
    words = "On the same held-out examples; one line per seed, with a band of one standard error from batch to batch."
    level = next((h.baseline for h in result.held_out if h.metric == metric), None)
    if level is not None and _is_near(level, lines):
        series = Series(name="guess", steps=(0, len(main_run(result).losses.steps)), values=(level, level))
        lines.append(Line(series=series, colour=5, label=f"guess: {guess(result)}", is_dashed=True))
    elif level is not None:
        words += f" The guess, {guess(result)}, is far off: {figure_text(metric, level)}."
    return line_plot(metric, metric_name(metric).capitalize(), words, lines)


def _is_near(level: float, lines: Sequence[Line]) -> bool:
    """Whether a level can be drawn with the lines and leave them half of the height."""
    values = [v for line in lines for v in line.series.values if math.isfinite(v)]
    return bool(values) and min(values) - level <= max(values) - min(values) >= level - max(values)


def _update_plot(run: RunRecord) -> Plot | None:
    steps = tuple(u.step for u in run.updates)
    series = (
        ("reached what is kept", tuple(u.edq for u in run.updates)),
        ("reached the 16-bit weights", tuple(u.edq_weights for u in run.updates)),
        ("of the changes lost for good", tuple(u.lost for u in run.updates)),
    )
    lines = [
        Line(series=Series(name=label, steps=steps, values=values), colour=i, label=label)
        for i, (label, values) in enumerate(series)
    ]
    words = "Effective descent quality: the part of the intended update that reached memory; 1 is all of it."
    return line_plot("updates", "What reached memory of the updates", words, lines)


def _loss_heatmap(result: FinetuneResult) -> Heatmap | None:
    """What was lost in each layer at each recorded step, one block of columns per class of tensor."""
    tracked = [t for run in result.runs for t in run.tracked]
    if not any(t.underflow + t.overflow > 0 for t in tracked):
        return None
    roles = [r for r in ROLE_WORDS if any(t.role == r for t in tracked)]
    steps = _thinned(sorted({t.step for t in tracked}), _MAX_COLUMNS // len(roles) or 1)
    worst = max(tracked, key=lambda t: t.underflow + t.overflow)
    return loss_map(
        [_loss(t) for t in tracked if t.step in steps],
        blocks=[ROLE_WORDS[role] for role in roles],
        columns=[str(step) for step in steps],
        description=f"At worst {share_text(worst.underflow + worst.overflow, 1)}: {_words(worst)}.",
        head=_HEAT_HEAD,
    )


def _thinned(steps: list[int], most: int) -> list[int]:
    """At most so many of the steps, evenly, the first and last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / max(most - 1, 1))] for i in range(most)]


def _loss(t: TrackedRecord) -> Loss:
    return Loss(
        layer=t.layer,
        block=ROLE_WORDS[t.role],
        column=str(t.step),
        underflow=t.underflow,
        overflow=t.overflow,
        title=f"{ROLE_WORDS[t.role]} of {t.layer} at step {t.step} in {t.format}",
    )


def _words(t: TrackedRecord) -> str:
    return (
        f"{ROLE_WORDS.get(t.role, t.role)} of {t.layer} at step {t.step} in {t.format}: "
        f"{share_text(t.underflow, 1)} underflow, {share_text(t.overflow, 1)} overflow"
    )
