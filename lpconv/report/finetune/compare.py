"""Several fine-tunings side by side: what precision cost each, their curves in one plot, and their figures."""

from collections.abc import Callable, Sequence
from functools import partial

from lpconv.report.charts import Bar, Line, bar_plot, line_plot
from lpconv.report.compare import Figure, figures_of
from lpconv.report.finetune.words import (
    difference_text,
    figure_text,
    main_run,
    metric_name,
    noise_text,
    twin_run,
    verdict,
)
from lpconv.report.numbers import MISSING, count_text, duration_text, size_text
from lpconv.report.page import html_runs
from lpconv.report.plot import Plot
from lpconv.report.printable import printable, printable_record
from lpconv.results import FinetuneResult, GapRecord, HeldOutRecord, RunRecord, Series

__all__ = ["finetune_figures", "html_finetunes"]

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
    return figures_of(results, _FIGURES)


def _of_metric(metric: str) -> dict[str, Callable[[FinetuneResult], str]]:
    name = metric_name(metric)

    def held_out(read: Callable[[HeldOutRecord], float | None]) -> Callable[[FinetuneResult], str]:
        return lambda r: next(
            (figure_text(metric, read(h)) for h in r.held_out if h.role == "run" and h.metric == metric), MISSING
        )

    def last(role: Callable[[FinetuneResult], RunRecord | None]) -> Callable[[FinetuneResult], str]:
        def text(r: FinetuneResult) -> str:
            run = role(r)
            series = _evaluations(run, metric) if run is not None else None
            return figure_text(metric, series.values[-1]) if series is not None and series.values else MISSING

        return text

    def gap(read: Callable[[GapRecord], str]) -> Callable[[FinetuneResult], str]:
        return lambda r: next((read(g) for g in r.gaps if g.metric == metric), MISSING)

    return {
        f"{name}, run": last(main_run),
        f"{name}, twin": last(twin_run),
        f"{name}, gap": gap(noise_text),
        f"{name}, standard error of the gap": gap(
            lambda g: MISSING if g.standard_error is None else difference_text(metric, g.standard_error).lstrip("+")
        ),
        f"{name} before training": held_out(lambda h: h.before),
        f"{name} of the guess": held_out(lambda h: h.baseline),
    }


_FIGURES: dict[str, Callable[[FinetuneResult], str]] = {
    "model": lambda r: r.name,
    "recipe": lambda r: r.recipe,
    "twin": lambda r: r.twin or MISSING,
    "task": lambda r: r.task,
    "steps": lambda r: count_text(len(main_run(r).losses.steps)),
    "seeds": lambda r: count_text(sum(run.role == "run" for run in r.runs)),
    **_of_metric("eval_loss"),
    **_of_metric("eval_accuracy"),
    "steps left out": lambda r: count_text(main_run(r).num_skipped),
    "time per step": lambda r: duration_text(main_run(r).step_time_s),
    "memory of a step": lambda r: size_text(m.measured_bytes) if (m := main_run(r).memory) else MISSING,
    "saved as": lambda r: r.saved_as,
    "warnings": lambda r: count_text(len(r.warnings)),
}
