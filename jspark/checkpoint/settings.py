"""Checked access to configuration values that somebody else wrote.

Knows: types, ranges and how to say in one sentence what is wrong with which key.
Does not know: which keys exist.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from jspark.config import DecoderConfig
from jspark.errors import UserError

#: Above every real model, low enough that a nonsense number fails here and not as an allocation.
MAX_SIZE = 1 << 24
MAX_LAYERS = 1 << 10
MAX_POSITION = (1 << 31) - 1
#: Scaling of rotary positions at least: below it, frequencies would leave float32.
MIN_FACTOR = 1e-3


class Settings:
    """Values by key; every complaint names `origin`, the key and the value. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], origin: str):
        self.values = values
        self.origin = origin

    def get(self, key: str) -> Any:
        """The raw value, None when absent."""
        return self.values.get(key)

    def bad(self, key: str, what: str) -> UserError:
        """The error for a value of `key` that is not `what`."""
        value = self.values.get(key)
        if value is None:
            return UserError(f"{self.origin}: {key} is missing, but it must be {what}")
        return UserError(f"{self.origin}: {key} is {reprlib.repr(value)}, but it must be {what}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"{self.origin}: {key} is missing; fetch the checkpoint again or add the key")
        return value

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """An integer in low..high."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0) -> float:
        """A finite number greater than `low`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= low:
            raise self.bad(key, f"a number above {low:g}")
        return number

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def integers(self, key: str, low: int, high: int = MAX_SIZE) -> tuple[int, ...]:
        """One integer or a list of them; () when absent."""
        value = self.values.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(x, bool) or not isinstance(x, int) or not low <= x <= high for x in items):
            raise self.bad(key, f"a whole number or a list of whole numbers, each from {low} to {high}")
        return tuple(items)

    def section(self, key: str) -> Settings | None:
        """A nested object."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return Settings(value, f"{self.origin}: {key}")


def check_heads(config: DecoderConfig, origin: str) -> DecoderConfig:
    """`config` again; UserError when its heads cannot be grouped or rotated."""
    if config.num_heads % config.num_kv_heads:
        raise UserError(
            f"{origin}: {config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly; "
            "correct one of the two numbers"
        )
    if config.head_dim % 2:
        raise UserError(
            f"{origin}: a head dimension of {config.head_dim} is odd, but rotary positions need pairs; correct it"
        )
    return config
