"""A whole conversion, from a name to a published directory: resolve, plan, check, write, verify, report, publish."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpconv.convert.parts import adopt_parts, check_shareable, checked_parts, folder_for_parts, remove_parts
from lpconv.data import SELF, text_at
from lpconv.data.texts import check_reads_text, check_tokenizer
from lpconv.errors import OutputExistsError, UnsupportedError, UsageError, VerificationError
from lpconv.forms.form import Side
from lpconv.gates import needs_logits
from lpconv.inspect.headers import inspect
from lpconv.machine import peak_rss_bytes
from lpconv.options import with_keywords
from lpconv.plan.files import (
    CARD,
    SOURCE_CARD,
    copy_side_files,
    model_side_files,
    write_metadata,
    write_provenance,
    write_sums,
)
from lpconv.plan.job import Job, check_disk, disk_bytes, estimate_seconds, free_bytes, identity, open_model, prepare
from lpconv.plan.options import NEAREST, ConvertOptions
from lpconv.plan.provenance import (
    inherited_facts,
    plan_warnings,
    planned_record,
    public_source,
    tensor_warnings,
    versions,
)
from lpconv.plan.settings import command_line, fill_options, shaping_options
from lpconv.plan.suited import suited_options
from lpconv.progress import Progress, Silent
from lpconv.results import (
    CalibrationRecord,
    ConvertResult,
    FileRecord,
    PartResult,
    PlanResult,
    TensorRecord,
    from_json,
    json_text,
    to_json,
)
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.storage.contents import read_json
from lpconv.storage.partfile import write_small
from lpconv.storage.place import sha256_of
from lpconv.storage.remote import head, is_url
from lpconv.storage.remote_output import RemoteStaging, check_free_url, delete_records
from lpconv.storage.remote_view import view_of
from lpconv.storage.staging import JOURNAL, MARKER, Staging, check_free, read_marker
from lpconv.verify.run import check_hashes

_CALIBRATION = "calibration"  # marks a journal line among the lines of weight files
# Models that generate no text; other classes are asked once transformers is imported.
_WITHOUT_GENERATION = ("ForMaskedLM", "Classification", "ForQuestionAnswering", "ForMultipleChoice")
_DEPTH = ("none", "auto", "weights", "logits")  # of verification, least first


def plan(
    model: Openable,
    output: Path | str,
    options: ConvertOptions,
    *,
    measure: bool = False,
    progress: Progress | None = None,
) -> PlanResult:
    """The plan of `convert` for the same arguments, from headers alone without `measure`; nothing is written.

    With `measure` the first layers are rounded with error feedback, to estimate time and memory. Raises UsageError if
    the options ask for no error feedback.
    """
    filled = fill_options(options)
    if measure and filled.rounding == NEAREST:
        raise UsageError("--measure is for error feedback: other times are known", hint="leave it out")
    checkpoint = open_model(model, output, filled)
    filled, notes = suited_options(options, checkpoint)
    _check_reads_text(checkpoint, filled)
    with prepare(checkpoint, output, filled, headers_only=True) as job:
        measured = None
        if measure:
            from lpconv.convert.forecast import measure_rounding  # imports torch (seconds)

            measured = measure_rounding(job, progress or Silent())
        return PlanResult(
            method=job.plan.options.method,
            format=job.plan.format_name,
            output=job.url or str(job.output),
            source=job.source_record,
            tensors=tuple(planned_record(t) for t in job.plan.tensors),
            bytes=job.bytes,
            shards=tuple(FileRecord(name=f.name, size_bytes=f.size_bytes) for f in job.plan.files),
            side_files=job.checkpoint.side_files,
            memory_bytes=job.memory.needed_bytes,
            disk_bytes=disk_bytes(job),
            disk_free_bytes=free_bytes(job.output),
            seconds=estimate_seconds(job, measured),
            workers=job.memory.workers,
            measured=measured,
            warnings=(*notes, *plan_warnings(job, verb="would be")),
        )


@with_keywords(ConvertOptions)
def convert(
    model: Openable,
    output: Path | str,
    options: ConvertOptions,
    *,
    progress: Progress | None = None,
    command: str | None = None,
    names_source: bool = True,
    codes: Mapping[str, Side] | None = None,
) -> ConvertResult:
    """Convert a checkpoint into the directory or URL `output`, which is published only after all checks have passed.

    `model` is a directory, a URL, an alias, a hub id or ``demo``. With `names_source` the local reports contain the
    source's path. `codes` has the components to store for some tensors, instead of those that rounding would give.
    Raises an `LpconvError` for every failure that is not a bug: see the exit codes in `lpconv.errors`.
    """
    started, progress = time.perf_counter(), progress or Silent()
    with _prepared(model, output, options, progress) as job:
        if (done := _finished(job, progress)) is not None:
            return done
        _check_can_run(job)
        if job.url is None:
            check_disk(job.output, disk_bytes(job))
        return _write(job, progress, started, command, names_source=names_source, codes=codes)


def finish(
    model: Openable,
    output: Path | str,
    options: ConvertOptions,
    *,
    progress: Progress | None = None,
    command: str | None = None,
) -> ConvertResult:
    """Combine the parts written by `convert_part`, with the same bytes as a single `convert`.

    Arguments and errors are those of `convert`. Every part is checked before anything is written; parts are deleted
    once the output is published, and are kept if a gate fails.
    """
    started, progress = time.perf_counter(), progress or Silent()
    check_shareable(options)
    with _prepared(model, folder_for_parts(output), options, progress) as job:
        result = _finished(job, progress)
        if result is None:
            _check_can_run(job)
            result = _write(job, progress, started, command, parts=checked_parts(job, progress))
        remove_parts(job.output)
    return result


@contextlib.contextmanager
def _prepared(model: Openable, output: Path | str, options: ConvertOptions, progress: Progress) -> Iterator[Job]:
    """The prepared job of a conversion, with the text that the model writes itself if options ask for it."""
    checkpoint = open_model(model, output, fill_options(options))
    options, notes = suited_options(options, checkpoint)
    _check_place(output, options)
    _check_reads_text(checkpoint, options)
    own_text = _place_of_own_text(output, options) if options.calibrate == SELF else None
    options = options if own_text is None else dataclasses.replace(options, calibrate=str(own_text))
    with prepare(checkpoint, output, options) as job:
        for note in notes:
            progress.message(note)
        origin = job.checkpoint.origin
        if origin.revision is not None:
            progress.message(f"{origin.name} is {origin.resolved} at {origin.revision}")
        if own_text is not None and not (options.resume and own_text.exists()):
            from lpconv.verify.calibrate import write_own_text  # imports transformers (seconds)

            write_own_text(job, own_text, progress)
            progress.message(f"calibrating on `{own_text}`, which the model wrote")
        yield job


def _check_reads_text(checkpoint: Checkpoint, options: ConvertOptions) -> None:
    """Raise an error, from files alone, if the options ask for a text that the model does not read."""
    if options.calibrate is not None:
        config, name = checkpoint.config, str((checkpoint.config.get("architectures") or [""])[0])
        if options.calibrate == SELF and (config.get("is_encoder_decoder") or name.endswith(_WITHOUT_GENERATION)):
            hint = "pass a text with --calibrate FILE, or --calibrate demo for the sample text"
            raise UnsupportedError(f"--calibrate self: `{name}` does not generate text on its own", hint=hint)
        hint = "leave --calibrate out, with --rounding nearest and without static scales"
        if config.get("is_encoder_decoder") and options.kv_cache:
            hint = "leave --kv-cache out"
        check_reads_text(config, hint=hint, allow_pairs=options.kv_cache is None)
        check_tokenizer(checkpoint.directory)


def _finished(job: Job, progress: Progress) -> ConvertResult | None:
    """The record of an output that the same command made, if resuming; None if there is no lpconv output.

    Raises OutputExistsError for an output of another command, source or version, and for one that was damaged since.
    """
    if not job.plan.options.resume:
        return None
    if job.url is not None:
        if head(job.url, MARKER) is None:
            return None
        delete_records(job.url)
        job = dataclasses.replace(job, output=view_of(job.url, whole=False))
    if not (job.output / MARKER).is_file():
        return None
    changed = _changed_facts(job, read_marker(job.output))
    if changed:
        raise OutputExistsError(
            f"`{job.url or job.output}` was made with other {', '.join(changed)}",
            hint="choose another --output, or replace it with --force",
            details={"changed": changed},
        )
    damaged = check_hashes(job.output, progress).mismatched
    if damaged:
        raise OutputExistsError(
            f"`{job.url or job.output}` is damaged: `{damaged[0]}` no longer matches SHA256SUMS",
            hint="write it again with --force",
            details={"mismatched": list(damaged)},
        )
    (job.output / JOURNAL).unlink(missing_ok=True)  # left by a run that was killed between publishing and cleaning up
    result = from_json(ConvertResult, read_json(job.output / "report.json"))
    progress.message(f"`{result.output}` is complete: there is nothing to resume")
    return result


def _changed_facts(job: Job, record: dict[str, Any]) -> list[str]:
    """Facts in which the output's record differs from the job, like `identity` for an unfinished run."""
    wanted = {
        "options": shaping_options(job.plan.options),
        "source": to_json(public_source(job.source_record)),
        "versions": versions(),
    }
    changed = [name for name, value in wanted.items() if record.get(name) != json.loads(json.dumps(value))]
    text = job.plan.options.calibrate
    if text is not None and (record.get("calibration") or {}).get("sha256") != sha256_of(text_at(text)):
        changed.append("calibration text")
    verify: dict[str, Any] = record.get("verify") or {}
    gates = [g.get("expression") for g in verify.get("gates") or ()]
    if gates != [g.expression for g in job.gates]:
        changed.append("gates")
    asked, ran = job.plan.options.verify, verify.get("level")
    if ran not in _DEPTH or (asked != "auto" and _DEPTH.index(ran) < _DEPTH.index(asked)):
        changed.append("verification")
    published = (job.output / MARKER).stat().st_mtime_ns
    if any((job.watch.directory / name).stat().st_mtime_ns > published for name in job.watch.seen):
        changed.append("source files")
    return changed


