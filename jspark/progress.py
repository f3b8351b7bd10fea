"""Progress of long work on stderr: a bar on a terminal, one plain line elsewhere.

Knows: rich. Does not know: what the work is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

if TYPE_CHECKING:
    from jspark.profile import Tell


@contextlib.contextmanager
def told(doing: str, console: Console | None = None) -> Iterator[Tell]:
    """Shows how far something is with programs, from its first news to its last; on stderr if no console is given.

    News may come from any thread; what comes after the end of the context is not shown.
    """
    console = console or Console(stderr=True, highlight=False)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    # What others write to stdout belongs there, bar or not.
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
    task = bar.add_task(doing, total=None)
    lock, ended = threading.Lock(), False

    def tell(done: int, of: int, what: str) -> None:
        if not console.is_interactive:
            if done == 0:
                console.print(f"{doing}: up to {of} programs", soft_wrap=True, markup=False)
            return
        with lock:
            bar.update(task, completed=done, total=of, description=f"{doing}: {what}")
            if done == of:
                bar.stop()
            elif not ended:
                bar.start()

    try:
        yield tell
    finally:
        with lock:
            ended = True
            if bar.live.is_started:
                bar.stop()
