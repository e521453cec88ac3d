"""Check the files of an output against its list of hashes."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lpconv.errors import InputError
from lpconv.progress import Progress
from lpconv.results import HashCheck
from lpconv.storage.contents import is_plain
from lpconv.storage.partfile import sha256_of
from lpconv.storage.staging import MARKER, SUMS


def check_hashes(directory: Path, progress: Progress) -> HashCheck:
    """Check every file in SHA256SUMS; weights, config and lpconv.json must be among them.

    Raises InputError if there is no such list.
    """
    digests = _listed_files(directory)
    sizes = {n: (directory / n).stat().st_size for n in digests if os.path.isfile(directory / n)}
    progress.start("hashing", sum(sizes.values()))
    weights = {p.relative_to(directory).as_posix() for p in directory.rglob("*.safetensors")}
    mismatched = sorted({"config.json", MARKER, *weights} - digests.keys())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashing releases the GIL
        hashes = pool.map(lambda n: sha256_of(directory / n) if n in sizes else None, digests)
        for (name, digest), hashed in zip(digests.items(), hashes, strict=True):
            mismatched += [] if hashed == digest else [name]
            progress.advance(sizes.get(name, 0))
    return HashCheck(num_files=len(digests), mismatched=tuple(mismatched))


def _listed_files(directory: Path) -> dict[str, str]:
    """Names and digests from SHA256SUMS (the format of `sha256sum`). Raises InputError if it is missing."""
    path, digests = directory / SUMS, {}
    if not path.exists():
        raise InputError(f"`{directory}` has no {SUMS}", hint="pass an output of `lpconv convert`")
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or not is_plain(name):
            raise InputError(
                f"`{path}` has the line {line[:80]!r}, which is not a hash and a file name",
                hint="download the file again",
            )
        digests[name] = digest
    return digests
