"""Long runs against a server process: many streams, generated requests, hostile grammars. All are slow."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fuzz_bodies import bodies, regexes, schemas
from serving import check_shape
from test_structured import EOS, PIECES
from text_model import text_model

from jspark.bench.engine_alone import apart
from jspark.bench.load import Settings
from jspark.bench.serve import measure
from jspark.bench.server_process import started

#: Programs that are compiled in the background would be part of the memory that grows.
SIZES = "--max-running-requests 32 --context-length 128 --page-size 16 --no-background-compile"


@pytest.fixture(scope="module")
def flags(goldens, tmp_path_factory):
    """Of a server of the tiny models."""
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("load") / "model", PIECES, EOS)
    drafter = goldens / "dspark_qwen3_tiny_vanilla_trained"
    return f"--model-path {model} --speculative-draft-model-path {drafter} {SIZES}"


@pytest.fixture(scope="module")
def server(flags):
    with started(flags) as found:
        yield found


def state(server) -> dict:
    return httpx.get(f"{server.address}/server_info", timeout=60).json()["internal_states"][0]


def assert_free(server) -> None:
    """No slot, no page and no request is left over."""
    for _ in range(100):
        httpx.post(f"{server.address}/flush_cache", timeout=60)
        after = state(server)
        if not after["num_live_reqs"] and after["free_pages"] == after["pages"]:
            return
        time.sleep(0.1)
    raise AssertionError(after)


def resident(server) -> int:
    """Bytes of the server's process."""
    return int(Path(f"/proc/{server.process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_256_streams_of_which_a_tenth_goes_away(flags, server):
    settings = Settings(
        concurrency=(256,),
        requests=2000,
        cancelled=0.1,
        seeded=0.5,
        prompts=32,
        prompt_tokens=(1, 100),
        new_tokens=24,
        seed=0,
    )
    expected = apart(flags, replace(settings, concurrency=()))["expected"]
    [run] = measure(server.address, settings, server.process, expected)["runs"]
    assert (run["wrong"], run["failed"], run["failures"]) == (0, 0, [])
    assert run["whole"] + run["left"] == 2000
    assert 120 < run["left"] < 280
    assert (run["leaked_slots"], run["leaked_pages"]) == (0, 0)
    grown = run["resident_bytes_after"] - run["resident_bytes_middle"]
    assert grown < 32 << 20, f"memory grew by {grown} bytes in the second half"


@pytest.mark.slow
def test_bodies_of_a_fuzzer_are_answered_or_refused(server):
    before = resident(server)
    with httpx.Client(base_url=server.address, timeout=60) as client:
        for path, body in bodies(seed=0, count=1500):
            answer = client.post(path, content=body)
            assert answer.status_code in (200, 400, 404, 413, 429), (path, body[:300], answer.text[:300])
            if answer.status_code != 200:
                check_shape(answer.json())
    assert_free(server)
    assert resident(server) - before < 512 << 20


@pytest.mark.slow
def test_grammars_of_a_fuzzer_are_answered_or_refused(server):
    before = resident(server)
    asked = [{"regex": regex} for regex in regexes(seed=0, count=60)]
    asked += [{"json": schema} for schema in schemas(seed=0, count=60)]
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0}

    def ask(outputs: dict) -> tuple[int, str]:
        answer = httpx.post(
            f"{server.address}/v1/completions", json=body | {"structured_outputs": outputs}, timeout=300
        )
        return answer.status_code, answer.text[:300]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, asked))
    for outputs, (status, text) in zip(asked, answers, strict=True):
        assert status in (200, 400), (str(outputs)[:200], text)
    assert {status for status, _ in answers} == {200, 400}
    assert_free(server)
    assert resident(server) - before < 1 << 30


@pytest.mark.slow
def test_requests_made_from_the_servers_own_description(server):
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        "run",
        f"{server.address}/openapi.json",
        "--no-color",
    ]
    # Values that fit the description can still be refused: no schema says that a prompt fits the context.
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--request-timeout", "120"]
    command += ["--max-response-time", "120"]
    command += ["--suppress-health-check", "all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert_free(server)


DEEP: dict = {"type": "object"}
for _ in range(150):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}
HOSTILE = [
    {"json": DEEP},
    {"json": {"$ref": "#"}},
    {"json": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(500)]}},
    {"json": {"enum": [f"value {i}" for i in range(8000)]}},
    {"json": {"type": "string", "pattern": "(a|a)*b{1,1000}(c|c|c)*"}},
    {"json": {"type": "array", "minItems": 10**9}},
    {
        "json": {
            "allOf": [{"anyOf": [{"multipleOf": p}, {"type": "string"}]} for p in (2, 3, 5, 7, 11, 13, 17, 19)]
        }
    },
    {"regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    {"regex": "(a+)+$"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"regex": "[^a]*" * 2000},
    {"regex": "(?=a)b"},
    {"choice": ["x" * 5000 + str(i) for i in range(30)]},
    {"grammar": "start: start start | "},
    {"grammar": 'start: a\na: b b\nb: c c\nc: d d\nd: "x"*'},
    {"grammar": "start: " + " ".join(f'"{i}"?' for i in range(3000))},
]


@pytest.mark.slow
def test_hostile_grammars_are_served_or_refused_while_others_go_on(server):
    address = server.address
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
    ended, plain = threading.Event(), []

    def others() -> None:
        while not ended.is_set():
            plain.append(httpx.post(f"{address}/v1/completions", json=body, timeout=30).status_code)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for outputs in HOSTILE:
            more = {"structured_outputs": outputs, "max_tokens": 20}
            done = httpx.post(f"{address}/v1/completions", json=body | more, timeout=150)
            assert done.status_code in (200, 400), (str(outputs)[:100], done.text[:300])
    finally:
        ended.set()
        thread.join()
    assert set(plain) == {200}
    assert_free(server)
