"""Traces: what is written is read back, and sums to the engine's own figures."""

import contextlib
import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import httpx
import numpy as np
import pytest
from serving import running
from support import drafter, mesh, prompts, run, target
from test_llm import EOS, PIECES, SIZES
from test_serve_faults import slow
from text_model import text_model

from jspark import LLM, trace
from jspark.budget import Fixed
from jspark.config import EngineConfig
from jspark.engine import Engine
from jspark.errors import UserError
from jspark.request import Request, SamplingParams

NAME = "dspark_qwen3_tiny_vanilla_trained"
HEADER = trace.Header("tiny", NAME, 7, "cap-accept", "Fixed(window=3)", 16, False, None, {"jspark": "0"}, "cpu")


def traced(path, buffer=trace.BUFFER):
    """(requests, their results, the trace) of an engine under cap-accept; the last request is aborted."""
    writer = trace.TraceWriter(path, HEADER, buffer)
    config = EngineConfig(
        max_running_requests=4,
        page_size=16,
        context_length=128,
        chunked_prefill_size=32,
        verify_mode="cap-accept",
        single_shapes=True,
    )
    hear = {"observer": writer, "on_abort": writer.end}
    engine = Engine(config, target("qwen3_tiny"), drafter(NAME), mesh=mesh(), policy=Fixed(3), **hear)
    requests = [
        Request(i, prompt[: 20 + i], SamplingParams(temperature=1, seed=i, max_tokens=12 + i))
        for i, prompt in enumerate(prompts(NAME)[:3])
    ]
    results = run(engine, requests)
    lost = Request(9, prompts(NAME)[0], SamplingParams(temperature=1, seed=9, max_tokens=40))
    engine.add(lost)
    while not (updates := engine.step()):
        pass
    # One that has tokens, twice; one that has none; one that has ended; one that nobody knows.
    engine.add(replace(lost, id=10))
    for request in (9, 9, 10, 0, 77):
        engine.abort(request)
    writer.close()
    return requests, results, len(updates[0].tokens), engine


def test_a_trace_says_what_the_engine_says(tmp_path):
    requests, results, aborted, engine = traced(tmp_path / "t.jsonl")
    found = trace.read(tmp_path / "t.jsonl")
    assert found.header == HEADER
    assert found.lost == 0
    assert [a.request for a in found.arrivals] == [0, 1, 2, 9]
    ends = {e.request: e for e in found.ends}
    assert len(ends) == len(found.ends) == 4
    assert ends[9] == trace.End(9, aborted, "abort")
    assert {ends[i].finish_reason for i in (0, 1, 2)} == {None}
    assert [s.number for s in found.steps] == list(range(1, len(found.steps) + 1))
    assert all(s > 0 for s in found.seconds)
    assert all(s.context == sum(s.position) for s in found.steps)
    columns = ((s.request, s.drafted, s.window, s.count, s.accepted) for s in found.steps)
    rows = [row for of_step in columns for row in zip(*of_step, strict=True)]
    assert sum(row[3] for row in rows if row[0] == 9) == aborted
    for request, result in zip(requests, results, strict=True):
        own = [row for row in rows if row[0] == request.id]
        arrival = found.arrivals[request.id]
        assert (arrival.prompt, arrival.sampled) == (len(request.prompt), request.params.temperature > 0)
        assert sum(row[3] for row in own) == len(result.tokens)
        assert ends[request.id].output == len(result.tokens)
        decode = [row for row in own if row[1]]
        assert Counter(row[2] for row in decode) == result.stats.windows == {3: result.stats.steps}
        assert Counter(row[4] for row in decode) == result.stats.accepted
    uncut = sum(sum(s.block_accepted) for s in found.steps)
    cut = sum(sum(s.accepted) for s in found.steps)
    engine.totals.add(results[0].stats)  # and back: totals hold what has ended, the aborted request included
    assert engine.totals.steps == sum(r.stats.steps for r in results) + results[0].stats.steps
    assert uncut > cut > 0
    for step in found.steps:
        for drafted, survival in zip(step.drafted, step.survival, strict=True):
            assert (survival is None) == (drafted == 0)
            if survival:
                assert len(survival) == 7
                assert np.all(np.diff(survival) <= 0)


