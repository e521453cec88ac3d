"""Objects in stores and on servers, by URL: listing, reading whole or by ranges, and writing, through obstore.

obstore signs and connects, and retries failed requests. It reads credentials from the environment variables of each
provider; URLs and messages never contain any.

A conversion reads blocks of half a megabyte from front to back. So `RemoteFile` fetches whole pieces, some ahead of the
reader, and caches them while the reader is near.
"""

import datetime
import functools
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from lpconv.errors import (
    InputError,
    LpconvError,
    ResourceError,
    UnreadError,
    UnsupportedError,
    UsageError,
    check_installed,
)
from lpconv.storage.hub import files_url, why_unreachable

UNFINISHED = "lpconv-unfinished/"  # folder of an unfinished run below its output's URL; deleted once it is published
_SCHEMES = ("s3", "gs", "az", "hf", "https", "http")
_PART, _AT_A_TIME, _MOST_PARTS = 8 * 2**20, 4, 9_000  # for uploads; S3 takes up to 10,000 parts
_STALLED, _WHOLE = datetime.timedelta(seconds=30), datetime.timedelta(minutes=5)  # per read, per answer
# Each pause is drawn between the first pause and three times the previous one: about ten seconds in total, enough for a
# throttling server to recover.
_PAUSES = {"init_backoff": datetime.timedelta(seconds=0.1), "max_backoff": datetime.timedelta(seconds=15), "base": 3}
_RETRIES = {"max_retries": 10, "retry_timeout": datetime.timedelta(minutes=2), "backoff": _PAUSES}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS to a credentials file",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "set HF_TOKEN or run `hf auth login`",
}
DOWNLOAD = "download the files and pass their folder"
_PIECE = 4 * 2**20  # bytes per request
_HELD, _AHEAD = 24, 8  # pieces in the cache, and pieces fetched ahead
# Cached pieces, and answers in flight, which obstore holds first in chunks and then in one piece.
WINDOW_BYTES = (_HELD + 2 * _AHEAD) * _PIECE
_LITTLE, _FEW = 2**18, 2  # a few small reads, such as a header and its length, do not fetch a piece


def is_url(name: str) -> bool:
    """Whether a name is a URL."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def check_url(url: str) -> str:
    """Check a checkpoint's URL and return it as it is recorded: without empty parts of its path.

    Raises UsageError for a URL with credentials, a query or a fragment, and UnsupportedError for an unsupported scheme
    or if obstore is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise UnsupportedError(
            f"lpconv cannot read `{parts.scheme}://` URLs",
            hint="it reads " + ", ".join(f"{s}://" for s in _SCHEMES[:-1]),
        )
    if (parts.username and parts.scheme != "hf") or parts.password or parts.query or parts.fragment:
        raise UsageError(
            f"a `{parts.scheme}://` URL must not contain credentials, a query or a fragment",
            hint="pass credentials in the provider's environment variables",
        )
    check_installed(f"`{parts.scheme}://`", "obstore", extra="remote")
    key = "/".join(filter(None, [parts.netloc, *parts.path.split("/")]))
    return url.rstrip("/") if parts.scheme.startswith("http") else f"{parts.scheme}://{key}"


def hub_names(url: str) -> tuple[str, str]:
    """The repository and the revision in an ``hf://`` URL; the revision is empty if there is none."""
    repo_id, _, revision = url.removeprefix("hf://").partition("@")
    return repo_id, revision


@dataclass(frozen=True, kw_only=True)
class RemoteObject:
    """An object, by its name relative to the checkpoint's URL. The tag is the time if a server gives no ETag."""

    name: str
    size_bytes: int
    e_tag: str | None = None
    modified_ns: int = 0


@functools.cache
def store_at(url: str) -> Any:
    """The obstore store for a URL. Paths in it are relative to that URL."""
    import obstore.store as stores

    parts = urlsplit(url)
    endpoints = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"))
    is_plain = parts.scheme == "http" or (parts.scheme == "s3" and any(e.startswith("http:") for e in endpoints))
    client: dict[str, Any] = {"allow_http": is_plain, "read_timeout": _STALLED, "timeout": _WHOLE}
    if parts.scheme in ("http", "https") and (why := why_unreachable(url)):  # obstore would retry for ten seconds
        raise InputError(f"cannot read `{url}`: {why}", hint="check the URL and the network")
    with remote_errors(url):
        if parts.scheme == "hf":
            url, headers = files_url(*hub_names(url))
            client |= {"default_headers": headers, "allow_http": url.startswith("http:")}
        if parts.scheme in ("hf", "http", "https"):
            return stores.HTTPStore.from_url(url, client_options=client, retry_config=_RETRIES)
        kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[parts.scheme]
        prefix = parts.path.strip("/") or None  # as written: `from_url` would decode percent signs
        return kind(parts.netloc, prefix=prefix, client_options=client, retry_config=_RETRIES)


