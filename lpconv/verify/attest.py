"""In-toto statements (https://in-toto.io/Statement/v1) with SLSA provenance about conversions; see docs/verify.md."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from lpconv.errors import InputError, UnsupportedError, VerificationError
from lpconv.layouts.reader import FETCH_AGAIN, open_readable
from lpconv.plan.provenance import public_source
from lpconv.progress import Progress
from lpconv.results import SourceRecord, from_json
from lpconv.storage.place import sha256_of
from lpconv.storage.staging import MARKER, SUMS, TUNED
from lpconv.verify.options import VerifyOptions
from lpconv.verify.reader import read_output
from lpconv.verify.run import STATEMENT, listed_files, verify_output


def attest(directory: Path, *, against: str | None, progress: Progress) -> dict[str, Any]:
    """The statement about an output of a conversion. It has no times or paths, so equal outputs have equal statements.

    With `against`, the weights are first compared with that source, and its files are listed with their hashes. Raises
    InputError if a file does not match SHA256SUMS, and VerificationError if the weights do not match the source.
    """
    recorded = read_output(directory)
    if (directory / TUNED).exists():
        raise UnsupportedError(f"`{directory}` was trained", hint="attest an output of `lpconv convert`")
    options = VerifyOptions(against=against, level="hash" if against is None else "weights")
    checked = verify_output(directory, options, progress=progress)
    if not checked.passed:
        if checked.hash is not None and checked.hash.mismatched:
            raise InputError(checked.problems[0], hint=FETCH_AGAIN)
        raise VerificationError(checked.problems[0], hint="pass the checkpoint that was converted to --against")
    source = from_json(SourceRecord, recorded.provenance["source"])
    if against is not None:
        opened = open_readable(against)
        source = public_source(opened.record(lambda name: sha256_of(opened.directory / name, stored=False)))
    digests = {**listed_files(directory), SUMS: sha256_of(directory / SUMS)}
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digests[name]}} for name in sorted(digests)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": _provenance(recorded.provenance, digests[MARKER], source),
    }


def _provenance(record: Any, record_sha256: str, source: SourceRecord) -> dict[str, Any]:
    """The SLSA predicate: the options, the files of the source, the libraries, and the recorded verification."""
    place = f"file:{quote(source.name)}/"
    if source.revision is not None:
        place = f"pkg:huggingface/{quote(source.resolved)}@{source.revision}#"
    files = [
        {"name": f.name, "uri": place + quote(f.name)} | ({"digest": {"sha256": f.sha256}} if f.sha256 else {})
        for f in source.files
    ]
    versions = from_json(dict[str, str], record.get("versions"))
    libraries = [{"name": n, "uri": f"pkg:pypi/{n}@{quote(v)}"} for n, v in versions.items() if n != "python"]
    verification = {"verification": record.get("verify")}
    return {
        "buildDefinition": {
            "buildType": "urn:lpconv:convert:v1",
            "externalParameters": {
                "options": record["options"],
                "source": {"name": source.name, "revision": source.revision},
            },
            "resolvedDependencies": files + libraries,
        },
        "runDetails": {
            "builder": {"id": "urn:lpconv"},
            "byproducts": [{"name": MARKER, "digest": {"sha256": record_sha256}, "annotations": verification}],
        },
    }
