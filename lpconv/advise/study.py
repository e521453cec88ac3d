"""One advice: open the model, measure the candidates for each purpose, choose, and write the commands.

The result is a record that grows: each stage takes it and yields it with more measurements.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lpconv.advise.candidates import best, coded, conversions, describe_conversion, rank_rows
from lpconv.advise.infer import NO_TIME, Trial, forecast, measure_conversion, measure_conversions, measure_feedback
from lpconv.advise.options import AdviseOptions
from lpconv.advise.parts import parts_of, with_bits_of_parts
from lpconv.advise.record import command_for
from lpconv.advise.subject import Subject, job_of, open_converted, open_subject
from lpconv.advise.train import Runs, drop_noisy_recipes, measure_recipes, recipe_rows
from lpconv.bench.worker import measure_peaks
from lpconv.errors import LpconvError, UnreadError
from lpconv.kernels.compiled import eager_mode
from lpconv.plan.provenance import versions
from lpconv.probe.advice import findings, loss_scales
from lpconv.probe.checkpoint import counted_layers
from lpconv.probe.noise import NOISE_RECIPES, gradient_noise
from lpconv.probe.record import GRADIENT_ROLES
from lpconv.probe.track import probe
from lpconv.progress import Deadline, Progress, TimeIsUp, quiet_transformers
from lpconv.report.advise import findings_of, nearest, noise_findings, recommendation, unknowns
from lpconv.results import AdviceResult, AdviceRow, RecipeNoise, Recommendation, to_json
from lpconv.storage.checkpoint import Checkpoint

_NOISE_SHARE = 0.2  # share of the time for training that finds recipes to leave out
_INFER_SHARE = 0.6  # share of the time for inference if training is included
_PARTS_SHARE = 0.3  # time for the cost of single tensors, relative to that of conversions


def study(
    checkpoint: Checkpoint,
    output: Path,
    options: AdviseOptions,
    deadline: Deadline,
    keep: Callable[[AdviceResult], object],
    command: str | None,
) -> AdviceResult:
    """The advice on a checkpoint's model until the deadline; raises and calls `keep` as `advise` does."""
    subject = open_subject(checkpoint, options, deadline.progress)
    result = _merge_rows(_initial_result(subject, output, options, command), _all_rows(subject, options))
    for purpose in options.purposes:
        share = _INFER_SHARE if purpose == "infer" and "train" in options.purposes else 1.0
        limit = deadline.part(share)
        is_infer = purpose == "infer"
        stage = _infer(result, subject, options, limit) if is_infer else _train(result, subject, options, limit)
        try:
            while True:
                keep(_conclude(result, options, deadline, interrupted=True))
                with limit.enforced():
                    result = next(stage)
        except (StopIteration, TimeIsUp):
            pass  # rows without figures are listed as not measured
        except LpconvError as e:
            if options.purpose == purpose or isinstance(e, UnreadError):
                raise
            what = "conversions were not tried" if purpose == "infer" else "training was not tried"
            warning = f"{what}: {e.message}" + (f" ({e.hint})" if e.hint else "")
            result = replace(result, warnings=(*result.warnings, warning))
    with suppress(TimeIsUp), deadline.enforced():
        result = replace(result, findings=(*_probe_findings(subject, options, deadline), *result.findings))
    return _conclude(result, options, deadline, interrupted=False)


def _initial_result(subject: Subject, output: Path, options: AdviseOptions, command: str | None) -> AdviceResult:
    """The result before any measurement."""
    prepared = subject.prepared
    return AdviceResult(
        name=subject.name,
        output=str(output),
        facts={
            "Model": f"{type(subject.model).__name__}, {prepared.task.words}",
            "Text": f"{prepared.data_words}, {len(subject.windows)} windows of {prepared.seq_len} tokens at most",
        },
        metric=subject.metric,
        source_bytes=subject.source_bytes,
        rows=(),
        findings=(),
        warnings=(*prepared.notes, *prepared.batches.tokens.doubts),
        options=to_json(options),
        versions=versions(),
        command=command,
    )