def listing(url: str) -> list[RemoteObject]:
    """All objects below a URL except empty ones that stand for folders, sorted by name. The store must be listable."""
    with remote_errors(url):
        objects = [_object(meta, meta["path"]) for batch in store_at(url).list() for meta in batch]
    folders = {"", *(str(folder) for o in objects for folder in PurePosixPath(o.name).parents)}
    return sorted((o for o in objects if o.size_bytes or o.name not in folders), key=lambda o: o.name)


def head(url: str, name: str) -> RemoteObject | None:
    """Metadata of one object, or None if it does not exist."""
    with remote_errors(url, name), suppress(FileNotFoundError):
        try:
            return _object(store_at(url).head(name), name)
        except FileNotFoundError as e:
            if "status code: 405" in str(e):  # some servers answer GET only; the body is not read
                return _object(store_at(url).get(name).meta, name)
    return None


def _object(meta: Any, name: str) -> RemoteObject:
    modified = int(meta["last_modified"].timestamp()) * 10**9
    tag = meta["e_tag"] or (f"modified {modified}" if modified else None)
    return RemoteObject(name=name, size_bytes=meta["size"], e_tag=tag, modified_ns=modified)


def fetch(url: str, name: str, e_tag: str | None = None, *, span: tuple[int, int] | None = None) -> Any:
    """The bytes of an object as a buffer: all, or those from `span[0]` to `span[1]`.

    Raises InputError if reading fails after retries, or if the object no longer has the version `e_tag`.
    """
    options: dict[str, Any] = {"if_match": e_tag} if e_tag is not None and e_tag.startswith('"') else {}
    if span is not None:
        options["range"] = span
    with remote_errors(url, name):
        answer = store_at(url).get(name, options=options)
        data = answer.bytes()
    if e_tag not in (None, _object(answer.meta, name).e_tag):  # some servers ignore the condition
        raise changed_error(f"{url}/{name}")
    if span is not None and len(data) != span[1] - span[0]:
        raise shorter_error(f"{url}/{name}")
    return data


def put(url: str, name: str, data: bytes, *, create: bool = False) -> RemoteObject | None:
    """Write a small object. With `create`, returns None if it already exists. Raises ResourceError."""
    import obstore.exceptions as raised

    with remote_errors(url, name, writing=True):
        try:
            store_at(url).put(name, data, mode="create" if create else "overwrite")
        except raised.AlreadyExistsError:
            return None
    return head(url, name)


def delete(url: str, names: Sequence[str]) -> None:
    """Delete objects in this order, ignoring missing ones. Raises ResourceError."""
    for name in names:  # one by one, to keep the order
        # Another writer may have deleted it. S3 ignores that; other stores report an error.
        with remote_errors(url, name, writing=True), suppress(FileNotFoundError):
            store_at(url).delete(name)


def upload_bytes(size_bytes: int) -> int:
    """Memory that uploading an object takes: the parts in flight and the one being filled."""
    return (_AT_A_TIME + 1) * _part_bytes(size_bytes)


