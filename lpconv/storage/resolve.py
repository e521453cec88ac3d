"""Resolve a model's name to a directory that holds a checkpoint.

A name is, in this order: ``demo``, a URL, a local directory, an alias or a hub id. For hub models a complete snapshot
in the cache is used without a request, so a run reads the same bytes with and without network; `--revision` selects
another.

The hub's cache names each blob after the hash that the hub gave when it was fetched, and never checks the bytes:
SHA-256 for weights, Git's SHA-1 for small files. So every file is hashed here once. Successful checks are recorded by
size, time and inode in the repository's own cache folder, and are deleted with that folder.
"""

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, LpconvError, UsageError
from lpconv.gguf import SUFFIX
from lpconv.gguf.view import as_directory
from lpconv.lookup import missing_directory, nearest, nearest_sibling
from lpconv.storage.aliases import ALIASES
from lpconv.storage.hub import cached_snapshot, commit_of, download, wanted_files
from lpconv.storage.partfile import write_small
from lpconv.storage.place import hash_of, sha256_of
from lpconv.storage.remote import check_url, hub_names, is_url
from lpconv.storage.remote_view import copy_of_file, view_of

DEMO = "demo"  # the checkpoint inside this package; a directory of that name is ./demo
STATE = "lpconv-checked.json"  # records the blobs whose hashes have been checked
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_NAME = r"[A-Za-z0-9_][\w.-]*"
_HUB_NAME = re.compile(rf"{_NAME}(/{_NAME})?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A resolved model: the name as typed, its meaning, and the directory of its files.

    `resolved` is a hub id, the absolute path of a local directory, or ``demo``. `revision` is the commit hash of a hub
    snapshot, otherwise None.
    """

    name: str
    resolved: str
    revision: str | None = None
    directory: Path

    @property
    def hub_id(self) -> str | None:
        """The model's hub id, or None if it is not from the hub."""
        return self.resolved if self.revision is not None else None


def resolve(name: str, *, revision: str | None = None, whole: bool = False) -> Resolved:
    """The checkpoint that `name` refers to; `revision` is a branch, tag or commit hash of the hub.

    Looks at the disk first and downloads only what is not in the cache; downloaded files are compared with the hub's
    hashes. Remote files stay at their URL; with `whole` they are copied, as are files that cannot be opened by ranges,
    and an existing copy is reused. Raises InputError, with a hint, if nothing is found or if a download has another
    hash; UsageError for a revision of a model that has none; UnsupportedError for an unsupported URL.
    """
    origin = _find(name, revision, whole=whole)
    return replace(origin, directory=as_directory(origin.directory))


def _find(name: str, revision: str | None, *, whole: bool) -> Resolved:
    """The checkpoint that a name refers to; its `directory` may be a file."""
    if name == DEMO:
        if revision is not None:
            raise UsageError(f"the included model has no revision `{revision}`", hint="leave --revision out")
        return Resolved(name=DEMO, resolved=DEMO, directory=demo_checkpoint())
    if is_url(name):
        return _from_url(name, revision, whole=whole)
    # os.path functions never raise: the name may be too long, or name a user that does not exist.
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path) and path.suffix != SUFFIX:
        raise InputError(
            f"`{name}` is a file, not a checkpoint directory",
            hint=f"pass the directory that contains it: {path.parent}",
        )
    if name and (os.path.isdir(path) or os.path.isfile(path)):
        if revision is not None:
            raise UsageError(
                f"`{name}` is a local directory and has no revision `{revision}`",
                hint="leave --revision out; for a hub model of that name, run from another folder",
            )
        return Resolved(name=name, resolved=str(path.resolve()), directory=path.resolve())
    if looks_like_path(name):
        raise missing_directory(name, hint="pass a directory that exists, a hub id or an alias")
    return _from_hub(name, revision)


def looks_like_path(name: str) -> bool:
    """Whether `name` can only be a path: neither ``name`` nor ``owner/name`` in the hub's spelling."""
    return _HUB_NAME.fullmatch(name) is None


def directory_of(path: str | Path) -> Path:
    """The directory of a path or of a checkpoint's URL. Raises the errors of `resolve` for a URL."""
    return resolve(path).directory if isinstance(path, str) and is_url(path) else Path(path)


