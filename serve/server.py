"""Sockets, signals and the life of the process: listen, load, serve, drain, end.

Knows: uvicorn, exit codes, what is said at the start. Does not know: routes (api.py) or the engine (loop.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console

from jspark.errors import UserError
from jspark.progress import told
from jspark.record import Observer
from serve.api import Api
from serve.gate import AccessLog, Gate
from serve.loop import DeviceLoop
from serve.metrics import Metrics
from serve.settings import ServerFlags

if TYPE_CHECKING:
    from jspark.cost import CostTable
    from jspark.llm import LLM
    from jspark.profile import Tell

#: Seconds that a server whose engine has failed still answers, so that probes see it.
FAILED_SECONDS = 3.0
#: Seconds between two lines while the server is not ready.
PROGRESS_SECONDS = 5.0
_KEEP_ALIVE = 60
#: Connections that may wait to be accepted, and how many are in one turn of the event loop.
_BACKLOG, _ACCEPTED = 2048, 16
#: Seconds between two looks at how late the event loop is.
_HEARTBEAT = 0.02


class Server:
    """A server on a socket of its own. load: makes the model, on the engine's thread. say: takes start-up lines.

    Raises:
        UserError: the address cannot be listened on, or the access log cannot be written.
    """

    def __init__(
        self, load: Callable[[Observer], LLM], flags: ServerFlags, say: Callable[[str], None] = lambda line: None
    ):
        self.flags, self._say = flags, say
        self.socket = _listen(flags.host, flags.port)
        self.port: int = self.socket.getsockname()[1]
        self._log = AccessLog(flags.access_log)
        self.engine = DeviceLoop(load, self._metrics, flags.max_queued_requests, self._changed)
        self.api = Api(self.engine, flags)
        gate = Gate(self.api.app, flags.keys, self._log, self._answered)
        config = uvicorn.Config(
            gate,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=5,
            ws="none",
            backlog=_ACCEPTED,
        )
        self._uvicorn = _Uvicorn(config)
        self._own_process = False
        self._ending: asyncio.Task | None = None
        self._heart: asyncio.Task | None = None
        self._progress: asyncio.Task | None = None

    def run(self) -> int:
        """Serves until a signal, or until the engine fails; the exit code.

        Raises:
            UserError: the model cannot be loaded.
        """
        # uvloop, where it is installed.
        self._own_process = True
        with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
            runner.run(self._main(signals=True))
        problem = self.engine.problem
        if isinstance(problem, UserError):
            raise problem
        return 0 if problem is None else 1

    async def _main(self, signals: bool) -> None:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT) if signals else ()
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        host = f"[{self.flags.host}]" if ":" in self.flags.host else self.flags.host
        self._address = f"http://{host}:{self.port}"
        self._say(f"listening on {self._address}; loading the model")
        self._started = time.perf_counter()
        self.engine.start()
        self._progress = asyncio.ensure_future(self._tell_progress())
        try:
            await self._uvicorn.serve(sockets=[self.socket])
        finally:
            for task in (self._ending, self._heart, self._progress):
                if task:
                    task.cancel()
            self.engine.close()
            self.socket.close()
            await asyncio.to_thread(self.engine.join, 10)
            self.api.close()
            self._log.close()
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def stop(self) -> None:
        """Takes no more requests, lets those in progress end, and ends. A second call does not wait."""
        if self._ending is not None:
            self.engine.fail_all("the server is shutting down; try again later")
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            return
        self._say("shutting down: requests in progress may end")
        self.engine.drain()
        self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        deadline = time.perf_counter() + self.flags.drain_seconds
        while self.engine.live and time.perf_counter() < deadline:
            await asyncio.sleep(0.05)
        if self.engine.live:
            self.engine.fail_all("the server is shutting down and could not wait; try again later")
        self._uvicorn.should_exit = True

    async def _fail(self) -> None:
        await asyncio.sleep(0 if isinstance(self.engine.problem, UserError) else FAILED_SECONDS)
        self._uvicorn.should_exit = True

    def _changed(self) -> None:
        engine = self.engine
        if engine.state == "warming" and engine.loaded is not None:
            for line in describe(engine.loaded):
                self._say(line)
            self._say("compiling the first programs")
        elif engine.state == "ready":
            report = engine.llm.engine.programs.report
            seconds = time.perf_counter() - self._started
            self._heart = asyncio.ensure_future(self._beat())
            if self._own_process:
                # What there is now stays: later full collections, which stop all threads, have little to look at.
                gc.freeze()
            background = engine.llm.engine.config.background_compile
            others = "others follow in the background" if background else "others at their first use"
            self._say(
                f"ready after {seconds:.1f} s: {report.programs} programs made ready in {report.seconds:.1f} s, "
                f"{others}; the API is at {self._address}/v1"
            )
        elif engine.state == "dead" and self._ending is None:
            if not isinstance(engine.problem, UserError):
                self._say("the engine has failed; shutting down")
            self._ending = asyncio.ensure_future(self._fail())

    async def _tell_progress(self) -> None:
        """A line now and then while the model is loaded and the first programs are compiled."""
        while self.engine.state in ("loading", "warming"):
            await asyncio.sleep(PROGRESS_SECONDS)
            llm, seconds = self.engine.loaded, time.perf_counter() - self._started
            if self.engine.state == "warming" and llm is not None:
                self._say(f"{seconds:.0f} s: {llm.engine.programs.report.programs} programs compiled")
            elif self.engine.state == "loading":
                self._say(f"{seconds:.0f} s: still loading")

    async def _beat(self) -> None:
        """Measures how late the event loop is, and what it costs."""
        assert self.engine.metrics is not None
        self.engine.metrics.cpu_seconds["http"] = time.thread_time()
        while True:
            due = time.perf_counter() + _HEARTBEAT
            await asyncio.sleep(_HEARTBEAT)
            self.engine.metrics.beat(time.perf_counter() - due, time.thread_time(), self.engine.load.cpu_seconds)

    def _metrics(self, llm: LLM, engine: DeviceLoop) -> Metrics:
        names = self.flags.metrics_prefix, llm.served_model_name
        whole_blocks = llm.engine.block_size > 0 and llm.engine.config.verify_mode != "compact"
        return Metrics(*names, engine.speculation, engine.steps, lambda: engine.load, whole_blocks)

    def _answered(self, path: str, status: int) -> None:
        if self.engine.metrics is not None:
            self.engine.metrics.answered(path, status)


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own. A crowd at the door waits there, not in the event loop."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio takes one number for both.
        for own in sockets or ():
            own.listen(_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def describe(llm: LLM) -> list[str]:
    """What is served, in a few lines."""
    engine, config = llm.engine, llm.engine.config
    drafter = "no drafter"
    if llm.draft_name is not None:
        drafter = f"drafter {llm.draft_name} ({llm.algorithm}, γ {engine.block_size})"
    gib = engine.kv_bytes / 2**30
    return [
        f"model {llm.served_model_name} ({llm.target.config.model_type}, {config.dtype}) · {drafter} · "
        f"verify {config.verify_mode}",
        f"weights {llm.weight_bytes / 2**30:.2f} GiB · KV cache {gib:.2f} GiB: {config.max_total_tokens} tokens "
        f"in pages of {config.page_size} · context {config.context_length} · {config.max_running_requests} slots",
        f"row buckets {_steps(config.row_buckets)} · token tiers {_steps(config.token_tiers)}",
        f"cost table {'none' if engine.cost is None else _costs(engine.cost)}",
    ]


def _costs(table: CostTable) -> str:
    """The ends of a table, so that one that is flat is seen."""
    (small, cheap), *_, (large, dear) = [*table.verify.items()] * 2
    (few, quick), *_, (many, slow) = [*table.draft.items()] * 2
    return (
        f"in ms: verify {cheap * 1e3:.3g} (T {small}) to {dear * 1e3:.3g} (T {large}) · "
        f"draft {quick * 1e3:.3g} (R {few}) to {slow * 1e3:.3g} (R {many})"
    )


def serve(load: Callable[[Observer, Tell], LLM], flags: ServerFlags) -> int:
    """Runs a server in this process, its start-up lines on stderr; the exit code.

    load: makes the model; what it is given observes the steps, and hears how far measuring the cost table is.
    """
    console = Console(stderr=True, highlight=False)
    # Around it all, so that a process that ends while it measures leaves the terminal as it was.
    with told("measuring the cost table", console) as tell:

        def heard(done: int, of: int, what: str) -> None:
            # Measuring may take minutes, and is asked at each program whether to go on.
            server.engine.go_on()
            tell(done, of, what)

        server = Server(
            lambda observer: load(observer, heard),
            flags,
            lambda line: console.print(line, soft_wrap=True, markup=False),
        )
        code = server.run()
    llm = server.engine.loaded
    if server.engine.alive or (llm is not None and llm.engine.programs.background.busy):
        # It compiles, say: the interpreter would pull the ground from under it.
        sys.stdout.flush()
        os._exit(code)
    return code


def _steps(steps: tuple[int, ...]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 12 else f"{steps[0]} … {steps[-1]} ({len(steps)})"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family[0], socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(family[4])
        found.listen(_BACKLOG)
        found.setblocking(False)
        return found
    except (OSError, UnicodeError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise UserError(f"{host}:{port} cannot be listened on ({why}); choose another --host or --port") from None
