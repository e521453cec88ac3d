"""`lpconv verify`: an output against its own hashes, and against the source it came from.

What each level sees is told, and shown by planted damage, in docs/verify.md.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lpconv.checkpoint.resolve import resolve
from lpconv.checkpoint.staging import TUNED, is_output
from lpconv.convert.hashes import check_hashes
from lpconv.convert.reader import read_provenance
from lpconv.errors import UsageError
from lpconv.gates import CONVERT_GATES, needs_logits
from lpconv.progress import Progress
from lpconv.results import VerifyResult

__all__ = ["verify_output"]

_LEVELS = ("hash", "weights", "logits", "values")


def verify_output(
    directory: Path,
    *,
    against: str | None,
    level: str | None,
    gates: Sequence[str],
    trust_remote_code: bool,
    progress: Progress,
    data: Path | None = None,
    seq_len: int | None = None,
    max_tokens: int = 4096,
) -> VerifyResult:
    """Check a published output up to `level`; deeper levels include the shallower ones.

    None is ``hash``; but with `against` ``weights``, and ``logits`` where the models are small. ``weights`` and
    ``logits`` need the source, `against` or else the one that lpconv.json names. Raises InputError where a source is
    needed and not found, or is another one.

    ``values`` compares the weights of any two checkpoints by what they stand for; it is the level of a `directory` that
    is no output of a conversion, or was trained.

    With the text `data` both models say it besides (`text.py`), whatever their size: its first `max_tokens` tokens, in
    windows of `seq_len`.
    """
    if data is not None:
        if against is None:
            raise UsageError("a text needs a checkpoint to compare with", hint="name it with --against")
        is_converted = is_output(directory) and not (directory / TUNED).exists()
        shallow = level or ("weights" if is_converted else "values")
        found = verify_output(
            directory, against=against, level=shallow, gates=(), trust_remote_code=trust_remote_code, progress=progress
        )
        return _with_text(
            found, directory, resolve(against).directory, data, seq_len, max_tokens, gates=gates, progress=progress
        )
    if level not in (None, *_LEVELS):
        raise UsageError(f"unknown level `{level}`", hint="use " + ", ".join(_LEVELS))
    is_tuned = (directory / TUNED).exists()
    if is_tuned and level in ("weights", "logits"):
        raise UsageError(
            f"the weights of `{directory}` were trained, not converted: no other checkpoint has them",
            hint="--level values with --against MODEL says how far it is from another one",
        )
    if level == "values" or (level is None and against is not None and (is_tuned or not is_output(directory))):
        if against is None:
            raise UsageError("comparing values needs a checkpoint to compare with", hint="name it with --against")
        from lpconv.convert.compare import compare  # torch takes seconds to import

        return compare(directory, resolve(against).directory, gates=gates, progress=progress)
    parsed = [CONVERT_GATES.parse(g) for g in gates]
    provenance = read_provenance(directory)
    hashes = check_hashes(directory, progress)
    problems = tuple(f"`{n}` does not match its SHA-256" for n in hashes.mismatched)
    result = VerifyResult(level="hash", passed=not problems, hash=hashes, problems=problems)
    asked = level == "logits" or needs_logits(parsed)
    automatic = level is None and not asked and against is not None
    if not (asked or automatic or level == "weights" or parsed):
        return result
    from lpconv.convert.verify_source import check_source, prepare_again  # torch takes seconds to import

    depth = "logits" if asked else "auto" if automatic else "weights"
    job = prepare_again(provenance, directory, against, verify=depth, trust_remote_code=trust_remote_code)
    try:
        return check_source(job, directory, provenance, result, gates=parsed, progress=progress)
    finally:
        job.source.close()


def _with_text(
    found: VerifyResult,
    directory: Path,
    reference: Path,
    data: Path,
    seq_len: int | None,
    max_tokens: int,
    *,
    gates: Sequence[str],
    progress: Progress,
) -> VerifyResult:
    """`found` with what both models say of a text; gates ask for that."""
    from lpconv.convert.text import compare_on_text  # transformers takes seconds to import
    from lpconv.convert.verify_written import output_problems

    parsed = [CONVERT_GATES.parse(g) for g in gates]
    logits = compare_on_text(directory, reference, data, seq_len=seq_len, max_tokens=max_tokens, progress=progress)
    unknown = dataclasses.replace(logits, bit_equal=None)  # nothing is said here of whether they should be equal
    result = dataclasses.replace(found, logits=logits, problems=(*found.problems, *output_problems(unknown, ())))
    met = CONVERT_GATES.check(parsed, result)
    return dataclasses.replace(result, gates=met, passed=not result.problems and all(g.passed for g in met))
