"""Acceptance: the reference's numbers, exactness of whole blocks by chi-square, seeds, stops and limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jspark import accept
from jspark.accept import accept_probability, commit, leading_accepts, residual
from jspark.allocate import allocate, survival
from jspark.sampling import RowSampling, draft_token, log_probs

packed_judge = jax.jit(accept.judge, static_argnames=("sampled", "filtered", "coupled", "rejection"))
log_probs = jax.jit(log_probs, static_argnames="filtered")

V, GAMMA, BLOCKS = 6, 3, 3
TRIALS = 30_000


def judge(logits, drafts, log_q, window, drafted, rows, position, *, sampled, filtered):
    """Judges logits [r, w, v], packed row after row: (tokens, count, accepted)."""
    r, w, v = logits.shape
    index = jnp.arange(r * w, dtype=jnp.int32).reshape(r, w)
    verdict = packed_judge(
        logits.reshape(r * w, v),
        index,
        drafts,
        log_q,
        window,
        window,
        drafted,
        rows,
        position,
        sampled=sampled,
        filtered=filtered,
        coupled=sampled,
        rejection=sampled,
    )
    return verdict.tokens, verdict.count, verdict.accepted


def rows_of(n, *, seed=0, **fields) -> RowSampling:
    """n rows with seeds from `seed` on: of the others one value for all or one a row; left out is off."""

    def field(name, off, dtype: type = np.float32):
        return jnp.asarray(np.broadcast_to(np.asarray(fields.get(name, off), dtype), n))

    return RowSampling(
        temperature=field("temperature", 1),
        top_k=field("top_k", 0, np.int32),
        top_p=field("top_p", 1),
        min_p=field("min_p", 0),
        seed=seed + jnp.arange(n, dtype=jnp.uint32),
        coupled=field("coupled", False, bool),
    )


# A world small enough to enumerate: logits of target and draft by absolute position and previous token.


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(3)
    target = rng.normal(size=(GAMMA * BLOCKS + 8, V, V)).astype(np.float32) * 1.2
    draft = target + rng.normal(size=target.shape).astype(np.float32) * 0.7
    return jnp.asarray(target), jnp.asarray(draft)


@partial(jax.jit, static_argnames=("sampled", "filtered"))
def propose(draft, rows, anchor, position, *, sampled, filtered):
    """Drafts [r, γ] and their log q [r, γ, v]."""
    tokens, log_q, previous = [], [], anchor
    for k in range(GAMMA):
        log_q.append(log_probs(draft[position + k, previous], rows, filtered=filtered))
        previous = draft_token(log_q[-1], rows, position, k, sampled=sampled)
        tokens.append(previous)
    return jnp.stack(tokens, 1), jnp.stack(log_q, 1)


@partial(jax.jit, static_argnames=("sampled", "filtered"))
def verify(target, rows, anchor, position, drafts, log_q, window, *, sampled, filtered, garbage=jnp.nan):
    """Judges the drafts under `window`; target logits beyond it are `garbage`."""
    gamma = drafts.shape[1]
    previous = jnp.concatenate([anchor[:, None], drafts], axis=1)
    logits = target[position[:, None] + jnp.arange(gamma + 1)[None], previous]
    logits = jnp.where((jnp.arange(gamma + 1)[None] <= window[:, None])[..., None], logits, garbage)
    drafted = jnp.full_like(window, gamma)
    return judge(logits, drafts, log_q, window, drafted, rows, position, sampled=sampled, filtered=filtered)


def decode(world, rows, rule, *, filtered=False, blocks=BLOCKS):
    """The first `blocks` tokens after token 0 at position 0, [n, blocks]; each block commits at least one.

    `rule(drafts, drafts of the block before)` gives the windows.
    """
    target, draft = world
    n = rows.seed.shape[0]
    out = np.full((n, blocks * (GAMMA + 1)), -1)
    anchor, position = jnp.zeros(n, jnp.int32), jnp.zeros(n, jnp.int32)
    before = jnp.zeros((n, GAMMA), jnp.int32)
    for _ in range(blocks):
        # Finished trials idle at a position where the world still has logits.
        position = jnp.minimum(position, GAMMA * BLOCKS)
        drafts, log_q = propose(draft, rows, anchor, position, sampled=True, filtered=filtered)
        window = jnp.asarray(rule(drafts, before), jnp.int32)
        tokens, count, accepted = verify(
            target, rows, anchor, position, drafts, log_q, window, sampled=True, filtered=filtered
        )
        assert np.all((count >= 1) & (count <= window + 1) & (accepted == count - 1))
        start = np.asarray(position)
        for j in range(GAMMA + 1):
            on = np.asarray(count) > j
            out[on, start[on] + j] = np.asarray(tokens)[on, j]
        anchor = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        position = position + count
        before = drafts
    return out[:, :blocks]


def pvalue(world, rows, tokens, *, filtered=False):
    """Chi-square of the first tokens' joint counts against the target's exact distribution."""
    one = rows.take(jnp.zeros(V, jnp.int32))
    length = tokens.shape[1]
    steps = [np.exp(log_probs(world[0][t], one, filtered=filtered), dtype=np.float64) for t in range(length)]
    joint = steps[0][0]
    for step in steps[1:]:
        joint = joint[..., None] * step
    joint = joint.reshape(-1) / joint.sum()
    counts = np.bincount(np.ravel_multi_index(tuple(tokens.T), (V,) * length), minlength=joint.size)
    assert counts[joint == 0].sum() == 0, "tokens that the filters exclude were committed"
    expected = joint * len(tokens)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    return stats.chisquare(counts[keep], expected[keep]).pvalue


def fixed(size):
    return lambda drafts, before: np.full(drafts.shape[0], size)


def by_prefix(drafts, before):
    """Position k is verified only if the drafted tokens before it say so."""
    even = np.asarray(drafts) % 2 == 0
    return 1 + even[:, 0] + (even[:, 0] & even[:, 1])


def before_the_first_odd(drafts, before):
    """Stops in front of a token because of that token; the cut rule still decides it by the ordinary test."""
    return np.cumprod(np.asarray(drafts) % 2 == 0, axis=1).sum(1)


def by_the_last_tail(drafts, before):
    """Looks at the tail that the block before threw away, as a budget some steps old does."""
    return np.where(np.asarray(before)[:, -1] % 2 == 0, GAMMA, 0)


def scheduled(drafts, before):
    """Windows of a batch budget: confidence of position k from the token before k."""
    n = drafts.shape[0]
    logits = 1.0 - 0.8 * jnp.pad(drafts[:, :-1], ((0, 0), (1, 0))).astype(jnp.float32)
    conditional, alive = survival(logits, None)
    return allocate(
        alive,
        conditional,
        budget=jnp.int32(n),
        min_window=jnp.zeros(n, jnp.int32),
        max_window=jnp.full(n, GAMMA, jnp.int32),
        threshold=jnp.float32(0),
    )


RULES = {f"window {k}": fixed(k) for k in range(GAMMA + 1)} | {
    f.__name__: f for f in (by_prefix, before_the_first_odd, by_the_last_tail, scheduled)
}


@pytest.mark.parametrize("name", RULES)
def test_rejection_keeps_the_distribution(world, name):
    rows = rows_of(TRIALS, temperature=0.8)
    assert pvalue(world, rows, decode(world, rows, RULES[name])) > 1e-4


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 4, "top_p": 0.9, "min_p": 0.1, "temperature": 1.4},
    ],
    ids=lambda fields: "-".join(fields),
)
@pytest.mark.parametrize("name", ["window 3", "by_prefix"])
def test_rejection_keeps_the_filtered_distribution(world, fields, name):
    rows = rows_of(TRIALS, **fields)
    tokens = decode(world, rows, RULES[name], filtered=True)
    assert pvalue(world, rows, tokens, filtered=True) > 1e-4


def test_a_draft_without_the_filters_is_as_exact(world):
    """q may be any distribution, as long as it is the one that the drafts were drawn from."""
    rows = rows_of(TRIALS, top_k=2)
    zeros = jnp.zeros(TRIALS, jnp.int32)
    drafts, log_q = propose(world[1], rows, zeros, zeros, sampled=True, filtered=False)
    window = jnp.full(TRIALS, 2, jnp.int32)
    tokens, _, _ = verify(world[0], rows, zeros, zeros, drafts, log_q, window, sampled=True, filtered=True)
    assert pvalue(world, rows, np.asarray(tokens)[:, :1], filtered=True) > 1e-4


def test_coupled_keeps_the_distribution(world):
    rows = rows_of(TRIALS, coupled=True)
    assert pvalue(world, rows, decode(world, rows, by_prefix)) > 1e-4


def test_a_window_that_looks_ahead_biases_the_output(world):
    """The paper's appendix in small: dropping the block because of its second token starves that token."""

    def ahead(drafts, before):
        return np.where(np.asarray(drafts)[:, 1] == 0, 0, GAMMA)

    rows = rows_of(TRIALS)
    assert pvalue(world, rows, decode(world, rows, ahead)) < 1e-10


