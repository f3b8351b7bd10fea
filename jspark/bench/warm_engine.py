"""An engine in the middle of decoding, and direct calls of its programs, for timing.

Knows: how to do without a prefill.
Does not know: clocks, what arguments a program takes (profile.py), or what is done with the results.
"""

from __future__ import annotations

import time

import jax
import numpy as np
from jax import Array

from jspark import profile
from jspark.engine import Engine
from jspark.propose import Proposal
from jspark.request import Request
from jspark.shapes import ProposeShape, VerifyShape
from jspark.sizing import least_tokens
from jspark.state import PackedArgs, SlotTable
from jspark.step import Sampling


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
        own = range(1, self.scheduler.allocator.capacity + 1)
        calls = profile.Launches(self.programs, self._pools, self.config.max_running_requests, own, rng)
        return Launches(calls, self.config.max_running_requests, self.arguments.pages(context), context)


class Launches:
    """Calls of programs for `rows` rows, all alike, of `context` tokens each; greedy, without prefill.

    pages: of the tables that programs see.
    """

    def __init__(self, calls: profile.Launches, rows: int, pages: int, context: int):
        self.programs, self.rows, self.pages = calls.programs, rows, pages
        self._calls, self._context = calls, context

    def slots(self) -> SlotTable:
        """A slot table in the middle of decoding; a verify program uses it up."""
        return self._calls.slots(self._context)

    def args(self, tokens: int) -> PackedArgs:
        """Arguments of a step whose tier is `tokens`, filled."""
        return self._calls.args(self._shape(tokens, False), self._context)

    def proposal(self) -> Proposal | None:
        """A random block with random confidence; None without a drafter."""
        return self._calls.proposal(self.rows)

    def propose(self, slots: SlotTable, args: PackedArgs) -> Proposal:
        """Launches the propose program."""
        return self._calls.propose(ProposeShape(self.rows, self.pages, Sampling()), slots, args)

    def verify(self, tokens: int, slots: SlotTable, args: PackedArgs, proposal: Proposal | None) -> Array:
        """Launches the verify program of the tier `tokens`."""
        return self._calls.verify(self._shape(tokens, proposal is not None), slots, args, proposal)

    def _shape(self, tokens: int, drafts: bool) -> VerifyShape:
        tokens = max(tokens, least_tokens(self.programs.mesh))
        return VerifyShape(self.rows, self.pages, Sampling(), tokens, drafts, None)


def _random_like(x: jax.Array) -> jax.Array:
    make = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=x.sharding)
    key, shape, dtype = jax.random.key(x.size), x.shape, x.dtype
    # There may be no room for both.
    x.delete()
    return make(key, shape, dtype)
