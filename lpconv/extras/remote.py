"""Object stores and servers: what lies there, and reads and writes of it, through the package obstore.

obstore signs, connects, and repeats what a server refused or cut short. Credentials are read by obstore, from the
environment variables of each provider; none is ever part of a URL here, or of a message.
"""

import datetime
import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lpconv.errors import InputError, LpconvError, ResourceError, UnreadError
from lpconv.storage.hub import files_url, why_unreachable
from lpconv.storage.urls import hub_names

_PART, _AT_A_TIME, _MOST_PARTS = 8 * 2**20, 4, 9_000  # bytes of a part of an upload; S3 takes 10,000 of them
_STALLED, _WHOLE = datetime.timedelta(seconds=30), datetime.timedelta(minutes=5)  # for a read, for an answer
# Each pause is drawn between the first and three times the one before: some ten seconds in all, in which a server that
# throttles becomes free again.
_PAUSES = {"init_backoff": datetime.timedelta(seconds=0.1), "max_backoff": datetime.timedelta(seconds=15), "base": 3}
_RETRIES = {"max_retries": 10, "retry_timeout": datetime.timedelta(minutes=2), "backoff": _PAUSES}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS to a file of credentials",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "set HF_TOKEN or run `hf auth login`",
}


@dataclass(frozen=True, kw_only=True)
class RemoteObject:
    """An object by its name below the checkpoint's URL. Not every server tells tag and time."""

    name: str
    size_bytes: int
    e_tag: str | None = None
    modified_ns: int = 0


@functools.cache
def store_at(url: str) -> Any:
    """The obstore store of a URL, whose paths are names below it."""
    import obstore.store as stores

    parts = urlsplit(url)
    endpoints = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"))
    is_plain = parts.scheme == "http" or (parts.scheme == "s3" and any(e.startswith("http:") for e in endpoints))
    client: dict[str, Any] = {"allow_http": is_plain, "read_timeout": _STALLED, "timeout": _WHOLE}
    if parts.scheme in ("http", "https") and (why := why_unreachable(url)):  # obstore tries for ten seconds
        raise InputError(f"cannot get `{url}`: {why}", hint="check the URL and the network")
    with _remote_errors(url):
        if parts.scheme == "hf":
            address, headers = files_url(*hub_names(url))
            client |= {"default_headers": headers, "allow_http": address.startswith("http:")}
            return stores.HTTPStore.from_url(address, client_options=client, retry_config=_RETRIES)
        if parts.scheme in ("http", "https"):
            return stores.HTTPStore.from_url(url, client_options=client, retry_config=_RETRIES)
        return stores.from_url(url, client_options=client, retry_config=_RETRIES)


def listing(url: str) -> list[RemoteObject]:
    """All objects below a URL of a store that lists, in order of their names."""
    with _remote_errors(url):
        found = [_object(meta, meta["path"]) for batch in store_at(url).list() for meta in batch]
    return sorted(found, key=lambda o: o.name)


def head(url: str, name: str) -> RemoteObject | None:
    """What a server says of one object, None where there is none."""
    with _remote_errors(url, name):
        try:
            return _object(store_at(url).head(name), name)
        except FileNotFoundError:
            return None


def _object(meta: Any, name: str) -> RemoteObject:
    modified = int(meta["last_modified"].timestamp()) * 10**9
    return RemoteObject(name=name, size_bytes=meta["size"], e_tag=meta["e_tag"], modified_ns=modified)


def fetch(url: str, name: str, e_tag: str | None = None, *, span: tuple[int, int] | None = None) -> Any:
    """The bytes of an object, whole or from `span[0]` to `span[1]`, as a buffer.

    Raises InputError where that fails after repeating it, and where the object is not the version of `e_tag`.
    """
    options: dict[str, Any] = {} if e_tag is None else {"if_match": e_tag}
    if span is not None:
        options["range"] = span
    with _remote_errors(url, name):
        answer = store_at(url).get(name, options=options)
        data = answer.bytes()
    if e_tag not in (None, answer.meta["e_tag"]):  # not every server heeds the condition
        raise _changed(f"{url}/{name}")
    if span is not None and len(data) != span[1] - span[0]:
        raise InputError(f"`{url}/{name}` is shorter than it was", hint="run again when nothing writes to it")
    return data


def put(url: str, name: str, data: bytes, *, create: bool = False) -> RemoteObject | None:
    """Write a small object; None where it is to be created and there is one. Raises ResourceError."""
    import obstore.exceptions as raised

    with _remote_errors(url, name, writing=True):
        try:
            store_at(url).put(name, data, mode="create" if create else "overwrite")
        except raised.AlreadyExistsError:
            return None
    return head(url, name)


def delete(url: str, names: Sequence[str]) -> None:
    """Delete objects in this order, those that are there. Raises ResourceError."""
    for name in names:  # at once they would go in any order
        # Another writer may have deleted it, of which S3 says nothing, and others do.
        with _remote_errors(url, name, writing=True), suppress(FileNotFoundError):
            store_at(url).delete(name)


def upload_bytes(size_bytes: int) -> int:
    """Memory that the upload of an object takes: the parts on their way, and the one that is filled."""
    return (_AT_A_TIME + 1) * _part_bytes(size_bytes)


def _part_bytes(size_bytes: int) -> int:
    return max(_PART, size_bytes // _MOST_PARTS)


class Upload:
    """A large object that is sent in parts as it is written, and is there when it is closed."""

    def __init__(self, url: str, name: str, size_bytes: int) -> None:
        import obstore

        part = _part_bytes(size_bytes)
        self._errors = functools.partial(_remote_errors, url, name, writing=True)
        with self._errors():
            self._writer = obstore.open_writer(store_at(url), name, buffer_size=part, max_concurrency=_AT_A_TIME)

    def write(self, data: bytes | memoryview) -> None:
        """Send the next bytes. Raises ResourceError."""
        with self._errors():
            self._writer.write(bytes(data))  # a copy: obstore keeps what it is given, and callers use buffers again

    def close(self) -> None:
        """Make it an object. Raises ResourceError."""
        with self._errors():
            self._writer.close()


@contextmanager
def _remote_errors(url: str, name: str = "", *, writing: bool = False) -> Iterator[None]:
    """Turn what obstore raises inside into an error of ours, without anything that may be a secret."""
    import obstore.exceptions as raised

    where = f"{url}/{name}" if name else url
    try:
        yield
    except raised.PreconditionError as e:
        raise _changed(where) from e
    except (FileNotFoundError, raised.NotFoundError) as e:
        raise InputError(f"there is no `{where}`", hint="check the URL") from e
    except (raised.BaseError, OSError, ValueError) as e:
        raise _failed(e, where, writing) from e


def _changed(where: str) -> InputError:
    return InputError(
        f"`{where}` changed while it was read", hint="wait until nothing writes to it, and run again with --force"
    )


def _failed(error: Exception, where: str, writing: bool) -> LpconvError:
    first = re.sub(r"\?\S+", "", str(error).partition("\n")[0])
    if re.search(r"status code: 40[13]\b", first):  # beside it stands how many milliseconds that took
        hint = _CREDENTIALS.get(urlsplit(where).scheme, "is it public?")
        return UnreadError(f"there is no access to `{where}`", hint=hint)
    kind, done = (ResourceError, "written") if writing else (UnreadError, "read")
    return kind(
        f"`{where}` cannot be {done}: {first:.240}",
        hint=_CREDENTIALS.get(urlsplit(where).scheme, "check the URL and the network") + "; then run again",
    )