def plain(world, rows, length, *, filtered=False, sampled=True):
    """Decoding without drafts: γ = 0."""
    n = rows.seed.shape[0]
    token, out = jnp.zeros(n, jnp.int32), []
    for t in range(length):
        position = jnp.full(n, t, jnp.int32)
        tokens, count, _ = verify(
            world[0],
            rows,
            token,
            position,
            jnp.zeros((n, 0), jnp.int32),
            None,
            jnp.zeros(n, jnp.int32),
            sampled=sampled,
            filtered=filtered,
        )
        assert np.all(count == 1)
        token = tokens[:, 0]
        out.append(token)
    return np.stack(out, 1)


def test_plain_rejection_decoding_draws_the_target(world):
    rows = rows_of(TRIALS, min_p=0.1)
    assert pvalue(world, rows, plain(world, rows, 2, filtered=True), filtered=True) > 1e-4


@pytest.mark.parametrize("drafting", ["drafter", "any tokens"])
def test_coupled_and_greedy_rows_equal_plain_decoding(world, drafting, rng):
    n, length = 300, 9
    temperature = np.where(np.arange(n) % 3 == 0, 0, 0.9)
    rows = rows_of(n, temperature=temperature, top_k=4, coupled=True, seed=77)
    want = plain(world, rows, length, filtered=True)
    anchor = position = jnp.zeros(n, jnp.int32)
    got = np.full((n, length + GAMMA + 1), -1)
    lengths = []
    for _ in range(length):
        drafts, _ = propose(world[1], rows, anchor, position, sampled=True, filtered=True)
        if drafting == "any tokens":
            drafts = jnp.asarray(rng.integers(0, V, (n, GAMMA)), jnp.int32)
        window = jnp.asarray(rng.integers(0, GAMMA + 1, n), jnp.int32)
        tokens, count, accepted = verify(
            world[0], rows, anchor, position, drafts, None, window, sampled=True, filtered=True
        )
        verdict = commit(
            tokens,
            count,
            remaining=length - position,
            stop_ids=jnp.full((n, 1), -1, jnp.int32),
            active=position < length,
        )
        for j in range(GAMMA + 1):
            on = np.asarray(verdict.count) > j
            got[on, np.asarray(position)[on] + j] = np.asarray(verdict.tokens)[on, j]
        lengths.append(np.asarray(accepted))
        anchor = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        position = position + verdict.count
    np.testing.assert_array_equal(got[:, :length], want)
    assert np.mean(lengths) > (0.5 if drafting == "drafter" else 0.1), "drafts were accepted at all"


