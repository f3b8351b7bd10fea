"""Invariant 2 on the whole engine: the rejection sampler's output has the target's distribution."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support import adjusted, drafter, full_logits, make_engine, prompts, row_sampling, run, target
from test_lossless import Erratic

from jspark.config import EngineConfig
from jspark.request import Request, SamplingParams
from jspark.sampling import log_probs

NAME = "dspark_qwen3_tiny_vanilla_trained"
TRIALS, TOKENS = 3000, 4


def exact(request: Request) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of TOKENS tokens, from one plain forward a prefix."""
    prompt, rows = request.prompt, row_sampling(request.params, False)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for prefix, mass in joint.items():
            logits = adjusted(request, list(prefix), full_logits(prompt + prefix)[-1])
            p = np.exp(np.asarray(log_probs(jnp.asarray(logits[None], jnp.float32), rows, filtered=True)))[0]
            for token in np.flatnonzero(p):
                longer[(*prefix, int(token))] = mass * float(p[token])
        joint = longer
    return joint


FILTERS = {
    "top-k": {"top_k": 3},
    "all": {"top_p": 0.8, "min_p": 0.03, "top_k": 5},
    "rules": {"top_k": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": -0.4},
}


RULES = pytest.param("compact", "rules", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mode", "filters"),
    [
        ("compact", "top-k"),
        pytest.param("compact", "all", marks=pytest.mark.slow),
        pytest.param("static", "top-k", marks=pytest.mark.slow),
        pytest.param("cap-accept", "all", marks=pytest.mark.slow),
        RULES,
    ],
)
def test_rejection_sampling_keeps_the_distribution(mode, filters, rng):
    prompt = prompts(NAME)[2]
    params = SamplingParams(temperature=0.8, max_tokens=TOKENS, **FILTERS[filters])
    config = EngineConfig(
        max_running_requests=64,
        page_size=16,
        context_length=64,
        chunked_prefill_size=512,
        row_buckets=(64,),
        token_tiers=(150,),
        block_size=4,
        verify_mode=mode,
    )
    engine = make_engine(config, target("qwen3_tiny"), drafter(NAME), policy=Erratic(rng))
    request = Request(0, prompt, params)
    if filters == "rules":
        # Forbidden after what comes first most often, and the likeliest tokens made rarer and likelier.
        first, second, third = np.argsort(full_logits(prompt)[-1])[:-4:-1].tolist()
        likely = int(np.argmax(full_logits((*prompt, second))[-1]))
        params = replace(params, logit_bias={first: -0.5, third: 0.5})
        request = Request(0, prompt, params, bad_words=((second, likely), (*prompt[-2:], third, first)))
    probabilities = exact(request)
    results = run(engine, [replace(request, id=i) for i in range(TRIALS)])
    counts = dict.fromkeys(probabilities, 0)
    for result in results:
        counts[tuple(result.tokens)] += 1  # A token outside the filters is a KeyError.
    expected = np.array(list(probabilities.values())) * TRIALS
    seen = np.array(list(counts.values()))
    # Cells of small expectation are pooled, as the test needs.
    small = expected < 5
    if small.any():
        seen, expected = (np.append(x[~small], x[small].sum()) for x in (seen, expected))
    assert len(seen) > 3
    assert stats.chisquare(seen, expected * (TRIALS / expected.sum())).pvalue > 1e-4
    accepted = sum((r.stats.accepted for r in results), start=type(results[0].stats.accepted)())
    assert accepted[0]
    assert any(accepted[k] for k in range(1, 5))
    windows = set(itertools.chain.from_iterable(r.stats.windows for r in results))
    assert windows == {4} if mode == "static" else len(windows) > 2
