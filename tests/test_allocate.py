"""Windows: against an oracle that hands out one token at a time, and the reference's proposals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import ArrayLike

from jspark.allocate import allocate, survival

jitted = jax.jit(allocate)


def windows(alive, conditional=None, *, budget, minimum: ArrayLike = 0, maximum=None, threshold=0.0):
    alive = np.asarray(alive, np.float32)
    rows, size = alive.shape
    maximum = size if maximum is None else maximum
    return np.asarray(
        jitted(
            jnp.asarray(alive),
            jnp.asarray(alive if conditional is None else conditional),
            budget=jnp.int32(budget),
            min_window=jnp.asarray(np.broadcast_to(np.asarray(minimum, np.int32), rows)),
            max_window=jnp.asarray(np.broadcast_to(np.asarray(maximum, np.int32), rows)),
            threshold=jnp.float32(threshold),
        )
    )


def oracle(alive, conditional, budget, minimum, maximum, threshold):
    """One token at a time to the likeliest next position; ties to the earlier position, then row."""
    rows, size = alive.shape
    granted = np.minimum(minimum, maximum)
    eligible = np.array([next((k for k in range(size) if c[k] < threshold), size) for c in conditional])
    eligible = np.maximum(np.minimum(eligible, maximum), granted)
    window = granted.copy()
    for _ in range(budget - granted.sum()):
        open_rows = [r for r in range(rows) if window[r] < eligible[r]]
        if not open_rows:
            break
        window[min(open_rows, key=lambda r: (-alive[r, window[r]], window[r], r))] += 1
    return window


@pytest.mark.parametrize("kind", ["random", "ties"])
def test_equals_the_oracle(kind, rng):
    rows, size = 6, 4
    for _ in range(300):
        conditional = rng.uniform(size=(rows, size)).astype(np.float32)
        if kind == "ties":
            conditional = rng.choice([0.0, 0.5, 1.0], size=(rows, size)).astype(np.float32)
        alive = np.cumprod(conditional, axis=1)
        budget = int(rng.integers(-2, rows * size + 3))
        maximum = rng.integers(0, size + 1, rows)
        minimum = rng.integers(0, size + 1, rows) * (rng.uniform(size=rows) < 0.3)
        threshold = float(rng.choice([0.0, 0.3, 0.5]))
        got = windows(alive, conditional, budget=budget, minimum=minimum, maximum=maximum, threshold=threshold)
        want = oracle(alive, conditional, budget, minimum, maximum, threshold)
        np.testing.assert_array_equal(got, want)
        assert got.sum() <= max(budget, np.minimum(minimum, maximum).sum())


def test_equal_survivals_go_to_earlier_positions_then_rows():
    assert windows(np.ones((4, 3)), budget=6).tolist() == [2, 2, 1, 1]
    assert windows(np.zeros((3, 2)), budget=2).tolist() == [1, 1, 0]


def test_the_whole_budget_is_spent_however_poor_the_tokens():
    assert windows(np.full((3, 4), 1e-12), budget=7).sum() == 7
    assert windows(np.zeros((3, 4)), budget=100).tolist() == [4, 4, 4]


def test_minimum_windows_come_first_and_exceed_the_budget_if_they_must():
    alive = [[0.9, 0.8], [0.1, 0.01]]
    assert windows(alive, budget=2).tolist() == [2, 0]
    assert windows(alive, budget=2, minimum=[0, 1]).tolist() == [1, 1]
    assert windows(alive, budget=0, minimum=[0, 2]).tolist() == [0, 2]
    assert windows(alive, budget=4, minimum=[0, 2], maximum=[2, 0], threshold=0.85).tolist() == [1, 0]
    assert windows(alive, budget=4, minimum=[0, 1], threshold=0.85).tolist() == [1, 1]


def test_nan_confidence_is_no_confidence():
    logits = jnp.array([[2.0, jnp.nan, 5.0], [0.0, 0.0, 0.0]])
    conditional, alive = survival(logits, None)
    np.testing.assert_allclose(alive[0], [1 / (1 + np.exp(-2)), 0, 0], atol=1e-6)
    np.testing.assert_allclose(conditional[0, 1], 0)
    assert windows(alive, conditional, budget=4).tolist() == [1, 3]
    assert windows(np.full((2, 2), np.nan), budget=1).tolist() == [1, 0]
    assert windows(np.full((2, 2), np.nan), budget=4, threshold=0.1).tolist() == [0, 0]


def test_windows_are_prefixes_of_any_values():
    """A later position never costs an earlier one its place, even where survival rises by rounding."""
    got = windows([[0.2, 0.9, 0.9], [0.5, 0.4, 0.3]], np.ones((2, 3)), budget=3)
    assert got.tolist() == [0, 3]


def test_survival_is_the_product_of_scaled_confidences(rng):
    logits = rng.normal(size=(5, 3)).astype(np.float32)
    temperatures = np.array([0.5, 1.0, 2.0], np.float32)
    conditional, alive = survival(jnp.asarray(logits), jnp.asarray(temperatures))
    want = 1 / (1 + np.exp(-logits / temperatures))
    np.testing.assert_allclose(conditional, want, rtol=1e-5)
    np.testing.assert_allclose(alive, np.cumprod(want, axis=1), rtol=1e-5)


def test_blocks_without_drafts_have_no_windows():
    assert windows(np.zeros((3, 0)), budget=4).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "vanilla_trained", "rnn_trained", "vanilla_b5"])
def test_threshold_proposes_what_the_reference_does(goldens, name):
    outputs = np.load(goldens / f"dspark_qwen3_tiny_{name}" / "outputs.npz")
    runs = [key.removesuffix("_step_confidence_logits") for key in outputs if "thr50_step_confidence" in key]
    assert runs
    for run in runs:
        logits = outputs[f"{run}_step_confidence_logits"]
        conditional, alive = survival(jnp.asarray(logits), None)
        got = windows(alive, conditional, budget=logits.size, threshold=0.5)
        np.testing.assert_array_equal(got, outputs[f"{run}_proposal_lengths"])
