"""The one exception that users are meant to see.

Knows: nothing but the type. Every message is one sentence that says what was wrong and what to do.
The command line prints it and exits with 2; the HTTP server answers with a 4xx.
"""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: a file, an option or a request that cannot be served as given."""
