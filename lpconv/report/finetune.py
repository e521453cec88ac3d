"""Documents of a fine-tuning: what precision cost relative to the twin, diagnostics, settings, and planned memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath

from lpconv.report.charts import Bar, Chart, HeatMap, Line, Loss, bar_chart, line_chart
from lpconv.report.compare import compare_document
from lpconv.report.document import (
    Bullets,
    Document,
    Outcome,
    Table,
    Tile,
    Verdict,
    failed_gates,
    gates_section,
    section,
    sections_of,
    texts_of,
)
from lpconv.report.finetune_words import (
    arithmetic_of,
    diagnostics,
    figure_text,
    gap_table,
    guess,
    held_out_table,
    held_out_words,
    lost_text,
    main_run,
    metric_name,
    metric_title,
    noise_text,
    title,
    twin_run,
    verdict,
    worst_tracked,
)
from lpconv.report.numbers import MISSING, ROLE_WORDS, count_text, duration_text, plural, share_text, size_text
from lpconv.results import FinetuneResult, GapRecord, MemoryPlan, RunRecord, Series, TrackedRecord

_METRICS = ("eval_loss", "eval_accuracy")
_HEAT_WORDS = (
    "Percentage of elements that became zero (orange) or, with an arrow, exceeded the range (red). A cell without "
    "a number lost less than 0.5 %, a grey cell nothing."
)
_LEFT_OUT = (
    "Estimated peaks of the forward and backward pass. Temporary tensors of the optimizer and the device's own memory "
    "are not included. To publish the model, the first process gathers it in fp32 in CPU memory."
)
_MAX_COLUMNS = 24  # most columns of a heat map


def finetune_document(result: FinetuneResult) -> Document:
    """The training, the cost of low precision, and the layers where it arose."""
    return Document(
        kind="finetune",
        title=PurePath(result.output).name,
        subtitle=title(result),
        verdict=_verdict(result),
        tiles=_tiles(result),
        warnings=result.warnings,
        sections=sections_of(
            section("", *_training_charts(result)),
            gates_section(result.gates),
            section("What precision cost", gap_table(result)),
            section("Before the first step and after the last", held_out_table(result), held_out_words(result)),
            section("During training", Bullets(lines=diagnostics(result))),
            section("Where most was lost", Bullets(lines=worst_tracked(result))),
            section("Elements lost, by layer and step", _heat_map(result), _HEAT_WORDS, only="page"),
            section("Loss change by layer; negative helped", _layer_table(result)),
            section("Memory of a step at its peak", _memory_table(result)),
        ),
        facts={**result.facts, "Saved as": result.saved_as},
        command=result.command,
        versions=result.versions,
    )


def _verdict(result: FinetuneResult) -> Verdict:
    """Verdict "failed" if a gate fails, "not run" if nothing was shown about precision or recovered, else "passed"."""
    shows_cost = result.gaps and result.learned("twin") is not False
    outcome: Outcome = "passed" if shows_cost or (result.source and result.learned("run")) else "not run"
    if failed := failed_gates(result.gates):
        return Verdict(outcome="failed", text=f"{failed}. {verdict(result)}")
    return Verdict(outcome=outcome, text=verdict(result))


def _tiles(result: FinetuneResult) -> tuple[Tile, ...]:
    run, twin = main_run(result), twin_run(result)
    tiles = [
        Tile(
            label=f"{metric_title(g.metric)}: gap to {result.twin}",
            figure=noise_text(g),
            detail=f"{figure_text(g.metric, g.run)} and {figure_text(g.metric, g.twin)}",
        )
        for g in result.gaps
    ]
    for h in result.held_out if result.source else ():
        before, after = (figure_text(h.metric, x) for x in (h.before, h.after))
        tiles.append(Tile(label=metric_title(h.metric, result), figure=f"{before} → {after}", detail="held out"))
    beside = f"twin {duration_text(twin.step_time_s)}" if twin is not None else "median"
    tiles.append(Tile(label="Time per step", figure=duration_text(run.step_time_s), detail=beside))
    if run.memory is not None:
        memory = size_text(run.memory.measured_bytes)
        tiles.append(Tile(label="Memory of a step", figure=memory, detail="at its peak"))
    ends = [v for v in (run.losses.values[0], run.losses.values[-1]) if math.isfinite(v)]
    skipped = f"{plural(run.num_skipped, 'step')} skipped"
    return (*tiles, Tile(label="Training loss", figure=" → ".join(f"{v:.4g}" for v in ends), detail=skipped))


def _layer_table(result: FinetuneResult) -> Table:
    """Each layer's change of the loss, the part due to rounding, and the share of moved weights that lowered it."""
    allocation = main_run(result).loss_allocation
    rows = tuple(
        (a.layer, f"{a.change:+.3g}", f"{a.rounding:+.3g}", MISSING if a.helped is None else share_text(a.helped, 1))
        for a in (allocation.layers if allocation is not None else ())
    )
    columns = ("Layer", "Loss change", "By rounding", "Weights that helped")
    return Table(columns=columns, rows=rows, has_names=True)


def _memory_table(result: FinetuneResult) -> Table:
    """Parts of a step's peak memory with sizes and shares, the total last; no rows if it was not measured."""
    memory = main_run(result).memory
    parts = memory.parts | {f"peak, {memory.instrument}": memory.measured_bytes} if memory else {}
    whole = memory.measured_bytes if memory else 0
    rows = tuple((part, size_text(size), share_text(size, whole)) for part, size in parts.items())
    return Table(columns=("Part", "Size", "Of the peak"), rows=rows)


