"""What an observer of the engine sees, against the reference's own record of its steps."""

import numpy as np
import pytest
from support import arrays, drafter, make_engine, prompts, run, target

from jspark.budget import GlobalArgmax, Threshold
from jspark.calibration import Temperatures
from jspark.config import EngineConfig
from jspark.cost import CostTable
from jspark.record import StepRecord
from jspark.request import Request, SamplingParams

NAME = "dspark_qwen3_tiny_vanilla_trained"
GREEDY = SamplingParams(temperature=0, max_tokens=48)


def observe(requests, policy=None, sts=None, **sizes) -> tuple[list[StepRecord], list]:
    records: list[StepRecord] = []
    config = EngineConfig(
        max_running_requests=4, page_size=16, context_length=128, chunked_prefill_size=32, **sizes
    )
    engine = make_engine(
        config, target("qwen3_tiny"), drafter(NAME), policy=policy, sts=sts, observer=records.append
    )
    return records, run(engine, requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_records_are_the_references_steps(overlap):
    inputs = prompts(NAME)
    sampled = Request(9, inputs[0], SamplingParams(temperature=1, seed=1, max_tokens=20))
    requests = [*(Request(i, p, GREEDY) for i, p in enumerate(inputs)), sampled]
    records, results = observe(requests, verify_mode="static", single_shapes=True, overlap=overlap)
    assert [r.number for r in records] == sorted({r.number for r in records})
    assert all(r.dispatched < r.collected for r in records)
    assert {(r.rows, r.verify_tokens) for r in records} == {(4, 4), (4, 32)}
    assert {r.prefill_tokens for r in records} == {0, 32}
    assert all(r.confidence.shape == (len(r.request), 7) for r in records)
    joined = {
        name: np.concatenate([getattr(r, name) for r in records])
        for name in (
            "request",
            "position",
            "sampled",
            "drafted",
            "window",
            "block_accepted",
            "count",
            "confidence",
        )
    }
    outputs = arrays(NAME)[1]
    for request, result in zip(requests, results, strict=True):
        own = {name: values[joined["request"] == request.id] for name, values in joined.items()}
        assert own["count"].sum() == len(result.tokens)
        assert (
            own["position"].tolist() == (len(request.prompt) - 1 + np.cumsum(own["count"]) - own["count"]).tolist()
        )
        assert own["sampled"].all() == own["sampled"].any() == (request.id == 9)
        assert own["drafted"].tolist() == own["window"].tolist() == [0] + [7] * result.stats.steps
        assert np.isnan(own["confidence"][0]).all()
        if request.id == 9:
            continue
        i, steps = request.id, result.stats.steps
        assert (own["block_accepted"][1:] + 1).tolist() == outputs[f"p{i}_acceptance_lengths"][:steps].tolist()
        want = outputs[f"p{i}_step_confidence_logits"][:steps]
        np.testing.assert_allclose(own["confidence"][1:], want, rtol=1e-3, atol=1e-3)


def test_greedy_and_sampled_requests_have_temperatures_of_their_own():
    """A tiny temperature makes a certainty of every doubt, a huge one a coin flip that the threshold refuses."""
    params = (GREEDY, SamplingParams(temperature=1, seed=3, max_tokens=12))
    requests = [Request(i, prompts(NAME)[0], p) for i, p in enumerate(params)]
    sts = Temperatures(greedy=(1e-6,) * 7, sampled=(1e6,) * 7)
    records, _ = observe(requests, Threshold(0.7), sts, single_shapes=True, overlap=False)
    windows = {i: np.concatenate([r.window[r.request == i] for r in records]) for i in (0, 1)}
    assert windows[0].max() == 7
    assert windows[1].max() == 0


def test_a_doubtful_block_stops_drafting_for_a_step_or_two():
    """Drafting pays on average here and not where confidence is low: plain steps stay few."""
    request = Request(0, prompts(NAME)[1], SamplingParams(temperature=1, seed=1, max_tokens=110))
    table = CostTable({1: 1.1}, {t: 1.0 + 0.02 * t for t in range(1, 9)})
    sizes = {"token_tiers": (2, 3, 4, 6), "row_buckets": (1, 4)}
    records, _ = observe([request], policy=GlobalArgmax(table), **sizes)
    drafted = [int(r.drafted[0]) for r in records if len(r.drafted)][1:]
    assert set(drafted) == {0, 7}
    plain = "".join("x" if d else "." for d in drafted)
    assert max(map(len, plain.split("x"))) <= 3, plain
    for r in records:
        assert np.isnan(r.confidence[r.drafted == 0]).all()
