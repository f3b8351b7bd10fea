"""Where jspark keeps files between runs, and whether it may fetch new ones.

Knows: the folder and how to make it, the variables of the environment. Does not know: what is kept there.
"""

from __future__ import annotations

import os
from pathlib import Path

from jspark.errors import UserError


def cache_dir() -> Path:
    """$JSPARK_CACHE, else $XDG_CACHE_HOME/jspark, else ~/.cache/jspark; not created here."""
    if own := os.environ.get("JSPARK_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "jspark"
    try:
        return Path.home() / ".cache" / "jspark"
    except RuntimeError:
        raise UserError("this user has no home folder for a cache; set JSPARK_CACHE to a folder") from None


def make_folder(path: Path) -> Path:
    """`path`, created where needed; UserError when it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"the cache folder {path} cannot be made ({e.strerror}); set JSPARK_CACHE to a writable folder"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"the cache folder {path} cannot be written; set JSPARK_CACHE to a writable folder")
    return path


def is_offline(asked: bool = False, *also: str) -> bool:
    """Whether nothing may be fetched: asked for, or by JSPARK_OFFLINE or one of the variables in `also`."""
    names = ("JSPARK_OFFLINE", *also)
    return asked or any(os.environ.get(n, "").lower() not in ("", "0", "off", "no", "false") for n in names)
