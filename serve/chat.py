"""Chats: messages and tools → a prompt, and what that asks of the answer.

Knows: the OpenAI API's messages and tool choice. Does not know: how an answer is read for tool calls (tools.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jspark.errors import UserError
from serve.errors import HttpError
from serve.protocol import ChatRequest, Message, NamedTool, TokenizeRequest
from serve.settings import ToolFormat
from serve.tools import MARKS, PYTHON_TAG, Kind, detect

if TYPE_CHECKING:
    from jspark.llm import LLM


@dataclass(frozen=True)
class Conversation:
    """A chat as the engine sees it.

    ids: the prompt. tools: how the model writes the tool calls that the answer may hold. forced: it is a call of
    this tool, or "" for a list of calls; None when no call is forced. constraint, stop: for the sampling
    parameters. special_marks: the marks of a tool call are special tokens, which must not be left out.
    """

    ids: list[int]
    tools: Kind | None = None
    forced: str | None = None
    constraint: dict[str, Any] | None = None
    stop: tuple[str, ...] = ()
    special_marks: bool = False


def conversation(llm: LLM, body: ChatRequest, parser: ToolFormat) -> Conversation:
    """The chat that `body` asks for. parser: how the model writes tool calls.

    Raises UserError or HttpError for what the template or the tools refuse.
    """
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice or ("auto" if tools else "none")
    if choice != "none" and not tools:
        raise HttpError(400, "tool_choice was given without tools; add tools, or drop it", param="tool_choice")
    if choice == "none":
        return Conversation(prompt_ids(llm, body, []))
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise HttpError(
                400, f"tool_choice names {name!r}, which is not among the tools; correct it", param="tool_choice"
            )
        schema = _parameters(tools[names.index(name)])
        return Conversation(prompt_ids(llm, body, tools), forced=name, constraint={"json": schema})
    if choice == "required":
        single = body.parallel_tool_calls is False
        return Conversation(
            prompt_ids(llm, body, tools), forced="", constraint={"json": _calls_schema(tools, single)}
        )
    tokenizer = llm.target.need_tokenizer("a chat")
    kind = detect(tokenizer) if parser == "auto" else parser
    begin, end = MARKS[kind]
    return Conversation(
        prompt_ids(llm, body, tools),
        tools=kind,
        stop=(end,) if body.parallel_tool_calls is False and end else (),
        special_marks=_special(tokenizer, begin or PYTHON_TAG),
    )


def prompt_ids(llm: LLM, body: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]]) -> list[int]:
    """The prompt's token ids, by the model's chat template."""
    variables = body.chat_template_kwargs or {}
    taken = sorted(variables.keys() & {"messages", "tools", "add_generation_prompt", "documents"})
    if taken:
        raise HttpError(400, f"chat_template_kwargs cannot set {taken[0]}; drop it", param="chat_template_kwargs")
    messages = [_plain(m, f"messages.{i}") for i, m in enumerate(body.messages or ())]
    return llm.target.chat_ids(messages, tools or None, **variables)


def _plain(message: Message, where: str) -> dict[str, Any]:
    """A message as templates know it: content one text, arguments of tool calls objects."""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    elif message.content is not None or message.tool_calls is None:
        if message.content is None:
            raise HttpError(400, f"{where}.content is missing; add it", param=f"{where}.content")
        plain["content"] = message.content
    else:
        plain["content"] = ""
    if message.tool_calls is not None and message.role != "assistant":
        raise HttpError(400, f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, where)},
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise HttpError(
            400, f"{where}.tool_calls: arguments must be a JSON object, as text; correct them", param=where
        )
    return value


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _calls_schema(tools: list[dict[str, Any]], single: bool) -> dict[str, Any]:
    """A list of at least one call. Definitions of the tools' schemas move to the top, where references look."""
    calls, definitions = [], {}
    for tool in tools:
        parameters = dict(_parameters(tool))
        for key in ("$defs", "definitions"):
            for name, definition in dict(parameters.pop(key, None) or {}).items():
                if definitions.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise UserError(f"two tools define {name!r} in different ways; rename one")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    return schema | ({"maxItems": 1} if single else {}) | definitions


def _special(tokenizer: Any, mark: str) -> bool:
    return any(t.special and t.content == mark for t in tokenizer.backend.get_added_tokens_decoder().values())
