"""One advice: open the model, measure the candidates for each purpose, choose, and write the commands.

The result is a record that grows: each stage takes it and yields it with more measurements.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from lpconv.advise.bits import Base, base_for, parts_of, raise_costly_tensors
from lpconv.advise.candidates import best, rank_rows
from lpconv.advise.infer import Trial, forecast, measure_conversion, measure_conversions
from lpconv.advise.options import AdviseOptions
from lpconv.advise.record import command_for
from lpconv.advise.subject import Subject, job_of, open_converted, open_subject
from lpconv.advise.train import Runs, drop_noisy_recipes, measure_recipes, recipe_rows
from lpconv.bench.worker import measure_peaks
from lpconv.errors import LpconvError, UnreadError
from lpconv.kernels.compiled import eager_mode
from lpconv.plan.provenance import versions
from lpconv.probe.advice import findings, loss_scales
from lpconv.probe.noise import NOISE_RECIPES, gradient_noise
from lpconv.probe.record import GRADIENT_ROLES
from lpconv.probe.track import probe
from lpconv.progress import Deadline, Progress, TimeIsUp, quiet_transformers
from lpconv.report.advise import findings_of, noise_findings, recommendation, unknowns
from lpconv.results import AdviceResult, AdviceRow, RecipeNoise, Recommendation, to_json
from lpconv.storage.checkpoint import Checkpoint

_INFER_SHARE = 0.4  # share of the time for inference if training is included
_PARTS_SHARE = 0.3  # share of the time of conversions for the cost of single tensors, on which no choice depends


def study(
    checkpoint: Checkpoint,
    output: Path,
    options: AdviseOptions,
    progress: Progress,
    keep: Callable[[AdviceResult], object],
    command: str | None,
) -> AdviceResult:
    """The advice on a checkpoint's model within the time budget; raises and calls `keep` as `advise` does."""
    deadline = Deadline(60 * options.budget.minutes, progress)
    subject = open_subject(checkpoint, options, progress)
    with quiet_transformers():
        peaks = measure_peaks("cpu")
    forecasts = {kind: forecast(subject, options.batch_size, peaks, opened=kind) for kind in ("bf16", "fp32")}
    trial = Trial(
        subject=subject, text=options.data or "demo", budget=options.budget, forecasts=forecasts, progress=progress
    )
    base = None if options.bits is None or "infer" not in options.purposes else base_for(subject, options.bits)
    result = _initial_result(subject, output, options, command)
    keep(_conclude(result, options, deadline, interrupted=True))
    if deadline.left_s > 0:
        result = replace(result, findings=_probe_findings(subject, options, progress))
    for purpose in options.purposes:
        if purpose == "infer":
            limit = deadline.part(_INFER_SHARE if "train" in options.purposes else 1.0)
            stage, missed = _infer(result, replace(trial, progress=limit), base, limit), "conversions were not tried"
        else:
            stage, missed = _train(result, subject, options, deadline), "training was not tried"
        try:
            for result in stage:
                keep(_conclude(result, options, deadline, interrupted=True))
        except TimeIsUp:
            pass  # its rows without figures are listed as not measured
        except LpconvError as e:
            if options.purpose == purpose or isinstance(e, UnreadError):
                raise
            warning = f"{missed}: {e.message}" + (f" ({e.hint})" if e.hint else "")
            result = replace(result, warnings=(*result.warnings, warning))
    return _conclude(result, options, deadline, interrupted=False)


def _initial_result(subject: Subject, output: Path, options: AdviseOptions, command: str | None) -> AdviceResult:
    """The result before any measurement."""
    prepared, checkpoint = subject.prepared, subject.prepared.checkpoint
    return AdviceResult(
        name=subject.name,
        output=str(output),
        facts={
            "Model": f"{type(subject.model).__name__}, {prepared.task.words}",
            "Text": f"{prepared.data_words}, {len(subject.windows)} windows of {prepared.seq_len} tokens at most",
        },
        metric=subject.metric,
        source_bytes=sum((checkpoint.directory / f).stat().st_size for f in checkpoint.weight_files),
        rows=(),
        findings=(),
        warnings=(*prepared.notes, *prepared.batches.tokens.doubts),
        options={k: to_json(v) for k, v in dataclasses.asdict(options).items()},
        versions=versions(),
        command=command,
    )


