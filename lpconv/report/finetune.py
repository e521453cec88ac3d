"""Documents of a fine-tuning: what precision cost relative to the twin, diagnostics, settings, and planned memory."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath

from lpconv.report.charts import Chart
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
from lpconv.report.finetune_charts import curves_chart, evaluations_of, gap_chart, heat_map, training_charts
from lpconv.report.finetune_words import (
    diagnostics,
    figure_text,
    gap_table,
    held_out_table,
    held_out_words,
    main_run,
    metric_name,
    metric_title,
    noise_text,
    title,
    twin_run,
    verdict,
    worst_tracked,
)
from lpconv.report.numbers import MISSING, count_text, duration_text, plural, share_text, size_text
from lpconv.results import FinetuneResult, MemoryPlan

_METRICS = ("eval_loss", "eval_accuracy")
_HEAT_WORDS = (
    "Percentage of elements that became zero (orange) or, with an arrow, exceeded the range (red). A cell without "
    "a number lost less than 0.5 %, a grey cell nothing."
)
_LEFT_OUT = (
    "Estimated peaks of the forward and backward pass. Temporary tensors of the optimizer and the device's own memory "
    "are not included. To publish the model, the first process gathers it in fp32 in CPU memory."
)


def finetune_document(result: FinetuneResult) -> Document:
    """What was trained, what precision cost, and in which layers."""
    return Document(
        kind="finetune",
        title=PurePath(result.output).name,
        subtitle=title(result),
        verdict=_verdict(result),
        tiles=_tiles(result),
        warnings=result.warnings,
        sections=sections_of(
            section("", *training_charts(result)),
            gates_section(result.gates),
            section("What precision cost", gap_table(result)),
            section("Before the first step and after the last", held_out_table(result), held_out_words(result)),
            section("During training", Bullets(lines=diagnostics(result))),
            section("Where most was lost", Bullets(lines=worst_tracked(result))),
            section("Elements lost, by layer and step", heat_map(result), _HEAT_WORDS, only="page"),
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
        *(gap_chart(named, m) for m in metrics),
        *(curves_chart(named, metric_title(m), partial(evaluations_of, metric=m)) for m in _METRICS),
        curves_chart(named, "Training loss", lambda run: run.losses),
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
