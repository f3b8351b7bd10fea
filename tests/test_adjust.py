"""Penalties, bias, bad words, minimum length, log-probabilities and opt-out: exact under speculation.

The judge of plain decoding is a NumPy version of the rules, applied token by token to logits of a full forward;
the judge of speculation is plain decoding.
"""

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    adjusted,
    drafter,
    full_logits,
    make_engine,
    plain_engine,
    prompts,
    row_sampling,
    run,
    target,
)
from test_lossless import DRAFTERS, Erratic

from jspark.config import EngineConfig
from jspark.engine import Engine
from jspark.request import Request, SamplingParams
from jspark.sampling import coupled_gumbel, log_probs

VOCAB = 320


def scores(request: Request, output: list[int]) -> np.ndarray:
    """What the argmax is taken of: adjusted logits, or log p with the seed's noise."""
    sequence = request.prompt + tuple(output)
    z = adjusted(request, output, full_logits(sequence)[-1])
    if request.params.temperature == 0:
        return z
    rows = row_sampling(request.params, True)
    z = log_probs(jnp.asarray(z[None], jnp.float32), rows, filtered=request.params.filtered)
    return np.asarray(z + coupled_gumbel(rows.seed, jnp.full(1, len(sequence), jnp.int32), VOCAB))[0]


def check_follows(request: Request, got: list[int], judge: list[int] | None = None) -> int:
    """Every token is the best by the rules (`judge` None), or as the judge has it up to a tie; ties excused."""
    for i, token in enumerate(got):
        if judge is not None and judge[i] == token:
            continue
        z = scores(request, got[:i])
        best = int(np.argmax(z))
        if best != token or judge is not None:
            top = np.sort(z)
            assert z[token] > top[-1] - 1e-4, f"request {request.id} token {i}: {token} for {best}"
            return 1
    if judge is not None:
        assert len(got) == len(judge)
    return 0


def random_request(rng: np.random.Generator, i: int) -> Request:
    """Some requests have no rules, or ask for nothing; enough others in every batch do, so few programs exist."""
    base = prompts(DRAFTERS[0])[i % 4]
    prompt = (base * 3)[: rng.integers(2, 40)]
    # The tokens that this prompt leads to: rules forbid what would have come, sequences included.
    likely = plain_continuation(base)
    options, words, stop = {}, (), ()
    limit = int(rng.integers(12, 28))
    if i not in (0, 3, 6):
        options = {
            "repetition_penalty": float(rng.choice([0.7, 1.1, 1.5])),
            "presence_penalty": float(rng.choice([0, rng.uniform(-2, 2)])),
            "frequency_penalty": float(rng.choice([0, rng.uniform(-1, 2)])),
            "logit_bias": {int(t): float(rng.uniform(-9, 9)) for t in rng.choice(likely, 5)},
        }
        cuts = [(int(a), int(n)) for a, n in zip(rng.integers(0, 20, 6), rng.integers(1, 5, 6), strict=True)]
        words = (*(tuple(likely[a : a + n]) for a, n in cuts), (*prompt[-2:], likely[0]))
        stop = tuple(rng.choice(likely, 3).tolist()) if i % 2 else ()
    params = SamplingParams(
        # The last ones are sampled, and so every batch has such a row.
        temperature=0 if i % 2 and i < 8 else float(rng.uniform(0.3, 1.2)),
        seed=int(rng.integers(2**40)),
        top_k=20,
        max_tokens=limit if i < 8 else 28,
        min_tokens=int(rng.integers(0, limit)) if stop else 0,
        logprobs=None if i in (0, 4) else int(rng.integers(1, 4)),
        prompt_logprobs=2,
        speculative=i % 5 != 2,
        **options,
    )
    return Request(i, prompt, params, stop, words)


@cache
def plain_continuation(prompt: tuple[int, ...]) -> list[int]:
    return run(plain_engine(), [Request(0, prompt, SamplingParams(temperature=0, max_tokens=28))])[0].tokens


@cache
def plain_result(seed: int):
    """Requests of a case and plain decoding's answers; not cached by request, whose parameters hold a dict."""
    rng = np.random.default_rng(seed)
    requests = [random_request(rng, i) for i in range(10)]
    return requests, run(batch_engine(None), requests)


def batch_engine(mode, policy=None, **options) -> Engine:
    config = EngineConfig(
        max_running_requests=4,
        page_size=16,
        context_length=80,
        chunked_prefill_size=24,
        row_buckets=(4,),
        token_tiers=(14,),
        block_size=4 if mode else 0,
        verify_mode=mode or "compact",
    )
    draft = drafter(DRAFTERS[0]) if mode else None
    return make_engine(replace(config, **options), target("qwen3_tiny"), draft, policy=policy)


@pytest.mark.parametrize(
    "mode", ["compact", *(pytest.param(m, marks=pytest.mark.slow) for m in ("static", "cap-accept"))]
)
def test_random_settings_equal_plain_decoding(mode, rng, record_property):
    requests, wanted = plain_result(7)
    excused = 0
    engine = batch_engine(mode, Erratic(rng), overlap=mode == "compact")
    longest = 0
    for request, got, want in zip(requests, run(engine, requests), wanted, strict=True):
        longest = max(longest, *got.stats.accepted, 0)
        tie = check_follows(request, got.tokens, want.tokens)
        excused += tie
        assert request.params.speculative or set(got.stats.windows) <= {0}
        if not tie:
            assert got.reason == want.reason
            compare_logprobs(request, got, want)
    record_property("excused_ties", excused)
    assert longest > 1
    assert excused <= 1


def compare_logprobs(request: Request, got, want) -> None:
    for asked, ours, theirs, tokens in (
        (request.params.logprobs, got.logprobs, want.logprobs, got.tokens),
        (request.params.prompt_logprobs, got.prompt_logprobs, want.prompt_logprobs, request.prompt[1:]),
    ):
        assert [x.token_id for x in ours] == ([] if asked is None else list(tokens))
        for a, b in zip(ours, theirs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4
            assert np.allclose([p for _, p in a.top], [p for _, p in b.top], rtol=0, atol=1e-4)
            assert len(a.top) == asked
            assert [p for _, p in a.top] == sorted((p for _, p in a.top), reverse=True)


def test_plain_decoding_follows_the_rules_written_in_numpy():
    requests, results = plain_result(7)
    ties = 0
    for request, result in zip(requests, results, strict=True):
        ties += check_follows(request, result.tokens)
        every = full_logits((*request.prompt, *result.tokens)).astype(np.float64)
        every -= np.log(np.sum(np.exp(every), axis=-1, keepdims=True))
        said = [*result.prompt_logprobs, *result.logprobs]
        first = 0 if result.prompt_logprobs else len(request.prompt) - 1
        for row, entry in zip(every[first:], said, strict=False):
            assert abs(row[entry.token_id] - entry.logprob) < 1e-4
            assert np.allclose(np.sort(row)[::-1][: len(entry.top)], [p for _, p in entry.top], rtol=0, atol=1e-4)
            assert all(abs(row[t] - p) < 1e-4 for t, p in entry.top)
    assert ties <= 1
    # The rules mattered: most answers are not what the prompts lead to.
    pairs = list(zip(requests, results, strict=True))
    changed = [r.tokens != plain_continuation(q.prompt)[: len(r.tokens)] for q, r in pairs[::2]]
    assert sum(changed) >= 3
