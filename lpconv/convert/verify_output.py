"""`lpconv verify`: an output against its own hashes, and against the source it came from."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lpconv.checkpoint.contents import read_contents
from lpconv.checkpoint.resolve import resolve
from lpconv.checkpoint.source import open_source
from lpconv.convert.reader import OutputReader, read_provenance
from lpconv.convert.verify import check_hashes, check_weights
from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.gates import CONVERT_GATES, needs_logits
from lpconv.progress import Progress
from lpconv.results import SourceRecord, VerifyResult, from_json

__all__ = ["LEVELS", "verify_output"]

LEVELS = ("hash", "weights", "logits")


def verify_output(
    directory: Path,
    *,
    against: str | None,
    level: str,
    gates: Sequence[str],
    trust_remote_code: bool,
    progress: Progress,
) -> VerifyResult:
    """Check a published output up to `level`; deeper levels include the shallower ones.

    ``weights`` and ``logits`` need the source, `against` or else the one that lpconv.json names. Raises InputError
    where a source is needed and not found, or is another one.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level `{level}`", hint="use " + ", ".join(LEVELS))
    parsed = [CONVERT_GATES.parse(g) for g in gates]
    if parsed:
        level = "logits" if needs_logits(parsed) or level == "logits" else "weights"
    provenance = read_provenance(directory)
    hashes = check_hashes(directory, progress)
    problems = [f"`{n}` does not match its SHA-256" for n in hashes.mismatched]
    result = VerifyResult(level="hash", passed=not problems, hash=hashes, problems=tuple(problems))
    if level == "hash":
        return result
    recorded = from_json(SourceRecord, provenance["source"])
    wanted = resolve(against or recorded.name, revision=None if against else recorded.revision)
    contents = read_contents(wanted.directory)
    source = open_source(contents)
    try:
        with OutputReader.from_directory(directory) as output:
            _check_same_tensors(output, set(source.entries))
            weights = check_weights(source, output, progress)
    except (InputError, UnsupportedError) as e:
        if not problems:
            raise
        return dataclasses.replace(result, problems=(*problems, e.message))  # broken, as the hashes have said
    finally:
        source.close()
    problems += [f"tensor `{n}` does not decode to what the source says" for n in weights.mismatched]
    result = dataclasses.replace(result, level="weights", weights=weights, problems=tuple(problems))
    if level == "logits":
        from lpconv.convert.logits import check_logits, check_model  # transformers takes seconds to import

        progress.start("running both models", 0)
        check_model(contents, sum(e.info.num_elements for e in source.entries.values()))
        logits = check_logits(wanted.directory, directory, trust_remote_code=trust_remote_code)
        result = dataclasses.replace(result, level="logits", logits=logits)
    records = CONVERT_GATES.check(parsed, result)
    return dataclasses.replace(result, gates=records, passed=not problems and all(g.passed for g in records))


def _check_same_tensors(output: OutputReader, names: set[str]) -> None:
    missing = sorted(output.records.keys() - names)
    if missing:
        raise InputError(
            f"the source has no tensor `{missing[0]}`: it is not the checkpoint that was converted",
            hint="name the right one with --against",
        )
