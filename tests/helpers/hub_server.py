"""A model hub on localhost with the API that `huggingface_hub` uses, and with faults.

One repository with its files; every file may have one fault. Requests are counted and the server stops by itself, after
so many of them or so long, so that a client that retries for ever ends a test and does not hang it.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

__all__ = ["COMMIT", "FAULTS", "Hub", "serving"]

COMMIT = "c" * 40
_MAX_REQUESTS, _LIFETIME_S = 300, 60.0
FAULTS = (
    "ok", "gated", "private", "missing", "cut", "cut-once", "corrupt-header", "corrupt-body", "longer", "500", "slow",
    "stall", "redirect", "redirect-loop", "no-hash", "no-etag",
)  # fmt: skip


@dataclass(kw_only=True)
class Hub:
    """A running hub. `faults` maps names of files, or ``api`` for the listing, to one of FAULTS."""

    repo_id: str
    files: Mapping[str, bytes]
    faults: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    def digest(self, name: str) -> str:
        """The hub's hash of a file: SHA-256 for weights, Git's hash for others."""
        data = self.files[name]
        if _is_large(name):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def served(self, name: str) -> bytes:
        """What the hub sends for a file, by its fault: of the promised size, unless it is ``longer``."""
        data, fault = self.files[name], self.faults.get(name)
        if fault == "corrupt-header":
            return b"\xff" * 12 + data[12:]
        if fault == "corrupt-body":
            return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]
        return data + b"more" if fault == "longer" else data

    def listing(self) -> dict[str, object]:
        """The answer to `model_info`."""
        return {
            "id": self.repo_id,
            "sha": COMMIT,
            "siblings": [{"rfilename": n, "size": len(data)} for n, data in self.files.items()],
        }

    def tree(self) -> list[dict[str, object]]:
        """The answer to `list_repo_tree`."""
        rows: list[dict[str, object]] = []
        for name, data in self.files.items():
            row: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": self.digest(name)[:40]}
            if _is_large(name):
                row["lfs"] = {"oid": self.digest(name), "size": len(data), "pointerSize": 130}
            rows.append(row)
        return rows


@contextmanager
def serving(repo_id: str, files: Mapping[str, bytes], **faults: str) -> Iterator[Hub]:
    """Serve one repository until the end of the block."""
    hub = Hub(repo_id=repo_id, files=files, faults=dict(faults))
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = hub
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    timer = threading.Timer(_LIFETIME_S, server.shutdown)
    timer.daemon = True
    thread.start()
    timer.start()
    try:
        yield hub
    finally:
        timer.cancel()
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at `Hub.requests` instead."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        if len(hub.requests) > _MAX_REQUESTS:
            self.close_connection = True
            return
        api = f"/api/models/{hub.repo_id}"
        if path == api or path.startswith(f"{api}/revision/"):
            self._json("api", hub.listing())
        elif path.startswith(f"{api}/tree/"):
            self._json("api", hub.tree())
        elif path.startswith("/elsewhere/"):
            self._send_file(path.removeprefix("/elsewhere/"))
        elif path.startswith(f"/{hub.repo_id}/resolve/"):
            name = path.removeprefix(f"/{hub.repo_id}/resolve/").partition("/")[2]
            self._file(name)
        else:
            self._status(404, {"X-Error-Code": "RepoNotFound"})

    def _refuse(self, name: str) -> bool:
        """Answer as the fault of a file (or of the listing) says, if it is one that gives no file."""
        refusals = {
            "gated": (403, {"X-Error-Code": "GatedRepo"}), "private": (401, {"X-Error-Code": "RepoNotFound"}),
            "missing": (404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}), "500": (500, {}),
        }  # fmt: skip
        found = refusals.get(self.server.hub.faults.get(name, ""))
        if found is None:
            return False
        self._status(*found)
        return True

    def _file(self, name: str) -> None:
        hub, fault = self.server.hub, self.server.hub.faults.get(name)
        if self._refuse(name):
            return
        if name not in hub.files:
            self._status(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif fault == "redirect-loop":
            self._status(307, {"Location": self.path})
        elif fault == "redirect":
            large = {"X-Linked-Etag": f'"{hub.digest(name)}"', "X-Linked-Size": str(len(hub.files[name]))}
            self._status(302, {"Location": f"/elsewhere/{name}", "X-Repo-Commit": COMMIT, **large})
        else:
            self._send_file(name)

    def _send_file(self, name: str) -> None:
        hub, fault = self.server.hub, self.server.hub.faults.get(name)
        whole = data = hub.served(name)
        start, asked = 0, self.headers.get("Range", "")
        if asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, data = int(first), data[: int(last) + 1 if last else None]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("X-Repo-Commit", COMMIT)
        etag = {"no-hash": '"an-opaque-word"', "no-etag": None}.get(fault or "", f'"{hub.digest(name)}"')
        if etag is not None:
            self.send_header("ETag", etag)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(whole)}")
        self.end_headers()
        if self.command == "GET":
            self._body(data, start, fault)

    def _body(self, data: bytes, start: int, fault: str | None) -> None:
        half = len(data) // 2
        if fault == "cut-once":
            self.server.hub.faults[self.path.rpartition("/")[2]] = "ok"
        if fault in ("cut", "cut-once"):
            self.wfile.write(data[start:half])
            self.close_connection = True
        elif fault == "stall":
            self.wfile.write(data[start:half])
            time.sleep(5)
            self.close_connection = True
        elif fault == "slow":
            for n in range(start, len(data), 1 + len(data) // 10):
                self.wfile.write(data[n : n + 1 + len(data) // 10])
                time.sleep(0.1)
        else:
            self.wfile.write(data[start:])

    def _json(self, name: str, document: object) -> None:
        if self._refuse(name):
            return
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _status(self, code: int, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))
