"""Figures of an evaluation against hand counts and brute force, on arrays alone."""

import numpy as np
import pytest

from jspark import sts
from jspark.evaluate import text_shape
from jspark.evaluate.accept_length import Counts, Figure, Macro, conditional_acceptance, threshold_sweep
from jspark.evaluate.confidence import auc, bins, brier, scores, survival
from jspark.sts import survived


def test_scores_by_hand():
    prediction = np.array([0.1, 0.1, 0.5, 0.9])
    outcome = np.array([False, True, True, True])
    # Bins of 1/15: two predictions in one (mean 0.1, half true), the others alone.
    assert bins(prediction, outcome).ece == pytest.approx((2 * 0.4 + 0.5 + 0.1) / 4)
    # The false case ties with one true case and is below the two others.
    assert auc(prediction, outcome) == pytest.approx((0.5 + 1 + 1) / 3)
    assert brier(prediction, outcome) == pytest.approx((0.01 + 0.81 + 0.25 + 0.01) / 4)
    assert np.isnan(auc(prediction, np.ones(4, bool)))
    assert bins(np.array([0.0, 1.0]), np.array([False, True])).ece == 0


def test_chance_alone_gives_the_ece_that_is_stated_as_chance(rng):
    prediction = rng.random(2000)
    s = scores(prediction, rng.random(2000) < prediction)
    assert 0.01 < s.ece_noise < 0.04
    assert abs(s.ece - s.ece_noise) < 0.015
    assert scores(prediction, rng.random(2000) < prediction**2).ece > 0.1


def test_survival_and_labels():
    logits = np.array([[0.0, np.log(3)]], np.float32)
    np.testing.assert_allclose(survival(logits), [[0.5, 0.375]], rtol=1e-6)
    np.testing.assert_allclose(survival(logits, np.array([1.0, 1e9])), [[0.5, 0.25]], rtol=1e-6)
    assert survived(np.array([0, 1, 2]), 2).tolist() == [[False, False], [True, False], [True, True]]


def drawn(rng, n, temperatures):
    """Logits, and how far blocks survive when σ(logit / T) is the truth."""
    logits = rng.normal(1.5, 2.0, (n, len(temperatures))) * temperatures
    kept = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / temperatures))
    return logits.astype(np.float32), np.cumprod(kept, axis=1).sum(axis=1)


def test_the_fit_recovers_temperatures_and_holds_on_new_data(rng):
    truth = np.array([2.5, 0.6, 1.4])
    fitted = np.array(sts.fit(*drawn(rng, 60_000, truth)))
    np.testing.assert_allclose(fitted, truth, rtol=0.12)
    logits, accepted = drawn(rng, 60_000, truth)
    for k in range(3):
        before, after = survival(logits)[:, k], survival(logits, fitted)[:, k]
        outcome = survived(accepted, 3)[:, k]
        assert bins(after, outcome).ece < min(0.01, bins(before, outcome).ece)
    # Scaling one position by one temperature keeps the order of its conditional confidences.
    order = np.argsort(logits, axis=0, kind="stable")
    scaled = np.take_along_axis(logits / fitted, order, 0)
    assert (scaled[1:] >= scaled[:-1]).all()


def test_the_fit_of_what_is_calibrated_is_near_one(rng):
    fitted = sts.fit(*drawn(rng, 60_000, np.ones(4)))
    np.testing.assert_allclose(fitted, 1.0, rtol=0.12)
    assert len(sts.fit(np.zeros((5, 2), np.float32), np.zeros(5, int))) == 2


def brute_loop(tokens) -> bool:
    for n in range(1, text_shape.LONGEST + 1):
        need = max(3 * n, 12)
        tail = list(tokens[-need:])
        if len(tokens) >= need and all(tail[i] == tail[i - n] for i in range(n, need)):
            return True
    return False


def test_loops_are_found_as_the_rule_says(rng):
    unit = [5, 6, 7, 8, 9]
    cases = [
        [*range(20), *unit * 4, *range(30, 40)],
        [1] * 11,
        [1] * 12,
        [*range(64)] * 3,
        [*range(65)] * 4,
        rng.integers(0, 2, 200).tolist(),
        [3],
        [],
    ]
    for tokens in cases:
        tokens = np.array(tokens, np.int32)
        want = [brute_loop(tokens[: i + 1]) for i in range(len(tokens))]
        assert text_shape.in_loop(tokens).tolist() == want
    assert text_shape.in_loop(np.array([*range(20), *unit * 4])).nonzero()[0].tolist() == [34, 35, 36, 37, 38, 39]
    assert not text_shape.in_loop(np.array([*range(65)] * 4)).any()


