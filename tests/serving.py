"""A server on a real socket in a thread, and what its tests share."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import openai

from jspark.llm import LLM
from serve.server import Server
from serve.settings import ServerFlags

FLAGS = ServerFlags(port=0, access_log="none")


class Running:
    """A server that runs. `address` is its own, without /v1."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop):
        self.server, self.loop = server, loop
        self.address = f"http://127.0.0.1:{server.port}"

    def call(self, function: Callable[[], object]) -> None:
        """Runs `function` on the server's event loop."""
        self.loop.call_soon_threadsafe(function)

    def wait(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            time.sleep(0.005)

    def assert_free(self) -> None:
        """Nothing waits or runs, and every page comes back."""
        engine = self.server.engine
        assert engine.loaded is not None
        scheduler = engine.loaded.engine.scheduler
        self.wait(lambda: not engine.live and engine.loaded.engine.idle)  # type: ignore[union-attr]
        assert not scheduler.waiting
        assert not scheduler.running
        assert scheduler.allocator.in_use == 0


@contextlib.contextmanager
def running(llm: LLM | Callable[..., LLM], ready: bool = True, **flags) -> Iterator[Running]:
    """A server for `llm`, or for what it loads; ended at the end."""

    def load(observer) -> LLM:
        if not isinstance(llm, LLM):
            return llm(observer)
        llm.engine._observer = observer
        return llm

    server = Server(load, replace(FLAGS, **flags))
    started = threading.Event()
    found: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        found.append(asyncio.get_running_loop())
        started.set()
        await server._main(signals=False)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait(10)
    run = Running(server, found[0])
    try:
        if ready:
            run.wait(lambda: _status(run.address) == 200)
        yield run
    finally:
        if thread.is_alive():
            run.call(server.stop)
        thread.join(60)
        assert not thread.is_alive()


def _status(address: str) -> int:
    try:
        return httpx.get(f"{address}/health").status_code
    except httpx.HTTPError:
        return 0


@contextlib.contextmanager
def client_of(run: Running, key: str = "none") -> Iterator[openai.OpenAI]:
    """The openai package's client, without its own retries."""
    with openai.OpenAI(base_url=f"{run.address}/v1", api_key=key, max_retries=0, timeout=120) as client:
        yield client


def events(response: httpx.Response) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]
