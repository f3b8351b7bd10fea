"""`python -m jspark` and the command `jspark`: quiet at Ctrl-C from the first import on.

Does not know: commands (cli.py).
"""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Runs the command and returns its exit code."""
    # A handler of our own only where Ctrl-C is not ignored, as it is for jobs in the background.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from jspark.cli import main as run

    return run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt; but an extension that is being loaded would print it, so then the process just ends."""
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        at = at.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    sys.exit(main())
