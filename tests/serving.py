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
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel

from jspark.llm import LLM
from serve.server import Server
from serve.settings import ServerFlags

FLAGS = ServerFlags(port=0, access_log="none")
#: What is ours beyond the OpenAI API, by the type that has it; vLLM and SGLang have the same.
EXTRAS = {
    "Completion": {"metrics", "sglext"},
    "CompletionChoice": {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"},
    "ChatCompletion": {"metrics", "sglext", "prompt_token_ids", "prompt_logprobs"},
    "ChatCompletionChunk": {"metrics", "sglext"},
    "Choice": {"stop_reason", "token_ids"},
}
KINDS = {"text_completion": Completion, "chat.completion": ChatCompletion}
KINDS |= {"chat.completion.chunk": ChatCompletionChunk}


def check_shape(body: dict) -> BaseModel:
    """The body as the openai package types it: every required field, no other types, no fields that it lacks."""
    if "error" in body:
        assert set(body) == {"error"}
        found = ErrorObject.model_validate(body["error"], strict=True)
        assert found.message
    else:
        found = KINDS[body["object"]].model_validate(_without_nulls(body), strict=True)
    for part in _parts(found):
        unknown = set(part.model_extra or ()) - EXTRAS.get(type(part).__name__, set())
        assert not unknown, f"{type(part).__name__} has no {unknown}"
    return found


def check_chunk(chunk: dict) -> BaseModel:
    """The same of a chunk. The package's type of completions does not know that the reason comes last."""
    if chunk.get("object") == "text_completion":
        choices = [c | {"finish_reason": c["finish_reason"] or "stop"} for c in chunk["choices"]]
        chunk = chunk | {"choices": choices}
    return check_shape(chunk)


def _without_nulls(body: dict) -> dict:
    """An echo's first token has no log-probability, which the package's type of completions does not know."""
    choices = []
    for choice in body["choices"]:
        logprobs = choice.get("logprobs")
        if body["object"] == "text_completion" and logprobs and logprobs["token_logprobs"][:1] == [None]:
            first = {"token_logprobs": 0.0, "top_logprobs": {}}
            logprobs = logprobs | {name: [v, *logprobs[name][1:]] for name, v in first.items()}
            choice = choice | {"logprobs": logprobs}
        choices.append(choice)
    return body | {"choices": choices}


def _parts(value: object) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _parts(getattr(value, name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _parts(one)


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
            run.wait(lambda: _status(run.address) == 200, seconds=300)
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
