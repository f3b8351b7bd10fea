"""The process that renders chat templates: `python -m jspark.template_worker`, one JSON message in, one out.

Templates come with checkpoints, so anybody may have written them. Jinja's sandbox keeps them from Python's
internals, but no sandbox inside a process bounds what `'a' * 10**9` or nested loops cost. Here the operating
system does: memory and processor time have hard limits, no file can be written and no process started. If a
template breaks the limits, or the interpreter itself, this process ends and the caller says so.

Knows: the environment that templates of Hugging Face expect. Does not know: tokenizers, or where templates
come from.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, ClassVar

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Processor seconds of one message, and memory beyond what the interpreter and the message itself take.
CPU_SECONDS = 2
MEMORY = 192 << 20
#: Characters of a prompt beside twice the message: some million tokens.
OUTPUT = 4 << 20
_LENGTH = struct.Struct("<Q")


class _RefusedError(Exception):
    """The template's own `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks text to train on; here it is its content."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise _RefusedError(message)


@lru_cache(8)
def compiled(source: str) -> jinja2.Template:
    """The template, with what transformers gives to templates: loop controls, tojson, strftime_now, …"""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def render(source: str, variables: dict[str, Any], limit: int) -> dict[str, str]:
    """{"text": …}, or {"error": kind, "why": …}."""
    try:
        pieces, size = [], 0
        for piece in compiled(source).generate(**variables):
            size += len(piece)
            if size > limit:
                return {"error": "bound", "why": f"it writes more than {limit} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except _RefusedError as e:
        return {"error": "refused", "why": str(e)}
    except jinja2.TemplateSyntaxError as e:
        return {"error": "syntax", "why": f"line {e.lineno}: {e.message}"}
    except MemoryError:
        return {"error": "bound", "why": "it needs too much memory"}
    except RecursionError:
        return {"error": "bound", "why": "it is nested too deeply"}
    except Exception as e:  # a template can raise anything that its expressions can
        return {"error": "failed", "why": f"{type(e).__name__}: {e}"}


def receive(pipe: BinaryIO, limit: int | None = None) -> bytes | None:
    """One message; None at the end of the pipe, or for one that is longer than `limit`."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    if limit is not None and size > limit:
        return None
    data = pipe.read(size)
    return data if len(data) == size else None


def send(pipe: BinaryIO, data: bytes) -> None:
    """One message."""
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def main() -> None:
    """Answers until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    send(sys.stdout.buffer, b"ready")
    while (message := receive(sys.stdin.buffer)) is not None:
        _limit(resource.RLIMIT_AS, _address_space() + MEMORY + 16 * len(message))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # Whole seconds only: between CPU_SECONDS and one more.
        _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + CPU_SECONDS + 1)
        try:
            request = json.loads(message)
            result = render(request["template"], request["variables"], OUTPUT + 2 * len(message))
            answer = json.dumps(result).encode()
        except MemoryError:
            answer = json.dumps({"error": "bound", "why": "it needs too much memory"}).encode()
        send(sys.stdout.buffer, answer)


def _limit(kind: int, value: int) -> None:
    """The soft limit, so that the next message can have another; some systems lack some limits."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 512 << 20


if __name__ == "__main__":
    main()
