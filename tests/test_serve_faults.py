"""Clients and machines that misbehave: slots and pages come back, everyone else goes on, errors are errors."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from serving import FLAGS, check_shape, client_of, events, running
from test_llm import EOS, PIECES, SIZES
from text_model import text_model

from jspark import LLM, SamplingParams, UserError
from serve.server import Server

LONG = {"prompt": "abc", "temperature": 0, "max_tokens": 108, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 4}


@pytest.fixture(scope="module")
def llm(goldens, tmp_path_factory) -> LLM:
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("faults") / "model", PIECES, EOS)
    return LLM(str(model), str(goldens / "dspark_qwen3_tiny_vanilla_trained"), **SIZES)


@contextmanager
def slow(llm: LLM, seconds: float = 0.03):
    """Steps that take their time, and how many there were; requests meant to be long are."""
    engine, step = llm.engine, llm.engine.step
    count = [0]

    def slowly():
        time.sleep(seconds)
        count[0] += 1
        return step()

    engine.step = slowly
    try:
        yield count
    finally:
        del engine.step


@contextmanager
def watched_aborts(run, count):
    """Steps between a request to end something and its end on the engine's thread."""
    engine, loop = run.server.engine.loaded.engine, run.server.engine
    asked: list[int] = []
    waited: list[int] = []
    forget, abort = loop._forget, engine.abort

    def ask(ids, *reason):
        if ids:
            asked.append(count[0])
        forget(ids, *reason)

    def do(request_id, reason):
        waited.append(count[0] - asked[-1])
        abort(request_id, reason)

    loop._forget, engine.abort = ask, do
    try:
        yield waited
    finally:
        del loop._forget, engine.abort


