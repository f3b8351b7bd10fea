"""Programs compiled beside the steps: the same tokens from whatever is ready, and no step that waits for one."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
from serving import running
from support import check_equals_plain, drafter, mesh, plain, prompts, run, target

from jspark.background import Background
from jspark.config import EngineConfig
from jspark.engine import Engine
from jspark.errors import JsparkWarning
from jspark.llm import LLM
from jspark.programs import Programs
from jspark.request import Request, SamplingParams
from jspark.shapes import VerifyShape
from jspark.step import Sampling

NAME = "dspark_qwen3_tiny_vanilla_trained"
CONFIG = EngineConfig(
    max_running_requests=2,
    page_size=16,
    context_length=96,
    chunked_prefill_size=32,
    row_buckets=(1, 2),
    background_compile=True,
)


def cold(config: EngineConfig = CONFIG) -> Engine:
    return Engine(config, target("qwen3_tiny"), drafter(NAME), mesh=mesh())


def requests() -> list[Request]:
    """Greedy and seeded ones, a short prompt, one of several chunks and one of a single token."""
    asked = [
        SamplingParams(temperature=0.0, max_tokens=6),
        SamplingParams(temperature=0.8, seed=5, max_tokens=6),
        SamplingParams(temperature=0.0, max_tokens=5),
    ]
    long = prompts("qwen3_tiny")[0] * 9
    texts = [long[:7], long[:40], long[:1]]
    return [Request(i, text, params) for i, (text, params) in enumerate(zip(texts, asked, strict=True))]


@contextlib.contextmanager
def compiling(monkeypatch) -> Iterator[list[VerifyShape]]:
    """Shapes that steps themselves compile while this is open."""
    own: list[VerifyShape] = []
    ready = Programs._ready

    def watched(self, key, *rest):
        if threading.current_thread().name != "background" and isinstance(key, VerifyShape):
            own.append(key)
        return ready(self, key, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "_ready", watched)
        yield own


@cache
def expected() -> list[list[int]]:
    return [plain(request) for request in requests()]


def check(engine: Engine, count: int = 3) -> None:
    """Runs the first requests and compares with plain decoding."""
    excused: list = []
    asked = requests()[:count]
    for request, result, tokens in zip(asked, run(engine, asked), expected(), strict=False):
        check_equals_plain(request, result.tokens, tokens, excused)


def test_a_larger_program_stands_in_with_the_same_tokens(monkeypatch):
    engine = cold()
    width, pages = engine.block_size + 1, engine.arguments.page_steps[-1]
    everything = Sampling(sampled=True, coupled=True, rejection=True)
    largest = VerifyShape(2, pages, everything, 2 * width, True, engine.arguments.prefill_shape(32, False))
    engine.programs.compile(largest)
    expected()
    asked: set[VerifyShape] = set()
    monkeypatch.setattr(engine.programs.background, "add", lambda shapes, urgent: asked.update(shapes))
    with compiling(monkeypatch) as own:
        check(engine)
    assert not own, "a step compiled although a larger program was there"
    assert len(asked) > 3, "and the thread was asked for what was missing"


def test_without_a_larger_program_a_step_compiles_and_the_thread_goes_on(monkeypatch):
    engine = cold()
    expected()
    with compiling(monkeypatch) as own:
        check(engine, 1)
        first = list(own)
        engine.programs.background.wait()
        check(engine, 1)
    assert first
    assert own == first


def test_the_oldest_programs_go_when_there_are_too_many():
    engine = cold(replace(CONFIG, background_compile=False))
    engine.programs.most = 3
    check(engine)
    assert len(engine.programs._compiled) <= 3
    assert engine.programs.report.programs > 3


def test_a_failure_in_the_background_is_told_once_and_steps_go_on(monkeypatch):
    engine = cold()
    width, pages = engine.block_size + 1, engine.arguments.page_steps[-1]
    coupled = Sampling(sampled=True, coupled=True)
    engine.programs.compile(
        VerifyShape(2, pages, coupled, 2 * width, True, engine.arguments.prefill_shape(32, False))
    )
    expected()
    ready = Programs._ready

    def broken(self, key, *rest):
        if threading.current_thread().name == "background":
            raise RuntimeError("no room for this program")
        return ready(self, key, *rest)

    monkeypatch.setattr(Programs, "_ready", broken)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", JsparkWarning)
        check(engine)
        engine.programs.background.wait()
    assert "no room for this program" in str(told[0].message)
    assert len(told) == 1
    assert len(engine.programs.background.failed) > 1


class Worker:
    def __init__(self):
        self.seen, self.started, self.go = [], threading.Event(), threading.Event()
        self.background = Background(self.work, lambda piece, error: f"{piece} failed: {error}")

    def work(self, piece: int) -> None:
        self.started.set()
        self.go.wait(10)
        self.seen.append(piece)


def test_urgent_pieces_go_first_and_none_twice():
    worker = Worker()
    worker.background.add([1, 2, 3])
    assert worker.started.wait(10)
    worker.background.add([3, 2, 5], urgent=True)
    worker.background.add([1, 4])
    assert worker.background.busy
    worker.go.set()
    worker.background.wait()
    assert worker.seen == [1, 5, 2, 3, 4]
    assert not worker.background.busy


def test_work_ends_with_its_owner():
    worker = Worker()
    seen, background, go = worker.seen, worker.background, worker.go
    background.add([1, 2, 3])
    del worker
    go.set()
    background.wait()
    assert len(seen) <= 1


@pytest.mark.slow
def test_a_server_answers_before_its_last_program_is_compiled(goldens):
    folder = str(goldens / "qwen3_tiny")
    sizes: dict[str, Any] = {"max_running_requests": 2, "page_size": 16, "context_length": 96}
    sizes["chunked_prefill_size"] = 32
    llm = LLM(folder, str(goldens / NAME), draft_probe=False, background_compile=True, **sizes)
    request = requests()[0]
    background = llm.engine.programs.background
    with running(llm, ready=False) as server:
        server.wait(lambda: server.server.engine.state == "ready", 300)
        assert background.busy, "ready, and not all is compiled"
        body = {"input_ids": list(request.prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
        answer = httpx.post(f"{server.address}/generate", json=body, timeout=120).json()
        check_equals_plain(request, answer["output_ids"], expected()[0], [])
    assert not background.left, "the end does not wait for the rest"
