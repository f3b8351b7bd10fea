"""The benchmark commands end to end on a tiny target; speed itself is not asserted."""

import json
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file
from support import GOLDENS, mesh, target

from jspark.bench import ceilings
from jspark.bench.ceilings import Ceilings, Work
from jspark.bench.load import Load, Settings
from jspark.cli import main
from jspark.models.drafter import Drafter
from jspark.weights import random_drafter, untrained_drafter_config

TINY = str(GOLDENS / "qwen3_tiny")
HEAD = {"benchmark", "command", "date", "versions", "device", "results"}
#: Parameters of the tiny target, and of its embedding.
SIZES = {name: x.size for name, x in load_file(f"{TINY}/model.safetensors").items()}
EMBEDDING = SIZES["model.embed_tokens.weight"]


def record(path: Path) -> dict:
    """The record, once its picture is seen to be one."""
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads(path.read_text())
    assert saved.keys() == HEAD
    return saved


def refusal(capsys, command: str) -> str:
    assert main(command.split()) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_bench_kernels_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(ceilings._BUFFER, "cpu", 2**23)
    output = tmp_path / "kernels.json"
    words = f"bench kernels --output {output}"
    assert main(words.split()) == 0
    assert "need an NVIDIA GPU" in capsys.readouterr().out
    results = record(output)["results"]
    assert {op["version"] for op in results["ops"]} == {"xla"}
    for op in results["ops"]:
        assert op["error"] < 1e-6
        assert op["us"] >= min(op["us_of_batches"]) > 0
    assert main(f"bench kernels --soak 0.1 --output {output}".split()) == 0
    soaked = record(output)["results"]
    assert soaked["errors"]["xla"]
    assert max(soaked["errors"]["xla"]) < soaked["bound"]


@pytest.mark.slow
def test_bench_cpu(tmp_path, capsys):
    output = tmp_path / "new" / "cpu.json"
    words = f"bench cpu --model-path {TINY} --new-tokens 6 --context 9 --repeats 2 --output {output}"
    assert main(words.split()) == 0
    assert "comparison with transformers was left out" in " ".join(capsys.readouterr().out.split())
    saved = record(output)
    assert saved["command"] == f"jspark {words}"
    results = saved["results"]
    ours, first, second = results["jspark"], results["first_start"], results["second_start"]
    assert results["transformers"] is None
    assert len(ours["ms_per_token_of_repeats"]) == 2
    assert min(ours["ms_per_token"], ours["tokens_per_second"], ours["prefill_ms"], first["load_seconds"]) > 0
    assert first["programs"] == second["programs"] > 0
    assert first["cache_hits"] == 0
    assert 0 < first["compile_seconds"] < first["seconds"]
    memory = results["memory"]
    assert memory["weight_bytes"] == 4 * sum(SIZES.values())
    # 15 tokens on one page, and the bin page: K and V of six layers, two heads of 16 float32.
    assert memory["kv_pool_bytes"] == 2 * 64 * 2 * 6 * 2 * 16 * 4
    assert memory["peak_rss_bytes"] > memory["weight_bytes"]
    floor = results["floor"]
    assert floor["ratio"] == pytest.approx(ours["ms_per_token"] / floor["ms_per_token"])


def test_bench_step(tmp_path):
    output = tmp_path / "step.json"
    words = f"bench step --model-path {TINY} --rows 3 --context 40 --block-size 3 --steps 2 --output {output}"
    assert main(words.split()) == 0
    results = record(output)["results"]
    tokens = {(p["program"], p["rows"]): p["tokens"] for p in results["programs"]}
    assert tokens == {
        ("verify plain", 3): 3,
        ("propose", 3): 9,
        ("verify middle", 3): 6,
        ("verify full", 3): 12,
    }
    for p in results["programs"]:
        assert p["ratio"] == pytest.approx(p["ms"] / p["floor_ms"])
        assert len(p["ms_of_batches"]) == results["batches"]
    assert [(e["algorithm"], e["rows"]) for e in results["engine"]] == [
        ("NONE", 3),
        ("DSPARK", 3),
    ]
    for e in results["engine"]:
        assert e["steps_counted"] == 2
        assert min(e["step_ms"], e["programs_ms"], e["dispatch_ms"], e["floor_ms"], e["kv_pool_bytes"]) > 0


def test_bench_host(tmp_path):
    output = tmp_path / "host.json"
    command = f"bench host --rows 2 --steps 3 --scheduler-rows 8 --output {output}"
    assert main(command.split()) == 0
    results = record(output)["results"]
    (engine,) = results["engine"]
    assert engine["rows"] == 2
    assert min(engine["stages_us"][s] for s in ("rows", "budget", "arguments", "dispatch", "collect", "rest")) > 0
    assert engine["step_us"] <= engine["p90_us"]
    assert results["scheduler"]["step_us"] > 0


