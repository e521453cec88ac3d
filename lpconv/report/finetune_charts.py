"""Charts of a fine-tuning: curves of run and twin, what precision cost, and losses by layer."""

import math
from collections.abc import Callable, Sequence

from lpconv.report.charts import Bar, Chart, HeatMap, Line, Loss, bar_chart, line_chart
from lpconv.report.finetune_words import (
    figure_text,
    guess,
    lost_text,
    main_run,
    metric_name,
    metric_title,
    noise_text,
    twin_run,
)
from lpconv.report.numbers import ROLE_WORDS
from lpconv.results import FinetuneResult, GapRecord, RunRecord, Series, TrackedRecord

_MAX_COLUMNS = 24  # most columns of a heat map


def training_charts(result: FinetuneResult) -> list[Chart]:
    """Held-out metrics first, which show what precision cost; then losses, their gap, loss scale and update quality."""
    run, twin = main_run(result), twin_run(result)
    charts = [_evaluation_chart(result, s.name) for s in reversed(run.evaluations) if len(s.steps) > 1]
    losses = [Line(series=run.losses, colour=0, label=result.recipe)]
    if twin is not None:
        losses.append(Line(series=twin.losses, colour=1, label=result.twin or ""))
    charts.append(line_chart("Training loss", "The loss at the start of every step.", losses))
    if twin is not None:
        words = "Training loss of the run minus that of its twin, at every step; above zero, the twin is better."
        charts.append(line_chart("The gap", words, _gap_lines(result)))
    if len(set(run.loss_scales.values)) > 1:
        logs = tuple(math.log2(v) for v in run.loss_scales.values)
        series = Series(name="loss scale", steps=run.loss_scales.steps, values=logs)
        words = "It falls when gradients overflow and a step is skipped."
        charts.append(line_chart("Loss scale, log2", words, [Line(series=series, colour=2)]))
    if run.updates:
        charts.append(_update_chart(run))
    return [p for p in charts if p is not None]


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


def _evaluation_chart(result: FinetuneResult, metric: str) -> Chart | None:
    """A held-out metric of run and twin, and the guess from class or token frequencies alone."""
    lines: list[Line] = []
    labelled: set[str] = set()
    for run in result.runs:
        series = next((s for s in run.evaluations if s.name == metric), None)
        if series is not None:
            label = (result.recipe if run.role == "run" else result.twin or "") if run.role not in labelled else ""
            labelled.add(run.role)
            errors = (h.standard_error for h in result.held_out if label and (h.role, h.metric) == (run.role, metric))
            error = next(errors, None)  # one band for all seeds, since bands would hide each other
            lines.append(Line(series=series, colour=0 if run.role == "run" else 1, label=label, error=error or 0.0))
    words = "On the same held-out examples; one line per seed. The band is one standard error from batch to batch."
    level = next((h.baseline for h in result.held_out if h.metric == metric), None)
    if level is not None and _is_near(level, lines):
        series = Series(name="guess", steps=(0, len(main_run(result).losses.steps)), values=(level, level))
        lines.append(Line(series=series, colour=5, label=f"guess: {guess(result)}", is_dashed=True))
    elif level is not None:
        words += f" The baseline guess, {guess(result)}, is outside the chart: {figure_text(metric, level)}."
    return line_chart(metric_title(metric, result), words, lines)


def _is_near(level: float, lines: Sequence[Line]) -> bool:
    """Whether a level can be drawn in one chart with the lines and leave them at least half of the height."""
    values = [v for line in lines for v in line.series.values if math.isfinite(v)]
    return bool(values) and min(values) - level <= max(values) - min(values) >= level - max(values)


def _update_chart(run: RunRecord) -> Chart | None:
    steps = tuple(u.step for u in run.updates)
    series = (
        ("reached all stored state", tuple(u.edq for u in run.updates)),
        ("reached the 16-bit weights", tuple(u.edq_weights for u in run.updates)),
        ("changes lost", tuple(u.lost for u in run.updates)),
    )
    lines = [
        Line(series=Series(name=label, steps=steps, values=values), colour=i, label=label)
        for i, (label, values) in enumerate(series)
    ]
    words = "Effective descent quality: the fraction of the intended update that reached memory."
    return line_chart("Fraction of updates that reached memory", words, lines)


def heat_map(result: FinetuneResult) -> HeatMap | None:
    """Elements lost in each layer at each recorded step, with a block of columns per class of tensor."""
    tracked = [t for run in result.runs for t in run.tracked]
    if not any(t.underflow + t.overflow > 0 for t in tracked):
        return None
    roles = [r for r in ROLE_WORDS if any(t.role == r for t in tracked)]
    steps = _thin_out(sorted({t.step for t in tracked}), _MAX_COLUMNS // len(roles) or 1)
    worst = max(tracked, key=lambda t: t.underflow + t.overflow)
    return HeatMap(
        title="Elements lost by layer, class of tensor and step",
        description=f"At worst {lost_text(worst)}.",
        blocks=tuple(ROLE_WORDS[role] for role in roles),
        columns=tuple(str(step) for step in steps),
        losses=tuple(_loss(t) for t in tracked if t.step in steps),
    )


def _thin_out(steps: list[int], most: int) -> list[int]:
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


def gap_chart(named: Sequence[tuple[str, FinetuneResult]], metric: str) -> Chart | None:
    gaps = [(name, g) for name, r in named for g in r.gaps if g.metric == metric]
    bars = [Bar(name=n, text=noise_text(g), lengths=(g.gap,), interval=_interval(g)) for n, g in gaps]
    worse = "Above" if metric == "eval_loss" else "Below"
    words = (
        f"Run minus twin. {worse} zero, low precision cost something. 95 % intervals, from seeds or held-out batches."
    )
    title = f"What precision cost: gap of {metric_name(metric)}"
    return bar_chart(title, words, bars, x_label=f"{metric_name(metric)}, run minus twin", reference=0.0)


def _interval(gap: GapRecord) -> tuple[float, float]:
    half = gap.half_width if gap.half_width is not None else 2 * (gap.standard_error or 0.0)
    return gap.gap - half, gap.gap + half


def curves_chart(
    named: Sequence[tuple[str, FinetuneResult]], title: str, read: Callable[[RunRecord], Series | None]
) -> Chart | None:
    """A chart with one curve per result, from its first seed."""
    curves = [(label, read(main_run(r))) for label, r in named]
    lines = [Line(series=s, colour=i, label=label) for i, (label, s) in enumerate(curves) if s is not None]
    return line_chart(title, "Runs with the first seed.", lines)


def evaluations_of(run: RunRecord, metric: str) -> Series | None:
    return next((s for s in run.evaluations if s.name == metric), None)
