"""Bodies, JSON schemas and regular expressions that a hostile client might send, drawn from a seed.

Every body has few tokens to come, so that what is valid by chance ends soon.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 3, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "temperature": 0},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 3, "temperature": 0}},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [1, 2]},
}
FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "stream",
    "stream_options",
    "response_format",
    "structured_outputs",
    "regex",
    "ebnf",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "return_token_ids",
    "speculative_sampling",
    "tools",
    "tool_choice",
    "messages",
    "prompt",
    "text",
    "input_ids",
    "sampling_params",
    "model",
    "user",
    "metadata",
    "chat_template_kwargs",
    "top_logprobs",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "tokens",
    "max_completion_tokens",
    "no_such_field",
]
ATOMS: list[Any] = [None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 1e-30, 1e30, -0.0, 0.5]
ATOMS += ["", "a", "abc", "\0", "\x7f", "é€𐍈", "\u202e", "a" * 5000, "{{ 7 * 7 }}", "%s%n", "../../etc/passwd"]
ATOMS += [
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    {"a": {"a": {}}},
    [0] * 3000,
    ["a"] * 3000,
    {str(i): i for i in range(300)},
]
ATOMS += [{"type": "json_object"}, {"include_usage": True}, {"role": "user", "content": "a"}, {"regex": "[ab]*"}]

#: Characters beyond which a regular expression does not grow further; schemas have ten times as many.
_LONG = 2000


def bodies(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(path, body): valid ones with some fields replaced, deeply nested ones, and bytes that are broken."""
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice(list(BASES))
        body = dict(BASES[path])
        for _ in range(chance.randrange(1, 4)):
            body[chance.choice(FIELDS)] = _value(chance)
        data = json.dumps(body).encode()
        match chance.randrange(12):
            case 0:
                at = chance.randrange(len(data))
                data = data[:at] + bytes([chance.randrange(256)]) + data[at + chance.randrange(2) :]
            case 1:
                data = data[: chance.randrange(len(data))]
            case 2:
                depth = chance.choice([10, 200, 5000, 200_000])
                opened, closed = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
                name = chance.choice(FIELDS).encode()
                data = b'{"%s": %s1%s}' % (name, opened * depth, closed * depth)
            case _:
                pass
        yield path, data


def _value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8)
    if depth < 3 and kind == 0:
        return [_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if depth < 3 and kind == 1:
        return {chance.choice(FIELDS): _value(chance, depth + 1) for _ in range(chance.randrange(4))}
    return chance.choice(ATOMS)


def regexes(seed: int, count: int) -> Iterator[str]:
    """Nested repetitions, wide alternations, deep groups, large counts, classes of odd characters."""
    chance = random.Random(seed)
    for _ in range(count):
        yield _regex(chance, chance.randrange(1, 7))


def _regex(chance: random.Random, depth: int) -> str:
    if depth == 0:
        return chance.choice(
            ["a", "[abc]", "\\d", ".", "\\w", "[^a]", "é", "(?i:a)", "\\b", "^", "$", "[a-\\U0010ffff]"]
        )
    inner = _regex(chance, depth - 1)
    if len(inner) > _LONG:
        return inner
    match chance.randrange(9):
        case 0:
            return f"({inner}|{_regex(chance, depth - 1)})*"
        case 1:
            return f"({inner}){{{chance.choice([1, 10, 1000])},{chance.choice([1000, 5000])}}}"
        case 2:
            return f"({inner}+)+"
        case 3:
            return inner * chance.choice([2, 20])
        case 4:
            return "(" * 200 + inner + ")" * 200
        case 5:
            return "|".join(f"{inner}{i}" for i in range(chance.choice([3, 100])))
        case 6:
            return f"(?={inner})a"
        case 7:
            return f"({inner})\\1"
        case _:
            return f"({inner})?({inner})?"


def schemas(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Deep, wide, cyclic and contradictory ones, with patterns of `regexes`."""
    chance = random.Random(seed)
    for _ in range(count):
        schema = _schema(chance, chance.randrange(1, 5))
        if chance.randrange(4) == 0:
            schema = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [schema, {"$ref": "#/$defs/a"}]}}}
        yield schema


def _schema(chance: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        atoms: list[dict[str, Any]] = [{}, {"type": "string"}, {"type": "integer", "minimum": 5, "maximum": 3}]
        atoms += [{"const": "a" * 3000}, {"enum": list(range(3000))}, {"type": "number", "multipleOf": 1e-9}]
        atoms += [{"type": "string", "pattern": _regex(chance, 3)}, {"type": "string", "maxLength": 10**9}]
        atoms += [{"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:1/schema"}, {"not": {}}]
        atoms += [{"type": "string", "format": "uuid"}, {"type": "nothing"}, {"type": ["null", "array"]}]
        return chance.choice(atoms)
    inner = _schema(chance, depth - 1)
    if len(json.dumps(inner)) > 10 * _LONG:
        return inner
    match chance.randrange(6):
        case 0:
            names = [f"k{i}" for i in range(chance.choice([1, 40]))]
            return {"type": "object", "properties": dict.fromkeys(names, inner), "required": names[:1]}
        case 1:
            return {"type": "array", "items": inner, "minItems": chance.choice([0, 3, 10**9])}
        case 2:
            return {"anyOf": [inner, *(_schema(chance, depth - 1) for _ in range(chance.choice([1, 20])))]}
        case 3:
            return {"allOf": [inner, _schema(chance, depth - 1)]}
        case 4:
            for _ in range(chance.choice([3, 300])):
                inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
            return inner
        case _:
            return {"type": "object", "patternProperties": {_regex(chance, 2): inner}}
