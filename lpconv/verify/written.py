"""Verify the files of a conversion against its source: before they are published, and again in `lpconv verify`."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpconv.errors import InputError, ResourceError, UnsupportedError, UsageError, VerificationError, problem_text
from lpconv.formats.spec import FORMATS
from lpconv.forms import Kept
from lpconv.gates import Gate, needs_logits, with_gates
from lpconv.layouts import LAYOUTS
from lpconv.layouts.compressed_config import COMPRESSED_TENSORS
from lpconv.lookup import find
from lpconv.plan.files import INDEX, output_config, replaced_config, weight_index
from lpconv.plan.job import Job, prepare
from lpconv.plan.options import ConvertOptions
from lpconv.plan.plan import Plan, PlannedTensor
from lpconv.plan.policy import settings_for
from lpconv.plan.provenance import joined_warnings, lost_signals
from lpconv.plan.settings import fill_options
from lpconv.progress import Progress
from lpconv.report.numbers import code_list, plural
from lpconv.report.tensors import overflow_text
from lpconv.results import (
    ComparedTensor,
    LogitsCheck,
    OpenedCheck,
    OpenedModel,
    TensorRecord,
    VerifyResult,
    WeightsCheck,
    from_json,
)
from lpconv.storage.checkpoint import Checkpoint, find_residual
from lpconv.storage.contents import read_json
from lpconv.storage.header import quantization_method
from lpconv.storage.staging import MARKER
from lpconv.verify.reader import OutputReader, Recorded
from lpconv.verify.weights import check_weights, whole_tensors

_SECONDS = 5  # on one core, for comparing weights before publishing: as many whole tensors as fit, pieces of the others
_OTHER_ORDER = 1e-5  # relative difference of outputs that another order of summing causes, as for transposed .bin files
_ABSENT = object()


def verify_written(job: Job, directory: Path, tensors: Sequence[TensorRecord], progress: Progress) -> VerifyResult:
    """Check the files in `directory` at the level of the job's options, and its gates.

    Raises UnreadError if disk or network fail: the files then get no verdict, and the run can be resumed.
    """
    level = job.plan.options.verify
    if level == "none" and not job.gates:
        return VerifyResult(level="none", passed=True)
    planned = {t.name: t for t in job.plan.tensors if t.action != "tie"}
    try:
        with OutputReader(directory, tensors, find_residual(directory)) as output:
            weights = check_weights(job, planned, output, progress, whole=whole_tensors(planned.values(), _SECONDS))
    except InputError as e:  # also for the source, which then cannot be compared
        return VerifyResult(level="weights", passed=False, problems=(problem_text(e),))
    problems = weights_problems(weights, tensors)
    result = VerifyResult(level="weights", passed=not problems, weights=weights, problems=problems)
    if level in ("logits", "auto") or needs_logits(job.gates):
        result = with_models(job, directory, result, tensors, progress)
    return with_gates(result, job.gates)


def with_models(
    job: Job, directory: Path, result: VerifyResult, tensors: Sequence[TensorRecord], progress: Progress
) -> VerifyResult:
    """Add to `result` what transformers says of source and output, and the comparison of their outputs.

    Large models are left out at the level ``auto``, unless a gate needs their outputs.
    """
    automatic = job.plan.options.verify == "auto" and not needs_logits(job.gates)
    if automatic and (why := job.memory.no_logits) is not None:
        opened = OpenedCheck(not_asked=(f"source and result: {why}",))
        return dataclasses.replace(result, opened=opened, logits=LogitsCheck(skipped=why))
    progress.start("opening both models", 0)
    opened = check_opened(job, directory)
    problems = (*result.problems, *opened_problems(opened, job.fit.missing))
    progress.start("running both models", 0)
    try:
        logits = check_outputs(job, directory, automatic=automatic)
    except VerificationError as e:
        logits, problems = LogitsCheck(skipped=e.message), (*problems, e.message)
    problems = tuple(dict.fromkeys((*problems, *output_problems(logits, tensors))))
    level = result.level if logits.skipped else "logits"
    return dataclasses.replace(
        result, level=level, passed=not problems, opened=opened, logits=logits, problems=problems
    )


def check_opened(job: Job, directory: Path) -> OpenedCheck:
    """Let transformers open source and output, or record why not.

    It must open the output if it opens the source, unless the layout is for another library, whose files it may read
    only in part, or a warning says that it does not.
    """
    from lpconv.models.witness import open_with_transformers  # imports transformers (seconds)

    trust, models, not_asked = job.plan.options.trust_remote_code, list[OpenedModel | None](), list[str]()
    for role, checkpoint in (("source", job.checkpoint), ("result", Checkpoint.open(directory))):
        model, why = None, None
        try:
            if job.memory.in_files and quantization_method(checkpoint.config) == COMPRESSED_TENSORS:
                raise UnsupportedError("transformers decodes this layout in memory, which is too small")
            model = open_with_transformers(checkpoint, trust_remote_code=trust)
        except UnsupportedError as e:
            why = e.message
        except VerificationError as e:
            is_meant = LAYOUTS[job.plan.options.layout].library == "transformers"
            must_open = is_meant and not any(joined_warnings(job.plan))
            is_known = role == "source" or None in models or not must_open
            why = e.message if is_known else None
            model = None if is_known else OpenedModel(error=e.message)
        if model is not None and model.different and role == "result" and any(joined_warnings(job.plan)):
            model, why = None, "plain transformers decodes its experts otherwise (see the warning)"
        models.append(model)
        not_asked += [] if why is None else [f"the {role}: {why}"]
    return OpenedCheck(source=models[0], result=models[1], not_asked=tuple(not_asked))


def opened_problems(opened: OpenedCheck, lacking: Collection[str]) -> tuple[str, ...]:
    """Descriptions of what transformers opens otherwise. The source may be `lacking` some weights."""
    problems = []
    for role, model in (("source", opened.source), ("result", opened.result)):
        if model is not None and model.error is not None:
            problems.append(f"{model.error} (the {role})")
        elif model is not None and model.different:
            names = f"{plural(len(model.different), 'tensor')} of the {role} ({code_list(model.different)})"
            problems.append(f"transformers reads {names} otherwise than lpconv")
    known = lacking if opened.source is None else opened.source.missing
    lost = [] if opened.result is None else [n for n in opened.result.missing if n not in known]
    if lost:
        problems.append(f"transformers finds no {code_list(lost)} in the result, and fills it with random numbers")
    return tuple(problems)


def weights_problems(weights: WeightsCheck, tensors: Iterable[TensorRecord]) -> tuple[str, ...]:
    """Descriptions of wrong weights, of which `tensors` have the records."""
    overflowed = {t.name: t for t in tensors if t.num_saturated}
    return tuple(
        overflow_text(t) if (t := overflowed.get(n)) else f"tensor `{n}` differs from the source"
        for n in weights.mismatched
    )


def output_problems(logits: LogitsCheck, tensors: Sequence[TensorRecord]) -> tuple[str, ...]:
    """Descriptions of problems with the models' outputs."""
    if logits.skipped or logits.max_abs_diff is None:
        return ()
    if logits.problem:
        return (logits.problem,)
    is_exact = not logits.rounded_inputs and all(t.max_rel_error == 0 for t in tensors if t.action == "convert")
    if logits.bit_equal is False and is_exact and logits.rel_error is not None and logits.rel_error > _OTHER_ORDER:
        return (f"the weights are exact, but outputs differ by {logits.max_abs_diff:g}",)
    return ()


