"""Benchmark clients of others, unchanged, against a server process: each where it is on the PATH.

How they are installed, and what they print, is in docs/clients.md.
"""

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from test_structured import EOS, PIECES
from text_model import text_model

from jspark.bench.server_process import started

SIZES = "--max-running-requests 4 --context-length 256 --page-size 16 --single-shapes --served-model-name tiny"
REQUESTS = 12


@pytest.fixture(scope="module")
def folder(goldens, tmp_path_factory) -> Path:
    """The tiny model with a tokenizer that transformers reads."""
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("clients") / "model", PIECES, EOS)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


@pytest.fixture(scope="module")
def server(goldens, folder):
    drafter = goldens / "dspark_qwen3_tiny_vanilla_trained"
    with started(f"--model-path {folder} --speculative-draft-model-path {drafter} {SIZES}") as found:
        yield found


def run(words: list[str], where: Path) -> str:
    """What the client prints; the test is skipped where it is not installed."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not on the PATH")
    done = subprocess.run(words, capture_output=True, text=True, cwd=where, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def generated(server) -> float:
    """Answers that ended by themselves so far."""
    page = httpx.get(f"{server.address}/metrics").text
    return sum(
        float(line.split()[-1]) for line in page.splitlines() if line.startswith("jspark:request_success_total")
    )


@pytest.mark.slow
def test_guidellm(server, folder, tmp_path):
    before = generated(server)
    data = "kind=synthetic_text,prompt_tokens=16,output_tokens=8"
    words = ["guidellm", "run", "--backend", f"kind=openai_http,target={server.address}/v1"]
    words += ["--profile", "kind=concurrent,streams=[3]", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    words += ["--tokenizer", f"kind=hf_auto,model={folder}", "--data", data]
    words += ["--output", "kind=json,path=report.json", "--disable-progress"]
    run(words, tmp_path)
    [one] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = one["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert generated(server) - before >= REQUESTS


@pytest.mark.slow
def test_aiperf(server, folder, tmp_path):
    before = generated(server)
    words = ["aiperf", "profile", "--model", "tiny", "--url", server.address, "--endpoint-type", "chat"]
    words += ["--streaming", "--tokenizer", str(folder), "--concurrency", "3", "--request-count", str(REQUESTS)]
    words += ["--isl", "16", "--osl", "8", "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    words += ["--artifact-dir", "out"]
    run(words, tmp_path)
    [report] = (tmp_path / "out").rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert not found.get("error_request_count", {}).get("avg")
    assert generated(server) - before >= REQUESTS


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_sglang_bench_serving(server, folder, tmp_path, backend):
    if shutil.which("sglang") is None:
        pytest.skip("sglang is not on the PATH")
    python = Path(str(shutil.which("sglang"))).with_name("python")
    words = [str(python), "-m", "sglang.bench_serving", "--backend", backend, "--base-url", server.address]
    words += ["--model", "tiny", "--tokenizer", str(folder), "--dataset-name", "random-ids"]
    words += ["--num-prompts", str(REQUESTS), "--random-input-len", "16", "--random-output-len", "8"]
    words += ["--output-file", "out.jsonl", "--seed", "1"]
    run(words, tmp_path)
    found = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
    assert found["completed"] == REQUESTS
    assert found["accept_length"] > 0
