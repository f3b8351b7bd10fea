"""Small files that somebody else wrote: read whole, within bounds.

Knows: regular files, sizes and JSON. Does not know: what is in them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jspark.errors import UserError

#: Bytes of a JSON file: parsed, it takes some twenty times as much.
MAX_JSON = 4 << 20


class UnreadableError(Exception):
    """Why a file cannot be read, in a few words."""


def is_file(path: Path) -> bool:
    """Whether it is one; a name that no file can have is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_file(path: Path, limit: int) -> bytes:
    """What a file of at most `limit` bytes holds; UnreadableError otherwise, also for pipes and devices."""
    try:
        if not path.is_file():
            raise UnreadableError("it is no file" if path.exists() else "it does not exist")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as e:
        raise UnreadableError(e.strerror or str(e)) from None
    except ValueError:  # a zero byte in the path
        raise UnreadableError("it does not exist") from None
    if len(data) > limit:
        raise UnreadableError(f"it has more than the {limit} bytes that such a file may have")
    return data


def read_text(path: Path, limit: int) -> str:
    """The same as text in UTF-8."""
    try:
        return read_file(path, limit).decode()
    except UnicodeDecodeError:
        raise UnreadableError("it is no text in UTF-8") from None


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; UserError when it is unreadable, too large or not an object."""
    try:
        data = json.loads(read_text(path, limit))
    except UnreadableError as e:
        raise UserError(
            f"{path} cannot be read ({e}); point to a folder that holds the whole checkpoint"
        ) from None
    except (ValueError, RecursionError) as e:
        # What is no error of JSON itself comes from its depth, or from a number of thousands of digits.
        deep, long = isinstance(e, RecursionError), not isinstance(e, json.JSONDecodeError)
        why = "it is nested too deeply" if deep else "a number in it is too long" if long else str(e)
        raise UserError(f"{path} is not valid JSON ({why}); fetch the checkpoint again") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a JSON {type(data).__name__}, not an object; fetch the checkpoint again")
    return data