def _probe_findings(subject: Subject, options: AdviseOptions, progress: Progress) -> tuple[str, ...]:
    """Findings of one forward and backward step: gradients matter for training, the other tensors for formats."""
    progress.start("one step forward and backward", 0)
    with quiet_transformers(), eager_mode():
        result = probe(subject.model, subject.batches, steps=1, loss=subject.prepared.loss)
    if "train" not in options.purposes:
        result = replace(result, tensors=tuple(t for t in result.tensors if t.role not in GRADIENT_ROLES))
    return findings_of(findings(result), loss_scales(result).values())


def _noise_in_four_bits(subject: Subject, options: AdviseOptions, progress: Progress) -> tuple[RecipeNoise, ...]:
    """Gradients over their rounding noise in the recipes of four bits, from one batch."""
    progress.start("gradients in four bits", 0)
    recipes = {name: recipe for name, recipe in NOISE_RECIPES.items() if recipe.weight.format == "e2m1"}
    with quiet_transformers(), eager_mode():
        return gradient_noise(
            subject.model, subject.batches, recipes=recipes, steps=1, loss=subject.prepared.loss, seed=options.seed
        )


def _infer(result: AdviceResult, trial: Trial, base: Base | None, deadline: Deadline) -> Iterator[AdviceResult]:
    """Yield the result with conversions tried, and then with the cost of each tensor for the best one."""
    subject, progress = trial.subject, trial.progress
    with job_of(subject, {}):
        pass  # raises an error for a model that cannot be converted
    for rows in measure_conversions(trial, deadline.part(1 - _PARTS_SHARE)):
        result = _merge_rows(result, rows)
        yield result
    if base is not None:
        name, settings = raise_costly_tensors(subject, base, deadline.part(_PARTS_SHARE), progress)
        result = _merge_rows(result, [measure_conversion(trial, name, settings, deadline)])
        yield result
    chosen = best(result.rows, "infer")
    if chosen is not None and deadline.left_s > 0:
        model, records = open_converted(subject, chosen.settings, progress)
        most = Deadline(min(deadline.left_s, deadline.spent_s * _PARTS_SHARE / (1 - _PARTS_SHARE)), progress)
        parts = parts_of(subject, model, records, most, progress)
        yield replace(result, parts=parts, parts_of=chosen.name)


def _train(result: AdviceResult, subject: Subject, options: AdviseOptions, limit: Deadline) -> Iterator[AdviceResult]:
    """Yield the result with recipes tried."""
    runs = Runs(subject.prepared.checkpoint, options, limit)
    noise = _noise_in_four_bits(subject, options, limit)
    rows = drop_noisy_recipes(recipe_rows(subject.model, options.budget), noise)
    facts, found = result.facts | {"Training": runs.words}, (*result.findings, *noise_findings(noise))
    result = _merge_rows(replace(result, facts=facts, findings=found), rows)
    yield result
    steps = runs.longest(limit)
    result = replace(result, steps_tried=steps)
    for row in measure_recipes(runs, rows, steps, limit):
        result = _merge_rows(result, [row])
        yield result


def _merge_rows(result: AdviceResult, rows: Iterable[AdviceRow]) -> AdviceResult:
    """The result with new or updated rows."""
    known = {(row.purpose, row.name): row for row in result.rows} | {(row.purpose, row.name): row for row in rows}
    return replace(result, rows=tuple(known.values()))


def _conclude(result: AdviceResult, options: AdviseOptions, deadline: Deadline, *, interrupted: bool) -> AdviceResult:
    """The result with ranked rows, recommendations, and what it does not know."""
    rows = rank_rows(result.rows)
    result = replace(result, rows=rows, seconds=deadline.spent_s, interrupted=interrupted)
    chosen = [(purpose, best(result.rows, purpose)) for purpose in options.purposes]
    advised = tuple(
        Recommendation(
            purpose=purpose,
            row=row.name if row else None,
            words=recommendation(result, row, purpose),
            command=command_for(result.name, row, options) if row else None,
        )
        for purpose, row in chosen
    )
    return replace(result, recommendations=advised, unknowns=tuple(unknowns(result)))
