"""Errors as the OpenAI API writes them.

Knows: status codes and the error object. Does not know: what went wrong, or how bytes are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

from pydantic import ValidationError


class ErrorDetail(TypedDict):
    """What clients show."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail
    object: NotRequired[str]


#: Type of an error by its status; below 500 it is the client's.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}


class HttpError(Exception):
    """An answer that is not 2xx. message: one sentence for the client. param: the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        """The error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


def invalid(error: ValidationError) -> HttpError:
    """The first of pydantic's complaints, as one sentence with the field's name."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not _internal(part))[:200]
    match first["type"]:
        case "extra_forbidden":
            message = f"the field {path!r} is unknown to this server; leave it out"
        case "json_invalid":
            return HttpError(
                400, f"the body is not JSON ({first['msg'].removeprefix('Invalid JSON: ')}); correct it"
            )
        case "missing":
            message = f"the field {path!r} is missing; add it"
        case "value_error":
            message = f"{path or 'the body'}: {first['msg'].removeprefix('Value error, ')}"
        case _:
            message = f"{path or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:]}; correct it"
    line = " ".join(message.split())
    printable = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in line)
    return HttpError(400, printable[:1000], param=path or None)


def _internal(part: int | str) -> bool:
    """Whether it names a branch of a union, not a field of the body."""
    return isinstance(part, str) and (
        "[" in part or "-" in part or part in {"str", "int", "float", "bool", "dict"}
    )
