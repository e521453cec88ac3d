"""Checkpoints of a run that was stopped at any moment: sealed when they are whole, and used only as they were sealed.

Trainer writes a dozen files into `checkpoint-STEP`, and takes the folder of the largest number for a whole one. Here
the last file is a list of hashes of the others.
"""

import shutil
from pathlib import Path

from lpconv.checkpoint.partfile import NOT_A_FILE, read_error, sha256_of, write_small, writing
from lpconv.errors import LpconvError, UnreadError

_SEAL = "SHA256SUMS"
_KEPT = 2  # the last may turn out to be what diverges
_PREFIX = "checkpoint-"


def seal_checkpoint(folder: Path, step: int) -> None:
    """Say that the checkpoint of a step is whole, and delete those before the last two."""
    checkpoint = folder / f"{_PREFIX}{step}"
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != _SEAL)
    lines = [f"{sha256_of(p)}  {p.relative_to(checkpoint).as_posix()}\n" for p in files]
    write_small(checkpoint / _SEAL, "".join(lines))
    with writing(folder):
        for old in _checkpoints(folder)[_KEPT:]:
            shutil.rmtree(old)


def last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint that is whole; None where there is none."""
    return next((c for c in _checkpoints(folder) if _is_whole(c)), None)


def drop_broken(folder: Path) -> None:
    """Delete checkpoints that are not whole: they lie where later ones will be written."""
    with writing(folder):
        for checkpoint in _checkpoints(folder):
            if not _is_whole(checkpoint):
                shutil.rmtree(checkpoint)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def _checkpoints(folder: Path) -> list[Path]:
    """The latest first."""
    found = (p for p in folder.glob(f"{_PREFIX}*") if p.is_dir() and p.name.removeprefix(_PREFIX).isdecimal())
    return sorted(found, key=step_of, reverse=True)


def _is_whole(checkpoint: Path) -> bool:
    """Whether every file is there as it was written. Raises UnreadError where the disk fails."""
    try:
        lines = (checkpoint / _SEAL).read_text(encoding="utf-8").splitlines()
        sums = [line.partition("  ")[::2] for line in lines]
        return bool(sums) and all(sha256_of(checkpoint / name) == digest for digest, name in sums)
    except UnreadError:  # nobody knows, and nothing is deleted
        raise
    except (*NOT_A_FILE, ValueError, LpconvError):
        return False
    except OSError as e:
        raise read_error(e, checkpoint / _SEAL) from e
