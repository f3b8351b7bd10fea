"""Bytes to and from a client: bodies within limits, JSON, server-sent events, and noticing that it is gone.

Knows: ASGI. Does not know: routes, or what is sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Receive, Send

from serve.errors import ClientGone, HttpError, invalid

#: Seconds that a client may take to send its body.
_BODY_SECONDS = 60.0
#: Bytes of a body that are parsed on the event loop; longer ones are parsed beside it.
_SHORT = 1 << 16
DONE = b"data: [DONE]\n\n"


async def read_body(request: Request, longest: int) -> bytes:
    """The body. Raises HttpError when it is longer than `longest` or comes too slowly, ClientGone at its end."""
    too_long = HttpError(413, f"the body is longer than the {longest} bytes that this server takes; shorten it")
    try:
        declared = int(request.headers.get("content-length", "0"))
    except ValueError:
        raise HttpError(400, "Content-Length is no number; correct it") from None
    if declared > longest:
        raise too_long
    pieces, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                size += len(piece)
                if size > longest:
                    raise too_long
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {_BODY_SECONDS:.0f} seconds; send it again") from None


async def parse[B: BaseModel](kind: type[B], body: bytes) -> B:
    """The body as `kind`; HttpError for what is not one."""
    try:
        if len(body) <= _SHORT:
            return kind.model_validate_json(body)
        return await asyncio.to_thread(kind.model_validate_json, body)
    except ValidationError as e:
        raise invalid(e) from None


async def until_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client goes away first, cancels it and raises ClientGone.

    The body must have been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def to_json(value: Any) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    """A whole response."""
    named = {"content-type": content_type, "content-length": str(len(body))} | dict(headers or {})
    raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: HttpError) -> None:
    """An error object."""
    await send_bytes(send, error.status, to_json(error.body), headers=error.headers)


async def send_events(send: Send, events: AsyncIterator[bytes]) -> None:
    """Server-sent events as they come. Nothing is sent before the first one, so that its error has a status."""
    started = False
    async for data in events:
        if not started:
            started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
