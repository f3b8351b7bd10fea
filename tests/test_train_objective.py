"""The training objective against the reference, what it may look at, and whom its gradients reach."""

from __future__ import annotations

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import GOLDENS, drafter, exact, target

from jspark import weights
from jspark.checkpoint.export import _name
from jspark.train import objective
from jspark.train.blocks import block_hidden
from jspark.train.pipeline import Batch

FOLDER = GOLDENS / "dspark_loss"
CONFIG = json.loads((FOLDER / "config.json").read_text())
ALPHAS = CONFIG["alphas"]
LOSS = objective.Weights(
    ALPHAS["ce_loss_alpha"], ALPHAS["l1_loss_alpha"], ALPHAS["confidence_head_alpha"], ALPHAS["loss_decay_gamma"]
)


@cache
def golden() -> tuple[dict, dict]:
    with np.load(FOLDER / "inputs.npz") as i, np.load(FOLDER / "outputs.npz") as o:
        return dict(i), dict(o)


def batch_of(tokens: np.ndarray, mask: np.ndarray) -> Batch:
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return Batch(jnp.asarray(tokens), jnp.asarray(positions), jnp.ones(tokens.shape, jnp.int32), jnp.asarray(mask))


def loss_of(model, config, features, taught, chunk=3):
    """The summed loss of the golden batch as a function of a drafter, with the drafter's own frozen head."""
    inputs, _ = golden()
    ends = model.vocabulary(target("qwen3_tiny")[0].vocabulary)
    batch = batch_of(inputs["input_ids"], inputs["loss_mask"] > 0)
    anchors = jnp.asarray(inputs["anchor_positions"])
    keep = jnp.asarray(inputs["block_keep_mask"])

    def loss(trainable):
        hidden = block_hidden(trainable, ends.embed, config, batch, features, anchors, "xla")
        blocks = objective.gather_blocks(hidden, taught, batch.tokens, batch.mask, anchors, keep, LOSS.decay)
        heads = objective.Heads(trainable.markov, trainable.confidence)
        with_markov = config.confidence == "hidden+markov"
        total, sums = objective.summed_loss(
            heads, blocks, ends.head, ends.head, LOSS, with_markov=with_markov, chunk=chunk
        )
        return total / sums["weight"], (sums, hidden)

    return loss


@pytest.mark.parametrize("tag", CONFIG["models"])
@exact
def test_losses_and_gradients_equal_the_reference(tag):
    inputs, outputs = golden()
    entry = CONFIG["models"][tag]
    model, config = drafter(entry["folder"])
    states = inputs["target_hidden_states_all"]
    features = jnp.asarray(np.concatenate([states[i + 1] for i in entry["target_layer_ids"]], axis=-1))
    taught = jnp.asarray(inputs["target_last_hidden_states"])
    loss = loss_of(model, config, features, taught)
    # The same programs for another drafter: its gradients would tell nothing new.
    graded = tag in ("vanilla", "gated", "rnn")
    if graded:
        (total, (sums, _)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(model)
    else:
        (total, (sums, _)), gradient = jax.jit(loss)(model), None
    got = objective.figures(sums, LOSS)

    def want(name):
        return outputs[f"{tag}/{name}"]

    def close(value, name):
        np.testing.assert_allclose(np.asarray(value), want(name), atol=1e-5, rtol=1e-5, err_msg=name)

    close(total, "total_loss")
    close(got["ce"], "ce_loss")
    close(got["tv"], "l1_loss")
    close(got["confidence"], "confidence_loss")
    close(sums["weight"], "ce_loss_den")
    close(got["accept"], "accept_rate_per_position")
    close(got["accept_length"], "tau_probabilistic")
    close(got["confidence_error"], "confidence_abs_error")
    close(got["confidence_bias"], "confidence_bias")
    close(got["survival_bias"], "confidence_cumprod_bias")
    if gradient is None:
        return
    compared = 0
    for path, value in weights.parameters(gradient):
        if path.startswith(("embed.", "head.")):
            assert not np.any(value), f"{path} is frozen"
            continue
        norm = np.linalg.norm(np.asarray(value))
        np.testing.assert_allclose(norm, want(f"grad_norm/{_name(path)[0]}"), rtol=1e-3, err_msg=path)
        compared += 1
    names = [k for k in outputs if k.startswith(f"{tag}/grad_norm/")]
    assert compared == len(names) - sum("embed_tokens" in n or "lm_head" in n for n in names)