def check_outputs(job: Job, directory: Path, *, automatic: bool) -> LogitsCheck:
    """Run both models and compare, or record why not. Only an `automatic` comparison may be skipped."""
    # The imports below load transformers (seconds).
    from lpconv.models.opening import model_errors
    from lpconv.verify.outputs import check_logits, check_model

    gates = ", without gates on outputs" if needs_logits(job.gates) else ""
    hint = f"run again with --verify weights{gates}, and with --resume to keep the files already written"
    try:
        with model_errors("the model could not be run", hint=hint):
            if not job.memory.in_files:
                check_model(job.plain)
            trust = job.plan.options.trust_remote_code
            return check_logits(job.checkpoint, directory, trust_remote_code=trust, in_files=job.memory.in_files)
    except (UnsupportedError, ResourceError) as e:
        if not automatic:
            raise
        return LogitsCheck(skipped=e.message)


def prepare_verification(recorded: Recorded, source: Checkpoint, *, verify: str, trust_remote_code: bool) -> Job:
    """The conversion that made an output, prepared for verification at level `verify`.

    The records determine which tensors it converts. Raises InputError if they are damaged.
    """
    options = from_json(ConvertOptions, recorded.provenance["options"])
    options = dataclasses.replace(
        options,
        include=(),
        exclude=(),
        rules=tuple(r for r in options.rules if r.bits is not None),  # which no record repeats
        max_shard_size=None,
        revision=None,
        verify=verify,
        allow_missing=True,  # the output is published already
        trust_remote_code=trust_remote_code,
    )
    try:
        options = fill_options(options)
    except UsageError as e:
        raise InputError(f"invalid options in {MARKER}: {e.message}", hint="download the output again") from e
    return prepare(source, recorded.directory, options)


