"""The training objective against the reference, what it may look at, and whom its gradients reach."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import GOLDENS, drafter, exact, target

from jspark import weights
from jspark.checkpoint.export import _name
from jspark.train import objective
from jspark.train.blocks import block_hidden
from jspark.train.chains import chain_hidden
from jspark.train.pipeline import Batch
from jspark.train.teacher import choose_anchors, teach

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


def packed() -> Batch:
    """Two conversations of 12 and 9 tokens in one sequence of 24."""
    rng = np.random.default_rng(5)
    lengths = (12, 9)
    fields = {name: np.zeros((1, 24), np.int32) for name in ("tokens", "positions", "segments")}
    place = 0
    for segment, n in enumerate(lengths, 1):
        here = slice(place, place + n)
        fields["tokens"][0, here] = rng.integers(0, 318, n)
        fields["positions"][0, here] = np.arange(n)
        fields["segments"][0, here] = segment
        place += n
    return Batch(**{k: jnp.asarray(v) for k, v in fields.items()}, mask=jnp.asarray(fields["positions"] >= 3))


def changed(batch: Batch, where: slice) -> Batch:
    return replace(batch, tokens=batch.tokens.at[0, where].set((batch.tokens[0, where] + 7) % 318))


@pytest.mark.parametrize("name", ["dspark_qwen3_tiny_vanilla", "eagle3_qwen3_tiny"])
def test_a_block_sees_its_conversation_before_its_anchor_and_nothing_else(name):
    decoder, target_config = target("qwen3_tiny")
    model, config = drafter(name)
    ends = model.vocabulary(decoder.vocabulary)
    anchors = jnp.array([[6, 16]])
    forward: Any = chain_hidden if config.eagle3 else block_hidden

    @jax.jit
    @exact
    def hidden(batch):
        features, _ = teach(decoder, target_config, batch, config.target_layer_ids, "xla")
        return forward(model, ends.embed, config, batch, features, anchors, "xla")[0]

    batch = packed()
    whole = np.asarray(hidden(batch))
    # After the anchor, EAGLE-3 is fed with the text's own tokens, one a step, and looks no further than that.
    later = np.asarray(hidden(changed(batch, slice(7, 12))))
    rows = slice(0, 1) if config.eagle3 else slice(None)
    assert np.array_equal(later[0, rows], whole[0, rows]), "a token after the anchor leaks into its block"
    other = np.asarray(hidden(changed(batch, slice(0, 12))))
    assert np.array_equal(other[1], whole[1]), "a block sees another conversation"
    anchor = np.asarray(hidden(changed(batch, slice(6, 7))))
    before = np.asarray(hidden(changed(batch, slice(5, 6))))
    assert not np.allclose(anchor[0], whole[0], atol=1e-4)
    assert not np.allclose(before[0], whole[0], atol=1e-4)
    assert np.array_equal(before[1], whole[1])


@exact
def test_packed_conversations_are_taught_as_if_each_were_alone():
    decoder, config = target("qwen3_tiny")
    batch = packed()
    run = jax.jit(lambda b: teach(decoder, config, b, (-1, 2, 4), "xla"))
    features, last = run(batch)
    second = slice(12, 21)
    alone = jax.tree.map(lambda x: jnp.zeros_like(x).at[:, :9].set(x[:, second]), batch)
    own_features, own_last = run(alone)
    np.testing.assert_allclose(features[0, second], own_features[0, :9], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(last[0, second], own_last[0, :9], atol=1e-5, rtol=1e-5)


def test_anchors_are_answers_with_a_successor():
    batch = packed()
    for seed in range(5):
        index, keep = choose_anchors(jax.random.key(seed), batch, 20)
        real = np.asarray(index[0])[np.asarray(keep[0])]
        # Answers are 3..11 and 15..20, and the last token of each has nothing to predict.
        assert sorted(real) == [*range(3, 11), *range(15, 20)]


def test_the_soft_loss_is_the_cross_entropy_against_the_whole_distribution(rng):
    logits, taught = jnp.asarray(rng.normal(size=(2, 3, 11))), jnp.asarray(rng.normal(size=(2, 3, 11)))
    token = jnp.asarray(rng.integers(0, 11, (2, 3)), jnp.int32)
    weights_ = objective.Weights(0.3, 0.7, 0.0, soft=2.0)
    logits, taught = logits.astype(jnp.float32), taught.astype(jnp.float32)

    def total(z):
        log_q, p = jax.nn.log_softmax(z), jax.nn.softmax(taught)
        ce = -jnp.take_along_axis(log_q, token[..., None], axis=-1)[..., 0]
        tv = jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1)
        return jnp.sum(0.3 * ce + 0.7 * tv - 2.0 * jnp.sum(p * log_q, axis=-1))

    rows = objective._rows(logits, taught, token, weights_)
    want, gradient = jax.value_and_grad(total)(logits)
    got = jnp.sum(0.3 * rows.ce + 0.7 * rows.distance + 2.0 * rows.soft)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(rows.by_logits, gradient, atol=2e-6)
