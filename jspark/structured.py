"""What an answer must look like: the user's side of constrained decoding.

Knows: which kinds of constraint there are, and that a request has one of them. Does not know: how a constraint
is compiled or applied (grammar.py).
"""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jspark.errors import UserError

#: Characters of a schema, an expression or a grammar. A long enumeration has tens of thousands.
MAX_TEXT = 200_000


@dataclass(frozen=True)
class StructuredOutputs:
    """One constraint on an answer; the names are vLLM's.

    json: a JSON schema, as an object or as text. json_object: any JSON object. regex: an expression that the
    whole answer matches (Rust's syntax: no look-around, no back references). choice: one of several texts.
    grammar: a Lark grammar, or one in llama.cpp's GBNF. The whitespace of JSON answers is bounded (one space, or
    a line break with its indentation), since models like to repeat it; a schema's "x-guidance" overrides that.

    Raises:
        UserError: none of them is given, or more than one, or one of the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise UserError(f"json_object is {self.json_object!r}; it must be true or false")
        given = [f.name for f in fields(self) if getattr(self, f.name) is not f.default]
        if len(given) != 1:
            what = f"{given[0]} and {given[1]} were both given" if given else "no constraint was given"
            raise UserError(f"{what}; give one of json, json_object, regex, choice and grammar")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise UserError(f"{name} is {getattr(self, name)!r:.60}; it must be a text")
        if self.choice is not None:
            good = isinstance(self.choice, tuple | list) and all(isinstance(c, str) for c in self.choice)
            if not (good and self.choice):
                raise UserError(f"choice is {self.choice!r:.60}; it must be a list of at least one text")
            object.__setattr__(self, "choice", tuple(self.choice))
        if len(self.text) > MAX_TEXT:
            raise UserError(f"the {self.what} has {len(self.text)} characters; at most {MAX_TEXT} are supported")
        if any("\ud800" <= c <= "\udfff" for c in self.text):
            raise UserError(f"the {self.what} is not valid Unicode; pass it as UTF-8")

    @property
    def kind(self) -> str:
        """Which constraint it is: json, regex, choice or grammar."""
        if self.json_object:
            return "json"
        return next(name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The constraint itself; a choice as a JSON list."""
        if self.json_object:
            return '{"type": "object"}'
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json_format.dumps(value)

    @property
    def what(self) -> str:
        """What a user calls it."""
        return {"json": "JSON schema", "regex": "regular expression"}.get(self.kind, self.kind)


def structured(value: StructuredOutputs | Mapping[str, Any] | None) -> StructuredOutputs | None:
    """The constraint, given as an object or by names; UserError for anything else."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    names = [f.name for f in fields(StructuredOutputs)]
    if not (isinstance(value, Mapping) and all(key in names for key in value)):
        raise UserError(f"structured_outputs is {value!r:.60}; it must be one of {', '.join(names)} and its value")
    return StructuredOutputs(**value)


def _schema_text(schema: Any) -> str:
    """A schema as JSON; UserError for what is not JSON, or no schema."""
    try:
        if isinstance(schema, str):
            if len(schema) > MAX_TEXT:
                return schema  # refused for its length
            schema = json_format.loads(schema, parse_constant=_no_constant)
        if not isinstance(schema, Mapping):
            raise UserError(f"the JSON schema is {schema!r:.60}; it must be an object")
        return json_format.dumps(schema, allow_nan=False)
    except UserError:
        raise
    except (ValueError, TypeError, RecursionError) as e:
        raise UserError(f"the JSON schema is not JSON ({e}); correct it") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