def brute_lookup(tokens, prompt, size) -> list[tuple[int, int]]:
    """(anchor, committed) of prompt lookup decoding that may only look at what is known."""
    steps, at = [], prompt
    while at < len(tokens) - 1:
        known = tokens[: at + 1]
        draft = []
        for n in range(text_shape.LOOKUP_NGRAM, 0, -1):
            places = (
                [j for j in range(n - 1, at) if known[j - n + 1 : j + 1] == known[at - n + 1 :]]
                if at + 1 >= n
                else []
            )
            if places:
                draft = known[places[-1] + 1 :][:size]
                break
        accepted = 0
        while (
            accepted < len(draft)
            and at + 1 + accepted < len(tokens)
            and draft[accepted] == tokens[at + 1 + accepted]
        ):
            accepted += 1
        count = min(accepted + 1, len(tokens) - 1 - at)
        steps.append((at, count))
        at += count
    return steps


def test_prompt_lookup_is_replayed_as_it_would_run(rng):
    texts = [rng.integers(0, k, 120).tolist() for k in (2, 3, 8, 50, 1000)]
    texts += [[*range(10)] * 6, [7] * 30, [1, 2]]
    for tokens in texts:
        for size in (1, 4, 7):
            accepts = text_shape.lookup_accepts(np.array(tokens, np.int32), size)
            for prompt in (0, min(20, len(tokens) - 1)):
                position, count = text_shape.walk(accepts, prompt)
                assert list(zip(position.tolist(), count.tolist(), strict=True)) == brute_lookup(
                    tokens, prompt, size
                )


def test_tau_and_its_interval(rng):
    prompt = np.array([0, 0, 1, 1, 1])
    count = np.array([4, 2, 1, 1, 2])
    counts = Counts.of(prompt, count, 3)
    assert counts.tau() == 2
    assert Counts.of(prompt, count, 3, count > 1).tau() == pytest.approx(8 / 3)
    np.testing.assert_array_equal(counts.resampled(0), counts.resampled(0))
    # Many prompts whose τ scatters by a known amount: the interval is that of a mean.
    many = Counts(rng.normal(20, 4, 400), np.full(400, 10.0))
    figure = Macro.of({"a": many}).figure()
    assert figure.high - figure.low == pytest.approx(2 * 1.96 * 0.4 / 20, rel=0.15)
    assert figure.low < figure.value < figure.high
    nothing = Macro.of({"a": Counts(np.zeros(2), np.zeros(2))}).figure()
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()


def test_a_paired_gain_does_not_see_what_prompts_have_in_common(rng):
    common = rng.uniform(1, 8, 60)
    steps = np.full(60, 10.0)
    ours = Macro.of({"a": Counts(11 * common, steps), "b": Counts(2 * steps, steps)})
    theirs = Macro.of({"a": Counts(10 * common, steps), "b": Counts(2 * steps, steps)})
    gain = ours.over(theirs, "a")
    assert [gain.value, gain.low, gain.high] == pytest.approx([0.1, 0.1, 0.1])
    a = ours.values["a"]
    assert ours.over(theirs).value == pytest.approx((a + 2) / (a / 1.1 + 2) - 1)
    assert ours.over(theirs, "a", minus=1).value == pytest.approx((a - 1) / (a / 1.1 - 1) - 1)
    assert Figure.of(1.0, np.array([np.nan, np.nan])).value == 1
    nothing = Macro.of({"a": Counts(steps, steps)})
    endless = ours.over(nothing, "a", minus=1)
    assert [endless.value, endless.low, endless.high] == [np.inf] * 3


def test_acceptance_by_position_and_sweep_by_hand():
    accepted = np.array([0, 1, 3, 3])
    assert conditional_acceptance(accepted, 4) == [0.75, pytest.approx(2 / 3), 1.0, 0.0]
    high, low = 10.0, -10.0
    logits = np.array([[high, low, high]] * 2 + [[high] * 3, [low] * 3], np.float32)
    accepted = np.array([1, 3, 2, 0])
    sweep = {row["threshold"]: row for row in threshold_sweep(logits, accepted)}
    assert sweep[0.0]["window"] == 3
    assert sweep[0.0]["acceptance_rate"] == 0.5
    assert sweep[0.0]["tokens_per_step"] == 2.5
    row = sweep[0.5]
    assert row["window"] == (1 + 1 + 3 + 0) / 4
    assert row["acceptance_rate"] == pytest.approx((1 + 1 + 2) / 5)
    assert row["tokens_per_step"] == 2
    assert row["kept"] == pytest.approx(4 / 6)