def test_greedy_program_without_noise_equals_the_sampling_one(world, rng):
    n = 300
    rows = rows_of(n, temperature=0)
    anchor = jnp.asarray(rng.integers(0, V, n), jnp.int32)
    position = jnp.asarray(rng.integers(0, 8, n), jnp.int32)
    drafts, log_q = propose(world[1], rows, anchor, position, sampled=False, filtered=False)
    window = jnp.asarray(rng.integers(0, GAMMA + 1, n), jnp.int32)
    args = (world[0], rows, anchor, position, drafts)
    lean = verify(*args, None, window, sampled=False, filtered=False)
    full = verify(*args, log_q, window, sampled=True, filtered=True)
    for a, b in zip(lean, full, strict=True):
        np.testing.assert_array_equal(a, b)
    assert set(np.asarray(lean[1]).tolist()) == {1, 2, 3, 4}


def mixed(world, rng, n=300):
    """Greedy, coupled and rejection rows side by side, with drafts and random windows."""
    kind = np.arange(n) % 3
    rows = rows_of(n, temperature=np.where(kind == 0, 0, 1.1), coupled=kind == 1, top_p=0.95, seed=9)
    anchor = jnp.asarray(rng.integers(0, V, n), jnp.int32)
    position = jnp.asarray(rng.integers(0, 4, n), jnp.int32)
    drafts, log_q = propose(world[1], rows, anchor, position, sampled=True, filtered=True)
    window = jnp.asarray(rng.integers(0, GAMMA + 1, n), jnp.int32)
    return kind, rows, (anchor, position, drafts, log_q, window)


