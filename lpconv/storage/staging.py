"""The working folder of an output, and the rename that publishes it.

During a run, all files are in `OUT.partial` next to OUT, with a journal of the complete ones. A run that fails or is
killed leaves that folder and no OUT; `--resume` continues from its journal if source and options are still the same. A
lock on the journal keeps two runs apart. Locks are advisory and end with the process however it ends. Some file systems
have none (Lustre mounted without them, some network stores). There, other runs cannot be detected: work continues as if
it were alone, since a refusal would name another run that does not exist.

Only our own folders are deleted: OUT and `OUT.failed` are outputs by their marker (`lpconv.json`; `probe.json` for a
probe), `OUT.partial` by its journal, and both files are deleted last. OUT is replaced only if it contains nothing but
files that its SHA256SUMS lists and reports. An empty folder counts as free.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, Self

from lpconv.errors import InputError, OutputExistsError, UnsupportedError, UsageError
from lpconv.gguf.view import find_gguf
from lpconv.lookup import missing_directory
from lpconv.report.numbers import code_list
from lpconv.storage.contents import ADAPTER, ATTRIBUTES, PACKED, check_inside, no_checkpoint_error, read_json
from lpconv.storage.partfile import PART, PartFile, check_writable, fsync_directory, writing
from lpconv.storage.place import open_regular, sha256_of
from lpconv.storage.remote import check_url, is_url

JOURNAL = "journal.jsonl"
MARKER = "lpconv.json"  # marks a directory as an output of lpconv
TUNED = "finetune.json"  # marks an output whose weights lpconv fine-tuned
SUMS = "SHA256SUMS"
NOT_SUMMED = {SUMS, "report.json", "report.html"}  # these describe one run; all others depend on source and options
_UNLISTED = {"probe.json": {"calibration.json"}, "advice.json": {"advice.html", "jobs.yaml"}}  # files without SUMS
PARTS = ".parts"  # suffix of the folder next to an output for the shares of several workers
_SUFFIXES = (".partial", ".failed", ".replaced")  # of working folders next to an output


class Staging:
    """The working folder of one output. Use as a context manager, which always releases the lock.

    `resume` is None for a command that cannot resume, whose folder is deleted if it fails. `identity` must be the same
    for a resume: plan, source files, library versions that affect the bytes. The file `marker` marks a published folder
    as ours.
    """

    def __init__(
        self, output: Path, identity: dict[str, Any], *, resume: bool | None = None, force: bool, marker: str = MARKER
    ) -> None:
        self.output = output
        self.directory = folder_next_to(output, ".partial")
        self.done: list[dict[str, Any]] = []
        self._force, self._marker, self._can_resume = force, marker, resume is not None
        check_free(output, resume=resume, force=force, marker=marker)
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._journal = os.fdopen(open_regular(self.directory / JOURNAL, flags), "a+b")
        self._lock()
        try:
            with writing(self.directory):
                self._begin(identity, resume=bool(resume))
        except BaseException:
            if not resume:  # for example because the disk is full
                self.discard()
            self._journal.close()
            raise

    def _lock(self) -> None:
        if not try_lock(self._journal.fileno()):
            self._journal.close()
            raise locked_error(self.directory)
        # Another run may have published after we opened the journal and before we locked it.
        if not _is_at(self._journal.fileno(), self.directory / JOURNAL):
            self._journal.close()
            raise OutputExistsError(f"another run has just finished `{self.output}`", hint="choose another --output")

    def _begin(self, identity: dict[str, Any], *, resume: bool) -> None:
        lines, size = _read_journal(self.directory / JOURNAL)
        if resume and lines:
            check_same_run(self.directory, identity, lines[0])
            os.ftruncate(self._journal.fileno(), size)  # the next line would be appended to a truncated one
            self.done = [line for line in lines[1:] if self._is_intact(line)]
            _clear(self.directory, {JOURNAL, *(f["name"] for line in self.done for f in line["files"])})
            return
        _clear(self.directory, {JOURNAL})
        os.ftruncate(self._journal.fileno(), 0)
        self.append(identity)

    def _is_intact(self, line: dict[str, Any]) -> bool:
        for f in line.get("files", ()):
            path = self.directory / f["name"]
            if not path.is_file() or path.stat().st_size != f["size_bytes"] or sha256_of(path) != f["sha256"]:
                return False
        return True

    def append(self, line: dict[str, Any]) -> None:
        """Append one line to the journal, durably."""
        with writing(self.directory / JOURNAL):
            self._journal.write(json.dumps(line).encode() + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())

    def create(self, name: str, size_bytes: int, flusher: ThreadPoolExecutor) -> PartFile:
        """Begin a file in the folder."""
        return PartFile(self.directory, name, size_bytes, flusher)

    def publish(self) -> None:
        """Rename the folder to the output. A replaced output is deleted only after that.

        The journal is deleted last: while it exists, no other run treats the folder as abandoned.
        """
        _check_output(self.output, self._marker, force=self._force)
        old = folder_next_to(self.output, ".replaced")
        with writing(self.output):
            if self.output.exists():
                _remove(old, self._marker)
                os.rename(self.output, old)
            os.rename(self.directory, self.output)
            fsync_directory(self.output.parent)
            (self.output / JOURNAL).unlink(missing_ok=True)  # a resumed run deletes it too
            _remove(old, self._marker)

    def discard(self) -> None:
        """Delete the folder."""
        with contextlib.suppress(OSError):
            _remove(self.directory, JOURNAL)

    def set_aside(self) -> Path | str:
        """Keep a failed output for inspection as `OUT.failed`, never as OUT."""
        failed = folder_next_to(self.output, ".failed")
        with writing(failed):
            _remove(failed, self._marker)
            os.rename(self.directory, failed)
            (failed / JOURNAL).unlink()
        return failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is not None and not self._can_resume:
            self.discard()
        self._journal.close()


def check_free(output: Path, *, resume: bool | None = None, force: bool, marker: str = MARKER) -> None:
    """Refuse an output that exists, or that an interrupted run has left. Raises OutputExistsError.

    `resume` is None for a command that cannot resume. Raises ResourceError if the path cannot be written.
    """
    check_writable(output)
    _check_output(output, marker, force=force)
    _check_working_folders(output, marker)
    partial = folder_next_to(output, ".partial")
    if is_unused(partial) or resume or force:
        return  # if another run is alive, its lock stops this one later
    if is_locked(partial / JOURNAL):
        raise locked_error(partial)
    hint = "start over with --force" if resume is None else "continue it with --resume, or start over with --force"
    raise OutputExistsError(f"`{partial}` is left from an interrupted run", hint=hint)


def check_same_run(place: Path | str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse to resume a run that was started with other settings. Raises OutputExistsError."""
    changed = differing_settings(current, saved)
    if changed:
        raise OutputExistsError(
            f"`{place}` was started with other {', '.join(changed)}",
            hint="repeat that run's command with --resume, or start over with --force",
            details={"changed": changed},
        )