def _all_rows(subject: Subject, options: AdviseOptions) -> Iterator[AdviceRow]:
    """Every candidate for the purposes that is known so far, without measurements."""
    if "infer" in options.purposes:
        for settings in conversions(options.runtime).values() if options.bits is None else (coded(options.bits),):
            name = describe_conversion(settings)
            yield AdviceRow(purpose="infer", name=name, settings=settings, status="unmeasured", why=NO_TIME)
    if "train" in options.purposes:
        yield from recipe_rows(subject.model, options.budget)


def _probe_findings(subject: Subject, options: AdviseOptions, deadline: Deadline) -> tuple[str, ...]:
    """Findings of one forward and backward step: gradients matter for training, the other tensors for formats."""
    with quiet_transformers(), eager_mode(), counted_layers(subject.model, 1, deadline):
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


def _infer(result: AdviceResult, subject: Subject, options: AdviseOptions, limit: Deadline) -> Iterator[AdviceResult]:
    """Yield the result with conversions tried, and then with the cost of each tensor for the best one."""
    with job_of(subject, {}):
        pass  # raises an error for a model that cannot be converted
    limit.start("measuring this machine", 0)
    peaks = measure_peaks("cpu")
    trial = Trial(
        subject=subject,
        text=options.data or "demo",
        runtime=options.runtime,
        budget=options.budget,
        forecasts={kind: forecast(subject, options.batch_size, peaks, opened=kind) for kind in ("bf16", "fp32")},
        progress=limit,
    )
    for rows in (
        measure_conversions(trial, limit) if options.bits is None else _measure_parts(trial, options.bits, limit)
    ):
        result = _merge_rows(result, rows)
        yield result
    chosen = best(result.rows, "infer")
    if chosen is not None and (chosen.calibration_s or 0.0) < limit.left_s:
        model, records = open_converted(subject, chosen.settings, limit)
        most = Deadline(min(limit.left_s, limit.spent_s * _PARTS_SHARE), limit)
        parts, whole = parts_of(subject, model, records, most, limit)
        yield replace(result, parts=parts, parts_whole=whole, parts_of=chosen.name)


def _measure_parts(trial: Trial, bits: float, limit: Deadline) -> Iterator[Sequence[AdviceRow]]:
    """Yield the conversion with the same bits for all parts, then with bits for each, and with error feedback too."""
    start = coded(bits)
    yield [measure_conversion(trial, describe_conversion(start), start, limit.part(1 / 4))]
    settings = with_bits_of_parts(trial.subject, start, limit.part(2 / 3), limit)
    yield [mixed := measure_conversion(trial, describe_conversion(settings), settings, limit)]
    yield from measure_feedback(trial, [mixed], limit)


def _train(result: AdviceResult, subject: Subject, options: AdviseOptions, limit: Deadline) -> Iterator[AdviceResult]:
    """Yield the result with recipes tried."""
    runs = Runs(subject.prepared.checkpoint, options, limit)
    noise: tuple[RecipeNoise, ...] = ()
    part = limit.part(_NOISE_SHARE)
    with suppress(TimeIsUp), part.enforced():
        noise = _noise_in_four_bits(subject, options, part)
    rows = drop_noisy_recipes((row for row in result.rows if row.purpose == "train"), noise)
    facts, found = result.facts | {"Training": runs.words}, (*result.findings, *noise_findings(noise))
    result = _merge_rows(replace(result, facts=facts, findings=found), rows)
    yield result
    steps = runs.longest(limit)
    rows = [replace(row, seconds=runs.seconds(steps)) if row.status == "unmeasured" else row for row in rows]
    result = _merge_rows(replace(result, steps_tried=steps), rows)
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
            nearest=near.name if (near := row or nearest(result, purpose)) else None,
        )
        for purpose, row in chosen
    )
    return replace(result, recommendations=advised, unknowns=tuple(unknowns(result)))
