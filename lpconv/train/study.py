"""A whole fine-tuning: data, runs and their twins over seeds, the model, the report."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from lpconv.gates import FINETUNE_GATES, Gate
from lpconv.models.objective import Objective
from lpconv.plan.provenance import inherited_facts, versions
from lpconv.progress import Progress
from lpconv.report.cards import finetune_card
from lpconv.report.finetune import finetune_document, nothing_learned
from lpconv.report.html import html
from lpconv.report.markdown import markdown
from lpconv.report.numbers import plural
from lpconv.results import FinetuneResult, RunRecord, json_text, to_json
from lpconv.scaled.critical import InputRisk
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.partfile import write_small
from lpconv.train.folder import (
    MERGED,
    PAGE,
    REPORT,
    RUNS,
    asked_for,
    held_folder,
    read_finished,
    remove_leftovers,
    run_folder,
    write_finished,
)
from lpconv.train.held_out import as_published, baselines
from lpconv.train.job import (
    MEASURED_BATCHES,
    TrainingJob,
    TrainingRun,
    check_run,
    first_batches,
    start_in_fp32,
    training_job,
    with_measured,
)
from lpconv.train.one import train_one
from lpconv.train.options import FinetuneOptions
from lpconv.train.outcome import gap_records, held_out_records
from lpconv.train.processes import is_main_process, num_processes, wait_for_all
from lpconv.train.publish import in_place, publish_model
from lpconv.train.recover import Recovery
from lpconv.train.recoverable import Recoverable
from lpconv.train.trainer import Clock

_CALIBRATED = 16  # batches on which the merged weights of an adapter are rounded


def study(
    checkpoint: Checkpoint,
    output: Path,
    options: FinetuneOptions,
    gates: Sequence[Gate],
    *,
    progress: Progress,
    command: str | None,
    start: Recoverable | None = None,
    twin: Checkpoint | None = None,
) -> FinetuneResult:
    """Fine-tune the model of a checkpoint and its twin, and fill the folder `output`; raises as `finetune` does.

    `start` is set for --recover. `twin` is what the twin starts from, if that is not `checkpoint`.
    """
    started = time.perf_counter()
    check_run(options)
    clock = Clock(progress)
    checkpoint.check_promised()
    with clock.phase("reading data"):
        job = training_job(checkpoint, options)
    if job.guess:
        progress.message(job.guess)
    if start is not None:
        with clock.phase("opening the source"):
            job = dataclasses.replace(job, recovery=Recovery.open(start, job.task, progress))
    on_source = f" on {twin.origin.name}" if twin not in (None, checkpoint) else ""
    is_main, asked = is_main_process(), asked_for(checkpoint.origin.name, options)
    with held_folder(output, asked, resume=options.resume, force=options.force) if is_main else nullcontext():
        wait_for_all()
        with clock.phase("measuring inputs"):
            job, chosen = with_measured(job)
        if job.recovery is not None and job.recovery.start.adapter is not None:
            with clock.phase("rounding the merged weights"):
                batches = first_batches(job, job.stream(options.seed, held_out=False), _CALIBRATED, torch.device("cpu"))
                recovery = job.recovery.with_better_start(job.task, batches, output / RUNS / MERGED, progress)
                with_rate = dataclasses.replace(job.options, lr=options.lr or recovery.lr_of_merge)
                job = dataclasses.replace(job, recovery=recovery, options=with_rate)
        runs = _train_all(job, twin, output, progress, is_main, clock)
        wait_for_all()
        held_out = job.stream(0, held_out=True)
        guess = baselines(job.targets(), held_out, num_targets=job.num_targets) if start is None else {}
        result = FinetuneResult(
            name=checkpoint.origin.name,
            output=str(output),
            recipe=options.arithmetic.name,
            twin=options.twin_arithmetic.name + on_source if options.twin_arithmetic else None,
            source=None if start is None else start.teacher,
            task=job.task.name,
            facts=_facts(job) | _critical_facts(job.options.critical, chosen),
            runs=runs,
            gaps=gap_records(runs),
            seconds=time.perf_counter() - started,
            spent=clock.seconds,
            saved_as=" ".join(options.saved_form),
            held_out=held_out_records(
                runs, guess, num_examples=len(held_out), num_available=len(job.examples.held_out)
            ),
            options=to_json(options),
            versions=versions(),
            command=command,
            card=inherited_facts(checkpoint.directory, checkpoint.origin.hub_id),
            warnings=_warnings(job, runs),
        )
        warnings = (*result.warnings, *nothing_learned(result))
        result = dataclasses.replace(result, gates=FINETUNE_GATES.check(gates, result), warnings=warnings)
        if is_main:
            _write(output, result)
    return result


def _write(output: Path, result: FinetuneResult) -> None:
    """Write all files next to the model; the report comes last, so a folder with it is complete."""
    write_small(output / "README.md", markdown(finetune_card(result)))
    remove_leftovers(output)
    with in_place(output):
        write_small(output / PAGE, html(finetune_document(result)))
        write_small(output / REPORT, json_text(result))


def _train_all(
    job: TrainingJob, twin: Checkpoint | None, output: Path, progress: Progress, is_main: bool, clock: Clock
) -> tuple[RunRecord, ...]:
    """All runs of all seeds, each followed by its twin; finished runs of an earlier command are read."""
    options = job.options
    records: list[RunRecord] = []
    for seed in range(options.seed, options.seed + options.seeds):
        for work in _runs_of_seed(job, output, seed):
            record = read_finished(work.folder)
            if record is None:
                own = dataclasses.replace(job, checkpoint=twin) if twin and work.role == "twin" else job
                finished = train_one(own, work, progress)
                record = finished.record
                for what, seconds in record.seconds.items():
                    clock.add(what, seconds)
                figures = as_published(record.evaluations)
                if work.role == "run":
                    progress.message("saving the model")
                    with clock.phase("publishing"):
                        figures = publish_model(output, job, work, finished, progress)
                record = dataclasses.replace(record, evaluations=(*record.evaluations, *figures))
                if job.recovery is not None and job.recovery.start.adapter is not None:
                    record = _with_kept(job, record, finished.prepared.model)
                if is_main:
                    write_finished(work.folder, record)
                del finished
                wait_for_all()
            records.append(record)
    return tuple(records)


def _with_kept(job: TrainingJob, record: RunRecord, model: Any) -> RunRecord:
    """The record of a merge with the share of the adapter's update that the trained model has."""
    assert job.recovery is not None
    batches = first_batches(job, job.stream(record.seed, held_out=True), job.options.eval_batches, model.device)
    start = start_in_fp32(dataclasses.replace(job, recovery=None), record.seed).to(model.device)
    before = job.recovery.distillation.divergence(start, batches)
    after = next(s.values[-1] for s in record.evaluations if s.name == "eval_loss_published")
    return dataclasses.replace(
        record,
        update_kept=1 - math.sqrt(max(after, 0.0) / before) if before > 0 else None,
        kept_by_layer=job.recovery.distillation.kept_by_layer(start, model, batches[0]),
    )


