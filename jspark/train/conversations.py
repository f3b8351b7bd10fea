"""Where text comes from: a chat template's own openings, prompts in a file, or conversations in a file.

Knows: chat templates taken apart, the built-in openings of questions, JSONL and what is wrong with it.
Does not know: how text is written (writer.py), selected (select.py) or stored (text.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from jspark.errors import UserError
from jspark.loading import Target
from jspark.train.text import Conversation
from jspark.train.writer import Script

_MARK = "\u241f"
_ROLES = ("system", "user", "assistant", "tool")


def openings() -> list[str]:
    """The built-in beginnings of questions: mathematics, code, writing, knowledge. None is from an evaluation."""
    text = files("jspark.train").joinpath("openings.txt").read_text(encoding="utf-8")
    return [line.replace("\\n", "\n") for line in text.splitlines() if line]


def self_written(target: Target, lead: Sequence[str], free: int) -> Script:
    """Scripts that open the template's user turn and let the target ask.

    lead: beginnings of questions, taken in turns; before each come `free` questions without one. Raises UserError
    where there is no chat template, or it cannot be opened in the middle.
    """
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise UserError(
            f"{target.name} has no chat template, so it cannot ask itself questions; give it some with --prompts "
            "FILE.jsonl"
        )
    whole = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, mark, after = whole.partition(_MARK)
    if not (before and mark and after):
        raise UserError(
            f"the chat template of {target.name} does not hold the user's words as they are; give it prompts with "
            "--prompts FILE.jsonl"
        )
    base = tokenizer.encode(before, add_special_tokens=False)
    connector = tokenizer.encode(after, add_special_tokens=False)
    scripts = []
    for text in lead or [""]:
        ids = tokenizer.encode(before + text, add_special_tokens=False)
        if ids[: len(base)] != base:
            raise UserError(f"the opening {text!r} changes the tokens of the chat template; leave it out")
        scripts += [base] * (free if lead else 0) + [ids]
    return _script(scripts, len(base), connector)


def given_prompts(target: Target, path: Path, longest: int) -> Script:
    """Whole prompts, from lines with "messages", "turns", or "prompt" (a text for the chat template)."""
    scripts = []
    for where, value in _lines(path):
        messages = value.get("messages")
        if messages is None:
            turns = value.get("turns")
            text = value.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
            if not isinstance(text, str) or not text:
                raise UserError(f'{where} has no "prompt", "turns" or "messages"; write {{"prompt": "…"}}')
            messages = [{"role": "user", "content": text}]
        messages = _messages(messages, where)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise UserError(f"{where} holds nothing to answer; add a user's message")
        ids = target.chat_ids(messages)
        if len(ids) >= longest:
            raise UserError(
                f"{where} has {len(ids)} tokens, which leave no room for an answer below {longest}; "
                "shorten it or raise --context-length"
            )
        scripts.append(ids)
    return _script(scripts, 0, [])


def given_conversations(target: Target, path: Path, longest: int) -> Iterator[Conversation]:
    """Conversations with the assistant's turns to train on, from lines with "messages"."""
    tokenizer = target.need_tokenizer("a file of conversations")
    for number, (where, value) in enumerate(_lines(path)):
        messages = _messages(value.get("messages", value.get("conversations")), where)
        if not any(m["role"] == "assistant" for m in messages):
            raise UserError(f"{where} has no assistant turn to train on; add one, or use --prompts for such lines")
        ids: list[int] = []
        spans = []
        for i, message in enumerate(messages):
            upto = tokenizer.encode(
                tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False),
                add_special_tokens=False,
            )
            if message["role"] == "assistant":
                start = len(target.chat_ids(messages[:i])) if i else len(ids)
                spans.append((min(start, len(upto)), _end_of_turn(target, upto)))
            ids = upto
        if len(ids) > longest:
            raise UserError(
                f"{where} has {len(ids)} tokens, more than the {longest} of a sequence; shorten it or raise "
                "--context-length"
            )
        yield Conversation(number, np.asarray(ids, np.int32), np.asarray(spans, np.int32))


def evaluation_tokens(target: Target, path: Path) -> Iterator[list[int]]:
    """Token ids of every text in an evaluation file, for the overlap check: all strings of "turns" or "prompt"."""
    tokenizer = target.need_tokenizer("the check against evaluation files")
    for where, value in _lines(path):
        texts = value.get("turns", value.get("prompt", value.get("messages")))
        texts = texts if isinstance(texts, list) else [texts]
        texts = [t.get("content") if isinstance(t, dict) else t for t in texts]
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f'{where} has no "turns" or "prompt"; write {{"turns": ["…"]}}')
            yield tokenizer.encode(text, add_special_tokens=False)


def _script(scripts: Sequence[Sequence[int]], shared: int, connector: Sequence[int]) -> Script:
    if not scripts:
        raise UserError("there is no prompt to answer; write one a line")
    lengths = np.asarray([len(s) for s in scripts], np.int32)
    tokens = np.zeros((len(scripts), int(lengths.max())), np.int32)
    for row, script in zip(tokens, scripts, strict=True):
        row[: len(script)] = script
    connectors = np.tile(np.asarray(connector or [0], np.int32), (len(scripts), 1))
    return Script(tokens, lengths, shared, connectors, np.full(len(scripts), len(connector), np.int32))


def _end_of_turn(target: Target, ids: Sequence[int]) -> int:
    """Up to the last end-of-text token and with it: what a template writes after it is not the target's."""
    stops = set(target.eos_token_ids)
    last = [i for i, t in enumerate(ids) if t in stops]
    return last[-1] + 1 if last and last[-1] >= len(ids) - 3 else len(ids)


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    good = (
        isinstance(value, list)
        and value
        and all(
            isinstance(m, Mapping) and m.get("role") in _ROLES and isinstance(m.get("content"), str) for m in value
        )
    )
    if not good:
        raise UserError(f'{where} has no "messages" of {{"role": …, "content": …}}; write them so')
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what to call the line in an error, its object)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read ({e}); pass a JSONL file in UTF-8") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{where} is not JSON ({e}); write one object a line") from None
        if not isinstance(value, dict):
            raise UserError(f"{where} is not a JSON object; write one object a line")
        yield where, value
