"""How far a benchmark is, on the terminal.

Knows: rich. Does not know: what is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, gone at the end; what it gives is called with (done, of how many, what is next)."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def tell(done: int, of: int, what: str) -> None:
            bar.update(task, completed=done, total=of, description=what)

        yield tell