def differing_settings(current: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Names of the settings in which two runs differ."""
    return sorted(k for k in {*current, *saved} if current.get(k) != saved.get(k))


def is_unused(directory: Path) -> bool:
    """Whether a path does not exist, or is an empty directory."""
    return not os.path.lexists(directory) or (directory.is_dir() and not any(directory.iterdir()))


def folder_next_to(output: Path, suffix: str) -> Path:
    """The path of a working folder next to an output, such as `OUT.partial`."""
    named = output if output.name not in ("", "..") else Path(os.path.abspath(output))
    return Path(f"{named}{suffix}")


def working_folders(output: Path) -> tuple[Path, ...]:
    """The output and all folders next to it that a run may use."""
    return (output, *(folder_next_to(output, s) for s in (*_SUFFIXES, PARTS)))


def read_marker(directory: Path) -> dict[str, Any]:
    """The marker document of an output; empty for any other directory."""
    path = directory / MARKER
    return read_json(path) if path.exists() else {}


def is_output(directory: Path) -> bool:
    """Whether a conversion or a fine-tuning wrote a directory, by its marker or sums file, even if it is damaged."""
    if not (directory / MARKER).exists():
        return (directory / SUMS).exists() and not any((directory / n).exists() for n in (TUNED, PACKED))
    return read_marker(directory).get("kind") not in ("restore", "repair")


def is_trained(directory: Path) -> bool:
    """Whether training moved the weights off the source's. Recovered codes still belong to the source's weights."""
    asked = read_json(directory / TUNED) if (directory / TUNED).exists() else None
    return asked is not None and bool(asked.get("merges") or not (asked.get("arithmetic") or {}).get("on_codes"))


def check_is_output(directory: Path) -> None:
    """Raise UnsupportedError for a checkpoint that is not an output, InputError for anything else without a marker."""
    for name in (MARKER, SUMS):
        if (directory / name).exists():
            check_inside(directory, name)
    if (directory / MARKER).exists():
        return
    if not os.path.exists(directory):
        raise missing_directory(directory, hint="pass an output of `lpconv convert`")
    if (directory / ADAPTER).is_file():
        raise no_checkpoint_error(directory)
    if is_output(directory) or not ((directory / "config.json").exists() or find_gguf(directory)):
        raise InputError(f"`{directory}` has no {MARKER}", hint="pass an output of `lpconv convert`")
    if (directory / PACKED).is_file():
        raise UnsupportedError(
            f"`{directory}` has the weights of a checkpoint that lpconv did not convert, so it has no {MARKER}",
            hint=f"check its files with `sha256sum -c {SUMS}`, or compare with `lpconv verify PATH --against MODEL`",
        )
    raise UnsupportedError(
        f"`{directory}` was not written by lpconv: it has no {MARKER} to verify or restore it by",
        hint="pass an output of `lpconv convert`, or compare weights with `lpconv verify PATH --against MODEL`",
    )


def check_apart(source: Path | str, output: Path | str) -> None:
    """Refuse an output inside its own source, or one that contains or replaces it; both may be URLs."""
    is_remote = is_url(str(output))
    if is_remote != is_url(str(source)):
        return
    place = check_url if is_remote else os.path.realpath
    inner = PurePath(place(str(source)))
    for folder in (output,) if is_remote else working_folders(Path(output)):
        outer = PurePath(place(str(folder)))
        if inner == outer:
            raise OutputExistsError(f"`{source}` and the output are the same directory", hint="choose another --output")
        if inner.is_relative_to(outer):
            raise OutputExistsError(f"`{source}` lies inside `{folder}`", hint="choose another --output")
        if outer.is_relative_to(inner):
            raise UsageError(f"`{folder}` lies inside `{source}`", hint="choose an --output outside of it")


def check_no_foreign(place: Path | str, names: Iterable[str], own: set[str], sums: bytes) -> None:
    """Raise OutputExistsError for files that are neither in the `sums` of an output nor `own`, or in `own` folders.

    What a killed run left of writing one of them is as good as the file.
    """
    known = {
        *own,
        *NOT_SUMMED,
        ATTRIBUTES,
        JOURNAL,
        *(line[66:] for line in sums.decode(errors="replace").splitlines()),
    }
    folders = tuple(name for name in own if name.endswith("/"))
    foreign = sorted(n for n in names if n.removesuffix(PART) not in known and not n.startswith(folders))
    if foreign:
        raise OutputExistsError(
            f"`{place}` contains files that are not of its run, so --force does not delete it: {code_list(foreign)}",
            hint="move or delete them, or choose another --output",
        )


def check_ours(output: Path, own: set[str]) -> None:
    """Refuse to replace a folder with files of others, as `check_no_foreign` does."""
    files = (p.relative_to(output).as_posix() for p in output.rglob("*") if p.is_symlink() or not p.is_dir())
    check_no_foreign(output, files, own, (output / SUMS).read_bytes() if (output / SUMS).is_file() else b"")


def _check_output(output: Path, marker: str, *, force: bool) -> None:
    if is_unused(output) and not output.is_symlink():
        return
    if not force:
        raise OutputExistsError(f"`{output}` exists", hint="choose another --output, or replace it with --force")
    if not _is_ours(output, marker):
        raise OutputExistsError(
            f"`{output}` was not written by this command, so --force does not delete it",
            hint="choose another --output",
        )
    check_ours(output, {marker, *_UNLISTED.get(marker, ())})


def _check_working_folders(output: Path, marker: str) -> None:
    for suffix in _SUFFIXES:
        folder = folder_next_to(output, suffix)
        if os.path.lexists(folder) and not _is_ours(folder, JOURNAL if suffix == ".partial" else marker):
            raise OutputExistsError(
                f"`{folder}` exists and was not written by lpconv", hint="move it, or choose another --output"
            )


def _is_ours(directory: Path, proof: str) -> bool:
    """Whether a directory may be deleted: it is empty, or contains the file `proof`."""
    if directory.is_symlink() or not directory.is_dir():
        return False
    return (directory / proof).is_file() or not any(directory.iterdir())


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The journal's lines up to the first truncated one, and their size in bytes."""
    lines, size = [], 0
    for raw in path.read_bytes().splitlines(keepends=True):
        try:
            line = json.loads(raw)
        except ValueError:
            break
        if not raw.endswith(b"\n") or not isinstance(line, dict):
            break
        lines.append(line)
        size += len(raw)
    return lines, size


def _clear(directory: Path, names_to_keep: set[str]) -> None:
    """Delete everything below `directory` except the files `names_to_keep`, relative to it."""
    for path in sorted(directory.rglob("*"), reverse=True):  # contents of a folder before the folder
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # not empty: it contains a kept file
                path.rmdir()
        elif path.relative_to(directory).as_posix() not in names_to_keep:
            path.unlink()


def _remove(directory: Path, proof: str) -> None:
    """Delete a folder of ours, with `proof` last, so that the remains of a killed deletion still count as ours."""
    if directory.exists() and _is_ours(directory, proof):
        _clear(directory, {proof})
        shutil.rmtree(directory)


def try_lock(descriptor: int) -> bool:
    """Try to lock an open file or folder exclusively until it is closed; returns whether that succeeded."""
    return _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def wait_for_lock(descriptor: int) -> None:
    """Wait for the exclusive lock on an open file, which is held until it is closed."""
    _lock(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether a live process has locked a file or a folder; False if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # a shared lock, so concurrent checks do not block each other
        return not _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def locked_error(place: Path) -> OutputExistsError:
    """Error for an output that another run has locked."""
    return OutputExistsError(f"another run is writing `{place}`", hint="wait for it, or choose another --output")


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
