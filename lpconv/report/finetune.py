"""Documents and sentences of a fine-tuning: what precision cost relative to the twin, diagnostics, planned memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath

from lpconv.report.charts import Bar, Chart, Line, bar_chart, line_chart
from lpconv.report.compare import compare_document
from lpconv.report.document import Document, Table, Tile, Verdict, failed_gates, gates_section, section, sections_of
from lpconv.report.numbers import (
    MISSING,
    count_text,
    duration_text,
    plural,
    scale_text,
    share_text,
    size_text,
)
from lpconv.results import FinetuneResult, GapRecord, LossAllocation, MemoryPlan, RunRecord, Series

_WEIGHTS = {"": "", "_fp32": " of the weights in fp32", "_published": " of the published model"}
_METRICS = {f"eval_{m}{end}": f"held-out {m}{of}" for m in ("loss", "accuracy") for end, of in _WEIGHTS.items()}
_RECOVERED = {"held-out loss": "KL to the teacher", "held-out accuracy": "equal first choices"}
_SHARES = tuple(metric for metric in _METRICS if "accuracy" in metric)
_CURVES = ("eval_loss", "eval_accuracy")
_LEFT_OUT = (
    "Estimated peaks of the forward and backward pass. Temporary tensors of the optimizer and the device's own memory "
    "are not included. To publish the model, the first process gathers it in fp32 in CPU memory."
)


def title(result: FinetuneResult) -> str:
    """Name of the model and of its training."""
    if main_run(result).kept_by_layer:
        return f"{result.source}, merged"
    return f"{result.name} fine-tuned: {result.recipe}" + (f" next to {result.twin}" if result.twin else "")


def main_run(result: FinetuneResult) -> RunRecord:
    """The run of the first seed."""
    return next(r for r in result.runs if r.role == "run")


def twin_run(result: FinetuneResult) -> RunRecord | None:
    """The twin of the first seed's run, or None."""
    seed = main_run(result).seed
    return next((r for r in result.runs if r.role == "twin" and r.seed == seed), None)


def metric_name(metric: str, result: FinetuneResult | None = None) -> str:
    """Display name of a held-out metric."""
    name = _METRICS.get(metric, metric)
    for usual, recovered in _RECOVERED.items() if result is not None and result.source else ():
        name = name.replace(usual, recovered)
    return name


def metric_title(metric: str, result: FinetuneResult | None = None) -> str:
    """Display name of a held-out metric, with a capital letter."""
    name = metric_name(metric, result)
    return name[:1].upper() + name[1:]


def figure_text(metric: str, value: float | None) -> str:
    """A held-out metric as text: accuracy in per cent, loss with five digits."""
    if value is None:
        return MISSING
    return f"{100 * value:.2f} %" if metric in _SHARES else f"{value:#.5g}"


def _two_digits(value: float, sign: str = "") -> str:
    """A number with two significant digits, trailing zeros included: 0.010."""
    return f"{value:{sign}#.2g}".removesuffix(".") if value else f"{value:{sign}g}"


def noise_text(gap: GapRecord) -> str:
    """The gap as text, with its 95 % interval over seeds if there is one."""
    is_share = gap.metric in _SHARES
    text = f"{100 * gap.gap:+.2f} points" if is_share else _two_digits(gap.gap, "+")
    if gap.half_width is None:
        return text
    width = f"{100 * gap.half_width:.2f}" if is_share else _two_digits(gap.half_width)
    return f"{text} ± {width}"


def _error_text(metric: str, error: float | None) -> str:
    """A standard error as text; in percentage points for accuracy."""
    if error is None:
        return MISSING
    return f"{100 * error:.2g} points" if metric in _SHARES else _two_digits(error)


def gap_table(result: FinetuneResult) -> Table:
    """Every metric of run and twin after the last step, with the gap and whether it exceeds noise."""
    return Table(
        columns=("Metric", result.recipe, result.twin or "", "Gap", "Std. error", "Seen from", "<Beyond noise?"),
        rows=tuple(_gap_rows(result)),
        caption="After the last step, mean over seeds. The gap has a 95 % interval from paired seeds and a "
        "standard error over held-out batches; a true gap of Seen from would exceed the noise in 80 % of cases.",
    )