def test_a_server_and_its_clients_end_requests(goldens, tmp_path):
    """By the limit, by a stop string, by leaving; then an iterator that is closed, and a step that fails."""
    model = text_model(goldens / "qwen3_tiny", tmp_path / "model", PIECES, EOS)
    path, drafter_folder = tmp_path / "t.jsonl", str(goldens / NAME)
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    with running(lambda o: LLM(str(model), drafter_folder, observer=o, trace_out=path, **SIZES)) as run:
        llm = run.server.engine.loaded
        assert llm is not None
        url = f"{run.address}/v1/completions"
        whole = httpx.post(url, json=body, timeout=60).json()["choices"][0]["text"]
        assert httpx.post(url, json=body | {"stop": whole[12:16]}, timeout=60).status_code == 200
        run.assert_free()
        with slow(llm), httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
            next(response.iter_lines())
        run.assert_free()
    assert llm.trace is not None
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with contextlib.closing(llm.stream("abc", params)) as pieces:
        next(pieces)
    llm.generate("abc", replace(params, stop=whole[12:16]))
    pieces = llm.stream("abc", params)
    next(pieces)

    def broken():
        raise RuntimeError("the device is lost")

    llm.engine.step = broken
    with pytest.raises(RuntimeError, match="is lost"):
        list(pieces)
    llm.trace.close()
    found = trace.read(path)
    *warm_up, limit, stopped, left, closed, stopped_here, failed = sorted(found.ends, key=lambda e: e.request)
    assert {e.finish_reason for e in warm_up} == {None}
    assert (limit.finish_reason, limit.output) == (None, 40)
    assert [e.finish_reason for e in (stopped, stopped_here)] == ["stop", "stop"]
    assert [e.finish_reason for e in (left, closed, failed)] == ["abort"] * 3
    assert {a.request for a in found.arrivals} == {e.request for e in found.ends}
    for end in found.ends:
        rows = ((r, n) for step in found.steps for r, n in zip(step.request, step.count, strict=True))
        assert end.output == sum(n for request, n in rows if request == end.request) > 0
    assert max(left.output, closed.output, failed.output) < 40


def test_a_trace_of_before_has_ends_without_reasons(tmp_path):
    traced(tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    older = [{k: v for k, v in line.items() if k != "finish_reason"} for line in lines]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in older))
    assert {e.finish_reason for e in trace.read(tmp_path / "t.jsonl").ends} == {None}


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    with pytest.raises(UserError, match="cannot be read"):
        trace.read(path)
    for text in ("{}\n", "no json\n", '{"kind":"step"}\n', "\n"):
        path.write_text(text)
        with pytest.raises(UserError, match="is no trace"):
            trace.read(path)
    with pytest.raises(UserError, match="cannot be written"):
        trace.TraceWriter(tmp_path / "none" / "t.jsonl", HEADER)


def test_a_full_disk_is_said_at_the_start(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /dev/full")
    with pytest.raises(UserError, match="No space"):
        trace.TraceWriter("/dev/full", HEADER)


#: Hands records over faster than they can be written, until it is interrupted.
FLOOD = """
import sys, numpy as np
from jspark import trace
from jspark.record import StepRecord
header = trace.Header("m", None, 1, "compact", "", 1, False, None, {}, "cpu")
writer = trace.TraceWriter(sys.argv[1], header, 64)
one = np.ones(1, int)
print("go", flush=True)
try:
    for n in range(10**9):
        values = [one] * 7 + [one > 2, np.zeros((1, 1)), np.ones((1, 1)), one, one * 1.0]
        writer(StepRecord(n, 1, 1, 0, 0.0, 1.0, one, one, one > 2, *values[:5], *values[7:]))
except KeyboardInterrupt:
    print(n + 1 - writer.lost)
"""


def test_an_interrupt_leaves_whole_lines(tmp_path):
    path = tmp_path / "t.jsonl"
    words = [sys.executable, "-c", FLOOD, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        while path.stat().st_size < 100_000:
            pass
        process.send_signal(signal.SIGINT)
        try:
            handed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert path.read_bytes().endswith(b"\n")
    found = trace.read(path)
    # The last one may have been on its way into the buffer.
    assert int(handed) - 1 <= len(found.steps) <= int(handed)
    assert found.lost > 0
    # A line that was cut off is left out.
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert 0 < len(trace.read(path).steps) < len(found.steps)
