"""Log-probabilities as the target has them: before penalties, temperature and filters.

Knows: log-softmax, the likeliest tokens, how the logits of many prompt rows stay small. Does not know: which rows
are asked for, or by whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jspark.request import TokenLogprob

#: Prompt rows whose logits exist at the same time.
CHUNK = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """chosen: of the tokens asked about. top, ids: the k likeliest tokens, in falling order."""

    chosen: Float[Array, "*n"]
    top: Float[Array, "*n k"]
    ids: Int[Array, "*n k"]


def logprobs(logits: Float[Array, "n v"], tokens: Int[Array, " n"], k: int) -> Logprobs:
    """Log-softmax of `logits` at `tokens`, and its `k` largest entries."""
    z = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(z, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(z, tokens[:, None], axis=-1) - total
    top, ids = jax.lax.top_k(z, k)
    return Logprobs(chosen[:, 0], top - total, ids.astype(jnp.int32))


def prompt_logprobs(
    head: Callable[[Float[Array, "n h"]], Float[Array, "n v"]],
    hidden: Float[Array, "c h"],
    tokens: Int[Array, " c"],
    k: int,
) -> Logprobs:
    """The same from hidden rows, with the logits of `CHUNK` rows at a time."""
    count = hidden.shape[0]
    size = min(CHUNK, count)
    parts = -(-count // size)
    padding = parts * size - count

    def split(x: Array) -> Array:
        return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))).reshape(parts, size, *x.shape[1:])

    out = jax.lax.map(lambda part: logprobs(head(part[0]), part[1], k), (split(hidden), split(tokens)))
    return jax.tree.map(lambda x: x.reshape(parts * size, *x.shape[2:])[:count], out)


def told(tokens: tuple[int, ...], values: Logprobs, where: int | slice, k: int) -> tuple[TokenLogprob, ...]:
    """What a request hears of its `tokens`, from the host's copy of a step's values."""
    chosen, top, ids = (x[where].tolist() for x in (values.chosen, values.top[..., :k], values.ids[..., :k]))
    each = zip(tokens, chosen, top, ids, strict=False)
    return tuple(TokenLogprob(t, c, tuple(zip(i, p, strict=True))) for t, c, p, i in each)
