"""`lpconv verify`: check an output against its own hashes, and against its source.

docs/verify.md shows which planted damage each level detects.
"""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from lpconv.data.texts import check_reads_text, check_seq_len, check_text, check_tokenizer, num_positions
from lpconv.errors import InputError, UsageError
from lpconv.gates import VERIFY_GATES, Gate, check_measured, is_of_task, needs_logits, with_gates
from lpconv.layouts.modelopt import MODELOPT
from lpconv.layouts.reader import open_readable, stored_shapes
from lpconv.lookup import missing_directory
from lpconv.machine import usable_cores
from lpconv.options import check, with_keywords
from lpconv.plan.files import summed_files
from lpconv.plan.provenance import lost_signals
from lpconv.progress import Progress, Silent
from lpconv.results import FilesCheck, HashCheck, VerifyResult, from_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import PACKED, is_plain, read_json
from lpconv.storage.header import quantization_method
from lpconv.storage.place import read_small, sha256_of
from lpconv.storage.resolve import directory_of
from lpconv.storage.source import open_source
from lpconv.storage.staging import MARKER, SUMS, is_output, is_trained
from lpconv.student import with_plan
from lpconv.verify.options import VerifyOptions
from lpconv.verify.reader import read_output
from lpconv.verify.tasks import check_tasks, compare_on_tasks, load_tasks

STATEMENT = "https://in-toto.io/Statement/v1"  # `_type` of attestations


@with_keywords(VerifyOptions)
def verify(path: str | Path, options: VerifyOptions, *, progress: Progress | None = None) -> VerifyResult:
    """Check an output, or compare any two checkpoints; `path` is anything that the command accepts."""
    return verify_output(directory_of(str(path)), options, progress=progress or Silent())


def verify_output(directory: Path, options: VerifyOptions, *, progress: Progress) -> VerifyResult:
    """Check a published output at a level; deeper levels include the shallower ones.

    None means ``hash``, or with `against` ``weights``, and ``logits`` if the models are small. ``weights`` and
    ``logits`` need the source: `against`, or else the one in lpconv.json. Raises InputError if the source is needed and
    not found, or is a different one. A text, tasks and ``values`` need one too, and find it as `with_source` does.

    ``values`` compares the decoded weights of any two checkpoints. It is the default for a `directory` that is not an
    output of a conversion, or was trained.

    With `attestation`, an in-toto statement, its subjects must be the files of `directory`; that is checked first.

    With the text `data`, both models also run on its first `max_tokens` tokens, in windows of `seq_len`, whatever their
    size (`outputs.py`). With `tasks`, both also answer the questions of lm-eval's tasks (`tasks.py`).
    """
    check(options)
    if options.detect is not None and options.data is None and not options.tasks:
        raise UsageError("--detect needs a text or tasks to plan for", hint="add --data FILE or --tasks NAME")
    if not os.path.exists(directory):
        raise missing_directory(directory, hint="pass an output of `lpconv convert`")
    subjects = {} if options.attestation is None else _subjects(options.attestation)
    attested = check_hashes(directory, progress, subjects) if subjects else None
    if attested is not None and attested.mismatched:
        problems = tuple(f"`{n}` does not match the attestation" for n in attested.mismatched)
        return VerifyResult(level="hash", passed=False, attestation=attested, problems=problems)
    options = with_source(directory, options)
    check_tasks(options)
    gates = [VERIFY_GATES.parse(g) for g in options.gates]
    tasks = load_tasks(options, progress) if options.tasks else {}
    early_gates = [g for g in gates if not is_of_task(g.expression)]
    if options.data is not None:
        assert options.against is not None  # set by with_source, as for tasks
        reference = _open_reference(options.against)
        check_reads_text(reference.config, hint="leave --data out to compare weights only")
        check_tokenizer(reference.directory, directory)
        check_seq_len(options.seq_len, num_positions(reference.config))
        check_text(options.data, reference.directory, reference.config, options.seq_len)
        early_gates = []  # all gates wait for the outputs on the text
    result = _verify_stored(directory, options, early_gates, progress, hashes=subjects)
    result = dataclasses.replace(result, attestation=attested)
    if options.data is not None:
        result = _with_text(result, directory, reference, options, progress)
    if options.tasks:
        assert options.against is not None
        answers = compare_on_tasks(directory, options.against, tasks, limit=options.task_limit, progress=progress)
        result = dataclasses.replace(result, tasks=answers)
    if options.detect is not None:
        result = _with_plans(result, options.detect)
    if options.data is None and not options.tasks:
        return _strict(result, options)
    if quantization_method(Checkpoint.open(directory).config) == MODELOPT.name:
        warning = "inputs were not rounded, although readers of ModelOpt's checkpoints may round them"
        result = dataclasses.replace(result, warnings=(*result.warnings, warning))
    return _strict(with_gates(result, gates), options)


