"""What is asked: data sets from JSONL files, and questions that the target writes itself.

Knows: the files' form, chat templates as far as asking goes. Does not know: engines' sizes, or what is measured.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jspark.errors import UserError
from jspark.llm import LLM
from jspark.loading import Target
from jspark.request import SamplingParams

#: Tokens that a chat template may add around a further turn: an allowance, for sizes only.
TURN_OVERHEAD = 32
_MARK = "\u241f"
#: Request seeds of self-written questions count down from here; those of training text count up from 0.
_LAST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Conversation:
    """One prompt. turns: a user's messages, each asked after the answer to the one before, by the chat template.
    prompt: instead of turns, a text or token ids to be continued as they are. where: for messages about it."""

    where: str
    turns: tuple[str, ...] = ()
    prompt: str | tuple[int, ...] | None = None

    def first_ids(self, target: Target) -> list[int]:
        """Token ids of the first request."""
        if isinstance(self.prompt, str):
            return target.text_ids(self.prompt)
        if self.prompt is not None:
            return list(self.prompt)
        return target.chat_ids([{"role": "user", "content": self.turns[0]}])

    def reach(self, target: Target, new_tokens: int) -> int:
        """Tokens that the whole conversation may come to, with `new_tokens` an answer."""
        total = len(self.first_ids(target)) + new_tokens
        for turn in self.turns[1:]:
            total += len(target.text_ids(turn)) + TURN_OVERHEAD + new_tokens
        return total


@dataclass(frozen=True)
class DataSet:
    """A named list of conversations."""

    name: str
    conversations: tuple[Conversation, ...]

    @property
    def digest(self) -> str:
        """Of what is asked, not of where it is written."""
        asked = [(c.turns, c.prompt) for c in self.conversations]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def read_data(spec: str, limit: int = 0, first_turn_only: bool = False) -> DataSet:
    """The data set of `NAME=FILE.jsonl`, or of a file named after it; its first `limit` lines (0: all).

    One object a line: {"turns": ["…", …]}, or {"prompt": "…"} and {"prompt": [1, 2]}, which skip the chat
    template. Raises UserError with the line for anything else, and for an empty file.
    """
    name, equals, file = spec.partition("=")
    path = Path(file if equals else spec)
    name = name if equals else path.stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"{name!r} is no name for a data set; use letters, digits, points and dashes, NAME=FILE")
    try:
        # Not splitlines(): a line of JSON may hold other separators inside its strings.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise UserError(f"the data file {path} cannot be read ({why}); pass a JSONL file in UTF-8") from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"the data file {path} is empty; write one JSON object a line")
    chosen = numbered[:limit] if limit else numbered
    return DataSet(name, tuple(_conversation(line, f"line {n} of {path}", first_turn_only) for n, line in chosen))


def _conversation(line: str, where: str, first_turn_only: bool) -> Conversation:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where} is not JSON ({e}); write one object a line") from None
    value = value if isinstance(value, dict) else {}
    turns, prompt = value.get("turns"), value.get("prompt")
    if isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns):
        return Conversation(where, turns=tuple(turns[:1] if first_turn_only else turns))
    if isinstance(prompt, str) and prompt:
        return Conversation(where, prompt=prompt)
    if isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt):
        return Conversation(where, prompt=tuple(prompt))
    raise UserError(f'{where} has no prompt; write {{"turns": ["…"]}}, {{"prompt": "…"}} or {{"prompt": [1, 2]}}')


def longest_reach(data: Sequence[DataSet], target: Target, new_tokens: int, context: int = 0) -> int:
    """Tokens that the longest conversation may come to.

    context: what is allowed at most; 0: the model's own. Raises UserError, with the line, for a conversation that
    could be longer.
    """
    limit = context or target.config.max_position
    longest = 0
    for conversation in (c for d in data for c in d.conversations):
        reach = conversation.reach(target, new_tokens)
        if reach > limit:
            raise UserError(
                f"{conversation.where} may come to {reach} tokens with {new_tokens} new ones an answer, and the "
                f"context holds {limit}; lower --max-new-tokens, or leave the line out"
            )
        longest = max(longest, reach)
    return longest


def user_opening(target: Target) -> list[int]:
    """The chat template up to where the user's words begin; UserError where there is no such place."""
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise UserError(f"{target.name} has no chat template, so it cannot ask itself questions; pass --data FILE")
    before, mark, _ = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}]).partition(_MARK)
    if not (mark and before):
        raise UserError(
            f"the chat template of {target.name} does not hold the user's words as they are; pass --data FILE"
        )
    return tokenizer.encode(before, add_special_tokens=False)


def self_written(llm: LLM, count: int, seed: int, longest: int = 128) -> DataSet:
    """`count` different questions that the target asks itself: it opens the user's turn and samples.

    Seeds are other ones than training text has. Questions that do not end within `longest` tokens are left out.
    Raises UserError where there is no chat template, or too few questions come.
    """
    opening = user_opening(llm.target)
    found: dict[str, None] = {}
    asked = 0
    while len(found) < count and asked < 20 * count:
        batch = count - len(found) + count // 4 + 1
        params = [
            SamplingParams(temperature=1.0, max_tokens=longest, seed=(_LAST_SEED - seed * 2**24 - i) % 2**32)
            for i in range(asked, asked + batch)
        ]
        asked += batch
        outputs = dict(llm.as_completed([opening] * batch, params))
        for i in range(batch):
            text = (outputs[i].text or "").strip()
            if outputs[i].finish_reason == "stop" and text:
                found.setdefault(text)
    if len(found) < count:
        raise UserError(
            f"the target wrote {len(found)} different questions in {asked} attempts and {count} were wanted; "
            "ask for fewer prompts, or pass --data FILE"
        )
    questions = list(found)[:count]
    return DataSet(
        "self-written", tuple(Conversation(f"question {i}", turns=(q,)) for i, q in enumerate(questions))
    )
