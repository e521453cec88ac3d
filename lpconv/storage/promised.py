"""Check the files of a snapshot against the hub's hashes.

The hub's cache names each blob after the hash that the hub gave when it was fetched, and never checks the bytes:
SHA-256 for weights, Git's SHA-1 for small files. So every file is hashed here once. Successful checks are recorded by
size, time and inode in the repository's own cache folder, and are deleted with that folder.
"""

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from lpconv.errors import InputError, LpconvError
from lpconv.storage.hub import wanted_files
from lpconv.storage.partfile import hash_of, sha256_of, write_small

STATE = "lpconv-checked.json"
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


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
        stamp = _stamp(blob)
        if known.get(blob.name) != stamp:
            _check(snapshot / name, name, blob)
            known[blob.name] = stamp
        if _SHA256.fullmatch(blob.name):
            hashes[name] = blob.name
    if known != before:
        with contextlib.suppress(LpconvError):  # a cache that cannot be written is checked again next time
            write_small(state, json.dumps({"format_version": 1, "blobs": known}))
    return hashes


def _blob(path: Path) -> Path | None:
    """The blob that a file of a snapshot links to, if its name is a hash."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    is_hash = _SHA256.fullmatch(target.name) or _SHA1.fullmatch(target.name)
    return target if target.parent.name == "blobs" and is_hash else None


def _check(path: Path, name: str, blob: Path) -> None:
    if blob.name in _hashes(blob):
        return
    repository = path.parents[len(Path(name).parts) + 1].name.removeprefix("models--").replace("--", "/")
    raise InputError(
        f"`{name}` of `{repository}` does not match the hash that the hub gives for it, {blob.name[:12]}…",
        hint=f"delete `{blob}` and run again to download it anew",
        details={"file": name, "promised": blob.name, "blob": str(blob)},
    )


def _hashes(blob: Path) -> tuple[str, ...]:
    """The possible names of a blob with these bytes."""
    if _SHA256.fullmatch(blob.name):
        return (sha256_of(blob),)
    # Git hashes a header too; some mirrors give the plain SHA-1.
    git = hash_of(blob, hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False))
    return git, hash_of(blob, hashlib.sha1(usedforsecurity=False))


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _read_state(state: Path) -> dict[str, Any]:
    try:
        blobs = json.loads(state.read_bytes())["blobs"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return blobs if isinstance(blobs, dict) else {}
