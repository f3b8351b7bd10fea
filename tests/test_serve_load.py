"""Long runs against a server process: many streams, generated requests, hostile grammars. All are slow."""

import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from test_structured import EOS, PIECES
from text_model import text_model

from jspark.bench.serve import Settings, measure, started

SIZES = "--max-running-requests 32 --context-length 128 --page-size 16"


@pytest.fixture(scope="module")
def server(goldens, tmp_path_factory):
    """Address and process of a server of the tiny models."""
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("load") / "model", PIECES, EOS)
    drafter = goldens / "dspark_qwen3_tiny_vanilla_trained"
    with started(f"--model-path {model} --speculative-draft-model-path {drafter} {SIZES}") as found:
        yield found


def state(address: str) -> dict:
    return httpx.get(f"{address}/server_info", timeout=60).json()["internal_states"][0]


@pytest.mark.slow
def test_256_streams_of_which_a_tenth_goes_away(server):
    address, process = server
    settings = Settings(
        concurrency=(256,), requests=2000, cancelled=0.1, prompts=16, prompt_tokens=16, new_tokens=24, seed=0
    )
    [run] = measure(address, settings, process)["runs"]
    assert (run["wrong"], run["failed"], run["failures"]) == (0, 0, [])
    assert run["whole"] + run["left"] == 2000
    assert 120 < run["left"] < 280
    assert (run["leaked_slots"], run["leaked_pages"]) == (0, 0)
    grown = run["resident_bytes_after"] - run["resident_bytes_before"]
    assert grown < 64 << 20, f"memory grew by {grown} bytes"


@pytest.mark.slow
def test_requests_made_from_the_servers_own_description(server):
    address, _ = server
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{address}/openapi.json", "--no-color"]
    # Values that fit the description can still be refused: no schema says that a prompt fits the context.
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--request-timeout", "120"]
    command += ["--max-response-time", "120"]
    command += ["--suppress-health-check", "all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    after = state(address)
    assert (after["num_live_reqs"], after["free_pages"]) == (0, after["pages"])


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
    address, _ = server
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
    after = state(address)
    assert (after["num_live_reqs"], after["free_pages"]) == (0, after["pages"])
