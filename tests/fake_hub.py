"""A Hub on a local socket: the few answers of huggingface.co that a download needs, and its misbehaviour."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: From this size on, files are kept in LFS, whose names are sha256.
LFS = 10_000


@dataclass
class Repo:
    """revisions: name → commit. cut: bytes of a large file after which the connection breaks, once. token: who
    may read it. spoil: a large file's last byte is another than was published. short: bytes that are missing at
    its end, however often it is asked for."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    token: str | None = None
    cut: int = 0
    spoil: bool = False
    short: int = 0
    status: int = 0


class FakeHub(ThreadingHTTPServer):
    """`repos` may be changed while it runs; `log` has (method, path, range, token) of every request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.log: list[tuple[str, str, str | None, str | None]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [path.split("/")[-1] for method, path, _, _ in self.log if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.server.log.append((self.command, path, self.headers.get("Range"), token))
        parts = path.removeprefix("api/models/").split("/")
        repo = self.server.repos.get("/".join(parts[:2]))
        if repo is None or repo.token not in (None, token):
            return self._error(401 if token is None else 404, "RepoNotFound")
        if repo.gated:
            return self._error(403, "GatedRepo")
        if repo.status:
            return self._error(repo.status, "")
        commit = repo.revisions.get(parts[3], parts[3] if parts[3] in repo.revisions.values() else None)
        if commit is None:
            return self._error(404, "RevisionNotFound")
        if path.startswith("api/"):
            info = {"id": "/".join(parts[:2]), "sha": commit, "siblings": [_entry(*f) for f in repo.files.items()]}
            return self._send(json.dumps(info).encode(), {"Content-Type": "application/json"})
        name = "/".join(parts[4:])
        if name not in repo.files:
            return self._error(404, "EntryNotFound")
        self._send_file(repo, repo.files[name], commit)

    def _send_file(self, repo: Repo, data: bytes, commit: str) -> None:
        large = len(data) >= LFS
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git(data)}"'}
        if large:
            digest = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            if repo.spoil:
                data = data[:-1] + bytes([data[-1] ^ 1])
            if self.command == "GET" and repo.short:
                data = data[: -repo.short]
        status, start = 200, 0
        if asked := self.headers.get("Range"):
            status, start = 206, int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        stop = len(data)
        if large and self.command == "GET" and repo.cut:
            stop, repo.cut = repo.cut, 0
        self._send(data[start:], headers, status, data[start:stop])

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200, sent: bytes | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        sent = body if sent is None else sent
        if self.command == "GET":
            self.wfile.write(sent)
        if len(sent) != len(body):
            self.close_connection = True

    def _error(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "Content-Type": "application/json"}, status)


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict:
    entry = {"rfilename": name, "size": len(data), "blobId": _git(data)}
    if len(data) >= LFS:
        entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
    return entry