def _runs_of_seed(job: TrainingJob, output: Path, seed: int) -> Sequence[TrainingRun]:
    """The run of a seed, and its twin."""
    options, is_first = job.options, seed == job.options.seed
    works = {"run": options.arithmetic, "twin": options.twin_arithmetic}
    return [
        TrainingRun(
            role=role,
            seed=seed,
            arithmetic=trained,
            folder=run_folder(output, role, seed),
            metrics=(output if role == "run" and is_first else run_folder(output, role, seed)) / "metrics.jsonl",
            lca=options.lca and role == "run" and is_first,
        )
        for role, trained in works.items()
        if trained is not None
    ]


def _facts(job: TrainingJob) -> dict[str, str]:
    o = job.options
    processes = f" over {num_processes()} processes" if num_processes() > 1 else ""
    batches = f"{o.grad_accum} batches of " if o.grad_accum > 1 else ""
    recovery = job.recovery
    return {
        "Model": job.checkpoint.origin.resolved,
        **(
            {}
            if recovery is None
            else {"Source" if recovery.start.adapter is None else "Teacher": recovery.start.teacher}
        ),
        "Task": f"{job.task.name}: {job.loss}",
        "Data": job.examples.words,
        "Steps": f"{o.steps}, each of {batches}{plural(o.batch_size, 'sequence')} of at most {job.seq_len} tokens"
        f"{processes}{', with gradient checkpointing' * o.gradient_checkpointing}",
        "Optimizer": f"AdamW ({o.arithmetic.optimizer}), lr {o.highest_lr:g} {o.schedule}, {o.warmup:.0%} warm-up, "
        f"beta2 {o.beta2:g}, weight decay {o.weight_decay if recovery is None else 0:g}, clip {o.clip:g}".replace(
            "%", " %"
        ),
        "Seeds": ", ".join(str(s) for s in range(o.seed, o.seed + o.seeds)),
        **({"Start": recovery.words} if recovery is not None and recovery.words else {}),
        **({"Scales": f"measured on the first {MEASURED_BATCHES} batches"} if o.calibrate else {}),
    }


def _critical_facts(patterns: Sequence[str], chosen: Sequence[InputRisk]) -> dict[str, str]:
    """Labelled facts about layers that multiply in 16 bits, with reason and cost; empty if there are none."""
    measured = {r.layer for r in chosen}
    words = [p for p in patterns if p not in measured]
    if chosen:
        shown = ", ".join(f"{r.layer} (crest {r.crest:.3g})" for r in chosen)
        share = 100 * sum(r.share for r in chosen)
        words.append(f"{shown}: {share:.2g} % of the matmul work, at up to twice the time of fp8")
    return {"16-bit products": "; ".join(words)} if words else {}


def _warnings(job: TrainingJob, runs: Sequence[RunRecord]) -> tuple[str, ...]:
    objective, from_runs = job.objective or Objective(), dict.fromkeys(note for run in runs for note in run.notes)
    warnings = [*job.examples.notes, *objective.notes, *from_runs]
    rounds = job.options.steps * job.options.sequences_per_step / len(job.examples.train)
    if rounds > 1:
        warnings.append(f"the run passes over the training data {rounds:.3g} times")
    counted = sum((Counter(run.fallbacks) for run in runs), Counter[str]())
    cure = "; use --operand-scale tensor to avoid this" if any("saturated in" in n for n in counted) else ""
    warnings += [f"{name}: {count} times over all runs{cure}" for name, count in sorted(counted.items())]
    return tuple(warnings)
