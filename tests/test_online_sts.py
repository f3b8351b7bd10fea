"""Online calibration: what probes say, refits, and that neither changes a token."""

import time
from dataclasses import replace

import numpy as np
import pytest
from support import drafter, mesh, prompts, run, target

from jspark.budget import Fixed, Threshold
from jspark.config import EngineConfig, OnlineCalibrationMode
from jspark.engine import Engine
from jspark.errors import UserError
from jspark.online_sts import OnlineCalibration, mean_ece
from jspark.request import Request, SamplingParams

NAME = "dspark_qwen3_tiny_vanilla_trained"
GAMMA = 4


def blocks(rng: np.random.Generator, n: int, doubt: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and drafts accepted of blocks whose true logits are `doubt` times smaller."""
    logits = rng.normal(1.0, 2.0, (n, GAMMA))
    passed = rng.random((n, GAMMA)) < 1 / (1 + np.exp(-logits / doubt))
    return logits, np.cumprod(passed, axis=1).sum(axis=1)


def settle(calibration: OnlineCalibration) -> np.ndarray | None:
    """Waits for the refit that `poll` begins."""
    assert calibration.poll() is None
    while calibration._thread is not None:
        if (table := calibration.poll()) is not None:
            return table
        time.sleep(0.01)
    return None


def test_drift_is_seen_and_refitted(rng):
    calibration = OnlineCalibration(np.ones((2, GAMMA)), 0.5, frozen=False, least=256)
    logits, accepted = blocks(rng, 2000, doubt=3.0)
    calibration.observe(logits, np.zeros(2000, np.int64), accepted, 2.0)
    before = calibration.figures
    assert before.blocks == (2000, 0)
    survived = (accepted[:, None] > np.arange(GAMMA)).mean(axis=0)
    np.testing.assert_allclose(before.observed[0], survived)
    assert (before.ece[0] > 0.05).all()
    assert np.isnan(before.ece[1]).all()
    table = settle(calibration)
    assert table is not None
    assert calibration.figures.refits == 1
    assert abs(table[0, 0] / 3.0 - 1) < 0.3
    assert (table[1] == 1).all(), "nothing is known of sampled requests"
    logits, accepted = blocks(rng, 2000, doubt=3.0)
    assert mean_ece(logits, accepted, np.ones(2000), table[0]) < 0.04
    assert (calibration.figures.ece[0] < before.ece[0]).all()
    # Honest now: more of the same calls for nothing.
    calibration.observe(logits, np.zeros(2000, np.int64), accepted, 2.0)
    assert settle(calibration) is None
    assert calibration.figures.refits == 1


def test_frozen_only_watches(rng):
    calibration = OnlineCalibration(np.ones((2, GAMMA)), 0.5, frozen=True, least=256)
    logits, accepted = blocks(rng, 2000, doubt=3.0)
    calibration.observe(logits, np.ones(2000, np.int64), accepted, 2.0)
    assert settle(calibration) is None
    assert (calibration.figures.ece[1] > 0.05).all()
    assert (calibration.figures.temperatures == 1).all()


def test_probes_are_unbiased_where_windows_are_not(rng):
    """Windows from confidence see likely blocks only; probes see the share that there is."""
    calibration = OnlineCalibration(np.ones((2, GAMMA)), 0.1, frozen=True)
    logits, accepted = blocks(rng, 20_000, doubt=1.0)
    slots = np.arange(100)
    picked = np.concatenate([calibration.probes(slots, 100) for _ in range(200)])
    assert abs(picked.mean() - 0.1) < 0.01
    calibration.observe(logits[picked], np.zeros(picked.sum(), np.int64), accepted[picked], 10.0)
    truth = (accepted[:, None] > np.arange(GAMMA)).mean(axis=0)
    np.testing.assert_allclose(calibration.figures.observed[0], truth, atol=0.04)
    # The draw of a slot does not depend on who else is in the step.
    one, other = (OnlineCalibration(np.ones((2, GAMMA)), 0.5, frozen=True, seed=3) for _ in range(2))
    assert (one.probes(slots, 100)[7:9] == other.probes(slots[7:9], 100)).all()


def engine(policy, share: float, mode: OnlineCalibrationMode = "on", **options) -> Engine:
    config = EngineConfig(
        max_running_requests=4,
        page_size=16,
        context_length=128,
        chunked_prefill_size=32,
        single_shapes=True,
        token_tiers=(32,),
        online_calibration=mode,
        probe_share=share,
    )
    config = replace(config, **options)
    return Engine(config, target("qwen3_tiny"), drafter(NAME), mesh=mesh(), policy=policy)


def requests() -> list[Request]:
    return [
        Request(i, p[: 24 + i], SamplingParams(temperature=i % 2, seed=i, max_tokens=40))
        for i, p in enumerate(prompts(NAME)[:4])
    ]


@pytest.fixture(scope="module")
def without() -> list[list[int]]:
    """Tokens without probes."""
    return [r.tokens for r in run(engine(Fixed(2), 0.0, "off"), requests())]


@pytest.mark.parametrize("overlap", [False, True])
def test_probes_and_refits_change_no_token(without, overlap):
    e = engine(Fixed(2), 0.3, overlap=overlap)
    assert e._calibration is not None
    # Every few blocks, whatever the error.
    e._calibration._least, e._calibration._bound = 8, -1.0
    for round_ in range(3):
        results = run(e, [replace(r, id=r.id + 10 * round_) for r in requests()])
        assert [r.tokens for r in results] == without
        windows = set().union(*(r.stats.windows for r in results))
        assert windows == {2, 7}, "some blocks were probes, the others fixed"
    figures = e.calibration
    assert figures is not None
    assert sum(figures.blocks) > 10
    assert figures.refits > 0
    assert e.temperatures is not None
    assert (e.temperatures != 1).any()
    np.testing.assert_array_equal(np.asarray(e.programs._sts), e.temperatures.astype(np.float32))


def test_every_row_counts_where_blocks_are_whole():
    e = engine(Threshold(0.5), 0.0, "frozen", verify_mode="cap-accept")
    results = run(e, requests()[:1])
    figures = e.calibration
    assert figures is not None
    assert figures.blocks == (results[0].stats.steps, 0)
    accepted = results[0].stats.block_accepted
    observed = [sum(n for a, n in accepted.items() if a > k) / sum(accepted.values()) for k in range(7)]
    np.testing.assert_allclose(figures.observed[0], observed)


def test_it_needs_a_confidence_head():
    config = EngineConfig(max_running_requests=1, context_length=64, online_calibration="on")
    with pytest.raises(UserError, match="needs a drafter"):
        Engine(config, target("qwen3_tiny"), mesh=mesh())
    with pytest.raises(UserError, match="does not have"):
        Engine(config, target("qwen3_tiny"), drafter("dflash_qwen3_tiny_trained"), mesh=mesh())
    with pytest.raises(UserError, match="from 0 to 1"):
        EngineConfig(probe_share=2)