def _from_url(name: str, revision: str | None, *, whole: bool) -> Resolved:
    url = check_url(name)
    if not url.startswith("hf://"):
        if revision is not None:
            raise UsageError(f"`{url}` has no revision `{revision}`", hint="leave --revision out")
        directory = copy_of_file(url) if url.endswith(SUFFIX) else view_of(url, whole=whole)
        return Resolved(name=url, resolved=url, directory=directory)
    repo_id, url_revision = hub_names(url)
    ref = url_revision or revision
    snapshot = cached_snapshot(repo_id, ref)
    if snapshot is None and whole:
        snapshot = download(repo_id, ref)
        check_promises(snapshot)
    if snapshot is not None:
        return _snapshot(url, repo_id, snapshot)
    commit = commit_of(repo_id, ref)
    view = view_of(f"hf://{repo_id}@{commit}", whole=False)
    return Resolved(name=url, resolved=repo_id, revision=commit, directory=view)


def _from_hub(name: str, revision: str | None) -> Resolved:
    alias = ALIASES.get(name.casefold())
    repo_id = alias.repo_id if alias else name
    # A model that moved to an owner may be in the cache under its old bare name.
    for cached_id in dict.fromkeys((repo_id, name)):
        snapshot = cached_snapshot(cached_id, revision)
        if snapshot is not None:
            return _snapshot(name, cached_id, snapshot)
    if "/" not in repo_id:
        raise _unknown_name(name)
    try:
        snapshot = download(repo_id, revision)
    except InputError as e:
        near = nearest_sibling(Path(name))
        hint = f"did you mean the directory `{near}`? {e.hint}" if near else e.hint
        raise InputError(f"there is no directory `{name}`; as a hub model, {e.message}", hint=hint) from e
    check_promises(snapshot)
    return _snapshot(name, repo_id, snapshot)


def _snapshot(name: str, repo_id: str, directory: Path) -> Resolved:
    return Resolved(name=name, resolved=repo_id, revision=directory.name, directory=directory)


def _unknown_name(name: str) -> InputError:
    near, beside = nearest(name, ALIASES), nearest_sibling(Path(name))
    suggestions = f"did you mean `{near}` ({ALIASES[near].repo_id})? " if near else ""
    suggestions += f"did you mean the directory `{beside}`? " if beside else ""
    return InputError(
        f"`{name}` is neither a directory nor a known model",
        hint=f"{suggestions}`lpconv doctor --aliases` lists short names; write other hub models as OWNER/NAME",
    )


def check_promises(snapshot: Path) -> dict[str, str]:
    """Check the files of a snapshot, and return the SHA-256 of those for which the hub gave one.

    A file that is not a link to a blob named by a hash has no such hash. Raises InputError for the first file with
    another hash.
    """
    state = snapshot.parent.parent / STATE
    known, hashes = _read_state(state), dict[str, str]()
    before = dict(known)
    files = (p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file())
    for name in wanted_files(files):
        blob = _blob(snapshot / name)
        if blob is None:
            continue
        status = blob.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
        if known.get(blob.name) != stamp:
            _check_blob(snapshot / name, name, blob)
            known[blob.name] = stamp
        if _SHA256.fullmatch(blob.name):
            hashes[name] = blob.name
    if known != before:
        with suppress(LpconvError):  # a cache that cannot be written is checked again next time
            write_small(state, json.dumps({"format_version": 1, "blobs": known}))
    return hashes


def _blob(path: Path) -> Path | None:
    """The blob that a file of a snapshot links to, if its name is a hash."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    is_hash = _SHA256.fullmatch(target.name) or _SHA1.fullmatch(target.name)
    return target if target.parent.name == "blobs" and is_hash else None


def _check_blob(path: Path, name: str, blob: Path) -> None:
    if blob.name in _possible_names(blob):
        return
    repository = path.parents[len(Path(name).parts) + 1].name.removeprefix("models--").replace("--", "/")
    raise InputError(
        f"`{name}` of `{repository}` does not match the hash that the hub gives for it, {blob.name[:12]}…",
        hint=f"delete `{blob}` and run again to download it anew",
        details={"file": name, "promised": blob.name, "blob": str(blob)},
    )


def _possible_names(blob: Path) -> tuple[str, ...]:
    """The possible names of a blob with these bytes."""
    if _SHA256.fullmatch(blob.name):
        return (sha256_of(blob),)
    # Git hashes a header too; some mirrors give the plain SHA-1.
    git = hash_of(blob, hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False))
    return git, hash_of(blob, hashlib.sha1(usedforsecurity=False))


def _read_state(state: Path) -> dict[str, Any]:
    try:
        blobs = json.loads(state.read_bytes())["blobs"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return blobs if isinstance(blobs, dict) else {}
