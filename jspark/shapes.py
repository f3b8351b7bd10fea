"""Shapes of programs: the ladders they come from, and which program can stand in for which.

Knows: the keys of propose and verify programs, and what padding makes of a larger one. Pure functions of keys.
Does not know: compilation (programs.py), or what a step asks for (engine.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from jspark.step import Sampling


@dataclass(frozen=True)
class ProposeShape:
    """Key of a propose program."""

    rows: int
    pages: int
    sampling: Sampling


@dataclass(frozen=True)
class VerifyShape:
    """Key of a verify program; drafts: there is a proposal; prefill: chunk rows and the shape of their tiles.

    logprobs, prompt_logprobs: see verify_step. masked: rows of the grammar mask, 0 without one.
    """

    rows: int
    pages: int
    sampling: Sampling
    verify_tokens: int
    drafts: bool
    prefill: tuple[int, int, int] | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    masked: int = 0

    @property
    def propose(self) -> ProposeShape | None:
        """The program that drafts for this one: the two share their rows, page tables and sampling code."""
        return ProposeShape(self.rows, self.pages, self.sampling) if self.drafts else None

    @property
    def packed(self) -> int:
        """Rows of the target's forward, padding included."""
        return self.verify_tokens + (self.prefill[0] if self.prefill else 0)


def ladder(smallest: int, largest: int) -> tuple[int, ...]:
    """Powers of two times `smallest` below `largest`, then `largest`."""
    steps = []
    while smallest < largest:
        steps.append(smallest)
        smallest *= 2
    return (*steps, largest)


def at_least(steps: tuple[int, ...], wanted: int) -> int:
    """The smallest step that holds `wanted`."""
    return next(s for s in steps if s >= wanted)


def verify_ends(rows: int, block_size: int, least: int) -> tuple[int, int]:
    """Packed verify rows of `rows` requests without drafts and with whole blocks; least: see `least_tokens`."""
    return max(rows, least), max(rows * (block_size + 1), least)


def serves(have: VerifyShape, wanted: VerifyShape, chunks: Sequence[int] = ()) -> bool:
    """Whether the program `have` runs a step that asks for `wanted`, with the tokens that `wanted` would give.

    What is larger is padded: rows point to the dummy slot and decode nothing, packed rows and prefill rows belong
    to no request, page tables are masked by length, and a row reads only the sampling code that its own numbers
    ask for. A program that drafts serves a step that does not with empty windows; rejection rows are the
    exception, since what such a row draws after a draft is another draw than without one. chunks: sizes of the
    step's prompt chunks, one after the other.
    """
    return (
        have.rows >= wanted.rows
        and have.pages >= wanted.pages
        and have.verify_tokens >= wanted.verify_tokens
        and all(getattr(have.sampling, f.name) >= getattr(wanted.sampling, f.name) for f in fields(Sampling))
        and (have.drafts == wanted.drafts or (have.drafts and not wanted.sampling.rejection))
        and _holds(have.prefill, wanted.prefill, chunks)
        and _returns(have.logprobs, wanted.logprobs)
        and _returns(have.prompt_logprobs, wanted.prompt_logprobs)
        and have.masked >= wanted.masked
    )


def _holds(have: tuple[int, int, int] | None, wanted: tuple[int, int, int] | None, chunks: Sequence[int]) -> bool:
    """Whether the prompt chunks of a step find room in the prefill rows of a program."""
    if have is None or wanted is None:
        # A kernel was never given prefill rows of which none is real.
        return have is wanted or (have is not None and have[1] > 0)
    total, tiles, tile = have
    # A tile holds rows of one chunk. Kernels have no tiles.
    fits = sum(-(-size // tile) for size in chunks) <= tiles if tiles else wanted[1] == 0
    return fits and sum(chunks) <= total


def _returns(have: int | None, wanted: int | None) -> bool:
    """Whether enough of the likeliest tokens come back with each token."""
    return wanted is None or (have is not None and have >= wanted)


def cheapest(
    compiled: Iterable[VerifyShape], wanted: VerifyShape, chunks: Sequence[int] = ()
) -> VerifyShape | None:
    """The program of `compiled` that serves `wanted` at the least cost; None where none does.

    Packed rows go first, since the target's forward is most of a step, then drafting, request rows, the pages
    that attention gathers, and sampling code.
    """

    def cost(shape: VerifyShape) -> tuple[int, ...]:
        return (
            shape.packed,
            shape.drafts,
            shape.rows,
            shape.pages,
            sum(getattr(shape.sampling, f.name) for f in fields(Sampling)),
            -1 if shape.logprobs is None else shape.logprobs,
            -1 if shape.prompt_logprobs is None else shape.prompt_logprobs,
            shape.masked,
        )

    return min((s for s in compiled if serves(s, wanted, chunks)), key=cost, default=None)
