"""The sequential head and the confidence head of a DSpark drafter (arXiv 2607.05147, equations 4 to 7).

Knows: how the previous token changes the logits of the next row, and how likely a row is to survive.
Does not know: the backbone or how a token is chosen; propose.py runs the scan over the block.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from jspark.models.layers import Linear, Make


class MarkovHead(nnx.Module):
    """logits_k = U_k + B(x_<k), with B of low rank: vanilla (5), gated, or recurrent (6)."""

    def __init__(
        self,
        make: Make,
        kind: Literal["vanilla", "gated", "rnn"],
        vocab_size: int,
        hidden_size: int,
        rank: int,
    ):
        self.w1 = make((vocab_size, rank), ("vocab", None))
        self.w2 = make((rank, vocab_size), (None, "vocab"))
        self.gate = Linear(make, (hidden_size + rank, rank), (None, None), bias=True) if kind == "gated" else None
        joint = (hidden_size + 2 * rank, 3 * rank)
        self.joint = Linear(make, joint, (None, None), bias=True) if kind == "rnn" else None

    def start(self, rows: int) -> Float[Array, "r k"]:
        """The recurrent state before the first row of a block: s_0 = 0."""
        return jnp.zeros((rows, self.w2.shape[0]), self.w2.dtype)

    def embed(self, previous: Int[Array, " r"]) -> Float[Array, "r k"]:
        """W1[x_{k−1}]."""
        return self.w1.get_value().at[previous].get(mode="clip")

    def mix(
        self, state: Float[Array, "r k"], hidden: Float[Array, "r h"], previous: Int[Array, " r"]
    ) -> tuple[Float[Array, "r k"], Float[Array, "r k"]]:
        """The next state, and the vector whose product with W2 is the bias of this row."""
        e = self.embed(previous)
        if self.gate is not None:
            e = e * jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, e], axis=-1)))
        elif self.joint is not None:
            z = self.joint(jnp.concatenate([state, e, hidden], axis=-1))
            keep, candidate, output = jnp.split(z, 3, axis=-1)
            keep = jax.nn.sigmoid(keep)
            state = keep * state + (1 - keep) * jnp.tanh(candidate)
            e = jnp.tanh(output)
        return state, e

    def bias(self, e: Float[Array, "*r k"]) -> Float[Array, "*r v"]:
        """The float32 bias on the logits that belongs to `mix`'s vector."""
        return jnp.einsum("...k,kv->...v", e, self.w2[...], preferred_element_type=jnp.float32)

    def __call__(
        self, state: Float[Array, "r k"], hidden: Float[Array, "r h"], previous: Int[Array, " r"]
    ) -> tuple[Float[Array, "r k"], Float[Array, "r v"]]:
        """The next state and the float32 bias on the logits of this row."""
        state, e = self.mix(state, hidden, previous)
        return state, self.bias(e)


class ConfidenceHead(nnx.Module):
    """The logit of c_k, the chance that row k's token survives given that the earlier ones did (7)."""

    def __init__(self, make: Make, hidden_size: int, rank: int):
        self.kernel = make((hidden_size + rank, 1), (None, None))
        self.bias = make((1,), (None,))

    def __call__(self, hidden: Float[Array, "r h"], previous: Float[Array, "r k"] | None) -> Float[Array, " r"]:
        """Float32 logits, before the sigmoid; `previous` is W1[x_{k−1}] when the head was trained with it."""
        x = hidden if previous is None else jnp.concatenate([hidden, previous], axis=-1)
        logit = jnp.einsum("ri,io->ro", x, self.kernel[...], preferred_element_type=jnp.float32)
        return logit[:, 0] + self.bias[...].astype(jnp.float32)