def test_rows_of_a_mixed_batch_are_judged_as_alone(world, rng):
    kind, rows, rest = mixed(world, rng)
    together = verify(world[0], rows, *rest, sampled=True, filtered=True)
    for k in range(3):
        index = jnp.asarray(np.repeat(np.flatnonzero(kind == k), 3))
        part = verify(world[0], rows.take(index), *(x[index] for x in rest), sampled=True, filtered=True)
        for a, b in zip(together, part, strict=True):
            np.testing.assert_array_equal(a[index], b)


@pytest.mark.parametrize("garbage", [jnp.inf, -1e9, 3.0])
def test_logits_beyond_the_window_alter_nothing(world, rng, garbage):
    """So the modes, which differ in those rows only, commit the same tokens."""
    _, rows, rest = mixed(world, rng)
    nan = verify(world[0], rows, *rest, sampled=True, filtered=True)
    other = verify(world[0], rows, *rest, sampled=True, filtered=True, garbage=garbage)
    for a, b in zip(nan, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_window_cuts_the_full_block_short(world, rng):
    _, rows, (anchor, position, drafts, log_q, window) = mixed(world, rng)
    full = window * 0 + GAMMA
    args = (world[0], rows, anchor, position, drafts, log_q)
    whole, whole_count, _ = verify(*args, full, sampled=True, filtered=True)
    short, count, _ = verify(*args, window, sampled=True, filtered=True)
    np.testing.assert_array_equal(count, np.minimum(whole_count, window + 1))
    for j in range(GAMMA + 1):
        on = np.asarray(count) > j
        np.testing.assert_array_equal(np.asarray(short)[on, j], np.asarray(whole)[on, j])


def test_rows_without_drafts_draw_from_the_target(world):
    rows = rows_of(TRIALS)
    zeros = jnp.zeros(TRIALS, jnp.int32)
    drafts = jnp.full((TRIALS, GAMMA), 2, jnp.int32)
    logits = jnp.full((TRIALS, GAMMA + 1, V), jnp.nan).at[:, 0].set(world[0][0, 0][None])
    log_q = jnp.full((TRIALS, GAMMA, V), jnp.nan)
    tokens, count, _ = judge(logits, drafts, log_q, zeros, zeros, rows, zeros, sampled=True, filtered=False)
    assert np.all(count == 1)
    assert pvalue(world, rows, np.asarray(tokens)[:, :1]) > 1e-4


# The reference's numbers (tests/goldens/README.md, g).


@pytest.fixture(scope="module")
def acceptance(goldens):
    files = [np.load(goldens / "acceptance" / f"{name}.npz") for name in ("inputs", "outputs")]
    return {key: file[key] for file in files for key in file}


def test_reference_rows(acceptance):
    p, q = jnp.asarray(acceptance["rows_target"]), jnp.asarray(acceptance["rows_draft"])
    np.testing.assert_allclose(accept_probability(p, q), acceptance["rows_accept_prob"], atol=2e-6)
    np.testing.assert_allclose(residual(p, q), acceptance["rows_residual"], atol=1e-6)


@pytest.mark.parametrize("case", range(9))
def test_reference_cases(acceptance, case):
    names = ("target_logits", "draft_probs", "draft_tokens", "uniforms", "temperature", "stop_token")
    logits, q, drafts, uniforms, temperature, stop = (jnp.asarray(acceptance[f"case{case}_{n}"]) for n in names)
    want = {k.removeprefix(f"case{case}_"): v for k, v in acceptance.items() if k.startswith(f"case{case}_")}
    size = drafts.shape[0]
    greedy = float(temperature) == 0
    if greedy:
        p = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])
    else:
        p = jnp.exp(log_probs(logits[None], rows_of(1, temperature=float(temperature)), filtered=False))[0]
    np.testing.assert_allclose(p, want["target_probs"], atol=1e-6)
    index = jnp.arange(size)
    chance = accept_probability(p[index, drafts], q[index, drafts])
    np.testing.assert_allclose(chance, want["accept_prob"], atol=2e-6)
    passed = uniforms < chance
    np.testing.assert_array_equal(np.cumprod(passed), want["accept_prefix_mask"])

    window = jnp.full(1, size, jnp.int32)
    accepted = leading_accepts(passed[None], window)
    # The reference stops counting at a stop token; here that is `commit`'s part, from the whole block.
    anchor = jnp.zeros(1, jnp.int32)
    kept = jnp.where(jnp.arange(size + 1) < accepted[0], jnp.pad(drafts, (0, 1)), -1)[None]
    verdict = commit(kept, accepted, remaining=window + 1, stop_ids=stop.reshape(1, 1), active=jnp.ones(1, bool))
    assert int(verdict.count[0]) == want["accepted"]
    assert bool(verdict.finished[0]) == want["stopped"]
    if not want["stopped"]:
        n = int(accepted[0])
        following = p[n] if n == size else residual(p[n], q[n])
        np.testing.assert_allclose(following, want["next_token_probs"], atol=1e-6)
    if greedy:
        _, _, got = judge(
            logits[None], drafts[None], None, window, window, rows_of(1, temperature=0), anchor,
            sampled=False, filtered=False,
        )  # fmt: skip
        assert int(got[0]) == want["accepted"]


