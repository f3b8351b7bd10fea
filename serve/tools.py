"""Tool calls in the text of an answer.

Knows: how models write calls: Hermes and Qwen (<tool_call> around JSON), Mistral ([TOOL_CALLS] and a JSON list)
and Llama 3 (the answer is JSON). Does not know: prompts (chat.py), or how calls are sent.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from jspark.tokenizer import Tokenizer

Kind = Literal["hermes", "llama3_json", "mistral"]
#: What opens and what closes calls; "" where that is the beginning or the end of the answer.
MARKS: dict[Kind, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", ""),
    "llama3_json": ("", ""),
}
PYTHON_TAG = "<|python_tag|>"


def detect(tokenizer: Tokenizer) -> Kind:
    """The format that the chat template speaks of; Hermes' where it speaks of none."""
    template = tokenizer.chat_template
    text = "".join(template.sources.values()) if template is not None else ""
    if "<tool_call>" in text:
        return "hermes"
    if "[TOOL_CALLS]" in text:
        return "mistral"
    return "llama3_json" if PYTHON_TAG in text or '"parameters":' in text else "hermes"


@dataclass(frozen=True)
class Call:
    """One call. arguments: JSON, as text."""

    id: str
    name: str
    arguments: str


class Reader(Protocol):
    """Takes an answer's text as it comes; gives content and calls that no later text can take back."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Content and calls that `text` sets free."""
        ...

    def finish(self) -> tuple[str, list[Call]]:
        """What is left at the end: a call that was not closed, or text that only looked like one."""
        ...


def reader(kind: Kind) -> Reader:
    """A reader for one answer."""
    begin, end = MARKS[kind]
    return _Marked(begin, end) if begin else _Whole()


class _Marked:
    """Calls stand between marks, content before and after."""

    def __init__(self, begin: str, end: str):
        self._begin, self._end = begin, end
        self._held = ""
        self._inside = self._called = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        content, calls = "", []
        while True:
            mark = self._end if self._inside else self._begin
            at = self._held.find(mark) if mark else -1
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._inside:
                found = _read(before)
                calls += found or []
                self._called = self._called or bool(found)
                content += "" if found else self._begin + before + mark
            else:
                content += before
            self._inside = not self._inside
        if not self._inside:
            cut = len(self._held) - _overlap(self._held, self._begin)
            content += self._held[:cut]
            self._held = self._held[cut:]
        # Line breaks around calls are no content.
        if (self._called or self._inside) and not content.strip():
            content = ""
        return content, calls

    def finish(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        if not self._inside:
            return held, []
        self._inside = False
        found = _read(held)
        return ("", found) if found else (self._begin + held, [])


class _Whole:
    """The answer is a call, or it is none; its first character tells."""

    def __init__(self) -> None:
        self._held = ""
        self._plain = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        if self._plain:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if start.startswith(("{", "[{", PYTHON_TAG)) or PYTHON_TAG.startswith(start) or start == "[":
            return "", []
        self._plain = True
        return self._held, []

    def finish(self) -> tuple[str, list[Call]]:
        if self._plain:
            return "", []
        found = _read(self._held.strip().removeprefix(PYTHON_TAG))
        return ("", found) if found else (self._held, [])


def forced_calls(name: str, text: str) -> list[Call]:
    """The calls of an answer whose form was forced: arguments of `name`, or a list of calls for ""."""
    return [Call(_id(), name, text)] if name else _read(text) or []


def _read(text: str) -> list[Call] | None:
    """The calls in a JSON object or list; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = [_call(v) for v in (value if isinstance(value, list) else [value])]
    return [c for c in calls if c] if calls and all(calls) else None


def _call(value: Any) -> Call | None:
    if not (isinstance(value, dict) and isinstance(value.get("name"), str)):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(_id(), value["name"], arguments) if isinstance(arguments, str) else None


def _id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
