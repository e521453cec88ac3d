"""The Hugging Face hub: snapshots in the cache, downloads, and what its errors mean for the user.

`huggingface_hub` is imported inside the functions, so that the command line starts without it.
"""

import errno
import glob
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lpconv.checkpoint.aliases import ALIASES
from lpconv.errors import InputError, LpconvError, ResourceError
from lpconv.lookup import nearest

__all__ = ["cached_snapshot", "download", "has_weights", "known_sha256", "wanted_files"]

_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PICKLES = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIMEOUT_S = 20.0
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Weights that lpconv does not read, and training leftovers. `.bin` and `.safetensors` are chosen by name above.
_OTHER_WEIGHTS = (
    *(".safetensors", ".bin", ".h5", ".pb", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ggml", ".pt", ".pth"),
    *(
        ".ckpt",
        ".tflite",
        ".ot",
        ".nemo",
        ".mlmodel",
        ".xml",
        ".npz",
        ".pkl",
        ".engine",
        ".params",
        ".data",
        ".parquet",
    ),
)


def cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The complete snapshot of `repo_id` in the cache, or None. Asks nobody; a partial snapshot counts as none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repo_id, "config.json", revision=revision)
    except HFValidationError:
        return None
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    return snapshot if has_weights(snapshot) else None


def known_sha256(path: Path) -> str | None:
    """The SHA-256 of a file of a snapshot, after which the cache names the large files that it links to; else None."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    return target.name if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) else None


def has_weights(directory: Path) -> bool:
    """Whether a directory has weights that lpconv reads: one file, or every shard that an index there names."""
    if any((directory / name).exists() for name in ("model.safetensors", "pytorch_model.bin")):
        return True
    return any(_shards_exist(directory / name) for name in _INDEXES if (directory / name).exists())


def wanted_files(files: Iterable[str]) -> list[str]:
    """Of a repository's files, those that a conversion needs: one set of weights and every small side file.

    Safetensors are preferred over pickles, and only the names `transformers` loads count: repositories often hold the
    same weights twice (``consolidated.safetensors``, ``original/*.pth``) or in precisions nobody asked for.
    """
    names = sorted(files)
    is_chosen = _SAFETENSORS if any(_SAFETENSORS.fullmatch(n) for n in names) else _PICKLES
    unwanted_index = _INDEXES[1] if is_chosen is _SAFETENSORS else _INDEXES[0]
    side = [n for n in names if Path(n).suffix.lower() not in _OTHER_WEIGHTS and n != unwanted_index]
    # What lpconv's own collage method keeps beside the root checkpoint.
    residuals = [n for n in names if re.fullmatch(r"collage/residual.*\.safetensors", n)]
    return [n for n in names if is_chosen.fullmatch(n)] + residuals + side


def download(repo_id: str, revision: str | None) -> Path:
    """Fetch a model into the cache and return its snapshot; a progress bar appears on stderr if that is a terminal.

    Raises InputError where the hub cannot be reached or refuses, and ResourceError where the disk is full.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise _not_here(repo_id, revision, "HF_HUB_OFFLINE is set")
    with _explained(repo_id, revision):
        # Not `list_repo_files`, which tries for half a minute where there is no network.
        info = HfApi().model_info(repo_id, revision=revision, timeout=_TIMEOUT_S)
    wanted = wanted_files(f.rfilename for f in info.siblings or ())
    if not any(_is_weights(name) for name in wanted):
        raise InputError(
            f"`{repo_id}` has no weights that lpconv reads",
            hint="it reads model*.safetensors and pytorch_model*.bin; name a repository that has one of them",
        )
    with _explained(repo_id, revision), _bars_on_terminals_only():
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=[glob.escape(n) for n in wanted]))


def _is_weights(name: str) -> bool:
    return bool(_SAFETENSORS.fullmatch(name) or _PICKLES.fullmatch(name))


def _shards_exist(index: Path) -> bool:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        return all((index.parent / shard).exists() for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True  # a broken index is there; reading the checkpoint will say what is wrong with it


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _explained(repo_id: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except (
        Exception
    ) as e:  # the hub client lets errors of its HTTP and transfer libraries through, which vary by version
        raise _explain(repo_id, revision, e) from e


def _explain(repo_id: str, revision: str | None, error: Exception) -> LpconvError:
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo_id}"
    if isinstance(error, errors.GatedRepoError):
        return InputError(
            f"`{repo_id}` is gated and your account has no access (401/403)",
            hint=f"ask for access at {page}, then run `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(
            f"`{repo_id}` has no revision `{revision}` (404)", hint=f"see {page}/commits for those it has"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        near = nearest(repo_id, {a.repo_id for a in ALIASES.values()})
        meant = f"did you mean `{near}`? " if near else ""
        return InputError(
            f"no directory and no hub model `{repo_id}`, or it is private (401/404)",
            hint=f"{meant}check the spelling; for a private model run `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, errors.HFValidationError):
        return InputError(
            f"`{repo_id}` is no hub id: {_first_line(error)}", hint="write it as OWNER/NAME, or pass a directory"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return InputError(
            f"the hub refused `{repo_id}`: {_first_line(error)}", hint="try again later, or pass a directory"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ResourceError(f"disk full while downloading `{repo_id}`", hint="free space, or set HF_HOME elsewhere")
    return _not_here(repo_id, revision, f"the hub cannot be reached ({type(error).__name__}: {_first_line(error)})")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _not_here(repo_id: str, revision: str | None, why: str) -> InputError:
    at = f" at revision `{revision}`" if revision else ""
    option = f" --revision {revision}" if revision else ""
    return InputError(
        f"`{repo_id}`{at} is not complete in the cache, and {why}",
        hint=f"on a machine with network run `hf download {repo_id}{option}` and copy its cache here (HF_HOME names "
        "the folder), or pass a local directory",
    )