def _check_place(output: Path | str, options: ConvertOptions) -> None:
    """Raise an error if the output exists, unless a finished run is being resumed, which `_finished` checks."""
    if isinstance(output, str) and is_url(output):
        check_free_url(output, resume=options.resume, force=options.force)
    elif not (options.resume and os.path.isfile(Path(output) / MARKER)):
        check_free(Path(output), resume=options.resume, force=options.force)


def _place_of_own_text(output: Path | str, options: ConvertOptions) -> Path:
    """Next to the output, where `verify` looks for it; in the current folder if the output is at a URL.

    Raises OutputExistsError for a file that no option allows to use or to replace.
    """
    is_remote = isinstance(output, str) and is_url(output)
    text = Path(f"{Path(output).name if is_remote else Path(output)}.calibration.txt")
    if text.exists() and not options.resume and not options.force:
        raise OutputExistsError(f"`{text}` exists", hint=f"use it with --calibrate {text}, or replace it with --force")
    return text


def _check_can_run(job: Job) -> None:
    """Raise an error, before the work, if a model is to be run and cannot run here, or does not read the text."""
    options = job.plan.options
    if options.verify == "logits" or needs_logits(job.gates):
        from lpconv.verify.outputs import check_inputs, check_model  # imports transformers (seconds)

        if not job.memory.in_files:
            check_model(job.plain)
        check_inputs(job.plain, trust_remote_code=options.trust_remote_code)
    if options.calibrate is not None:
        from lpconv.verify.calibrate import job_windows  # imports transformers (seconds)

        job_windows(job)