def _gap_rows(result: FinetuneResult) -> Iterator[tuple[str, ...]]:
    """The rows of `gap_table`. Language models also get perplexity."""
    for g in result.gaps:
        says = {None: "one seed", True: "yes", False: "no"}[g.exceeds_noise]
        ends = (figure_text(g.metric, g.run), figure_text(g.metric, g.twin))
        errors = (_error_text(g.metric, g.standard_error), _error_text(g.metric, g.detectable))
        yield metric_name(g.metric), *ends, noise_text(g), *errors, says
        if g.metric == "eval_loss" and result.task != "classification" and max(g.run, g.twin) < 50:
            perplexities = (f"{math.exp(loss):#.5g}" for loss in (g.run, g.twin))
            change = f"{100 * math.expm1(g.gap):+.2g} %"
            yield "held-out perplexity", *perplexities, change, MISSING, MISSING, says


def held_out_table(result: FinetuneResult) -> Table:
    """Each held-out metric of run and twin, before the first step and after the last."""
    rows = tuple(
        (
            metric_name(h.metric, result),
            arithmetic_of(result, h.role),
            figure_text(h.metric, h.before),
            figure_text(h.metric, h.after),
            _error_text(h.metric, h.standard_error),
            figure_text(h.metric, h.baseline),
        )
        for h in result.held_out
    )
    return Table(columns=("Metric", "<Arithmetic", "Before", "After", "Std. error", "Guess"), rows=rows)


def held_out_words(result: FinetuneResult) -> str:
    """Number of examples and the baseline of the held-out metrics; empty if the record has none."""
    if not result.held_out:
        return ""
    h = result.held_out[0]
    examples = "example" if h.num_available == 1 else "examples"
    of_all = "" if h.num_examples == h.num_available else f" of {count_text(h.num_available)}"
    text = (
        f"On {count_text(h.num_examples)}{of_all} held-out {examples}; standard errors are for After, between batches."
    )
    if result.source:
        return text
    return f"{text} The baseline guess is {guess(result)}, with the frequencies of the training data."


def guess(result: FinetuneResult) -> str:
    """Description of the baseline of the held-out metrics."""
    return "the largest class" if result.task == "classification" else "the unigram distribution of tokens"


def arithmetic_of(result: FinetuneResult, role: str) -> str:
    """Name of the arithmetic of a run or of its twin."""
    return result.recipe if role == "run" else result.twin or ""


def nothing_learned(result: FinetuneResult) -> tuple[str, ...]:
    """Warnings for run and twin if the held-out metrics do not show that they learned anything."""
    return tuple(
        f"{arithmetic_of(result, role)} learned nothing measurable on the held-out examples: {_progress(result, role)}"
        for role in ("run", "twin")
        if result.learned(role) is False and result.update_kept is None
    )


def _progress(result: FinetuneResult, role: str) -> str:
    parts = []
    for h in (h for h in result.held_out if h.role == role):
        before, after = (figure_text(h.metric, x) for x in (h.before, h.after))
        text = f"{metric_name(h.metric, result)} {before} before, {after} after"
        if h.metric == "eval_accuracy" and h.baseline is not None:
            text += f", {figure_text(h.metric, h.baseline)} by {guess(result)}"
        if h.standard_error is not None:
            errors = (_error_text(h.metric, x) for x in (h.standard_error, h.change_error))
            text += ", standard error {}, of the change {}".format(*errors)
        parts.append(text)
    return "; ".join(parts)


def verdict(result: FinetuneResult) -> str:
    """Two or three sentences: what precision cost, and whether the data can show that."""
    run = main_run(result)
    if result.source:
        return _recovery_verdict(result)
    if not result.gaps:
        ends = [f"{metric_name(s.name, result)} {figure_text(s.name, s.values[-1])}" for s in run.evaluations]
        return f"No twin was trained, so the cost of low precision is unknown. The run ended at {' and '.join(ends)}."
    g = headline_gap(result)
    text = (
        f"After {plural(len(run.losses.steps), 'step')} the {metric_name(g.metric)} is {figure_text(g.metric, g.run)} "
        f"with {result.recipe} and {figure_text(g.metric, g.twin)} with {result.twin}: "
        f"a gap of {_gap_words(result, g)}."
    )
    if result.learned("twin") is False:
        return (
            f"{text} But the twin, {result.twin}, learned nothing measurable on the held-out examples "
            f"({_progress(result, 'twin')}), so the gap does not show what low precision costs."
        )
    if result.learned("run") is False:
        text += f" {result.recipe} learned nothing measurable ({_progress(result, 'run')}), while {result.twin} did"
        text += f" ({_progress(result, 'twin')})."
    if g.exceeds_noise is None:
        text += " One seed cannot separate this from noise; use --seeds 3."
    else:
        text += f" That is {'beyond' if g.exceeds_noise else 'within'} the noise between seeds (95 % interval)"
        shown = "" if g.detectable is None else f", which would show a gap above {_error_text(g.metric, g.detectable)}"
        text += f"{shown}."
    return text


