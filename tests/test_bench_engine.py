"""`jspark bench engine` and `jspark bench soak` on tiny models, and the parts that can be checked by hand."""

import contextlib
import gzip
import json
from collections import Counter

import numpy as np
import pytest
from support import GOLDENS

from jspark.bench import soak
from jspark.bench.closed_loop import Steps, Turn, rates, step_seconds
from jspark.bench.device_trace import device_time, read_trace
from jspark.bench.engine import summary
from jspark.bench.workloads import WORKLOADS
from jspark.cli import main
from jspark.record import StepRecord

TINY = GOLDENS / "qwen3_tiny"
TRAINED = GOLDENS / "dspark_qwen3_tiny_vanilla_trained"


def test_workloads_are_all_different():
    kinds = {name: prompts for name, prompts in WORKLOADS.items() if name != "mixed"}
    everything = [p for prompts in kinds.values() for p in prompts]
    assert all(len(prompts) >= 24 for prompts in kinds.values())
    assert len(set(everything)) == len(everything)
    assert sorted(WORKLOADS["mixed"]) == sorted(everything)
    first = [next(name for name, own in kinds.items() if p in own) for p in WORKLOADS["mixed"][:4]]
    assert set(first) == set(kinds)


def trace(tmp_path, *kernels):
    """Events of a trace file: kernels as (pid, tid, begin µs, duration µs, launch), on a host and two devices."""
    names = [(1, "/host:CPU"), (2, "/device:GPU:0"), (3, "/device:GPU:1")]
    threads = [
        (1, 1, "python"),
        (2, 1, "Stream #13(Compute)"),
        (2, 2, "Stream #20(MemcpyD2H)"),
        (2, 9, "XLA Modules"),
    ]
    threads += [(3, 1, "Stream #13(Compute)")]
    events = [{"ph": "M", "pid": p, "name": "process_name", "args": {"name": n}} for p, n in names]
    events += [{"ph": "M", "pid": p, "tid": t, "name": "thread_name", "args": {"name": n}} for p, t, n in threads]
    for p, t, ts, d, *launch in kernels:
        args = {"args": {"correlation_id": launch[0]}} if launch else {}
        events.append({"ph": "X", "pid": p, "tid": t, "ts": ts, "dur": d, "name": "k", **args})
    file = tmp_path / "host.trace.json.gz"
    with gzip.open(file, "wt", encoding="utf-8") as out:
        json.dump({"displayTimeUnit": "ns", "traceEvents": [*events, {}]}, out)
    return read_trace(file)


def test_a_device_is_busy_where_any_of_its_streams_is(tmp_path):
    events = trace(
        tmp_path,
        (1, 1, 0, 5000),  # the host
        (2, 9, 100, 900),  # a line that groups kernels
        (2, 1, 100, 100, "7"),
        (2, 2, 150, 100, "8"),  # overlaps, and ends later
        (2, 1, 160, 10, "7"),
        (2, 1, 300, 200, "9"),
        (2, 1, 510, 90, "9"),  # of the same graph
        (3, 1, 0, 9999),  # another device
    )
    found = device_time(events)
    assert found is not None
    assert found.span == pytest.approx(500e-6)
    assert found.busy == pytest.approx(440e-6)
    assert found.gaps == pytest.approx((50e-6, 10e-6))
    assert found.idle_share == pytest.approx(0.12)
    assert found.between == pytest.approx(50e-6)
    assert found.between_share == pytest.approx(0.1)


def test_a_trace_without_kernels_says_nothing(tmp_path):
    assert device_time(trace(tmp_path, (1, 1, 0, 5000))) is None


def step(collected, request, count, window, prefill=0, accepted=None, position=10, tier=8):
    n = len(request)
    accepted = np.asarray(count) - 1 if accepted is None else np.asarray(accepted)
    return StepRecord(
        number=1,
        rows=n,
        verify_tokens=tier,
        prefill_tokens=prefill,
        dispatched=collected - 0.01,
        collected=collected,
        request=np.array(request),
        position=np.full(n, position),
        sampled=np.zeros(n, bool),
        drafted=np.full(n, 3),
        window=np.array(window),
        accepted=accepted,
        block_accepted=np.full(n, 2),
        count=np.array(count),
        finished=np.zeros(n, bool),
        confidence=np.zeros((n, 3)),
        survival=np.ones((n, 3)),
        prompt=np.full(n, 5),
        arrived=np.zeros(n),
    )


