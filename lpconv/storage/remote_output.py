"""The output of a conversion in an object store, which has no rename: a partial output must not look finished.

The local working folder holds the small files and, for each weight file, a pointer to the uploaded object, so it can be
read like an output on disk. Objects are written in this order: a claim, by a conditional create, that describes the
run; weight files, each with a record of its hashes next to the claim; after verification the small files, `config.json`
last; and `lpconv.json`, by another conditional create, which completes the output. Then claim and records are deleted.
A resumed run reuses everything recorded under a claim of the same command.

Two runs that resume at once write the same bytes, except for reports. The one that finds a finished output stops before
it writes anything more: small files are created, and are replaced only while there is no output.
"""

import contextlib
import functools
import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from lpconv.errors import InputError, LpconvError, OutputExistsError, ResourceError, UnsupportedError
from lpconv.results import FileRecord
from lpconv.storage.partfile import PartFile
from lpconv.storage.place import MIN_POINTER_BYTES, cache_folder, write_pointer
from lpconv.storage.remote import (
    UNFINISHED,
    RemoteObject,
    check_url,
    delete,
    fetch,
    head,
    listing,
    open_writer,
    put,
    remote_errors,
)
from lpconv.storage.staging import JOURNAL, MARKER, SUMS, Staging, check_no_foreign, check_same_run

_CLAIM = f"{UNFINISHED}run.json"
_LAST = ("config.json", MARKER)


def check_free_url(url: str, *, resume: bool, force: bool) -> str:
    """Validate a URL for an output and return it as it is recorded.

    Raises OutputExistsError if something exists there, UnsupportedError for schemes that cannot be written, and errors
    of `check_url`.
    """
    url = check_url(url)
    if not url.startswith(("s3://", "gs://", "az://")):
        hint = "write to s3://, gs:// or az://, or convert to a local folder and upload it"
        raise UnsupportedError(f"lpconv cannot write to `{url}`", hint=hint)
    names = _check_names(url) if force else {o.name for o in listing(url)}
    if names and not names & {MARKER, _CLAIM}:
        raise OutputExistsError(f"`{url}` exists and was not written by lpconv", hint="choose another --output")
    if MARKER in names and not force and not resume:
        raise OutputExistsError(f"`{url}` exists", hint="choose another --output, or replace it with --force")
    if _CLAIM in names and not force and not resume:
        raise OutputExistsError(
            f"another run is writing `{url}`, or was interrupted",
            hint="continue it with --resume, or start over with --force",
        )
    return url


def _check_names(url: str) -> set[str]:
    """Names of the objects of an output or of an unfinished run. Raises OutputExistsError if there are others."""
    names = {o.name for o in listing(url)}
    if names & {MARKER, _CLAIM}:
        planned = _read(url, _CLAIM).get("files", ()) if _CLAIM in names else ()
        check_no_foreign(url, names, {MARKER, UNFINISHED, *planned}, bytes(fetch(url, SUMS)) if SUMS in names else b"")
    return names


def working_folder(url: str) -> Path:
    """Local working folder for the output at a URL."""
    return cache_folder("remote") / "outputs" / PurePosixPath(url.replace("://", "/"))