def raw(run, body: dict, path: str = "/v1/completions", buffer: int | None = None) -> socket.socket:
    """A connection on which a request has been sent and nothing read. buffer: bytes that it takes unread."""
    data = json.dumps(body).encode()
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", run.server.port))
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def test_a_client_that_leaves_frees_its_rows_and_pages(llm, tmp_path):
    [want] = llm.generate("abc", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    log = tmp_path / "log"
    with running(llm, access_log=str(log)) as run, slow(llm) as count, watched_aborts(run, count) as waited:
        engine = run.server.engine
        scheduler = llm.engine.scheduler
        # Mid-stream.
        with raw(run, LONG | {"stream": True}) as connection:
            assert b"200 OK" in connection.recv(200)
            run.wait(lambda: engine.load.running == 1)
        run.assert_free()
        # Not streaming: before the answer, which is its only message.
        with raw(run, LONG):
            run.wait(lambda: engine.live == 1 and engine.load.running == 1)
        run.assert_free()
        # Several answers at a time, some of them still waiting; then one that waits for a slot.
        with raw(run, LONG | {"n": 2, "prompt": ["abc", "b"], "temperature": 1}):
            run.wait(lambda: engine.live == 4 and engine.load.running == 2)
            with raw(run, LONG | {"stream": True}):
                run.wait(lambda: engine.live == 5)
            run.wait(lambda: engine.live == 4)
        run.assert_free()
        assert len(waited) >= 7
        assert max(waited) <= 2
        done = httpx.post(f"{run.address}/v1/completions", json=SHORT, timeout=60).json()
        assert done["choices"][0]["text"] == want.text
        page = httpx.get(f"{run.address}/metrics").text
        assert 'jspark:request_aborted_total{model_name="model"} 7.0' in page
        assert not scheduler.waiting
    statuses = [json.loads(line)["status"] for line in log.read_text().splitlines() if "completions" in line]
    assert sorted(statuses) == [200, 499, 499, 499, 499] or sorted(statuses) == [200, 200, 499, 499, 499]


def test_a_stop_string_ends_its_row_too(llm):
    [want] = llm.generate("abc", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    stop = (want.text or "")[12:16]
    with running(llm) as run, slow(llm) as count, watched_aborts(run, count) as waited:
        done = httpx.post(f"{run.address}/v1/completions", json=LONG | {"stop": stop}, timeout=60).json()
        assert done["choices"][0]["text"] == (want.text or "")[: (want.text or "").index(stop)]
        run.assert_free()
        assert max(waited) <= 2


def test_a_full_queue_refuses_with_429(llm):
    with running(llm, max_queued_requests=1) as run, slow(llm), client_of(run) as client:
        with ThreadPoolExecutor(3) as pool:
            busy = [
                pool.submit(httpx.post, f"{run.address}/v1/completions", json=LONG, timeout=60) for _ in range(3)
            ]
            run.wait(lambda: run.server.engine.live == 3)
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(model="model", prompt="abc")
            assert int(full.value.response.headers["retry-after"]) >= 1
            assert full.value.code == "queue_full"
            check_shape(full.value.response.json())
            refused = httpx.post(f"{run.address}/v1/completions", json=LONG | {"stream": True})
            assert refused.status_code == 429
            assert [b.result().status_code for b in busy] == [200] * 3
        # More at once than could ever wait is no matter of trying again.
        many = httpx.post(f"{run.address}/v1/completions", json=SHORT | {"prompt": ["a"] * 4})
        assert (many.status_code, "ask for fewer" in many.text) == (400, True)
        assert client.completions.create(model="model", prompt="abc", max_tokens=2).choices
        run.assert_free()


def test_keys(llm, monkeypatch):
    monkeypatch.setenv("JSPARK_API_KEY", "from-the-environment")
    with running(llm, api_key=("one", "two")) as run:
        for key in ("one", "two", "from-the-environment"):
            with client_of(run, key) as client:
                assert client.models.list().data[0].id == "model"
        with client_of(run, "three") as client, pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
        assert refused.value.code == "invalid_api_key"
        assert httpx.get(f"{run.address}/server_info").status_code == 401
        assert httpx.get(f"{run.address}/metrics").status_code == 200


def test_limits_of_bodies_prompts_and_time(llm):
    with running(llm, max_body_bytes=1024, max_prompt_tokens=5, request_timeout=0.5) as run:
        url = f"{run.address}/v1/completions"
        assert httpx.post(url, json=SHORT).status_code == 200
        big = json.dumps(SHORT | {"user": "x" * 2000}).encode()
        assert httpx.post(url, content=big).status_code == 413
        assert httpx.post(url, content=iter([big[:900], big[900:]])).status_code == 413
        refused = httpx.post(url, json=SHORT | {"prompt": "abcdef"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        with slow(llm, 0.1):
            late = httpx.post(url, json=LONG, timeout=30)
            assert (late.status_code, late.json()["error"]["type"]) == (408, "timeout_error")
            check_shape(late.json())
            with httpx.stream("POST", url, json=LONG | {"stream": True}, timeout=30) as response:
                last = events(response)[-2:]
            assert "0.5 seconds" in check_shape(json.loads(last[0])).message  # type: ignore[attr-defined]
            assert last[1] == "[DONE]"
            run.assert_free()


def test_a_slow_reader_holds_up_nobody(llm, tmp_path):
    """It keeps neither slot nor pages, and what is made ready for it to read is bounded."""
    log = tmp_path / "log"
    with running(llm, access_log=str(log)) as run:
        # Small buffers of the operating system: 2 MB of chunks do not fit.
        run.server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
        body = {"text": "abc", "sampling_params": sampling, "stream": True, "return_logprob": True}
        with raw(run, body | {"top_logprobs_num": 2}, "/generate", buffer=4096) as connection:
            assert b"200 OK" in connection.recv(200)
            done = httpx.post(f"{run.address}/v1/completions", json=SHORT, timeout=60)
            assert done.status_code == 200
            run.assert_free()
            [held] = [
                c.transport.get_write_buffer_size()
                for c in run.server._uvicorn.server_state.connections
                if c.transport.get_write_buffer_size()
            ]
            assert held < 200_000
            assert "/generate" not in log.read_text()
        run.wait(lambda: "/generate" in log.read_text())
        # What it had not read yet decides whether it counts as gone.
        assert json.loads(log.read_text().splitlines()[-1])["status"] in (200, 499)


def test_the_server_is_not_ready_before_the_model_is(llm):
    held = threading.Event()

    def load(observer) -> LLM:
        held.wait(30)
        return llm

    with running(load, ready=False) as run:
        run.wait(lambda: httpx.get(f"{run.address}/health").status_code == 503)
        early = httpx.post(f"{run.address}/v1/completions", json=SHORT)
        assert (early.status_code, early.headers["retry-after"]) == (503, "5")
        assert httpx.get(f"{run.address}/metrics").status_code == 200
        held.set()
        run.wait(lambda: httpx.get(f"{run.address}/health").status_code == 200)
        assert httpx.post(f"{run.address}/v1/completions", json=SHORT, timeout=60).status_code == 200


def test_shutting_down_lets_answers_end(llm):
    with running(llm) as run, slow(llm):
        url = f"{run.address}/v1/completions"
        with httpx.stream(
            "POST", f"{run.address}/v1/completions", json=LONG | {"stream": True}, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            run.call(run.server.stop)
            run.wait(lambda: httpx.get(f"{run.address}/health").status_code == 503)
            refused = httpx.post(url, json=SHORT)
            assert (refused.status_code, "shutting down" in refused.text) == (503, True)
            data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"


def test_shutting_down_does_not_wait_forever(llm):
    with running(llm, drain_seconds=0.1) as run, slow(llm, 0.1), client_of(run) as client:
        pieces = client.completions.create(model="model", prompt="abc", max_tokens=108, stream=True)
        next(iter(pieces))
        run.call(run.server.stop)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(pieces)


def test_a_dead_engine_is_told_to_all(llm, goldens, capfd, monkeypatch):
    own = LLM(llm.target, str(goldens / "dspark_qwen3_tiny_vanilla_trained"), **SIZES)

    def broken():
        raise RuntimeError("the device is lost")

    with running(own) as run, slow(own), client_of(run) as client:
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(httpx.post, f"{run.address}/v1/completions", json=LONG, timeout=60)
            pieces = client.completions.create(model="model", prompt="abc", max_tokens=108, stream=True)
            next(iter(pieces))
            run.wait(lambda: run.server.engine.load.running == 2)

            own.engine.step = broken
            with pytest.raises(openai.APIError, match="the engine has failed"):
                list(pieces)
            assert waiting.result().status_code == 503
        assert httpx.get(f"{run.address}/health").status_code == 503
        refused = httpx.post(f"{run.address}/v1/completions", json=SHORT)
        assert refused.status_code == 503
        check_shape(refused.json())
        assert isinstance(run.server.engine.problem, RuntimeError)
    assert "the device is lost" in capfd.readouterr().err

    # The process: it says so, and ends by itself with an exit code that a supervisor sees.
    monkeypatch.setattr("serve.server.FAILED_SECONDS", 0.2)
    said: list[str] = []
    server = Server(lambda observer: own, FLAGS, said.append)

    def ask() -> None:
        address = f"http://127.0.0.1:{server.port}/v1/completions"
        while server.engine.state != "ready":
            time.sleep(0.01)
        own.engine.step = broken
        statuses.append(httpx.post(address, json=SHORT, timeout=60).status_code)

    statuses: list[int] = []
    thread = threading.Thread(target=ask)
    thread.start()
    assert server.run() == 1
    thread.join()
    assert statuses == [503]
    assert said[-1] == "the engine has failed; shutting down"
    del own.engine.step


def test_what_the_pool_never_holds_is_refused_with_the_numbers(llm):
    sizes: dict[str, Any] = SIZES | {"max_total_tokens": 48}
    small = LLM(llm.target, **sizes)
    with running(small) as run, client_of(run) as client:
        with pytest.raises(openai.BadRequestError, match="needs 4 KV pages and the pool has 3"):
            client.completions.create(model="model", prompt="a" * 40, max_tokens=20)
        assert client.completions.create(model="model", prompt="a" * 40, max_tokens=4).choices
        run.assert_free()


def test_a_model_that_cannot_be_loaded_ends_the_server():
    def load(observer) -> LLM:
        raise UserError("there is no such model; name another")

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match="no such model"):
        Server(load, FLAGS).run()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.slow
def test_the_process_from_start_to_sigterm(llm, goldens, tmp_path):
    """The command itself: start-up lines, a client, SIGTERM under load, exit codes."""
    model = text_model(goldens / "qwen3_tiny", tmp_path / "model", PIECES, EOS)
    words = ["serve", "--model-path", str(model), "--port", "0", "--max-running-requests", "2"]
    words += ["--context-length", "512", "--served-model-name", "tiny"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jspark", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr
        lines = []
        while "ready after" not in (lines or [""])[-1]:
            line = process.stderr.readline()
            assert line, "".join(lines)
            lines.append(line)
        start = "".join(lines)
        assert "model tiny (qwen3, float32)" in start
        assert "KV cache" in start
        address = start.split("listening on ")[1].split(";")[0]
        body = LONG | {"model": "tiny", "max_tokens": 400}
        with ThreadPoolExecutor(4) as pool:
            busy = [pool.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=120) for _ in range(4)]
            while 'requests_running{model_name="tiny"} 2.0' not in httpx.get(f"{address}/metrics").text:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert [b.result().json()["usage"]["completion_tokens"] for b in busy] == [400] * 4
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        log = [json.loads(line) for line in out.splitlines()]
        assert [r["status"] for r in log if r["path"] == "/v1/completions"] == [200] * 4
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
    # A port that is taken, before anything is loaded.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "jspark", "serve", "--model-path", str(model), "--port", port],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert (done.returncode, "choose another --host or --port" in done.stderr) == (2, True)