# Stops and limits.


def committed(tokens, count, *, remaining=100, stop_ids=(-1, -1), active=True):
    verdict = commit(
        jnp.asarray([tokens], jnp.int32),
        jnp.asarray([count], jnp.int32),
        remaining=jnp.asarray([remaining], jnp.int32),
        stop_ids=jnp.asarray([stop_ids], jnp.int32).reshape(1, -1),
        active=jnp.asarray([active]),
    )
    return np.asarray(verdict.tokens)[0].tolist(), int(verdict.count[0]), bool(verdict.finished[0])


def test_commit_without_stops_keeps_all():
    assert committed([5, 6, 7, -1], 3) == ([5, 6, 7, -1], 3, False)
    assert committed([5, 6, 7, 8], 4, stop_ids=()) == ([5, 6, 7, 8], 4, False)


def test_commit_stops_after_the_first_stop_token():
    assert committed([5, 6, 7, 6], 4, stop_ids=(7, 6)) == ([5, 6, -1, -1], 2, True)
    assert committed([5, 6, 7, -1], 3, stop_ids=(7, -1)) == ([5, 6, 7, -1], 3, True)
    assert committed([5, 6, 7, 9], 3, stop_ids=(9, -1)) == ([5, 6, 7, -1], 3, False)


def test_commit_ends_at_the_limit():
    assert committed([5, 6, 7, 8], 4, remaining=2) == ([5, 6, -1, -1], 2, True)
    assert committed([5, 6, 7, 8], 4, remaining=4) == ([5, 6, 7, 8], 4, True)
    assert committed([5, 6, 7, 8], 4, remaining=2, stop_ids=(7, -1)) == ([5, 6, -1, -1], 2, True)
    assert committed([5, 6, 7, 8], 4, remaining=0) == ([-1] * 4, 0, True)


def test_inactive_rows_commit_nothing():
    assert committed([5, 6, 7, 8], 4, stop_ids=(5, -1), active=False) == ([-1] * 4, 0, False)
