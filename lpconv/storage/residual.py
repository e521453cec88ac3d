"""The residual files of a Collage checkpoint, and the check that they belong to its weights.

`collage/residual.json` names the form of the residual and, for each residual file, the root file that it completes with
that file's SHA-256. Users fine-tune the root and keep a stale residual; adding the two would be silent noise.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpconv.errors import InputError
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import check_inside, find_ignored, read_json
from lpconv.storage.partfile import sha256_of

RESIDUAL_FOLDER = "collage"
RESIDUAL_INDEX = f"{RESIDUAL_FOLDER}/residual.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Residual files: `form` is a key of `lpconv.mcf.split.RESIDUALS`; `roots` are pairs (root file, its SHA-256)."""

    form: str
    directory: Path
    files: tuple[str, ...]
    roots: tuple[tuple[str, str], ...]

    @property
    def as_checkpoint(self) -> Checkpoint:
        """The residual files as a separate checkpoint."""
        return Checkpoint.of_files(RESIDUAL_FOLDER, self.directory, self.files)


def residual_index(form: str, pairs: list[tuple[str, str, str]]) -> dict[str, Any]:
    """The document of `RESIDUAL_INDEX`; `pairs` holds (residual file, root file, root's SHA-256)."""
    return {
        "format_version": _VERSION,
        "residual": form,
        "files": {low: {"root": root, "root_sha256": digest} for low, root, digest in pairs},
    }


def read_residual(directory: Path) -> Residuals | None:
    """The residual of a checkpoint, or None. Raises InputError if a root file has changed."""
    residual = find_residual(directory)
    for name, digest in residual.roots if residual else ():
        if sha256_of(directory / name) != digest:
            raise InputError(
                f"`{name}` has changed since its residual was written",
                hint="the residual belongs to other weights; delete the collage folder to use the bf16 weights alone",
            )
    return residual


def find_residual(directory: Path) -> Residuals | None:
    """`read_residual` without reading the root files, for a writer that has just hashed them."""
    path = directory / RESIDUAL_INDEX
    if not path.exists():
        return None
    document = read_json(path)
    if document.get("format_version") != _VERSION:
        raise InputError(
            f"`{path}` has format_version {document.get('format_version')}", hint="update lpconv to open it"
        )
    form, files = document.get("residual"), document.get("files")
    if not isinstance(form, str) or not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise InputError(f"`{path}` is not a residual index", hint="download the checkpoint again")
    for low, entry in files.items():
        for name in (low, entry["root"]):
            check_inside(directory, name)
    roots = tuple((entry["root"], entry["root_sha256"]) for entry in files.values())
    return Residuals(form=form, directory=directory, files=tuple(files), roots=roots)


def residual_files(directory: Path) -> tuple[str, ...]:
    """The residual files of a checkpoint, relative to it; empty if it has none."""
    residual = find_residual(directory)
    return residual.files if residual else ()


def ignored_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Files with weights next to a checkpoint's own that neither lpconv nor transformers reads, sorted."""
    directory = checkpoint.directory
    return find_ignored(directory, {*checkpoint.weight_files, *checkpoint.side_files, *residual_files(directory)})


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("root", "root_sha256"))
