"""The built-in model against the reference: prompts' best logits and 64 greedy tokens, plain and speculative."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import GOLDENS, exact, make_engine, mesh, run

from jspark import kv
from jspark.batch import pack
from jspark.checkpoint import open_target
from jspark.config import EngineConfig
from jspark.request import Request, SamplingParams
from jspark.verify import forward
from jspark.weights import load_decoder, random_drafter, untrained_drafter_config

NAME = "smollm2_135m_q4_1"


@pytest.fixture(scope="module")
def outputs():
    with np.load(GOLDENS / NAME / "outputs.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def model():
    checkpoint = open_target("smollm2-135m")
    return load_decoder(checkpoint, checkpoint.config, jnp.float32, mesh()), checkpoint.config


def test_best_logits(model, outputs):
    decoder, config = model
    pool = kv.make_pool(config, 3, 64, jnp.float32, mesh())
    table = jnp.asarray([[1, 2]], jnp.int32)
    for i in range(4):
        prompt = outputs[f"prompt_{i}"]
        batch = pack(
            jnp.asarray(prompt)[None],
            jnp.zeros(1, jnp.int32),
            jnp.full(1, len(prompt) - 1, jnp.int32),
            jnp.ones(1, bool),
            table,
            None,
            verify_tokens=len(prompt),
            page_size=64,
        )
        with exact:
            logits = np.asarray(forward(decoder, config, pool, batch, logit_rows=len(prompt))[0])[-1]
        ids = outputs[f"top20_ids_{i}"]
        np.testing.assert_allclose(logits[ids], outputs[f"top20_logits_{i}"], atol=1e-3)
        np.testing.assert_array_equal(np.argsort(-logits)[:5], ids[:5])


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_greedy_tokens(model, outputs, speculative):
    drafter = None
    if speculative:
        config = untrained_drafter_config(model[1], block_size=3)
        drafter = (random_drafter(config, jnp.float32, mesh()), config)
    sizes = EngineConfig(max_running_requests=4, context_length=128, row_buckets=(4,))
    engine = make_engine(sizes, model, drafter)
    greedy = SamplingParams(temperature=0, max_tokens=64)
    requests = [Request(i, tuple(outputs[f"prompt_{i}"].tolist()), greedy) for i in range(4)]
    for i, result in enumerate(run(engine, requests)):
        assert result.tokens == outputs[f"greedy_{i}"].tolist()
