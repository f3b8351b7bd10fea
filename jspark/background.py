"""Work on other threads: what nobody waits for, one piece after another, and what is needed at once, side by side.

Knows: a queue whose urgent pieces go first, and the ends: of the work, of its owner, of the process.
Does not know: what the work is (programs.py compiles).
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor

from jspark.errors import JsparkWarning, warn

#: Programs that are compiled at the same time: each keeps one core busy, and the loop has one.
SIDE_BY_SIDE = max(1, min(12, (os.cpu_count() or 1) - 1))


def side_by_side[T](call: Callable[[T], object], pieces: Iterable[T]) -> None:
    """Calls `call` with every piece, SIDE_BY_SIDE of them at a time; returns, or raises, when all is done."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(call, pieces))


class Background[T: Hashable]:
    """Calls `run` with one piece after another, none of them twice.

    run: a bound method; when its object is gone, what is left is dropped. problem: what to tell of a piece that
    fails; only the first is told, and the others go on. The thread lives while there is work, so nothing has to be
    closed; at the end of the process it finishes the piece that it is at.
    """

    def __init__(self, run: Callable[[T], None], problem: Callable[[T, Exception], str]):
        self._run, self._problem = weakref.WeakMethod(run), problem
        self._queue: deque[T] = deque()
        self._known: set[T] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.failed: dict[T, Exception] = {}

    def add(self, pieces: Iterable[T], urgent: bool = False) -> None:
        """Queues what was never queued before; urgent pieces go before all others, also ones that wait."""
        with self._lock:
            for piece in pieces:
                if piece not in self._known:
                    self._known.add(piece)
                    self._queue.append(piece)
                if urgent and piece in self._queue:
                    self._queue.remove(piece)
                    self._queue.appendleft(piece)
            if self._queue and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="background")
                self._thread.start()

    @property
    def busy(self) -> bool:
        """A piece is being worked at, or waits."""
        return self._thread is not None

    @property
    def left(self) -> int:
        """Pieces that wait."""
        return len(self._queue)

    def drop(self) -> None:
        """Forgets what waits."""
        with self._lock:
            self._queue.clear()

    def wait(self) -> None:
        """Until there is no more work."""
        while (thread := self._thread) is not None:
            thread.join()

    def _next(self) -> T | None:
        with self._lock:
            # The process ends, and waits for this thread.
            if not threading.main_thread().is_alive():
                self._queue.clear()
            if not self._queue:
                self._thread = None
                return None
            return self._queue.popleft()

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            run = self._run()
            if run is None:
                self.drop()
                continue
            try:
                run(piece)
            except Exception as e:
                self.failed[piece] = e
                if len(self.failed) == 1:
                    with contextlib.suppress(JsparkWarning):  # where warnings are errors
                        warn(self._problem(piece, e))
            del run
