"""Calls that run in order beside the loop: launching a step costs the host about what planning one does.

Knows: a thread, and that XLA lets go of the interpreter while it launches, so that the loop plans and collects
meanwhile. Does not know: what is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

#: Seconds after which a thread that holds the interpreter lets another have it. Python's 5 ms are longer than a
#: step: a launch that is done would wait so long to return.
_SWITCH_SECONDS = 1e-4


class Launcher:
    """Runs calls one after the other, on a thread of its own from the first that is made apart."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def run[**P, T](self, apart: bool, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begins `call` once all earlier ones have ended, on the thread or else here and now.

        What a call on the thread raises is raised by the result. A call made here would overtake those under way
        on the thread: who changes over waits for them first.
        """
        if apart:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "jspark-launcher")
                sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
            return self._thread.submit(call, *args, **kwargs)
        done: Future[T] = Future()
        done.set_result(call(*args, **kwargs))
        return done