def _with_plans(result: VerifyResult, wanted: float) -> VerifyResult:
    """The result with the numbers of questions and windows that would show a `wanted` difference."""
    tasks = tuple(dataclasses.replace(t, drop=with_plan(t.drop, wanted)) for t in result.tasks)
    logits = result.logits
    if logits is not None:
        logits = dataclasses.replace(logits, loss_gap=with_plan(logits.loss_gap, wanted))
    return dataclasses.replace(result, tasks=tasks, logits=logits)


def _strict(result: VerifyResult, options: VerifyOptions) -> VerifyResult:
    """The result, failed if it has warnings and the options allow none."""
    if not (options.strict and result.warnings):
        return result
    return dataclasses.replace(result, problems=(*result.problems, *result.warnings), warnings=(), passed=False)


def with_source(directory: Path, options: VerifyOptions) -> VerifyOptions:
    """The options with the source of `directory` as `against`, if they need a checkpoint to compare with.

    That is the directory that the output's report names. Raises UsageError if it names none that is here.
    """
    what = "a text" if options.data is not None else "--tasks" if options.tasks else "--level values"
    if options.against is not None or not (options.data is not None or options.tasks or options.level == "values"):
        return options
    documents = [read_json(p) for n in ("report.json", MARKER) if (p := directory / n).is_file()]
    sources = [s for d in documents if isinstance(s := d.get("source"), dict)]
    names = [str(s[key]) for s in sources for key in ("name", "resolved") if s.get(key)]
    against = next((n for n in names if n == "demo" or os.path.isdir(n)), None)
    if against is None:
        flags = shlex.join(["lpconv", "verify", str(directory), "--against", *(names or ["MODEL"])[:1]])
        raise UsageError(
            f"{what} needs a checkpoint to compare with, and the source of `{directory}` is not here",
            hint=f"try `{flags}`",
        )
    return dataclasses.replace(options, against=against)


def _verify_stored(
    directory: Path, options: VerifyOptions, gates: Sequence[Gate], progress: Progress, hashes: Mapping[str, str]
) -> VerifyResult:
    """Check an output at the level of the options, without text and tasks. `hashes` are those of files just read."""
    against, level, is_tuned = options.against, options.level, is_trained(directory)
    if is_tuned and level in ("weights", "logits"):
        raise UsageError(
            f"the weights of `{directory}` were trained after conversion, so no source has the same weights",
            hint="measure the difference from another checkpoint with --level values --against MODEL",
        )
    by_value = level == "values" or (level is None and against is not None and (is_tuned or not is_output(directory)))
    check_measured(gates, has_outputs=not by_value)
    if not by_value and any(VERIFY_GATES.parse(g).metric == "nearest" for g in options.gates):
        raise UsageError("gate `nearest` compares codes with the nearest ones", hint="add --level values")
    if by_value:
        assert against is not None
        ours, reference = open_readable(directory), _open_reference(against)
        _check_comparable(ours, reference)
        from lpconv.verify.compare import compare  # imports torch (seconds)

        return _with_files(compare(ours, reference, gates=gates, progress=progress), ours, reference)
    recorded = read_output(directory)
    runs_models = level == "logits" or needs_logits(gates)
    is_open = level is None and against is not None  # how deep to go is left to lpconv
    is_compared = runs_models or is_open or level == "weights" or bool(gates)
    named = None if against is None else open_readable(against)
    source = named or (recorded.open_source(option="--against") if is_compared else None)
    if source is not None:
        recorded.check_source(source.origin.name, stored_shapes(source))
    hashed = check_hashes(directory, progress, known=hashes)
    problems = tuple(f"`{n}` does not match {SUMS}" for n in hashed.mismatched)
    files = FilesCheck(not_compared=("weights, config and other files at --level hash",)) if against else None
    result = VerifyResult(level="hash", passed=not problems, hash=hashed, files=files, problems=problems)
    if not problems:
        _ = recorded.checkpoint  # raises an error if there are no weights
        result = dataclasses.replace(result, warnings=tuple(lost_signals(recorded.tensors)))
    if source is None or not is_compared:
        return result
    from lpconv.verify.written import check_source, prepare_verification  # imports torch (seconds)

    depth = "logits" if runs_models else "auto" if is_open and options.data is None else "weights"
    trust = options.trust_remote_code
    with prepare_verification(recorded, source, verify=depth, trust_remote_code=trust) as job:
        checked = check_source(job, recorded, result, gates=gates, progress=progress)
        # The config is not compared: it was already recomputed and found equal.
        copied = from_json(tuple[str, ...], recorded.provenance.get("side_files", []))
        return _with_files(checked, recorded.checkpoint, job.plain, copied)