def _write(
    job: Job,
    progress: Progress,
    started: float,
    command: str | None,
    *,
    names_source: bool = True,
    codes: Mapping[str, Side] | None = None,
    parts: Sequence[PartResult] = (),
) -> ConvertResult:
    """Write, verify and publish. Files of `parts` are not written again."""
    with _working_folder(job) as staging:
        adopt_parts(job, parts, staging)
        calibration = _calibration(job, staging, progress)
        if calibration is not None:
            job = dataclasses.replace(job, plan=job.plan.with_inputs(calibration.absmax))
        with with_error_feedback(job, staging, progress, codes) as job:
            result = _carry_out(job, staging, progress, calibration, started, command)
            _write_documents(job, staging.directory, result, names_source=names_source)
        job.watch.check()
        if not result.verify.passed:
            from lpconv.report.verify import failure_text

            kept = staging.set_aside()
            raise VerificationError(
                f"verification failed: {failure_text(result.verify)}",
                hint=f"the rejected output was kept in `{kept}`",
                details=to_json(result.verify),
            )
        staging.publish()
    return result if names_source else dataclasses.replace(result, source=public_source(result.source))


def _working_folder(job: Job) -> Staging:
    known, options = identity(job), job.plan.options
    if job.url is not None:
        known |= {"files": [f.name for f in job.plan.files]}
        source = job.checkpoint.origin.name
        return RemoteStaging(job.url, known, source=source, resume=options.resume, force=options.force)
    return Staging(job.output, known, resume=options.resume, force=options.force)