def headline_gap(result: FinetuneResult) -> GapRecord:
    """The gap of the published model, which users get and gates judge, or else of the run's own arithmetic."""
    by_metric = {g.metric: g for g in result.gaps}
    names = (f"{metric}{published}" for metric in reversed(_CURVES) for published in ("_published", ""))
    return next((by_metric[name] for name in names if name in by_metric), result.gaps[0])


def _gap_words(result: FinetuneResult, gap: GapRecord) -> str:
    """A gap with its uncertainty and meaning: "+0.010 (standard error 0.003; +1 % perplexity)"."""
    own = next((g for g in result.gaps if gap.metric.startswith(g.metric)), gap)
    error = gap.standard_error or own.standard_error
    details = [f"standard error {_error_text(gap.metric, error)}"] if error and gap.half_width is None else []
    if gap.metric not in _SHARES and result.task != "classification":
        details.append(f"{_two_digits(100 * math.expm1(gap.gap), '+')} % perplexity")
    return noise_text(gap) + (f" ({'; '.join(details)})" if details else "")


def _recovery_verdict(result: FinetuneResult) -> str:
    """Held-out metrics before and after a recovery, and the metrics of the published model."""
    run = main_run(result)
    changes = (
        f"{metric_name(h.metric, result)} from {figure_text(h.metric, h.before)} to {figure_text(h.metric, h.after)}"
        for h in result.held_out
    )
    published = (
        f"{metric_name(metric, result)} {figure_text(metric, s.values[-1])}"
        for s in run.evaluations
        if (metric := s.name.removesuffix("_published")) != s.name
    )
    kept, text = result.update_kept, ""
    if kept is not None and kept < 0:
        text = "The model is further from the one with the adapter than before: train more steps, or set a lower --lr. "
    elif kept is not None:
        text = f"The codes kept {share_text(kept, 1)} of the adapter's change of predictions. "
    elif run.kept_by_layer:
        text = "The adapter does not change predictions. "
    return (
        f"{text}{plural(len(run.losses.steps), 'step')} towards {result.source} changed {' and '.join(changes)} on "
        f"held-out examples. The published model in fp32: {' and '.join(published)}."
    )


def diagnostics(result: FinetuneResult) -> tuple[str, ...]:
    """Diagnostics of the run, one sentence each."""
    run = main_run(result)
    twin = twin_run(result)
    of_twin = f" (twin {duration_text(twin.step_time_s)})" if twin is not None else ""
    sentences = [f"time per step: {duration_text(run.step_time_s)}{of_twin}", *_time_spent(result)]
    skipped = f"{plural(run.num_skipped, 'step')} skipped because of non-finite gradients"
    sentences.append(skipped if run.num_skipped else "no step was skipped")
    first = run.first_nonfinite
    if first is not None:
        sentences.append(
            f"first non-finite value: {first.layer}, {first.direction}, step {first.step}; {first.outcome}"
        )
    scales = run.loss_scales.values
    if len(set(scales)) > 1 or (scales and scales[0] != 1):
        sentences.append(f"loss scale from {scale_text(scales[0])} to {scale_text(scales[-1])}")
    if run.updates:
        last = run.updates[-1]
        sentences.append(
            f"of the intended update at step {last.step}, {share_text(last.edq, 1)} reached all stored state and "
            f"{share_text(last.edq_weights, 1)} the 16-bit weights (EDQ); {share_text(last.lost, 1)} of its changes "
            f"were lost"
        )
    if run.loss_allocation is not None:
        sentences.append(_allocation_text(run.loss_allocation))
    return tuple(sentences)


def _allocation_text(a: LossAllocation) -> str:
    share = MISSING if a.rounding_share is None else f"{round(100 * a.rounding_share, 1) + 0.0:.1f} %"  # avoids -0.0
    return (
        f"steps {a.first_step} to {a.last_step} changed the loss on the first held-out batches ({a.num_batches}) "
        f"by {a.loss_after - a.loss_before:+.3g} to {a.loss_after:.5g}; rounding took {share} of the intended change; "
        f"the layers' changes differ from the true one by {share_text(a.closure_error, 1)} (closure error)"
    )


