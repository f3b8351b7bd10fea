"""Chat templates: which of a checkpoint's templates is used, and rendering it within bounds.

Knows: templates by name (the one for tools), messages and tools as plain data, the process that renders
(template_worker.py) and when to give it up. Does not know: token ids, or where templates are stored.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspark import template_worker
from jspark.errors import UserError
from jspark.files import UnreadableError, read_text

DEFAULT, TOOL_USE = "default", "tool_use"
#: Characters of a template: several times the longest known.
MAX_SOURCE = 1 << 20
#: Of the whole rendering, for a machine that is busy; a template that works takes milliseconds.
_WALL_SECONDS = 4.5
_START_SECONDS = 60.0


class ChatTemplate:
    """The templates of one checkpoint by name, at least one called "default" or "tool_use".

    origin: the checkpoint, for messages. special_tokens: role → text, as templates see them.
    """

    def __init__(self, sources: Mapping[str, str], origin: str, special_tokens: Mapping[str, str]):
        for source in sources.values():
            if len(source) > MAX_SOURCE:
                raise UserError(
                    f"the chat template of {origin} has {len(source)} characters, more than the {MAX_SOURCE} "
                    "allowed; use another template"
                )
        self.sources = dict(sources)
        self.origin = origin
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt.

        messages: {"role": …, "content": …}, with "tool_calls" where the assistant called tools, and those of
        the role "tool". tools: JSON schemas as the OpenAI API has them. variables: further names for the
        template, such as enable_thinking. Raises UserError: for a template that is broken, ignores the tools,
        refuses the messages, or takes too long or too much.
        """
        if tools is not None:
            _check_tools(tools)
        names = {
            **self.special_tokens,
            "documents": None,
            **variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self._source(bool(tools))
        result = _ask(source, names)
        if result is None:
            raise self._bounds("it takes more time or memory than any prompt needs")
        if "text" in result:
            if tools and result == _ask(source, names | {"tools": None}):
                raise UserError(
                    f"tools were given, and the chat template of {self.origin} has no place for them; drop the "
                    "tools, or pass a template that has one with --chat-template"
                )
            return result["text"]
        why = result["why"]
        match result["error"]:
            case "refused":
                raise UserError(f"the chat template refuses these messages: {why}")
            case "syntax":
                raise UserError(f"the chat template of {self.origin} has a syntax error in {why}; correct it")
            case "bound":
                raise self._bounds(why)
        raise UserError(
            f"the chat template of {self.origin} failed on these messages ({why}); check their roles and content"
        )

    def _source(self, with_tools: bool) -> str:
        """As transformers chooses: with tools the template named tool_use, where there is one."""
        source = self.sources.get(TOOL_USE if with_tools and TOOL_USE in self.sources else DEFAULT)
        if source is None:
            raise UserError(
                f"{self.origin} has chat templates for {', '.join(self.sources)} and none for a plain chat; "
                "pass one with --chat-template"
            )
        return source

    def _bounds(self, why: str) -> UserError:
        return UserError(
            f"the chat template of {self.origin} was stopped, because {why}; use another with --chat-template"
        )


def read_template(path: str | os.PathLike[str]) -> str:
    """The template in a file; UserError when it cannot be read or is no text."""
    try:
        return read_text(Path(path), MAX_SOURCE)
    except UnreadableError as e:
        raise UserError(f"the chat template {path} cannot be read ({e}); pass a file with a template") from None


def _ask(source: str, names: Mapping[str, Any]) -> dict[str, str] | None:
    try:
        request = json.dumps({"template": source, "variables": names}, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise UserError(
            f"messages and tools must be plain data: texts, numbers, lists and objects ({e}); correct them"
        ) from None
    return _render(request)


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    plain = isinstance(tools, Sequence) and not isinstance(tools, str | bytes)
    if not plain or not all(isinstance(t, Mapping) for t in tools):
        raise UserError(
            'tools are a list of objects {"type": "function", "function": {"name": …, "parameters": schema}}; '
            "pass such a list"
        )


def _plain(value: Any) -> Any:
    """Mappings and sequences that are no dict or list."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"not {type(value).__name__}")


# ── the process that renders ──────────────────────────────────────────────────────────────────────────────────


class _Worker:
    """One rendering process, used by one thread at a time."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", template_worker.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUTF8": "1"}
            | {k: v for k, v in os.environ.items() if k in ("TZ", "LD_LIBRARY_PATH")},
        )
        self.ready = self._within(_START_SECONDS, lambda out: template_worker.receive(out, 100)) == b"ready"

    def ask(self, request: bytes) -> bytes | None:
        """The answer; None when the process is gone, and this worker with it."""
        process = self.process
        assert process.stdin is not None
        limit = 16 * (template_worker.OUTPUT + 2 * len(request))

        def exchange(out: Any) -> bytes | None:
            template_worker.send(process.stdin, request)  # type: ignore[arg-type]
            return template_worker.receive(out, limit)

        return self._within(_WALL_SECONDS, exchange)

    def _within(self, seconds: float, exchange: Any) -> bytes | None:
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            answer = exchange(self.process.stdout)
        except OSError:
            pass
        finally:  # also after Ctrl-C, when an answer would be left in the pipe
            timer.cancel()
            if answer is None:
                self.close()
        return answer

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_lock = threading.Lock()
_worker: _Worker | None = None


def _render(request: bytes) -> dict[str, str] | None:
    """The worker's answer; None when it had to be stopped, or broke."""
    global _worker
    with _lock:
        # After a fork the process is the parent's.
        if _worker is None or _worker.owner != os.getpid() or _worker.process.poll() is not None:
            _worker = _Worker()
            if not _worker.ready:
                _worker = None
                raise UserError(
                    "the process that renders chat templates does not start; check that "
                    f"{sys.executable or 'the Python interpreter'} can be run"
                )
        answer = _worker.ask(request)
        if answer is None:
            _worker = None
            return None
    return json.loads(answer)


@atexit.register
def _end() -> None:
    if _worker is not None and _worker.owner == os.getpid():
        _worker.close()
