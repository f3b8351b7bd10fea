"""An engine in the middle of decoding, and direct calls of its programs, for timing.

Knows: how to do without a prefill, what arguments a program takes when all rows are alike.
Does not know: clocks, or what is done with the results.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspark.adjust import Tables
from jspark.engine import Engine
from jspark.programs import Programs, ProposeShape, VerifyShape
from jspark.propose import Proposal
from jspark.request import Request
from jspark.sizing import least_tokens
from jspark.state import SLOT, PackedArgs, SlotTable, StepArgs
from jspark.step import Pools, Sampling


class WarmEngine(Engine):
    """An engine that begins in the middle: caches full of random numbers, requests that need no prefill."""

    def fill(self) -> None:
        """Random keys and values in both pools; zeros would flatter the time."""
        self._pools = jax.tree.map(_random_like, self._pools)

    def begin(self, requests: list[Request]) -> None:
        """Admits `requests` as if their prompts were in the cache."""
        for request in requests:
            self.add(request)
        admitted = self.scheduler.admit(time.perf_counter())
        assert len(admitted) == len(requests)
        self._admit(admitted)
        for running in admitted:
            running.prefilled = len(running.request.prompt) - 1

    def launches(self, context: int, rng: np.random.Generator) -> Launches:
        """Direct calls of the programs; the engine itself is of no use afterwards, its pools are donated."""
        pages = self._arguments.pages(context)
        rows = self.config.max_running_requests
        return Launches(self.programs, self._pools, rows, self.config.page_size, pages, context, rng)


class Launches:
    """Calls of an engine's programs with random tokens, all rows alike. Pools are donated from call to call.

    context: tokens of every row, the last row of its window included. pages: of the tables that programs see.
    """

    def __init__(
        self,
        programs: Programs,
        pools: Pools,
        rows: int,
        page_size: int,
        pages: int,
        context: int,
        rng: np.random.Generator,
    ):
        self.programs, self.pages = programs, pages
        self.rows = rows
        self._pools, self._rng = pools, rng
        self._vocab_size = programs.spec.target.vocab_size
        self._position = context - programs.spec.block_size - 1
        own = -(-context // page_size)
        self._table = np.zeros((rows, pages), np.int32)
        self._table[:, :own] = 1 + np.arange(rows * own).reshape(rows, own)

    def slots(self) -> SlotTable:
        """A slot table in the middle of decoding; a verify program uses it up."""
        words, slots = SLOT.blank(self.rows + 1)
        slots.anchor[:] = self._tokens(self.rows + 1)
        slots.position[:], slots.remaining[:] = self._position, 1 << 20
        slots.live[:] = slots.speculative[:] = 1
        return self.programs.place(SlotTable(words))  # type: ignore[arg-type]

    def args(self, tokens: int) -> PackedArgs:
        """Arguments of a step whose tier is `tokens`, filled."""
        rows = self.rows
        fields: dict[str, Any] = {
            "slot": np.arange(rows, dtype=np.int32),
            "decode": np.ones(rows, bool),
            "table": self._table,
            "budget": np.int32(tokens - rows),
            "threshold": np.float32(0),
            "min_window": np.zeros(rows, np.int32),
            "max_window": np.full(rows, self.programs.spec.block_size, np.int32),
        }
        args = PackedArgs.of(StepArgs(**fields, prefill=None))
        words, table = self.programs.place((args.words, args.table))
        return replace(args, words=words, table=table)

    def proposal(self) -> Proposal | None:
        """A random block with random confidence; None without a drafter."""
        shape = (self.rows, self.programs.spec.block_size)
        if not shape[1]:
            return None
        confidence = jnp.asarray(self._rng.normal(size=shape), jnp.float32)
        return self.programs.place(Proposal(jnp.asarray(self._tokens(shape)), confidence, None))

    def propose(self, slots: SlotTable, args: PackedArgs) -> Proposal:
        """Launches the propose program."""
        shape = ProposeShape(self.rows, self.pages, Sampling())
        return self.programs.propose(shape, self._pools, slots, args, Tables())

    def verify(self, tokens: int, slots: SlotTable, args: PackedArgs, proposal: Proposal | None) -> Array:
        """Launches the verify program of the tier `tokens`."""
        tokens = max(tokens, least_tokens(self.programs.mesh))
        shape = VerifyShape(self.rows, self.pages, Sampling(), tokens, proposal is not None, None)
        self._pools, _, _, packet = self.programs.verify(shape, self._pools, slots, args, proposal, Tables())
        return packet.words

    def _tokens(self, shape: int | tuple[int, ...]) -> np.ndarray:
        return self._rng.integers(self._vocab_size, size=shape, dtype=np.int32)


def _random_like(x: jax.Array) -> jax.Array:
    make = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=x.sharding)
    return make(jax.random.key(x.size), x.shape, x.dtype)