def test_target_pass_counts_by_hand():
    model, config = target("qwen3_tiny")
    work = ceilings.target_pass(model, config, rows=2, tokens=6, context=10)
    rest = sum(SIZES.values()) - EMBEDDING
    keys_values = 2 * 10 * 2 * 6 * 2 * 16 * 4
    assert work.bytes == 4 * rest + 6 * 64 * 4 + keys_values
    # Scores and their sum: 2 products of 4 heads × 16 for each of 10 positions, in each of 6 layers.
    assert work.flops == 2 * 6 * rest + 2 * 2 * 6 * 10 * 4 * 16 * 6


def test_drafting_reads_the_head_once_and_no_projection_of_features():
    model, config = target("qwen3_tiny")
    own = untrained_drafter_config(config, block_size=3)
    drafter = random_drafter(own, jnp.float32, mesh())
    assert isinstance(drafter, Drafter)
    work = ceilings.propose_pass(drafter, own, model, rows=1, block_size=3, context=0)
    everything = ceilings.weight_bytes(drafter) + 4 * SIZES["lm_head.weight"]
    features = 4 * (len(own.target_layer_ids) * 64 * 64 + 64)
    lookup = 4 * config.vocab_size * own.markov_rank
    assert work.bytes == everything - features - lookup


def test_floor_takes_the_longer_of_reading_and_arithmetic():
    limits = Ceilings("float32", read_bandwidth=10.0, matmul_rate=100.0)
    assert limits.floor(Work(bytes=20, flops=100)).seconds == 2.0
    assert limits.floor(Work(bytes=20, flops=100)).bound == "reading"
    assert limits.floor(Work(bytes=20, flops=500)).seconds == 5.0
    assert limits.floor(Work(bytes=20, flops=500)).bound == "arithmetic"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cpu --repeats 0", "--repeats is 0"),
        ("cpu --new-tokens 1", "--new-tokens is 1"),
        ("cpu --reference-python {folder}/none", "cannot be run"),
        ("cpu --output {folder}/figures.txt", "ends in .json"),
        ("step --rows 1,x", "--rows '1,x'"),
        ("step --rows 0", "at least 1"),
        ("step --context 20", "--context 20"),
        ("step --output {folder}/figures", "ends in .json"),
    ],
)
def test_bad_input(tmp_path, capsys, words, said):
    words = words.format(folder=tmp_path)
    output = "" if "--output" in words else f" --output {tmp_path}/r.json"
    assert said in refusal(capsys, f"bench {words} --model-path {TINY}{output}")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.skipif(find_spec("torch") is not None, reason="this interpreter has torch")
def test_interpreter_without_transformers(tmp_path, capsys):
    command = f"bench cpu --model-path {TINY} --reference-python {sys.executable} --output {tmp_path}/r.json"
    message = refusal(capsys, command)
    assert "torch" in message
    assert "benchmarks/README.md" in message


@pytest.mark.slow
@pytest.mark.skipif("JSPARK_REFERENCE_PYTHON" not in os.environ, reason="names no interpreter with transformers")
def test_bench_cpu_beside_transformers(tmp_path):
    output = tmp_path / "cpu.json"
    python = os.environ["JSPARK_REFERENCE_PYTHON"]
    command = f"bench cpu --new-tokens 12 --context 20 --repeats 2 --reference-python {python} --output {output}"
    assert main(command.split()) == 0
    theirs = record(output)["results"]["transformers"]
    assert theirs["tokens_equal"]
    assert len(theirs["ms_per_token_of_repeats"]) == 2
    assert theirs["versions"].keys() == {"python", "torch", "transformers"}


def test_bench_serve_refuses_what_contradicts_itself(capsys):
    for words, why in (
        ("--concurrency none", "nothing to measure"),
        ("--concurrency 1,x", "whole numbers"),
        ("--url http://127.0.0.1:1 --starts", "a server of their own"),
        ("--prompt-tokens 0-5", "no length or range"),
        ("--seeded 2", "between 0 and 1"),
        ("--requests 0", "at least 1"),
        ("--requests-per-client 0", "at least 1"),
    ):
        assert why in refusal(capsys, f"bench serve {words}")


def test_a_load_is_the_same_every_time_and_has_both_ends():
    settings = Settings((4,), 100, 0.2, 0.5, prompts=20, prompt_tokens=(1, 300), new_tokens=5, seed=3)
    load = Load(settings, 50)
    lengths = [len(prompt) for prompt in load.prompts]
    assert (min(lengths), max(lengths), len(lengths)) == (1, 300, 20)
    assert all(0 <= t < 50 for prompt in load.prompts for t in prompt)
    assert load.prompts == Load(settings, 50).prompts
    assert 0 < sum("seed" in s for s in load.sampling) < 20
    leaves = load.leaves(4, 100)
    assert set(leaves.values()) <= {1, 2, 3}
    assert 5 < len(leaves) < 40
    assert [settings.count(n) for n in (1, 60, 400)] == [100, 100, 100]
    assert [replace(settings, per_asker=8).count(n) for n in (1, 60, 400)] == [8, 100, 100]
