"""Filters against a sort-based oracle in NumPy; noise keyed as a seed's owner expects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jspark.sampling import (
    ACCEPT,
    COUPLED,
    DRAFT,
    RowSampling,
    coupled_gumbel,
    draft_token,
    gumbel,
    log_probs,
    uniform,
)

log_probs = jax.jit(log_probs, static_argnames="filtered")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "coupled": False}
TYPES = {"top_k": np.int32, "seed": np.uint32, "coupled": bool}


def rows_of(n, **fields) -> RowSampling:
    """n rows: of each field one value for all or one a row; left out is off."""
    values = {**OFF, **fields}
    return RowSampling(
        **{
            name: jnp.asarray(np.broadcast_to(np.asarray(value, TYPES.get(name, np.float32)), n))
            for name, value in values.items()
        }
    )


def oracle(logits, temperature, top_k, top_p, min_p):
    """One row by sorting, in float64: kept tokens, probabilities, whether float32 could decide otherwise."""
    z = (logits - logits.max()).astype(np.float32) / np.float32(temperature)
    z = z.astype(np.float64)
    keep = np.ones(len(z), bool)
    if 0 < top_k < len(z):
        keep &= z >= np.sort(z)[-top_k]
    p = np.where(keep, np.exp(z), 0)
    p /= p.sum()
    doubtful = False
    if top_p < 1:
        above = np.array([p[z > value].sum() for value in z])
        doubtful = bool(np.any((above > 0) & (np.abs(above - top_p) < 1e-5)))
        keep &= (above < top_p) | (z == z.max())
    if min_p > 0:
        keep &= np.exp(z) >= min_p
        doubtful |= bool(np.any((z < 0) & (np.abs(np.exp(z) - min_p) < 1e-6)))
    p = np.where(keep, np.exp(z), 0)
    return keep & np.isfinite(z), p / p.sum(), doubtful


def kind_of_logits(kind, rng, shape):
    logits = rng.normal(size=shape) * 3
    if kind == "ties":
        logits = np.round(logits)
    if kind == "extreme":
        logits = rng.choice([-np.inf, -1e30, -80.0, -1.0, -0.0, 0.0, 1e-3, 5.0, 80.0, 1e4], size=shape)
        logits[..., 0] = 0.0
    if kind == "equal":
        logits = np.full(shape, -2.5)
    return logits.astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", "ties", "extreme", "equal"])
def test_filters_equal_sorting(kind, rng):
    n, v = 400, 37
    logits = kind_of_logits(kind, rng, (n, v))
    temperature = rng.choice([0.05, 0.7, 1.0, 1.5], n)
    top_k = rng.choice([0, 1, 2, 5, v - 1, v, v + 10], n)
    top_p = rng.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0], n)
    min_p = rng.choice([0.0, 0.0, 0.03, 0.3, 1.0], n)
    rows = rows_of(n, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    log_p = np.asarray(log_probs(jnp.asarray(logits), rows, filtered=True))
    got = np.exp(log_p)
    doubtful = 0
    for i in range(n):
        cuts = top_k[i], np.float32(top_p[i]), np.float32(min_p[i])
        keep, want, skip = oracle(logits[i], temperature[i], *cuts)
        doubtful += skip
        if not skip:
            np.testing.assert_array_equal(np.isfinite(log_p[i]), keep)
            np.testing.assert_allclose(got[i], want, atol=2e-6, rtol=1e-5)
    assert doubtful < n / 20
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)
    assert np.all(got[np.arange(n), logits.argmax(-1)] > 0)


def test_filters_of_a_row_hold_at_every_offset_and_off_means_plain(rng):
    logits = rng.normal(size=(4, 3, 50)).astype(np.float32)
    rows = rows_of(4, temperature=[0.5, 1, 1, 2], top_k=[3, 0, 0, 0], top_p=[1, 0.6, 1, 1], min_p=[0, 0, 0.2, 0])
    whole = log_probs(jnp.asarray(logits), rows, filtered=True)
    for k in range(3):
        np.testing.assert_array_equal(whole[:, k], log_probs(jnp.asarray(logits[:, k]), rows, filtered=True))
    plain = log_probs(jnp.asarray(logits), rows, filtered=False)
    np.testing.assert_allclose(whole[3], plain[3], atol=1e-6)
    np.testing.assert_allclose(plain[3], jax.nn.log_softmax(logits[3] / 2), atol=1e-5)


def test_greedy_rows_are_not_filtered(rng):
    logits = rng.normal(size=(1, 20)).astype(np.float32)
    rows = rows_of(1, temperature=0, top_k=1, top_p=0.1, min_p=0.9)
    got = log_probs(jnp.asarray(logits), rows, filtered=True)
    np.testing.assert_allclose(got, jax.nn.log_softmax(logits), atol=1e-6)


def test_bfloat16_logits_and_a_tiny_temperature_stay_finite_at_the_argmax(rng):
    logits = jnp.asarray(rng.normal(size=(2, 20)) * 100, jnp.bfloat16)
    got = log_probs(logits, rows_of(2, temperature=[1e-30, 1.0]), filtered=False)
    assert got.dtype == jnp.float32
    assert not np.any(np.isnan(got))
    assert float(got[0].max()) == 0.0


def test_a_row_draws_the_same_whoever_shares_the_batch():
    seeds, positions = jnp.arange(5, dtype=jnp.uint32), jnp.arange(10, 15, dtype=jnp.int32)
    together = gumbel(seeds, positions, 2, DRAFT, 33)
    alone = gumbel(seeds[3:4], positions[3:4], 2, DRAFT, 33)
    np.testing.assert_array_equal(together[3:4], alone)
    block = uniform(seeds[:, None], positions[:, None], jnp.arange(4)[None], ACCEPT)
    np.testing.assert_array_equal(block[3, 2], uniform(seeds[3], positions[3], 2, ACCEPT))


def test_every_part_of_the_key_changes_the_noise():
    def draw(seed=1, position=7, offset=2, purpose=DRAFT):
        return np.asarray(gumbel(jnp.uint32(seed), jnp.int32(position), offset, purpose, 8))

    variants = [draw(), draw(seed=2), draw(position=8), draw(offset=1), draw(purpose=COUPLED)]
    # The same absolute position, reached from two anchors, does not share noise.
    variants.append(draw(position=8, offset=1))
    assert len({v.tobytes() for v in variants}) == len(variants)


def test_gumbel_argmax_draws_the_distribution(rng):
    n, v = 40_000, 9
    log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(1, v)) * 2, jnp.float32))
    noise = coupled_gumbel(jnp.arange(n, dtype=jnp.uint32), jnp.full(n, 5, jnp.int32), v)
    counts = np.bincount(np.argmax(log_p + noise, axis=-1), minlength=v)
    expected = np.exp(np.asarray(log_p[0], np.float64))
    assert stats.chisquare(counts, n * expected / expected.sum()).pvalue > 1e-4


def test_gumbel_reaches_far_into_the_tail():
    """A resolution of 2⁻²³ would leave 8 distinct values above 13.8 (2²⁰ draws reach that once)."""
    noise = np.asarray(gumbel(jnp.arange(64, dtype=jnp.uint32), jnp.zeros(64, jnp.int32), 0, DRAFT, 1 << 17))
    top = np.sort(noise.reshape(-1))[-256:]
    assert len(np.unique(top)) > 250


@pytest.mark.parametrize("sampled", [False, True])
def test_draft_token_follows_each_rows_rule(sampled, rng):
    n, v, offset = 6, 40, 2
    log_q = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(n, v)), jnp.float32))
    anchor = jnp.arange(20, 20 + n, dtype=jnp.int32)
    seed = np.arange(n)
    rows = rows_of(n, temperature=[0, 0, 1, 1, 1, 1], seed=seed, coupled=[0, 1, 1, 1, 0, 0])
    got = np.asarray(draft_token(log_q, rows, anchor, offset, sampled=sampled))
    greedy = np.argmax(log_q, -1)
    if not sampled:
        np.testing.assert_array_equal(got, greedy)
        return
    coupled = np.argmax(log_q + coupled_gumbel(rows.seed, anchor + 1 + offset, v), -1)
    rejection = np.argmax(log_q + gumbel(rows.seed, anchor, offset, DRAFT, v), -1)
    np.testing.assert_array_equal(got, [*greedy[:2], *coupled[2:4], *rejection[4:]])


def test_take_gathers_rows():
    rows = rows_of(4, temperature=[0, 1, 2, 3], seed=[5, 6, 7, 8]).take(jnp.array([3, 1]))
    np.testing.assert_array_equal(rows.temperature, [3, 1])
    np.testing.assert_array_equal(rows.seed, [8, 6])
