"""Several fine-tunings side by side: what precision cost each, their curves in one plot, and their figures."""

from collections.abc import Callable, Sequence
from functools import partial

from lpconv.report.charts_old import Bar, Line, bar_plot, line_plot
from lpconv.report.compare import Figure, figures_of
from lpconv.report.finetune.words import figure_text, gap_rows, main_run, metric_name, noise_text, verdict
from lpconv.report.numbers import MISSING, count_text, duration_text, size_text
from lpconv.report.page import html_runs
from lpconv.report.plot import Plot
from lpconv.report.printable import printable, printable_record
from lpconv.results import FinetuneResult, GapRecord, RunRecord, Series

_METRICS = ("eval_loss", "eval_accuracy")


def html_finetunes(results: Sequence[FinetuneResult], names: Sequence[str]) -> str:
    """One page of several fine-tunings."""
    runs, names = [printable_record(r) for r in results], list(map(printable, names))
    named = list(zip(names, runs, strict=True))
    metrics = [m for m in reversed(_METRICS) if any(g.metric == m for r in runs for g in r.gaps)]
    plots = [
        *(_gap_plot(named, m) for m in metrics),
        *(_curves(named, m, metric_name(m).capitalize(), partial(_evaluations, metric=m)) for m in _METRICS),
        _curves(named, "loss", "Training loss", lambda run: run.losses),
    ]
    return html_runs(names, finetune_figures(runs), plots, [verdict(r) for r in runs])


def _gap_plot(named: Sequence[tuple[str, FinetuneResult]], metric: str) -> Plot | None:
    found = [(name, g) for name, r in named for g in r.gaps if g.metric == metric]
    bars = [Bar(name=n, text=noise_text(g), lengths=(g.gap,), interval=_interval(g)) for n, g in found]
    worse = "Above" if metric == "eval_loss" else "Below"
    words = (
        f"Run less twin. {worse} zero precision cost something; 95 % intervals, from seeds or else held-out batches."
    )
    title = f"What precision cost: gap of {metric_name(metric)}"
    return bar_plot(f"gap-{metric}", title, words, bars, x_label=f"{metric_name(metric)}, run less twin", reference=0.0)


def _interval(gap: GapRecord) -> tuple[float, float]:
    half = gap.half_width if gap.half_width is not None else 2 * (gap.standard_error or 0.0)
    return gap.gap - half, gap.gap + half


def _curves(
    named: Sequence[tuple[str, FinetuneResult]], name: str, title: str, read: Callable[[RunRecord], Series | None]
) -> Plot | None:
    """The run of each result's first seed."""
    found = [(label, read(main_run(r))) for label, r in named]
    lines = [Line(series=s, colour=i, label=label) for i, (label, s) in enumerate(found) if s is not None]
    return line_plot(name, title, "The run of the first seed of each.", lines)


def _evaluations(run: RunRecord, metric: str) -> Series | None:
    return next((s for s in run.evaluations if s.name == metric), None)


def finetune_figures(results: Sequence[FinetuneResult]) -> tuple[Figure, ...]:
    """The figures of fine-tunings."""
    return figures_of([_figures(r) for r in results])


def _figures(r: FinetuneResult) -> dict[str, str]:
    run = main_run(r)
    found = {"model": r.name, "recipe": r.recipe, "twin": r.twin or MISSING, "task": r.task}
    found |= {"steps": count_text(len(run.losses.steps)), "seeds": count_text(sum(x.role == "run" for x in r.runs))}
    found |= {f"{metric_name(s.name)}, run": figure_text(s.name, s.values[-1]) for s in run.evaluations if s.values}
    for name, of_run, of_twin, gap, error, _ in gap_rows(r):
        found |= {f"{name}, run": of_run, f"{name}, twin": of_twin, f"{name}, gap": gap}
        found[f"{name}, standard error of the gap"] = error
    for h in (h for h in r.held_out if h.role == "run"):
        found[f"{metric_name(h.metric)} before training"] = figure_text(h.metric, h.before)
        found[f"{metric_name(h.metric)} of the guess"] = figure_text(h.metric, h.baseline)
    return found | {
        "steps left out": count_text(run.num_skipped),
        "time per step": duration_text(run.step_time_s),
        "memory of a step": size_text(run.memory.measured_bytes) if run.memory else MISSING,
        "saved as": r.saved_as,
        "warnings": count_text(len(r.warnings)),
    }