def compare_finetunes(results: Sequence[FinetuneResult], names: Sequence[str]) -> Document:
    """Several fine-tunings: what precision cost in each, their curves in one chart, and their figures side by side."""
    named = list(zip(names, results, strict=True))
    metrics = [m for m in reversed(_METRICS) if any(g.metric == m for r in results for g in r.gaps)]
    charts: list[Chart | None] = [
        *(_gap_chart(named, m) for m in metrics),
        *(_curves_chart(named, metric_title(m), partial(_evaluations_of, metric=m)) for m in _METRICS),
        _curves_chart(named, "Training loss", lambda run: run.losses),
    ]
    return compare_document(names, [_figures(r) for r in results], [_verdict(r) for r in results], charts=charts)


def _figures(r: FinetuneResult) -> Mapping[str, str]:
    run = main_run(r)
    figures = {"model": r.name, "recipe": r.recipe, "twin": r.twin or MISSING, "task": r.task}
    figures |= {"steps": count_text(len(run.losses.steps)), "seeds": count_text(sum(x.role == "run" for x in r.runs))}
    figures |= {
        f"{metric_name(s.name, r)}, run": figure_text(s.name, s.values[-1]) for s in run.evaluations if s.values
    }
    for name, of_run, of_twin, gap, error, _ in texts_of(gap_table(r)):
        figures |= {f"{name}, run": of_run, f"{name}, twin": of_twin, f"{name}, gap": gap}
        figures[f"{name}, standard error of the gap"] = error
    for h in (h for h in r.held_out if h.role == "run"):
        figures[f"{metric_name(h.metric, r)} before training"] = figure_text(h.metric, h.before)
        figures[f"{metric_name(h.metric, r)} of the baseline guess"] = figure_text(h.metric, h.baseline)
    return figures | {
        "skipped steps": count_text(run.num_skipped),
        "time per step": duration_text(run.step_time_s),
        "memory of a step": size_text(run.memory.measured_bytes) if run.memory else MISSING,
        "saved as": r.saved_as,
        "warnings": count_text(len(r.warnings)),
    }


def memory_document(plan: MemoryPlan) -> Document:
    """The number of GPUs that each recipe needs, and the memory of one GPU with the requested recipe."""
    devices = tuple(next(iter(plan.gpus.values()), {}))
    rows = tuple(
        (recipe, *(MISSING if n is None else str(n) for n in counts.values())) for recipe, counts in plan.gpus.items()
    )
    most = max(m.num_ranks for m in plan.memory)
    fewest = f"The smallest number of GPUs that is enough; {MISSING} if {most} are not"
    return Document(
        kind="finetune",
        title=f"{plan.name}: memory of a step",
        facts={
            "Parameters": count_text(plan.num_parameters),
            "A step": f"{plan.batch_size} sequences of {plan.seq_len} tokens over all GPUs, at least one per GPU",
            "Shared": "parameters, gradients and optimizer state, with `--parallel fsdp2` on several GPUs",
        },
        sections=sections_of(
            section(fewest, Table(columns=("Recipe", *devices), rows=rows)),
            section(f"Memory per GPU with recipe {plan.recipe}", _rank_table(plan), _LEFT_OUT),
        ),
    )


def _rank_table(plan: MemoryPlan) -> Table:
    plans = [m for m in plan.memory if m.recipe == plan.recipe]
    parts = (p.capitalize() for p in plans[0].parts)
    rows = ((str(m.num_ranks), *(size_text(x) for x in m.parts.values()), size_text(m.total_bytes)) for m in plans)
    return Table(columns=("GPUs", *parts, "Together"), rows=tuple(rows))


def _training_charts(result: FinetuneResult) -> list[Chart]:
    """Held-out metrics first, which show what precision cost; then losses, their gap, loss scale and update quality."""
    run, twin = main_run(result), twin_run(result)
    charts = [_evaluation_chart(result, s.name) for s in reversed(run.evaluations) if len(s.steps) > 1]
    losses = [
        Line(series=r.losses, colour=i, label=arithmetic_of(result, r.role))
        for i, r in enumerate(filter(None, (run, twin)))
    ]
    charts.append(line_chart("Training loss", "The loss at the start of every step.", losses))
    if twin is not None:
        words = "Training loss of the run minus that of its twin, at every step; above zero, the twin is better."
        charts.append(line_chart("The gap", words, _gap_lines(result)))
    if len(set(run.loss_scales.values)) > 1:
        logs = tuple(math.log2(v) if v > 0 else math.nan for v in run.loss_scales.values)
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
        series = _evaluations_of(run, metric)
        if series is not None:
            label = arithmetic_of(result, run.role) if run.role not in labelled else ""
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


def _evaluations_of(run: RunRecord, metric: str) -> Series | None:
    return next((s for s in run.evaluations if s.name == metric), None)


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


def _heat_map(result: FinetuneResult) -> HeatMap | None:
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


def _gap_chart(named: Sequence[tuple[str, FinetuneResult]], metric: str) -> Chart | None:
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


def _curves_chart(
    named: Sequence[tuple[str, FinetuneResult]], title: str, read: Callable[[RunRecord], Series | None]
) -> Chart | None:
    """A chart with one curve per result, from its first seed."""
    curves = [(label, read(main_run(r))) for label, r in named]
    lines = [Line(series=s, colour=i, label=label) for i, (label, s) in enumerate(curves) if s is not None]
    return line_chart(title, "Runs with the first seed.", lines)
