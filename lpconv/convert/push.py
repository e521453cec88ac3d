"""`lpconv push`: a verified output of a conversion to the Hugging Face hub, in one commit."""

from pathlib import Path

from lpconv.checkpoint.contents import read_json
from lpconv.checkpoint.hub_commit import check_repository, commit_files
from lpconv.checkpoint.staging import MARKER, SUMS, TUNED
from lpconv.convert.hashes import check_files, listed_files
from lpconv.convert.reader import read_provenance
from lpconv.errors import InputError, UnsupportedError, VerificationError
from lpconv.progress import Progress
from lpconv.results import FileRecord, PushResult, SourceRecord, VerifyResult, from_json

__all__ = ["push"]


def _check_pushable(directory: Path, repo_id: str) -> VerifyResult:
    """The verification that an output passed. Raises UsageError for a name that no repository can have, InputError and
    UnsupportedError for what is no output, VerificationError for one that was not verified or did not pass."""
    check_repository(repo_id)
    provenance = read_provenance(directory)
    if directory.suffix in (".partial", ".failed"):
        raise UnsupportedError(f"`{directory}` was not published", hint="push the output of a run that has finished")
    found = from_json(VerifyResult, provenance.get("verify"))
    if found.level == "none" or not found.passed:
        raise VerificationError(
            f"`{directory}` was not verified when it was converted",
            hint="convert again without --verify none; its card would say that nothing is known of it",
        )
    return found


def push(directory: Path, repo_id: str, *, private: bool, dry_run: bool, progress: Progress) -> PushResult:
    """Send everything that SHA256SUMS lists, and the list, as one commit; nothing where a file is not what it says.

    The reports stay here, they name folders of this machine. With `dry_run` nothing is asked of the network.
    """
    verify = _check_pushable(directory, repo_id)
    digests = listed_files(directory)
    hashes = check_files(directory, digests, progress)
    if hashes.mismatched:
        raise VerificationError(
            f"{len(hashes.mismatched)} files do not match their SHA-256, first `{hashes.mismatched[0]}`",
            hint="convert again, or fetch the output again",
        )
    outside = [n for n in digests if not (directory / n).resolve().is_relative_to(directory.resolve())]
    if outside:
        raise InputError(f"`{SUMS}` lists `{outside[0]}`, which lies elsewhere", hint="fetch the output again")
    files = {name: directory / name for name in (*digests, SUMS)}
    message = _message(directory)
    oid, url = None, None
    if not dry_run:
        progress.start("sending", 0)
        oid, url = commit_files(repo_id, files, message=message, private=private)
    return PushResult(
        path=str(directory),
        repo_id=repo_id,
        message=message,
        commit=oid,
        url=url,
        level=verify.level,
        files=tuple(
            FileRecord(name=n, size_bytes=p.stat().st_size, sha256=digests.get(n)) for n, p in sorted(files.items())
        ),
    )


def _message(directory: Path) -> str:
    document = read_json(directory / MARKER)
    source = from_json(SourceRecord, document["source"])
    name = source.name
    if (directory / TUNED).exists():  # of which the source is what training left
        name = f"{Path(str(read_json(directory / TUNED).get('model'))).name}, fine-tuned,"
    return f"Add {name} in {document['format']}, by lpconv {document['method']}"
