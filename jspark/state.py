"""What the device keeps of each request between steps, and what the host sends with a step.

Knows: the slot table (one entry a request slot, the last one a dummy that padded rows point to).
Does not know: pages (the host's tables come with each step) or how a step uses any of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jspark.adjust import RowAdjust, neutral
from jspark.logprobs import Logprobs
from jspark.pallas.ragged_attention import Segments, Tiles
from jspark.sampling import RowSampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The state of every request slot.

    anchor: the last committed token, not yet run through the target. position: where it stands (0 based), so
    also how many tokens the caches hold. remaining: tokens it may still commit. fresh: nothing committed yet,
    hence no features to draft from. speculative: the row may draft. stop_ids: padded with −1. carried: what
    eagle.py keeps of a request; None for other drafters.
    """

    anchor: Int[Array, " s"]
    position: Int[Array, " s"]
    remaining: Int[Array, " s"]
    live: Bool[Array, " s"]
    fresh: Bool[Array, " s"]
    speculative: Bool[Array, " s"]
    stop_ids: Int[Array, "s n"]
    sampling: RowSampling
    adjust: RowAdjust
    carried: Float[Array, "s h"] | None = None

    def take(self, index: Int[Array, " r"]) -> Slots:
        """The entries of some slots, as rows of a step."""
        return jax.tree.map(lambda x: x[index], self)


def empty_slots(slots: int, stop_ids: int, carried: tuple[int, DTypeLike] | None = None) -> Slots:
    """`slots` idle slots and the dummy. carried: width and dtype of what a request carries, if anything."""
    n = slots + 1
    ints, off = jnp.zeros(n, jnp.int32), jnp.zeros(n, bool)
    sampling = RowSampling(
        temperature=jnp.zeros(n, jnp.float32),
        top_k=ints,
        top_p=jnp.ones(n, jnp.float32),
        min_p=jnp.zeros(n, jnp.float32),
        seed=jnp.zeros(n, jnp.uint32),
        coupled=off,
    )
    # Copies, because the state is donated and a buffer can be donated once only.
    hidden = None if carried is None else jnp.zeros((n, carried[0]), carried[1])
    none = jnp.full((n, stop_ids), -1, jnp.int32)
    slots_ = Slots(ints, ints, ints, off, off, off, none, sampling, neutral(n), hidden)
    return jax.tree.map(lambda x: x.copy(), slots_)


def admit(slots: Slots, index: Int[Array, " a"], values: Slots) -> Slots:
    """The slot table with new requests written at `index`."""
    return jax.tree.map(lambda x, y: x.at[index].set(y), slots, values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefill:
    """The prefill-chunk rows of a step. tokens, positions, row: [c]; a row index of R or more is padding.

    tiles: the same rows as rectangles, indices counted in the whole packed buffer; None where kernels attend.
    segments: the same rows, counted from the first prefill row; None where the reference attends. following: the
    prompt's next token, where somebody asks for it.
    """

    tokens: Int[Array, " c"]
    positions: Int[Array, " c"]
    row: Int[Array, " c"]
    tiles: Tiles | None
    segments: Segments | None
    following: Int[Array, " c"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepArgs:
    """What the host decides for a step. decode: the row verifies (a row that only prefills does not)."""

    slot: Int[Array, " r"]
    decode: Bool[Array, " r"]
    table: Int[Array, "r p"]
    budget: Int[Array, ""]
    threshold: Float[Array, ""]
    min_window: Int[Array, " r"]
    max_window: Int[Array, " r"]
    prefill: Prefill | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packet:
    """What a step sends back: small, copied out asynchronously.

    tokens: [r, w], −1 beyond `count`. accepted: drafted tokens accepted within the window. block_accepted: the
    same without the window's cut, as far as rows were verified. confidence: [r, γ] logits of this step's block.
    logprobs: of the tokens [r, w]; prompt_logprobs: of the prefill rows [c]; both only where asked for.
    """

    tokens: Int[Array, "r w"]
    count: Int[Array, " r"]
    accepted: Int[Array, " r"]
    block_accepted: Int[Array, " r"]
    window: Int[Array, " r"]
    finished: Bool[Array, " r"]
    confidence: Float[Array, "r g"]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
