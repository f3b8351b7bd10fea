"""What the device keeps of each request between steps, and what the host sends with a step.

Knows: the slot table (one entry a request slot, the last one a dummy that padded rows point to).
Does not know: pages (the host's tables come with each step) or how a step uses any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jspark.adjust import RowAdjust
from jspark.landing import fetch
from jspark.logprobs import Logprobs
from jspark.packing import Layout
from jspark.pallas.ragged_attention import Segments, Tiles
from jspark.sampling import RowSampling

#: Stop token ids a request can have.
MAX_STOP_IDS = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The state of some request slots, as rows of a step.

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


def _idle_slot() -> Layout[Slots]:
    zero, real, off = np.int32(0), np.float32(0), np.bool_(False)
    fields: dict[str, Any] = {
        **dict.fromkeys(("anchor", "position", "remaining"), zero),
        **dict.fromkeys(("live", "fresh", "speculative"), off),
        "stop_ids": np.full(MAX_STOP_IDS, -1, np.int32),
    }
    sampling: dict[str, Any] = {
        "temperature": real,
        "top_k": zero,
        "top_p": np.float32(1),
        "min_p": real,
        "seed": np.uint32(0),
        "coupled": off,
    }
    adjust: dict[str, Any] = {
        "repetition": np.float32(1),
        "presence": real,
        "frequency": real,
        "min_position": zero,
        "biased": off,
        "worded": off,
    }
    return Layout(Slots(**fields, sampling=RowSampling(**sampling), adjust=RowAdjust(**adjust)))


#: Where a slot's state lies in its row of the table; `blank` is an idle slot.
SLOT = _idle_slot()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotTable:
    """The state of every request slot in one array, since each array of a call costs the host time."""

    words: Int[Array, "s n"]
    carried: Float[Array, "s h"] | None = None

    def take(self, args: StepArgs) -> Slots:
        """The state of a step's rows; `args` brings it where a slot has a new owner."""
        carried, new = self.carried, args.new[:, None]
        if carried is not None:
            carried = jnp.where(new, jnp.zeros((), carried.dtype), carried[args.slot])
        words = jnp.where(new, args.entry, self.words[args.slot])
        return replace(SLOT.unpack(words), carried=carried)

    def put(self, index: Int[Array, " r"], rows: Slots) -> SlotTable:
        """The table with the entries of some slots replaced."""
        words = self.words.at[index].set(SLOT.pack(replace(rows, carried=None)))
        return SlotTable(words, None if self.carried is None else self.carried.at[index].set(rows.carried))


def empty_slots(slots: int, carried: tuple[int, DTypeLike] | None = None) -> SlotTable:
    """`slots` idle slots and the dummy. carried: width and dtype of what a request carries, if anything."""
    hidden = None if carried is None else jnp.zeros((slots + 1, carried[0]), carried[1])
    return SlotTable(jnp.asarray(SLOT.blank(slots + 1)), hidden)


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
    """What the host decides for a step. decode: the row verifies (a row that only prefills does not).

    new: the row's slot has another owner now, whose state (a row of the slot table) is in `entry`.
    """

    slot: Int[Array, " r"]
    decode: Bool[Array, " r"]
    new: Bool[Array, " r"]
    entry: Int[Array, "r n"]
    table: Int[Array, "r p"]
    budget: Int[Array, ""]
    threshold: Float[Array, ""]
    min_window: Int[Array, " r"]
    max_window: Int[Array, " r"]
    prefill: Prefill | None


@dataclass(frozen=True)
class PackedArgs:
    """`StepArgs` as the host sends them: three arrays instead of twenty. NumPy where a call can take that.

    words: all but page table and prefill rows, so its size depends on R alone. prefill: None without such rows.
    """

    words: Int[Array, " n"]
    table: Int[Array, "r p"]
    prefill: Int[Array, " m"] | None
    layout: Layout[StepArgs]
    prefill_layout: Layout[Prefill] | None = None

    @classmethod
    def of(cls, args: StepArgs) -> PackedArgs:
        """Packs arrays of the host."""
        layout = Layout(replace(args, table=None, prefill=None))  # type: ignore[arg-type]
        if args.prefill is None:
            return cls(layout.blank(), args.table, None, layout)  # type: ignore[arg-type]
        prefill = Layout(args.prefill)
        return cls(layout.blank(), args.table, prefill.blank(), layout, prefill)  # type: ignore[arg-type]

    @property
    def arrays(self) -> tuple[Array, Array, Array | None]:
        """What a program is called with."""
        return self.words, self.table, self.prefill

    def unpack(self, words: Array, table: Array, prefill: Array | None) -> StepArgs:
        """The step's arguments from `arrays`, inside a program."""
        chunks = None if self.prefill_layout is None or prefill is None else self.prefill_layout.unpack(prefill)
        # Page numbers are not negative: this only gives the table a place within the program. A GPU's graph is
        # updated wherever an address changed, at each layer's attention if that read the argument itself.
        table = jnp.maximum(table, 0)
        return replace(self.layout.unpack(words), table=table, prefill=chunks)


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


@cache
def packet_layout(
    rows: int, block_size: int, logprobs: int | None, prompt_logprobs: int | None, prefill_rows: int
) -> Layout[Packet]:
    """Where the parts of a packet lie in the one buffer that it travels in."""

    def ints(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int32)

    def asked(k: int | None, *shape: int) -> Any:
        if k is None:
            return None
        return Logprobs(np.zeros(shape, np.float32), np.zeros((*shape, k), np.float32), ints(*shape, k))  # type: ignore[arg-type]

    width = block_size + 1
    fields: dict[str, Any] = {
        "tokens": ints(rows, width),
        **dict.fromkeys(("count", "accepted", "block_accepted", "window"), ints(rows)),
        "finished": np.zeros(rows, bool),
        "confidence": np.zeros((rows, block_size), np.float32),
        "logprobs": asked(logprobs, rows, width),
        "prompt_logprobs": asked(prompt_logprobs, prefill_rows),
    }
    return Layout(Packet(**fields))


@dataclass(frozen=True)
class PackedPacket:
    """A packet in one buffer, on its way to the host."""

    words: Int[Array, " n"]
    layout: Layout[Packet]

    def host(self) -> Any:
        """The packet with NumPy arrays; waits for them. `finished` is 0 or 1."""
        return self.layout.view(fetch(self.words))
