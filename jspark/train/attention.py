"""Attention of training and text writing: dense masks, through cuDNN where the device has it.

Knows: `jax.nn.dot_product_attention` and its two implementations. Does not know: what the masks mean.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

Implementation = Literal["xla", "cudnn"]


def implementation(device: Any, dtype) -> Implementation:
    """cuDNN on GPUs in bfloat16, XLA elsewhere."""
    return "cudnn" if device.platform == "gpu" and jnp.dtype(dtype) == jnp.bfloat16 else "xla"


def attend(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Bool[Array, "b 1 t s"],
    how: Implementation,
) -> Float[Array, "b t n d"]:
    """Grouped-query attention; a row whose mask is empty gives something finite."""
    # JAX's own function mixes dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=how)


def attend_cache(
    q: Float[Array, "r n d"],
    keys: Float[Array, "r c k d"],
    values: Float[Array, "r c k d"],
    length: Int[Array, " r"],
    how: Implementation,
    window: int | None = None,
) -> Float[Array, "r n d"]:
    """One query a row over the first `length` positions of its cache, or the last `window` of them."""
    if window is not None:
        place = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        seen = (place < length[:, None]) & (place >= length[:, None] - window)
        return attend(q[:, None], keys, values, seen[:, None, None], how)[:, 0]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out = jax.nn.dot_product_attention(
            q[:, None],
            keys,
            values,
            query_seq_lengths=jnp.ones_like(length),
            key_value_seq_lengths=length,
            implementation=how,
        )
    return out[:, 0]