def check_source(
    job: Job, recorded: Recorded, result: VerifyResult, *, gates: Sequence[Gate], progress: Progress
) -> VerifyResult:
    """Add to `result` (hashes of an output) the comparison with the source of `job`, and the gates.

    Raises InputError if the source is not the one that was converted, UnreadError if disk or network fail.
    """
    try:
        checked = _check_weights(job, recorded, result, progress)
    except (InputError, UnsupportedError) as e:  # the files cannot be read in their expected form
        return dataclasses.replace(result, level="weights", passed=False, problems=(*result.problems, problem_text(e)))
    if job.plan.options.verify != "weights":
        checked = with_models(job, recorded.directory, checked, recorded.tensors, progress)
    return with_gates(checked, gates)


def _check_weights(job: Job, recorded: Recorded, result: VerifyResult, progress: Progress) -> VerifyResult:
    """Add the comparison of weights, config and index to `result`."""
    from lpconv.verify.calibrate import check_calibration  # imports transformers (seconds)

    records = {r.name: r for r in recorded.tensors}
    plan = decided = _with_recorded_decisions(job.plan, records)
    if plan.num_calibrated:
        plan = _with_calibration(plan, recorded)
    with OutputReader.of(recorded) as output:
        plan = plan.with_forms(lambda t: output.as_chosen(t.form))
        planned = {t.name: t for t in plan.tensors if t.action != "tie"}
        weights = check_weights(job, planned, output, progress)
        wrong = (*weights.mismatched, *output.changed(t.form for t in planned.values()))
        weights = dataclasses.replace(weights, mismatched=tuple(dict.fromkeys(wrong)))
        feedback = check_calibration(dataclasses.replace(job, plan=decided), recorded, progress)
        names = {c.name for t in planned.values() for c in t.root}
        stray = [f"tensor `{n}` differs from the source" for n in sorted(output.entries.keys() - names)]
        stray += plan.header_problems(recorded.directory, output.checkpoint.headers)
        files = {n: e.file for n, e in output.entries.items()}
        index = weight_index(files, sum(e.info.num_bytes for e in output.entries.values()))
    ties = {t.name: t.tied_to for t in job.plan.tensors}
    untied = [f"`{n}` and `{r.tied_to}` are not tied in the source" for n, r in records.items() if r.tied_to != ties[n]]
    problems = (*stray, *untied, *_document_problems(job, plan, recorded, index))
    wrong = (*weights_problems(weights, records.values()), *(feedback.wrong if feedback else ()))
    problems = (*result.problems, *wrong, *problems)
    tensors = _compare_records(planned, records, set(weights.mismatched))
    return dataclasses.replace(
        result,
        level="weights",
        passed=not problems,
        weights=weights,
        feedback=feedback,
        problems=problems,
        warnings=(*lost_signals(recorded.tensors), *filter(None, [feedback.skipped if feedback else None])),
        tensors=tensors,
    )


