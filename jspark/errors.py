"""The one exception that users are meant to see, and the one warning.

Knows: nothing but the types. Every message is one sentence that says what was wrong and what to do.
The command line prints it and exits with 2; the HTTP server answers with a 4xx.
"""

from __future__ import annotations

import warnings

#: Characters of a message.
_LONGEST = 2000


class UserError(ValueError):
    """Bad input: a file, an option or a request that cannot be served as given.

    The message is one printable line of bounded length, whatever names and values of somebody's file are in it.
    """

    def __init__(self, message: str):
        line = " ".join(message.split())
        line = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in line)
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 300]} … {line[-300:]}")


class JsparkWarning(UserWarning):
    """Something that works, and probably not as it was meant to."""


def warn(message: str) -> None:
    """Tells the user; the message is cleaned as a `UserError`'s is."""
    warnings.warn(JsparkWarning(str(UserError(message))), stacklevel=2)