def _open_reference(name: str) -> Checkpoint:
    """The checkpoint to compare with; its files are checked against the hub's hashes."""
    reference = open_readable(name)
    reference.check_promised()
    return reference


def _check_comparable(ours: Checkpoint, reference: Checkpoint) -> None:
    """Raise InputError for two checkpoints of different families without a tensor name in common."""
    kinds = [c.config.get("model_type") for c in (ours, reference)]
    if kinds[0] != kinds[1] and None not in kinds:
        with closing(open_source(ours)) as a, closing(open_source(reference)) as b:
            if not a.entries.keys() & b.entries.keys():
                raise InputError(
                    f"the architectures differ, {kinds[0]} and {kinds[1]}, and no tensor has the same name",
                    hint="pass the checkpoint that this one was made from to --against",
                )


def _with_files(
    result: VerifyResult, ours: Checkpoint, reference: Checkpoint, copied: Sequence[str] | None = None
) -> VerifyResult:
    """Add the comparison of the files next to the weights to `result`."""
    from lpconv.verify.compare import compare_files

    files = compare_files(ours, reference, copied=copied)
    passed = result.passed and not files.different
    return dataclasses.replace(result, files=files, problems=(*result.problems, *files.different), passed=passed)


def _with_text(
    base: VerifyResult, directory: Path, reference: Checkpoint, options: VerifyOptions, progress: Progress
) -> VerifyResult:
    """Add the comparison of both models on the text of the options to `base`."""
    from lpconv.verify.outputs import compare_on_text  # imports transformers (seconds)
    from lpconv.verify.written import output_problems

    assert options.data is not None  # a comparison of weights alone does not come here
    logits, layers = compare_on_text(
        directory, reference, options.data, seq_len=options.seq_len, max_tokens=options.max_tokens, progress=progress
    )
    unknown = dataclasses.replace(logits, bit_equal=None)  # whether outputs should be equal is unknown here
    tensors = tuple(
        dataclasses.replace(t, input_sqnr_db=inputs, output_sqnr_db=output)
        for t in base.tensors
        for inputs, output in (layers.get(t.name, (None, None)),)
    )
    return dataclasses.replace(
        base, logits=logits, tensors=tensors, problems=(*base.problems, *output_problems(unknown, ()))
    )


def _subjects(path: Path) -> dict[str, str]:
    """File names and digests of an in-toto statement. Raises InputError if its subjects are not files with hashes."""
    document = read_json(path)
    try:
        digests = {str(s["name"]): str(s["digest"]["sha256"]) for s in document["subject"]}
    except (KeyError, TypeError):
        digests = {}
    if document.get("_type") != STATEMENT or not digests or not all(map(is_plain, digests)):
        raise InputError(f"`{path}` is not an in-toto statement", hint="pass the file that `lpconv attest` wrote")
    return digests


def check_hashes(
    directory: Path,
    progress: Progress,
    digests: Mapping[str, str] | None = None,
    known: Mapping[str, str] | None = None,
) -> HashCheck:
    """Check every file in `digests` (default: SHA256SUMS). All files but the run's own reports must be listed there.

    Files with `known` hashes are not read again. Raises InputError if there is no SHA256SUMS.
    """
    digests, known = listed_files(directory) if digests is None else digests, known or {}
    sizes = {n: (directory / n).stat().st_size for n in digests.keys() - known.keys() if os.path.isfile(directory / n)}
    progress.start("hashing", sum(sizes.values()))
    marker = PACKED if (directory / PACKED).is_file() else MARKER
    mismatched = sorted({"config.json", marker, *summed_files(directory)} - digests.keys())
    with ThreadPoolExecutor(len(usable_cores())) as pool:  # hashing releases the GIL
        hashes = pool.map(lambda n: sha256_of(directory / n) if n in sizes else known.get(n), digests)
        for (name, digest), hashed in zip(digests.items(), hashes, strict=True):
            mismatched += [] if hashed == digest else [name]
            progress.advance(sizes.get(name, 0))
    return HashCheck(num_files=len(digests), mismatched=tuple(mismatched))


def listed_files(directory: Path) -> dict[str, str]:
    """Names and digests from SHA256SUMS (the format of `sha256sum`). Raises InputError if it is missing."""
    path, digests = directory / SUMS, {}
    if not path.exists():
        raise InputError(f"`{directory}` has no {SUMS}", hint="pass an output of `lpconv convert`")
    for line in read_small(path).decode("utf-8", "replace").splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or not is_plain(name):
            raise InputError(
                f"`{path}` has the line {line[:80]!r}, which is not a hash and a file name",
                hint="download the file again",
            )
        digests[name] = digest
    return digests
