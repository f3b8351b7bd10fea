"""Around every request: its id, the key it must carry, its line in the access log, and faults of our own.

Knows: headers and the log. Does not know: routes and bodies.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import queue
import re
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspark.errors import UserError
from serve.errors import ClientGone, HttpError
from serve.stream import send_error

#: Paths that need no key: probes and scrapers.
OPEN_PATHS = frozenset({"/health", "/metrics"})
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_LINES = 10_000
#: Seconds of one turn of the event loop that go to requests that begin.
_TURN = 0.02


class AccessLog:
    """One JSON line a request, written by a thread of its own: a reader that stalls must not stall the server."""

    def __init__(self, where: str):
        self.lost = 0
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_LINES)
        self._file: TextIO | None = None
        if where == "none":
            return
        try:
            self._file = sys.stdout if where == "-" else open(where, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as e:
            raise UserError(f"the access log {where} cannot be written ({e.strerror}); choose another") from None
        self._thread = threading.Thread(target=self._write, name="access log", daemon=True)
        self._thread.start()

    def write(self, record: dict) -> None:
        """Queues a line; when too many wait, it is lost and counted."""
        if self._file is None:
            return
        try:
            self._lines.put_nowait(json.dumps(record, ensure_ascii=False))
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Writes what waits, for a moment."""
        if self._file is not None:
            self._lines.put(None)
            self._thread.join(2)
            if self._file is not sys.stdout:
                self._file.close()

    def _write(self) -> None:
        assert self._file is not None
        try:
            while (line := self._lines.get()) is not None:
                self._file.write(line + "\n")
                if self._lines.empty():
                    self._file.flush()
            self._file.flush()
        except (OSError, ValueError):
            return  # nobody reads any more; lines are lost and counted


class _Turns:
    """Splits the beginnings of many requests at a time over several turns of the event loop."""

    def __init__(self) -> None:
        self._since: float | None = None

    async def take(self) -> None:
        """Returns at once, unless requests that began in this turn have taken their share of it."""
        while self._since is not None and time.perf_counter() - self._since > _TURN:
            await asyncio.sleep(0)
        if self._since is None:
            self._since = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._since = None


class Gate:
    """The outermost ASGI application. answered: called with path and status of every request."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], log: AccessLog, answered: Callable[[str, int], None]):
        self._app, self._log, self._answered = app, log, answered
        self._keys = [key.encode() for key in keys]
        self._turns = _Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        note: dict = {}
        scope["jspark"] = note
        started = time.perf_counter()

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._turns.take()
            self._check_key(scope["path"], headers.get("authorization", ""))
            await self._app(scope, receive, reply)
        except ClientGone:
            note["status"] = 499
        except HttpError as e:
            note["error"] = str(e)
            await send_error(reply, e)
        except Exception:
            traceback.print_exc()
            note["error"] = "a fault of the server"
            if "status" not in note:
                await send_error(
                    reply, HttpError(500, "the server has a fault and wrote it to its log; try again")
                )
        finally:
            self._end(scope, request_id, note, time.perf_counter() - started)

    def _check_key(self, path: str, header: str) -> None:
        if not self._keys or path in OPEN_PATHS:
            return
        kind, _, key = header.partition(" ")
        good = [hmac.compare_digest(key.strip().encode("latin-1"), own) for own in self._keys]
        if kind.lower() != "bearer" or not any(good):
            raise HttpError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _end(self, scope: Scope, request_id: str, note: dict, seconds: float) -> None:
        status = note.pop("status", 499)
        route = scope.get("route")
        self._answered(getattr(route, "path", None) or "other", status)
        client = scope.get("client")
        self._log.write(
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z",
                "id": request_id,
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                **note,
            }
        )
