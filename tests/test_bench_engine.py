"""`jspark bench soak` on a tiny model, workloads, and the trace of a device."""

import gzip
import json

import pytest

from jspark.bench import soak
from jspark.bench.device_trace import device_time, read_trace
from jspark.bench.workloads import WORKLOADS
from jspark.cli import main


def test_workloads_are_all_different():
    kinds = {name: prompts for name, prompts in WORKLOADS.items() if name != "mixed"}
    everything = [p for prompts in kinds.values() for p in prompts]
    assert all(len(prompts) >= 24 for prompts in kinds.values())
    assert len(set(everything)) == len(everything)
    assert sorted(WORKLOADS["mixed"]) == sorted(everything)
    first = [next(name for name, own in kinds.items() if p in own) for p in WORKLOADS["mixed"][:4]]
    assert set(first) == set(kinds)


def trace(tmp_path, *kernels):
    """Events of a trace file: kernels as (pid, tid, begin µs, duration µs), on a host and two devices."""
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
    events += [{"ph": "X", "pid": p, "tid": t, "ts": ts, "dur": d, "name": "k"} for p, t, ts, d in kernels]
    file = tmp_path / "host.trace.json.gz"
    with gzip.open(file, "wt", encoding="utf-8") as out:
        json.dump({"displayTimeUnit": "ns", "traceEvents": [*events, {}]}, out)
    return read_trace(file)


def test_a_device_is_busy_where_any_of_its_streams_is(tmp_path):
    events = trace(
        tmp_path,
        (1, 1, 0, 5000),  # the host
        (2, 9, 100, 900),  # a line that groups kernels
        (2, 1, 100, 100),
        (2, 2, 150, 100),  # overlaps, and ends later
        (2, 1, 160, 10),
        (2, 1, 300, 200),
        (2, 1, 510, 90),
        (3, 1, 0, 9999),  # another device
    )
    found = device_time(events)
    assert found is not None
    assert found.span == pytest.approx(500e-6)
    assert found.busy == pytest.approx(440e-6)
    assert found.gaps == pytest.approx((50e-6, 10e-6))
    assert found.idle_share == pytest.approx(0.12)


def test_a_trace_without_kernels_says_nothing(tmp_path):
    assert device_time(trace(tmp_path, (1, 1, 0, 5000))) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("soak --streams 0", "--streams is 0"),
        ("soak --memory-share 0", "--memory-share"),
        ("soak --longest-prompt 4000", "4000 tokens"),
    ],
)
def test_bad_input(capsys, words, said):
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
    assert results["preemptions"] > 0
    assert results["looks"][-1]["request"] == 40


def test_a_soak_with_something_wrong_fails():
    good = {"begun": 3, "settings": {"requests": 3}, "complete": 2, "whole": 2, "wrong": [], "leaked_pages": 0}
    good["leaked_slots"] = 0
    assert soak.passed(good)
    for wrong in ({"begun": 2}, {"complete": 1}, {"wrong": [1]}, {"leaked_pages": 1}, {"leaked_slots": 1}):
        assert not soak.passed(good | wrong)
