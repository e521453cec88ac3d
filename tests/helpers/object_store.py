"""An object store on localhost: the part of S3 that lpconv uses, with faults.

Objects live in memory. A fault is a function of a request that says what is done to its answer, so a test can cut, slow
down or refuse any answer; requests are kept. `https://` sources are served from the same objects, without a listing.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "bucket"
_DATE = "Fri, 01 Jan 2100 00:00:00 GMT"  # later than what is written while a test runs
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "an-id", "AWS_SECRET_ACCESS_KEY": "top-secret", "AWS_REGION": "here"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request: method, key without the bucket, query, and range of bytes, if any."""

    method: str
    key: str
    query: str
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to an answer: another status, before the request is heeded or after that, a body cut after so many
    bytes, a pause before each piece of it."""

    status: int | None = None
    status_after: int | None = None
    cut: int | None = None
    pause_s: float = 0.0


@dataclass(kw_only=True)
class Store:
    """A running store. `fault` sees every request; None is a normal answer. Without `ranges` whole objects are sent;
    `date` is Last-Modified."""

    objects: dict[str, Any]
    fault: Callable[[Request], Fault | None] = lambda _: None
    requests: list[Request] = field(default_factory=list)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    etags: bool = True
    ranges: bool = True
    date: str | None = _DATE
    endpoint: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put_folder(self, prefix: str, folder: Path) -> str:
        """Store all files of a folder; returns the URL of the prefix."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.objects[f"{prefix}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
        return f"s3://{BUCKET}/{prefix}"

    def read(self, *, suffix: str = "") -> int:
        """Number of requested bytes of objects whose keys end with `suffix`."""
        asked = (r for r in self.requests if r.method == "GET" and r.key.endswith(suffix) and r.key in self.objects)
        return sum((r.last + 1 if r.last is not None else len(self.objects[r.key])) - (r.first or 0) for r in asked)


@contextmanager
def serving(objects: Mapping[str, bytes] | None = None) -> Iterator[Store]:
    """Serve a store until the end of the block."""
    store = Store(objects=dict(objects or {}))
    server = _Server(("127.0.0.1", 0), _Handler)
    server.store = store
    store.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    store: Store

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked may have been killed."""


def _etag(data: Any) -> str:
    ends = data[:4096] + data[-4096:] + str(len(data)).encode()  # a hash of a large object takes long at every request
    return f'"{hashlib.blake2b(ends, digest_size=16).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 20
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at `Store.requests` instead."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        first, last = self._range()
        request = Request(method=self.command, key=key, query=url.query, first=first, last=last)
        store = self.server.store
        store.requests.append(request)
        fault = store.fault(request) or Fault()
        if fault.status is not None:
            self._send(fault.status, b"<Error><Code>SlowDown</Code></Error>")
            return
        with store.lock:
            status, data, headers = self._found(request, parse_qs(url.query, keep_blank_values=True), body)
        self._send(fault.status_after or status, data, headers, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _found(self, r: Request, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        objects = self.server.store.objects
        if not unquote(self.path).startswith(f"/{BUCKET}"):
            return 404, b"\n<Error><Code>NoSuchBucket</Code></Error>", {}
        if r.method == "GET" and "list-type" in query:
            return 200, _listing(objects, query), {}
        if r.method == "POST" and "delete" in query:
            keys = [n.text or "" for n in ElementTree.fromstring(body).iter() if n.tag.endswith("Key")]
            for key in keys:
                objects.pop(key, None)
            rows = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return 200, f"<DeleteResult>{rows}</DeleteResult>".encode(), {}
        if r.method in ("PUT", "POST"):
            return self._write(r, query, body)
        if r.method == "DELETE":
            if "uploadId" in query:
                self.server.store.uploads.pop(query["uploadId"][0], None)
            else:
                objects.pop(r.key, None)
            return 204, b"", {}
        if r.key not in objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        return self._object(r, objects[r.key])

    def _object(self, r: Request, data: Any) -> tuple[int, bytes, dict[str, str]]:
        store = self.server.store
        headers = {"ETag": _etag(data)} if store.etags else {}
        headers |= {"Last-Modified": store.date} if store.date is not None else {}
        if self.headers.get("If-Match") not in (None, _etag(data)):
            return 412, b"", {}
        if r.first is None or not store.ranges:
            return 200, data, headers
        if r.first >= len(data):
            return 416, b"", {}
        last = len(data) - 1 if r.last is None else min(r.last, len(data) - 1)
        return 206, data[r.first : last + 1], headers | {"Content-Range": f"bytes {r.first}-{last}/{len(data)}"}

    def _write(self, r: Request, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        store = self.server.store
        if "uploads" in query:
            upload = f"upload-{len(store.uploads) + 1}-{time.monotonic_ns()}"
            store.uploads[upload] = {}
            return 200, f"<R><UploadId>{upload}</UploadId></R>".encode(), {}
        if "partNumber" in query:
            store.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return 200, b"", {"ETag": _etag(body)}
        if self.headers.get("If-None-Match") == "*" and r.key in store.objects:
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
        if "uploadId" in query:
            parts = store.uploads.pop(query["uploadId"][0])
            body = b"".join(parts[n] for n in sorted(parts))
        store.objects[r.key] = body
        done = f"<R><ETag>{escape(_etag(body))}</ETag></R>".encode() if "uploadId" in query else b""
        return 200, done, {"ETag": _etag(body)}

    def _range(self) -> tuple[int | None, int | None]:
        asked = self.headers.get("Range", "")
        if not asked.startswith("bytes="):
            return None, None
        first, _, last = asked.removeprefix("bytes=").partition("-")
        return int(first), int(last) if last else None

    def _send(
        self, status: int, data: bytes, headers: Mapping[str, str] | None = None, fault: Fault | None = None
    ) -> None:
        fault = fault or Fault()
        try:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            if "Content-Length" not in (headers or {}):
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            sent = data[: fault.cut]
            step = 1 + len(sent) // 4 if fault.pause_s else max(len(sent), 1)
            for start in range(0, len(sent), step):
                time.sleep(fault.pause_s)
                self.wfile.write(memoryview(sent)[start : start + step])
            if len(sent) < len(data):
                self.close_connection = True
        except OSError:  # whoever asked has gone
            self.close_connection = True


def _listing(objects: Mapping[str, bytes], query: dict[str, list[str]]) -> bytes:
    prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
    keys = sorted(k for k in objects if k.startswith(prefix) and k > after)
    page, rest = keys[:50], keys[50:]
    rows = "".join(
        f"<Contents><Key>{escape(k)}</Key><LastModified>2100-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(_etag(objects[k]))}</ETag><Size>{len(objects[k])}</Size></Contents>"
        for k in page
    )
    more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
    head = f"<ListBucketResult><IsTruncated>{'true' if rest else 'false'}</IsTruncated>{more}"
    return f"{head}{rows}</ListBucketResult>".encode()
