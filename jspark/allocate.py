"""Verify windows from the confidence of this step, on the device.

Knows: how sure the drafter is of each drafted token, and the plan's numbers. Does not know: costs or policies
(budget.py), packing, the target.

Non-anticipating: the confidence of position k reads tokens before k only, K is fixed before the step, and a
row's later positions rank below its earlier ones, so whether a token is sent never depends on that token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def survival(
    confidence_logits: Float[Array, "r g"], temperatures: Float[Array, "*#r g"] | None
) -> tuple[Float[Array, "r g"], Float[Array, "r g"]]:
    """(conditional, survival): the chance that a drafted token is accepted given that those before it were,
    and the chance that all up to it are.

    temperatures: of sequential temperature scaling, σ(logit_k / T_k), of all rows or one set a row; None is 1
    everywhere. A NaN confidence is 0.
    """
    logits = confidence_logits.astype(jnp.float32)
    if temperatures is not None:
        logits = logits / jnp.broadcast_to(temperatures.astype(jnp.float32), logits.shape)
    conditional = _no_nan(jax.nn.sigmoid(logits))
    return conditional, jnp.cumprod(conditional, axis=1)


def allocate(
    survival: Float[Array, "r g"],
    conditional: Float[Array, "r g"],
    *,
    budget: Int[Array, ""],
    min_window: Int[Array, " r"],
    max_window: Int[Array, " r"],
    threshold: Float[Array, ""],
) -> Int[Array, " r"]:
    """Window of every row, 0..γ: the `budget` drafted tokens of the batch that most likely survive.

    A row may use the positions before its first conditional confidence below `threshold` (0: all of them), at
    most `max_window` of them. Its first `min_window` positions are granted in any case, up to `max_window`.
    What is left of the budget goes to the largest survivals; ties go to the earlier position, then to the
    earlier row. So Σ window ≤ max(budget, Σ min_window). Rows that draft nothing have max_window 0.
    """
    rows, size = survival.shape
    ceiling = jnp.clip(max_window, 0, size)
    granted = jnp.clip(min_window, 0, ceiling)
    confident = jnp.cumprod((_no_nan(conditional) >= threshold).astype(jnp.int32), axis=1)
    eligible = jnp.maximum(jnp.minimum(jnp.sum(confident, axis=1, dtype=jnp.int32), ceiling), granted)

    place = jnp.arange(size)[None]
    candidate = (place >= granted[:, None]) & (place < eligible[:, None])
    # A running minimum: windows are prefixes even of values that are not quite a survival.
    value = jax.lax.cummin(_no_nan(survival), axis=1)
    # Position-major, so that the stable sort breaks ties by position, then row.
    order = jnp.argsort(jnp.where(candidate, -value, jnp.inf).T.reshape(-1), stable=True)
    rank = jnp.zeros(rows * size, jnp.int32).at[order].set(jnp.arange(rows * size)).reshape(size, rows).T
    chosen = candidate & (rank < budget - jnp.sum(granted))
    return (granted + jnp.sum(chosen, axis=1, dtype=jnp.int32)).astype(jnp.int32)


def _no_nan(x):
    return jnp.where(jnp.isnan(x), 0.0, x)