def with_error_feedback(
    job: Job, staging: Staging, progress: Progress, codes: Mapping[str, Side] | None = None
) -> contextlib.AbstractContextManager[Job]:
    """The job with given `codes` or those of error feedback, whose files are then deleted; else the job itself."""
    if codes is None and job.plan.options.rounding == NEAREST:
        return contextlib.nullcontext(job)
    from lpconv.convert.feedback import round_weights, with_codes  # imports torch (seconds)

    return round_weights(job, staging, progress) if codes is None else contextlib.nullcontext(with_codes(job, codes))


def _calibration(job: Job, staging: Staging, progress: Progress) -> CalibrationRecord | None:
    """The calibration record: of the resumed run, or computed now and saved for resuming. None without calibration."""
    if not job.plan.num_calibrated and job.plan.options.rounding == NEAREST:
        return None
    known = next((line for line in staging.done if line.get("shard") == _CALIBRATION), None)
    if known is not None:
        return from_json(CalibrationRecord, known[_CALIBRATION])
    from lpconv.verify.calibrate import calibrate  # imports torch (seconds)

    try:
        record = calibrate(job, progress)
    except BaseException:  # there is nothing to resume
        staging.discard()
        raise
    staging.append({"shard": _CALIBRATION, "files": [], _CALIBRATION: to_json(record)})
    return record


def _carry_out(
    job: Job,
    staging: Staging,
    progress: Progress,
    calibration: CalibrationRecord | None,
    started: float,
    command: str | None,
) -> ConvertResult:
    """Write the files of the checkpoint and verify them."""
    from lpconv.verify.written import verify_written  # imports torch (seconds)

    source, sizes = job.source_record, job.bytes  # before the work: a file that goes meanwhile is a changed source
    before = time.perf_counter()
    others_wrote = bool(staging.done)  # an interrupted run or workers wrote some files
    files, tensors = _write_weights(job, staging, progress)
    weights_seconds = None if others_wrote else time.perf_counter() - before
    write_metadata(staging.directory, job.plain, job.plan, files)
    names = sorted({*model_side_files(job.plain), *({CARD} & set(job.checkpoint.side_files))})
    side_files = copy_side_files(staging.directory, job.plain, names, renamed={CARD: SOURCE_CARD})
    verify = verify_written(job, staging.directory, tensors, progress)
    if job.plan.options.layout != "lpconv":  # verification has compared the scales with the source, if required
        problems = (*verify.problems, *inspect(staging.directory).problems)
        verify = dataclasses.replace(verify, passed=verify.passed and not problems, problems=problems)
    return ConvertResult(
        method=job.plan.options.method,
        format=job.plan.format_name,
        residual=job.plan.options.residual,
        output=job.url or str(job.output),
        source=source,
        architecture=next(iter(job.plain.config.get("architectures") or ()), None),
        tensors=tensors,
        files=files,
        side_files=side_files,
        bytes=sizes,
        seconds=time.perf_counter() - started,
        weights_seconds=weights_seconds,
        peak_rss_bytes=peak_rss_bytes(),
        verify=verify,
        calibration=calibration,
        options=shaping_options(job.plan.options),
        versions=versions(),
        command=command,
        card=inherited_facts(job.checkpoint.directory, job.checkpoint.origin.hub_id),
        warnings=(*plan_warnings(job, verb="was"), *tensor_warnings(tensors)),
    )


def _write_documents(job: Job, directory: Path, result: ConvertResult, *, names_source: bool) -> None:
    """Write model card, lpconv.json, SHA256SUMS and reports. Without `names_source`, no file has the source's path."""
    from lpconv.report.cards import model_card
    from lpconv.report.convert import convert_document
    from lpconv.report.html import html
    from lpconv.report.markdown import markdown

    public = public_source(result.source)
    command = result.command and command_line(public.name, job.plan.options)
    published = dataclasses.replace(result, source=public, command=command)
    write_small(directory / "README.md", markdown(model_card(published)))
    write_provenance(directory, published, job.plain, job.plan)
    write_sums(directory, result.files)
    shown = result if names_source else dataclasses.replace(result, source=public)
    write_small(directory / "report.html", html(convert_document(shown)))
    write_small(directory / "report.json", json_text(shown))


def _write_weights(
    job: Job, staging: Staging, progress: Progress
) -> tuple[tuple[FileRecord, ...], tuple[TensorRecord, ...]]:
    from lpconv.convert.apply import write_shards  # imports torch (seconds)

    written = write_shards(job, job.plan.shards, staging, progress)
    records = {t.name: t for shard in written for t in shard.tensors}
    ordered = (records.get(t.name) or planned_record(t) for t in job.plan.tensors)
    return tuple(f for shard in written for f in shard.files), tuple(ordered)