def _time_spent(result: FinetuneResult) -> tuple[str, ...]:
    """How the command's time was spent, largest first; parts below one per cent are left out."""
    spent = {what: s for what, s in result.spent.items() if s >= 0.01 * result.seconds}
    if not spent:
        return ()
    parts = (f"{duration_text(s)} {what}" for what, s in sorted(spent.items(), key=lambda part: -part[1]))
    return (f"of the command's {duration_text(result.seconds)}: {', '.join(parts)}",)


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
            section("During training", diagnostics(result)),
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
    if failed := failed_gates(result.gates):
        return Verdict(outcome="failed", text=f"{'; '.join(failed)}. {verdict(result)}")
    shows_something = shows_cost or (result.source and result.learned("run"))
    return Verdict(outcome="passed" if shows_something else "not run", text=verdict(result))


def _tiles(result: FinetuneResult) -> tuple[Tile, ...]:
    run, twin = main_run(result), twin_run(result)
    tiles = []
    if result.gaps:
        g = headline_gap(result)
        detail = f"{metric_name(g.metric)}: {figure_text(g.metric, g.run)} and {figure_text(g.metric, g.twin)}"
        tiles.append(Tile(label=f"Gap to {result.twin}", figure=noise_text(g), detail=detail))
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
        (a.layer, f"{a.change:+.3g}", f"{a.rounding:+.3g}", share_text(a.helped, 1))
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
    metrics = [m for m in reversed(_CURVES) if any(g.metric == m for r in results for g in r.gaps)]
    charts: list[Chart | None] = [
        *(_gap_chart(named, m) for m in metrics),
        *(_curves_chart(named, metric_title(m), partial(_evaluations_of, metric=m)) for m in _CURVES),
        _curves_chart(named, "Training loss", lambda run: run.losses),
    ]
    verdicts = [_verdict(r) for r in results]
    return compare_document(names, [_figures(r) for r in results], verdicts, charts=charts, choice=_choice(named))


def _choice(named: Sequence[tuple[str, FinetuneResult]]) -> str:
    """Which fine-tuning of a model ends best on the same held-out data; empty if they have no gap in common."""
    gaps = [(headline_gap(r), name) for name, r in named if r.gaps]
    if (
        len(gaps) < len(named)
        or len({(g.metric, r.name, r.facts.get("Data")) for (g, _), (_, r) in zip(gaps, named, strict=True)}) > 1
    ):
        return ""
    sign = -1 if gaps[0][0].metric in _SHARES else 1
    best, name = min(gaps, key=lambda run: sign * run[0].run)
    figure = figure_text(best.metric, best.run)
    return f"{name} ends with the best {metric_name(best.metric)}: {figure}, a gap of {noise_text(best)}"


def _figures(r: FinetuneResult) -> Mapping[str, str]:
    run = main_run(r)
    figures = {"model": r.name, "recipe": r.recipe, "twin": r.twin or MISSING, "task": r.task}
    figures |= {"steps": count_text(len(run.losses.steps)), "seeds": count_text(sum(x.role == "run" for x in r.runs))}
    figures |= {
        f"{metric_name(s.name, r)}, run": figure_text(s.name, s.values[-1]) for s in run.evaluations if s.values
    }
    for name, of_run, of_twin, gap, error, *_ in _gap_rows(r):
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
    rows = tuple((recipe, *map(count_text, counts.values())) for recipe, counts in plan.gpus.items())
    most = max(m.num_ranks for m in plan.memory)
    fewest = f"The smallest number of GPUs that is enough; {MISSING} if {most} are not"
    alone = next(m for m in plan.memory if m.recipe == plan.recipe)
    return Document(
        kind="finetune",
        verdict=Verdict(
            outcome="not run",
            text=f"{size_text(alone.total_bytes)} on {plural(alone.num_ranks, 'GPU')} with recipe {plan.recipe}",
        ),
        title=f"{plan.name}: memory of a step",
        facts={
            "Parameters": count_text(plan.num_parameters),
            "A step": f"{f'{plan.grad_accum} batches of ' * (plan.grad_accum > 1)}{plan.batch_size} sequences of "
            f"{plan.seq_len} tokens over all GPUs, at least one per GPU"
            f"{', with gradient checkpointing' * plan.gradient_checkpointing}",
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
    if run.kept_by_layer:
        words = "Share of the adapter's change of the states after each layer; 1 is all of it."
        layers = Series(name="kept", steps=tuple(range(len(run.kept_by_layer))), values=run.kept_by_layer)
        charts.insert(0, line_chart("Update kept, by layer", words, [Line(series=layers, colour=0)], over="layer"))
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