def _compare_records(
    planned: Mapping[str, PlannedTensor], records: Mapping[str, TensorRecord], wrong: set[str]
) -> tuple[ComparedTensor, ...]:
    """The recorded figures of each tensor, worst first. Verified tensors (not in `wrong`) have met theirs."""
    compared = [
        ComparedTensor(
            name=name,
            stored_as=t.form.words,
            reference=t.info.dtype,
            sqnr_db=math.inf if (noise := records[name].sqnr_db) is None else noise,
            max_rel_error=records[name].max_rel_error or 0.0,
            problem="differs from the source" if name in wrong else None,
        )
        for name, t in planned.items()
    ]
    return tuple(sorted(compared, key=lambda c: (c.problem is None, c.sqnr_db)))


def _with_recorded_decisions(plan: Plan, records: Mapping[str, TensorRecord]) -> Plan:
    """The plan with the recorded decision for each tensor, because another lpconv version may decide differently."""
    tensors = []
    for t in plan.tensors:
        settings = settings_for(plan.options, plan.linears, t.name)
        record = records.get(t.name)
        if record is None:
            raise InputError(f"{MARKER} has no record of tensor `{t.name}`", hint="download it again")
        form: Any = Kept(name=t.name, shape=t.info.shape, dtype=t.info.dtype)
        if record.action == "convert":
            fmt = find("format", record.format, FORMATS, error=InputError)
            refused = plan.form.refusal(t.form.shape, fmt, settings)
            if refused is not None:
                raise InputError(
                    f"tensor `{t.name}` is not stored as {MARKER} describes: {refused}", hint="download it again"
                )
            form = plan.form.of(t.name, t.form.shape, fmt, settings)
        tensors.append(dataclasses.replace(t, form=form, reason=record.reason, tied_to=record.tied_to))
    return plan.with_tensors(tensors)


def _with_calibration(plan: Plan, recorded: Recorded) -> Plan:
    """The plan with the recorded calibration, so that the text is not read again."""
    needed = [t.module for t in plan.tensors if t.form.has_input_scale]
    missing = [name for name in (*needed, *plan.cache_scales) if name not in recorded.absmax]
    if missing:
        raise InputError(
            f"{MARKER} does not record the largest value for `{missing[0]}`", hint="download the output again"
        )
    return plan.with_inputs(recorded.absmax)


def _document_problems(job: Job, plan: Plan, recorded: Recorded, index: Mapping[str, Any]) -> list[str]:
    """Differences of config.json, the index and lpconv.json from the source and the conversion."""
    directory, provenance = recorded.directory, recorded.provenance
    wanted, config = output_config(job.plain, plan), read_json(directory / "config.json")
    keys = sorted(k for k in wanted.keys() | config.keys() if wanted.get(k, _ABSENT) != config.get(k, _ABSENT))
    problems = [f"config.json: `{k}` does not match the source and the conversion" for k in keys]
    if (directory / INDEX).exists() and read_json(directory / INDEX) != index:
        problems.append(f"{INDEX} does not match these files")
    if provenance["source_config"] != replaced_config(job.plain, plan):
        problems.append(f"{MARKER}: `source_config` differs from the source's config")
    options = plan.options
    own = {"method": options.method, "format": options.format, "residual": options.residual}
    return problems + [f"{MARKER}: `{k}` does not match the options" for k, v in own.items() if provenance.get(k) != v]