def test_figures_of_a_turn_by_hand():
    records = [
        step(1.0, [0], [1], [0], position=4, tier=4),  # the first token of request 0
        step(1.5, [0, 1], [2, 1], [3, 1]),
        step(2.0, [0, 1], [3, 2], [3, 1], tier=4),
        step(2.25, [0], [1], [2], prefill=32),
        step(2.5, [0], [2], [2]),
    ]
    t = Turn(0.5, 20, records, 2.0, 0.25, {0: ("math", 5), 1: ("poetry", 5)}, 0)
    assert [s for _, s in step_seconds(t)] == pytest.approx([0.5, 0.5])
    assert rates(t) == pytest.approx([8 / 1.5, 2 / 0.5])
    figures = summary([t, t], True, None)
    assert figures["tokens_per_second"] == pytest.approx(12 / 2)
    # Row steps after first tokens: 2 + 1 + 3 + 2 + 1 + 2 tokens in six of them.
    assert figures["accept_length"]["value"] == pytest.approx(11 / 6)
    assert figures["accept_length"]["low"] <= 11 / 6 <= figures["accept_length"]["high"]
    assert figures["mean_window"] == pytest.approx(2.0)
    assert figures["window_histogram"] == [0, 4, 4, 4]
    assert figures["tiers"] == {4: 4, 8: 6}
    assert figures["utilisation"] == pytest.approx(5 / 12)
    assert figures["step_ms"] == pytest.approx(500)
    assert figures["host_share"] == pytest.approx(0.125)
    assert figures["prefill_tokens_per_second"] == pytest.approx(40)
    assert figures["steps_with_prompts"] == 2
    assert figures["by_kind"]["poetry"] == {"accept_length": 1.5, "mean_window": 1.0}
    assert Steps.of([t, t]).request.max() == 3


def test_an_interrupted_run_keeps_its_cells(tmp_path, monkeypatch, capsys):
    @contextlib.contextmanager
    def until_second_cell():
        def tell(done: int, of: int, what: str) -> None:
            assert 0 <= done < of
            if "T 1:" in what:
                raise KeyboardInterrupt

        yield tell

    monkeypatch.setattr("jspark.bench.progress.progress", until_second_cell)
    table = tmp_path / "cost.json"
    # Four tokens cost hardly more than one, more cost much more.
    cost = {"draft": {"1": 0.001}, "verify": {"1": 0.010, "4": 0.011, "8": 0.2}}
    table.write_text(json.dumps(cost), encoding="utf-8")
    output = tmp_path / "engine.json"
    words = (
        f"bench engine --model-path {TINY} --speculative-draft-model-path {TRAINED} --concurrency 1 --fixed 3 "
        f"--new-tokens 10 --seconds 0.2 --rounds 2 --no-alone --no-audit --cost-table {table} --output {output}"
    )
    assert main(words.split()) == 130
    results = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert not results["complete"]
    assert output.with_suffix(".png").stat().st_size > 1000
    assert "interrupted" in " ".join(capsys.readouterr().out.split())
    (cell,) = results["cells"]
    assert (cell["temperature"], cell["concurrency"]) == (0, 1)
    arms = cell["arms"]
    assert list(arms) == ["none", "fixed 3", "full", "compact"]
    assert arms["none"]["mean_window"] == 0
    assert arms["none"]["accept_length"]["value"] == 1
    assert set(arms["none"]["tiers"]) == {"1"}
    assert arms["fixed 3"]["mean_window"] == 3
    assert arms["full"]["mean_window"] == 7
    assert arms["full"]["utilisation"] == 1
    assert set(arms["compact"]["tiers"]) <= {"1", "4", "8"}
    assert Counter(arms["compact"]["tiers"]).most_common(1)[0][0] == "4"
    for arm in arms.values():
        assert arm["compiled_within"] == 0
        assert 0 < arm["host_share"] <= 1
        assert arm["over_none"] == pytest.approx(arm["tokens_per_second"] / arms["none"]["tokens_per_second"])
        assert arm["device"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("engine --concurrency 0", "--concurrency is 0"),
        ("engine --concurrency x", "--concurrency 'x'"),
        ("engine --fixed 9", "--fixed 9"),
        ("engine --workload songs", "--workload 'songs'"),
        ("engine --new-tokens 100000", "--new-tokens 100000"),
        ("engine --temperature -1", "--temperature"),
        ("soak --streams 0", "--streams is 0"),
        ("soak --memory-share 0", "--memory-share"),
        ("soak --longest-prompt 4000", "4000 tokens"),
    ],
)
def test_bad_input(capsys, words, said):
    if words.startswith("engine"):
        words += f" --model-path {TINY} --speculative-draft-model-path {TRAINED}"
    assert main(f"bench {words}".split()) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert said in message


@pytest.mark.slow
def test_soak(tmp_path):
    output = tmp_path / "soak.json"
    words = (
        "bench soak --streams 6 --requests 40 --longest-prompt 90 --new-tokens 10 --checked 40 --chunk 64 "
        f"--aborted 0.2 --memory-share 0.3 --output {output}"
    )
    assert main(words.split()) == 0
    results = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert results["begun"] == 40
    assert results["whole"] + results["aborted"] == 40
    assert results["aborted"] > 0
    assert results["complete"] == results["whole"] == results["compared_with_plain"]
    assert results["wrong"] == []
    assert results["leaked_pages"] == results["leaked_slots"] == 0
    assert results["looks"][-1]["request"] == 40


def test_a_soak_with_something_wrong_fails():
    good = {"begun": 3, "settings": {"requests": 3}, "complete": 2, "whole": 2, "wrong": [], "leaked_pages": 0}
    good["leaked_slots"] = 0
    assert soak.passed(good)
    for wrong in ({"begun": 2}, {"complete": 1}, {"wrong": [1]}, {"leaked_pages": 1}, {"leaked_slots": 1}):
        assert not soak.passed(good | wrong)