class RemoteStaging(Staging):
    """The working folder of an output at a URL. Raises OutputExistsError if another run writes there."""

    def __init__(self, url: str, identity: dict[str, Any], *, source: str, resume: bool, force: bool) -> None:
        self.url = check_free_url(url, resume=resume, force=force)
        super().__init__(working_folder(url), identity, resume=False, force=True)
        try:
            self._tags: dict[str, str | None] = {}
            self._claim_or_resume(json.loads(json.dumps(identity)), source, resume=resume, force=force)
        except BaseException:
            self._journal.close()
            raise

    def _claim_or_resume(self, identity: dict[str, Any], source: str, *, resume: bool, force: bool) -> None:
        """Claim the URL, or continue the claim of an interrupted run of the same command."""
        names = _check_names(self.url) if force else set()
        self._claim = put(self.url, _CLAIM, json.dumps(identity).encode(), create=not force)
        if source.startswith("http") and head(source, _CLAIM) is not None:  # the claim is seen at the source
            delete(self.url, [_CLAIM] if self._claim is not None else [])
            raise OutputExistsError(f"`{source}` is the output's own place", hint="choose another --output")
        # The list of files goes last, so that --force may also delete what a kill in between leaves.
        delete(self.url, sorted(names - {_CLAIM}, key=lambda name: (name != MARKER, name == SUMS)))
        if self._claim is not None:
            return
        if not resume:
            raise OutputExistsError(f"another run is writing `{self.url}`", hint="choose another --output")
        objects = {o.name: o for o in listing(self.url)}
        check_same_run(self.url, identity, _read(self.url, _CLAIM))
        self._claim = head(self.url, _CLAIM)
        for name in (n for n in objects if n.startswith(UNFINISHED) and n != _CLAIM):
            self._reuse_record(_read(self.url, name), objects)

    def _reuse_record(self, record: dict[str, Any], objects: dict[str, RemoteObject]) -> None:
        """Mark the files of a record as written if the objects in the store are the recorded ones."""
        recorded = {name: objects.get(name) for name in record["tags"]}
        if all(o is not None and o.e_tag == record["tags"][name] for name, o in recorded.items()):
            for o in filter(None, recorded.values()):
                self.record_upload(o)
            self.done.append(record["line"])

    def record_upload(self, o: RemoteObject) -> None:
        """Represent an uploaded object in the working folder: a copy if it is small, else a pointer."""
        path = self.directory / o.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if o.size_bytes < MIN_POINTER_BYTES:
            path.write_bytes(bytes(fetch(self.url, o.name, o.e_tag)))
        else:
            write_pointer(path, o.size_bytes, store=self.url, name=o.name, e_tag=o.e_tag)
        self._tags[o.name] = o.e_tag

    def check_alone(self) -> None:
        """Raise OutputExistsError if another run has published meanwhile, or has started over with --force."""
        if head(self.url, MARKER) is not None:
            self._lose()
        claim = head(self.url, _CLAIM)
        if claim is None or self._claim is None or claim.e_tag != self._claim.e_tag:
            raise OutputExistsError(f"another run has started to write `{self.url}`", hint="choose another --output")

    def _lose(self) -> NoReturn:
        delete_records(self.url)  # including files that arrived after the other run's clean-up
        # The output may be this run's own, if the answer to its first request was lost.
        raise OutputExistsError(
            f"another run has just finished `{self.url}`",
            hint="run the same command with --resume to check if it is the same output, or choose another --output",
        )

    def create(self, name: str, size_bytes: int, flusher: ThreadPoolExecutor) -> "_Upload":
        self.check_alone()
        return _Upload(self, name, size_bytes)

    def append(self, line: dict[str, Any]) -> None:
        """Append to the journal, and for a shard write its record next to the claim."""
        super().append(line)
        if "shard" in line:
            record = {"line": line, "tags": {f["name"]: self._tags[f["name"]] for f in line["files"]}}
            put(self.url, f"{UNFINISHED}{line['shard']}.json", json.dumps(record).encode())

    def publish(self) -> None:
        """Upload the small files, and the marker last. Raises OutputExistsError if another run has finished."""
        paths = {p.relative_to(self.directory).as_posix(): p for p in self.directory.rglob("*") if p.is_file()}
        names = sorted(set(paths) - {*self._tags, *_LAST, JOURNAL, SUMS})
        self.check_alone()
        for name in [SUMS, *names, "config.json"]:
            data = paths[name].read_bytes()
            if put(self.url, name, data, create=True) is None and bytes(fetch(self.url, name)) != data:
                self.check_alone()
                put(self.url, name, data)  # replaces the file of an unfinished run
        if put(self.url, MARKER, paths[MARKER].read_bytes(), create=True) is None:
            self._lose()
        delete_records(self.url)
        shutil.rmtree(self.directory)

    def discard(self) -> None:
        """Delete the working folder and this run's objects. If the store fails meanwhile, the objects remain."""
        super().discard()
        with contextlib.suppress(LpconvError):  # the original error is reported instead
            self.check_alone()
            delete(self.url, sorted(self._tags))
            delete_records(self.url)

    def set_aside(self) -> str:
        """Keep the uploaded objects, without the marker that would complete the output."""
        return self.url


def delete_records(url: str) -> None:
    """Delete a run's claim and records next to a published output."""
    names = sorted(o.name for o in listing(url) if o.name.startswith(UNFINISHED))
    delete(url, sorted(names, key=lambda name: name == _CLAIM))  # the claim last: it covers the records


class _Upload(PartFile):
    """A `PartFile` that is uploaded: bytes are sent in order, as they are hashed."""

    def __init__(self, staging: RemoteStaging, name: str, size_bytes: int) -> None:
        self._staging, self._name, self._size = staging, name, size_bytes
        self._hash, self._hashed = hashlib.sha256(), 0
        self._errors = functools.partial(remote_errors, staging.url, name, writing=True)
        with self._errors():
            self._writer = open_writer(staging.url, name, size_bytes)

    def append(self, data: bytes | memoryview) -> None:
        self.digest(data)

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Does nothing: `digest` receives the same bytes in order."""

    def digest(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._hashed += memoryview(data).nbytes
        with self._errors():
            self._writer.write(bytes(data))  # copied, since obstore keeps it and callers reuse buffers

    def finish(self) -> FileRecord:
        assert self._hashed == self._size, (self._name, self._hashed, self._size)
        self._staging.check_alone()
        with self._errors():
            self._writer.close()  # which creates the object
        uploaded = head(self._staging.url, self._name)
        if uploaded is None or uploaded.size_bytes != self._size:
            raise ResourceError(
                f"`{self._name}` was uploaded but is missing from the store", hint="run again with --resume"
            )
        self._staging.record_upload(uploaded)
        return FileRecord(name=self._name, size_bytes=self._size, sha256=self._hash.hexdigest())

    def abandon(self) -> None:
        """Leave the upload incomplete, so no object is created; the store deletes the parts by its own rules."""


def _read(url: str, name: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(bytes(fetch(url, name)))
    except ValueError as e:
        raise InputError(f"`{url}/{name}` is not the file that lpconv wrote", hint="start over with --force") from e
    return document
