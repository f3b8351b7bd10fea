"""Random small JSON schemas whose answers are short, for tests of constrained decoding."""

from typing import Any

import numpy as np


def random_schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """An object or array at the top; every string and array is bounded, so that any answer comes to an end."""
    return _container(rng, depth)


def _value(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _enum, _constant, _boolean, _pattern]
    if depth:
        kinds += [
            lambda r: _container(r, depth - 1),
            lambda r: {"anyOf": [_value(r, depth - 1) for _ in range(2)]},
        ]
    return kinds[rng.integers(len(kinds))](rng)


def _container(rng, depth):
    if rng.random() < 0.3:
        low = int(rng.integers(0, 2))
        return {
            "type": "array",
            "items": _value(rng, depth),
            "minItems": low,
            "maxItems": low + int(rng.integers(0, 3)),
        }
    names = [str(n) for n in rng.permutation(["a", "b", "name", "x y", "é", 'q"'])[: rng.integers(1, 4)]]
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [n for n in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _string(rng):
    low = int(rng.integers(0, 3))
    return {"type": "string", "minLength": low, "maxLength": low + int(rng.integers(0, 4))}


def _integer(rng):
    low = int(rng.integers(-200, 100))
    return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 300))}


def _number(rng):
    return {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": int(rng.integers(1, 8))}


def _enum(rng):
    values = ["", "abc", "bc", 1, -2.5, True, None, "é\n", [1, "a"], {"k": []}]
    return {"enum": [values[i] for i in rng.permutation(len(values))[: rng.integers(1, 4)]]}


def _constant(rng):
    return {"const": ["x", 7, None, False][rng.integers(4)]}


def _boolean(rng):
    return {"type": ["boolean", "null"]} if rng.random() < 0.5 else {"type": "boolean"}


def _pattern(rng):
    return {"type": "string", "pattern": ["^[a-c]{1,3}$", "^(ab|cd)?x$", "^[0-9]{2}-[0-9]$"][rng.integers(3)]}
