"""Launches beside the loop: in order, their errors where the step is collected."""

import threading
import time

import pytest
from support import drafter, make_engine, target

from jspark.config import EngineConfig
from jspark.launcher import Launcher
from jspark.request import Request, SamplingParams


def test_calls_run_one_after_the_other_on_one_thread():
    launcher, seen = Launcher(), []

    def call(number: int, seconds: float) -> int:
        time.sleep(seconds)
        seen.append((number, threading.get_ident()))
        return number

    results = [launcher.run(True, call, i, 0.02 if i == 0 else 0.0) for i in range(5)]
    assert [r.result() for r in results] == [number for number, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen} | {threading.get_ident()}) == 2


def test_without_a_thread_a_call_has_run_when_it_returns():
    launcher, seen = Launcher(), []
    assert launcher.run(False, seen.append, threading.get_ident()).done()
    assert seen == [threading.get_ident()]
    with pytest.raises(ZeroDivisionError):
        launcher.run(False, lambda: 1 // 0)


def test_a_launch_that_fails_is_raised_by_the_loop(monkeypatch):
    config = EngineConfig(max_running_requests=2, page_size=16, context_length=128, overlap=True)
    engine = make_engine(config, target("qwen3_tiny"), drafter("dspark_qwen3_tiny_vanilla"))
    engine.add(Request(0, (1, 2, 3), SamplingParams(max_tokens=20)))
    engine.step()

    def out_of_memory(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(engine.programs, "verify", out_of_memory)
    engine.step()
    with pytest.raises(MemoryError, match="no room"):
        engine.step()
