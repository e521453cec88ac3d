"""The Hugging Face hub: cached snapshots, downloads, and errors explained to the user.

`huggingface_hub` is imported inside the functions, so that the command line starts without it.
"""

import errno
import glob
import json
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from lpconv.errors import InputError, LpconvError, ResourceError, first_line, typed_line
from lpconv.lookup import nearest
from lpconv.storage.aliases import ALIASES

_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PICKLES = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
MODULE_WEIGHTS = re.compile(r"\d+_\w+/(model\.safetensors|pytorch_model\.bin)")  # modules of sentence-transformers
_TIMEOUT_S = 20.0  # for an answer
_CONNECT_S = 2.0  # for a connection; without a network, a name server may need half a minute to fail
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Weights that lpconv does not read, and training leftovers. `.bin` and `.safetensors` are chosen by name above.
_OTHER_WEIGHTS = (
    ".safetensors", ".bin", ".h5", ".pb", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ggml", ".pt", ".pth", ".ckpt",
    ".tflite", ".ot", ".nemo", ".mlmodel", ".xml", ".npz", ".pkl", ".engine", ".params", ".data", ".parquet",
)  # fmt: skip


def cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The complete snapshot of `repo_id` in the cache, or None. Sends no request; partial snapshots do not count."""
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


def has_weights(directory: Path) -> bool:
    """Whether a directory has weights that lpconv reads: one file, or every shard of its index."""
    if any((directory / name).exists() for name in ("model.safetensors", "pytorch_model.bin")):
        return True
    return any(_shards_exist(directory / name) for name in _INDEXES if (directory / name).exists())


def wanted_files(files: Iterable[str]) -> list[str]:
    """The files of a repository that a conversion needs: one set of weights and every small side file.

    Safetensors take precedence over pickles, and only names that `transformers` loads count: repositories often hold
    the same weights twice (``consolidated.safetensors``, ``original/*.pth``) or in other precisions.
    """
    names = sorted(files)
    is_chosen = _SAFETENSORS if any(_SAFETENSORS.fullmatch(n) for n in names) else _PICKLES
    unwanted_index = _INDEXES[1] if is_chosen is _SAFETENSORS else _INDEXES[0]
    side = [n for n in names if Path(n).suffix.lower() not in _OTHER_WEIGHTS and n != unwanted_index]
    # Residuals of lpconv's collage method, and modules that sentence-transformers runs after the model.
    others = [n for n in names if re.fullmatch(r"collage/residual.*\.safetensors", n)]
    others += [n for n in names if MODULE_WEIGHTS.fullmatch(n) and "modules.json" in names]
    return [n for n in names if is_chosen.fullmatch(n)] + others + side


def download(repo_id: str, revision: str | None) -> Path:
    """Download a model into the cache and return its snapshot; with a progress bar if stderr is a terminal.

    Raises InputError if the hub cannot be reached or refuses, and ResourceError if the disk is full.
    """
    from huggingface_hub import snapshot_download

    names = wanted_files(f.rfilename for f in _model_info(repo_id, revision).siblings or ())
    if not any(_SAFETENSORS.fullmatch(name) or _PICKLES.fullmatch(name) for name in names):
        raise InputError(
            f"`{repo_id}` has no weights that lpconv reads",
            hint="choose a repository with model*.safetensors or pytorch_model*.bin",
        )
    with _explain_errors(repo_id, revision, names), _bars_on_terminals_only():
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=[glob.escape(n) for n in names]))


def commit_of(repo_id: str, revision: str | None) -> str:
    """The current commit of a branch, a tag or None (the default branch). Raises the errors of `download`."""
    return str(_model_info(repo_id, revision).sha)


def commit_files(repo_id: str, commit: str) -> dict[str, int]:
    """The files of a commit with their sizes. Raises the errors of `download`."""
    siblings = _model_info(repo_id, commit, with_sizes=True).siblings or ()
    return {f.rfilename: f.size or 0 for f in siblings}


def files_url(repo_id: str, commit: str) -> tuple[str, dict[str, str]]:
    """The URL of the folder of a commit's files, and the headers for requests."""
    from huggingface_hub import constants, get_token

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return f"{constants.ENDPOINT}/{repo_id}/resolve/{commit}", headers


def _model_info(repo_id: str, revision: str | None, *, with_sizes: bool = False) -> Any:
    """The hub's information on a repository. Errors become lpconv errors."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise _not_cached_error(repo_id, revision, "HF_HUB_OFFLINE is set")
    if (why := why_unreachable(constants.ENDPOINT)) is not None:
        raise _not_cached_error(repo_id, revision, why)
    with _explain_errors(repo_id, revision):
        # Not `list_repo_files`, which retries for half a minute without a network.
        return HfApi().model_info(repo_id, revision=revision, timeout=_TIMEOUT_S, files_metadata=with_sizes)


def why_unreachable(endpoint: str) -> str | None:
    """Why the server of a URL, or its proxy, accepts no connection within two seconds; None if it does."""
    url = urlsplit(endpoint)
    proxies = {} if urllib.request.proxy_bypass(url.hostname or "") else urllib.request.getproxies()
    if proxy := proxies.get(url.scheme) or proxies.get("all"):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            outcome.append(None)
        except (OSError, UnicodeError) as e:
            outcome.append(f"{host} cannot be reached ({e})")

    # A thread, because a name lookup has no time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_S + 0.2)
    return outcome[0] if outcome else f"{host} cannot be reached (no answer within {_CONNECT_S:g} s)"


def _shards_exist(index: Path) -> bool:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        return all((index.parent / shard).exists() for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True  # the index is broken; reading the checkpoint will report how


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Disable the hub client's progress bars inside the context unless stderr is a terminal."""
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
def _explain_errors(repo_id: str, revision: str | None, files: Sequence[str] = ()) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # also from the client's HTTP and transfer libraries, which vary by version
        raise _explain(repo_id, revision, e, files) from e


def _explain(repo_id: str, revision: str | None, error: Exception, files: Sequence[str]) -> LpconvError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo_id}"
    name = _file_of(error, repo_id, revision, files)
    file = f"`{name}` of `{repo_id}`" if name else f"`{repo_id}`"
    if isinstance(error, errors.GatedRepoError):
        return InputError(
            f"{file} is gated and your account has no access (401/403)",
            hint=f"ask for access at {page}, then run `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"`{repo_id}` has no revision `{revision}` (404)", hint=f"{page}/commits lists its revisions")
    if isinstance(error, errors.RepositoryNotFoundError) and not files:
        near = nearest(repo_id, {a.repo_id for a in ALIASES.values()})
        meant = f"did you mean `{near}`? " if near else ""
        return InputError(
            f"there is no directory or hub model `{repo_id}`, or it is private (401/404)",
            hint=f"{meant}check the spelling; for a private model run `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, errors.HFValidationError):
        return InputError(
            f"`{repo_id}` is not a valid hub id: {first_line(error)}",
            hint="write it as OWNER/NAME, or pass a directory",
        )
    if isinstance(error, errors.HfHubHTTPError):
        return InputError(
            f"the hub refused to send {file}: {first_line(error)}", hint="try again later, or pass a directory"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ResourceError(
            f"the disk is full: {file} could not be downloaded", hint="free some space, or set HF_HOME to another disk"
        )
    if files:
        return InputError(
            f"downloading {file} failed: {typed_line(error)}",
            hint="run again to download the missing files, or pass a local directory",
        )
    return _not_cached_error(repo_id, revision, f"the hub cannot be reached ({typed_line(error)})")


def _file_of(error: BaseException, repo_id: str, revision: str | None, files: Sequence[str]) -> str | None:
    """The file that an error is about, by the URL in its message; otherwise the first that has not arrived."""
    from huggingface_hub import try_to_load_from_cache

    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(f"{cause} {getattr(cause, '_request', None)} ")
        cause = cause.__cause__ or cause.__context__
    named = [n for n in files if any(re.search(rf"/{re.escape(quote(n))}[\s')\].>]", text) for text in messages)]
    late = (n for n in files if not isinstance(try_to_load_from_cache(repo_id, n, revision=revision), str))
    return max(named, key=len) if named else next(late, None)


def _not_cached_error(repo_id: str, revision: str | None, why: str) -> InputError:
    at = f" at revision `{revision}`" if revision else ""
    option = f" --revision {revision}" if revision else ""
    return InputError(
        f"`{repo_id}`{at} is incomplete in the cache, and {why}",
        hint=f"on a machine with network run `hf download {repo_id}{option}` and copy its cache here (HF_HOME is "
        "the folder), or pass a local directory",
    )