def _part_bytes(size_bytes: int) -> int:
    return max(_PART, size_bytes // _MOST_PARTS)


def open_writer(url: str, name: str, size_bytes: int) -> Any:
    """A writer that sends a large object in parts as it is written. The object exists once the writer is closed."""
    import obstore

    part = _part_bytes(size_bytes)
    return obstore.open_writer(store_at(url), name, buffer_size=part, max_concurrency=_AT_A_TIME)


@contextmanager
def remote_errors(url: str, name: str = "", *, writing: bool = False) -> Iterator[None]:
    """Convert obstore's exceptions to lpconv errors, without anything that may be a secret."""
    import obstore.exceptions as raised

    where = f"{url}/{name}" if name else url
    try:
        yield
    except raised.PreconditionError as e:
        raise changed_error(where) from e
    except (raised.BaseError, OSError, ValueError) as e:
        raise _transfer_error(e, where, writing) from e


def changed_error(where: Path | str, **details: str) -> InputError:
    """Error for a file or object that changed between two reads."""
    hint = "wait until nothing writes to it, and run again with --force"
    return InputError(f"`{where}` changed while it was read", hint=hint, details=details)


def shorter_error(where: str) -> InputError:
    """Error for a file or object that has lost its end since it was opened."""
    return InputError(
        f"`{where}` became shorter while it was read", hint="wait until nothing writes to it, and run again"
    )


def _transfer_error(error: Exception, where: str, writing: bool) -> LpconvError:
    if re.search("<Code>(NoSuchBucket|ContainerNotFound)</Code>", str(error)):
        text = f"the bucket `{'/'.join(where.split('/')[:3])}` does not exist"
        return InputError(text, hint="check its name, the region and the endpoint")
    if type(error).__name__ == "NotSupportedError":
        return UnsupportedError(f"the server of `{where}` does not send byte ranges", hint=DOWNLOAD)
    if type(error).__name__ in ("FileNotFoundError", "NotFoundError"):
        return InputError(f"`{where}` does not exist", hint="check the URL")
    first = re.sub(r"\?\S+", "", str(error).partition("\n")[0])
    if re.search(r"status code: 40[13]\b", first):  # anchored, because the message also contains a time in ms
        hint = _CREDENTIALS.get(urlsplit(where).scheme, "check that it is public")
        return UnreadError(f"access to `{where}` was denied", hint=hint)
    kind, done = (ResourceError, "written") if writing else (UnreadError, "read")
    return kind(
        f"`{where}` cannot be {done}: {first:.240}",
        hint=_CREDENTIALS.get(urlsplit(where).scheme, "check the URL and the network") + "; then run again",
    )


class RemoteFile:
    """An object that any thread can read by ranges. `store` is a URL, `name` is relative to it."""

    def __init__(self, *, store: str, name: str, e_tag: str | None, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fetch = functools.partial(fetch, store, name, e_tag)
        self.num_pieces = -(-size_bytes // _PIECE)
        self._little = Counter[int]()

    def read_into(self, start: int, out: memoryview) -> None:
        if not len(out):
            return
        stop = start + len(out)
        if stop > self.size_bytes:
            raise InputError("a remote file is shorter than its header says", hint="upload the checkpoint again")
        first, last = start // _PIECE, (stop - 1) // _PIECE
        if len(out) <= _LITTLE and self._little[first] < _FEW and not _WINDOW.holds(self, first):
            self._little[first] += 1
            out[:] = memoryview(self._fetch(span=(start, stop)))
            return
        for index in range(first, last + 1):
            piece = memoryview(_WINDOW.piece(self, index).result())
            begin = index * _PIECE
            low, high = max(start, begin), min(stop, begin + len(piece))
            out[low - start : high - start] = piece[low - begin : high - begin]

    def fetch_piece(self, index: int) -> Any:
        """Fetch the bytes of a piece."""
        return self._fetch(span=(index * _PIECE, min((index + 1) * _PIECE, self.size_bytes)))

    def close(self) -> None:
        _WINDOW.forget(self)


class _Window:
    """Cache of recently read pieces of all files, and of pieces in flight."""

    def __init__(self) -> None:
        self._lock, self._pool = Lock(), ThreadPoolExecutor(_AHEAD, thread_name_prefix="lpconv-fetch")
        self._held: OrderedDict[tuple[RemoteFile, int], Future[Any]] = OrderedDict()

    def holds(self, file: RemoteFile, index: int) -> bool:
        """Whether a piece is cached or in flight."""
        with self._lock:
            return (file, index) in self._held

    def piece(self, file: RemoteFile, index: int) -> Future[Any]:
        """Future of a piece. After the piece before it (a sequential read), the following ones are prefetched."""
        with self._lock:
            is_going_on = (file, index - 1) in self._held
            last = min(index + (_AHEAD if is_going_on else 1), file.num_pieces)
            for n in range(index, last):
                held = self._held.get((file, n))
                if held is None or (held.done() and held.exception() is not None):
                    self._held[file, n] = self._pool.submit(file.fetch_piece, n)
                self._held.move_to_end((file, n))
            self._held.move_to_end((file, index))
            future = self._held[file, index]
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
            return future

    def forget(self, file: RemoteFile) -> None:
        """Drop the pieces of a file."""
        with self._lock:
            for key in [k for k in self._held if k[0] is file]:
                self._held.pop(key).cancel()


_WINDOW = _Window()
