"""What a step's results mean for its requests: tokens out, figures, ends; and what an observer sees of it.

Knows: packets on the host and the rows they belong to. Does not know: the loop, plans, programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from jspark.logprobs import Logprobs, told
from jspark.record import StepRecord
from jspark.request import FinishReason, Update
from jspark.scheduler import Chunk, Running
from jspark.shapes import VerifyShape
from jspark.state import PackedPacket
from jspark.sts import calibrated


class Flight(NamedTuple):
    """A dispatched step whose results are still on their way.

    rows, slots, admissions, drafted: of the rows that decode. drafted: it had something to draft from, and may.
    temperatures: [2, γ], of sequential temperature scaling, that the step ran with.
    probe: see `Plan`.
    """

    number: int
    shape: VerifyShape
    dispatched: float
    packet: Future[PackedPacket]
    rows: list[Running]
    slots: np.ndarray
    admissions: list[int]
    drafted: np.ndarray
    chunks: list[Chunk]
    temperatures: np.ndarray | None
    probe: np.ndarray | None


def take_in(flight: Flight, packet: Any, now: float, release: Callable[[Running], None]) -> list[Update]:
    """Hands a step's results (a `Packet` of NumPy arrays) to its requests.

    now: seconds on `time.perf_counter`'s clock. release: gives back slot and pages of a request that has ended.
    """
    _keep_prompt_logprobs(flight.chunks, packet.prompt_logprobs)
    updates = []
    # Lists: an element of an array costs as much as everything else that is done for a row here.
    count_of, finished_of, logprobs = packet.count.tolist(), packet.finished.tolist(), packet.logprobs
    blocks = zip(packet.window.tolist(), packet.accepted.tolist(), packet.block_accepted.tolist(), strict=True)
    columns = (count_of, finished_of, packet.tokens.tolist(), blocks)
    rows = zip(flight.rows, flight.admissions, *columns, strict=False)
    for i, (running, admission, count, finished, row, block) in enumerate(rows):
        if running.admission != admission or running.slot < 0:
            continue
        running.in_flight -= 1
        if not (count or finished):
            continue
        tokens = tuple(row[:count])
        stats = running.stats
        if running.first_token == 0.0:
            running.first_token = now
            stats.prefill_seconds = now - running.admitted
        elif count:
            stats.steps += 1
            stats.blocks[block] = stats.blocks.get(block, 0) + 1
            stats.decode_seconds = now - running.first_token
        running.tokens += tokens
        reason: FinishReason | None = None
        problem = None
        if finished:
            reason, problem = _end(running, tokens)
            release(running)
        elif running.matcher:
            running.matcher.advance(tokens)
        asked = prompt = ()
        if logprobs is not None and (k := running.request.params.logprobs) is not None:
            asked = told(tokens, logprobs, i, k)
        if running.prompt_logprobs:
            prompt = tuple(running.prompt_logprobs)
            running.prompt_logprobs.clear()
        updates.append(Update(running.request.id, tokens, reason, stats, asked, prompt, problem))
    return updates


def _end(running: Running, tokens: tuple[int, ...]) -> tuple[FinishReason, str | None]:
    """Why a request ended with these tokens, and what its grammar says if that was the reason."""
    stopped = bool(tokens) and tokens[-1] in running.request.stop_ids
    full = running.committed >= running.limit
    problem = None
    if running.matcher and not (stopped or full):  # nothing was legal any more
        problem = running.matcher.why_stopped(tokens)
    return "abort" if problem else "length" if full and not stopped else "stop", problem


def _keep_prompt_logprobs(chunks: list[Chunk], logprobs: Logprobs | None) -> None:
    """Log-probabilities of prompt tokens, kept until the first tokens of their request."""
    start = 0
    for chunk in chunks:
        size = chunk.stop - chunk.start
        k = chunk.running.request.params.prompt_logprobs
        if k is not None and logprobs is not None:
            tokens = tuple(chunk.running.tokens[chunk.start + 1 : chunk.stop + 1])
            chunk.running.prompt_logprobs += told(tokens, logprobs, slice(start, start + size), k)
        start += size


def record(flight: Flight, packet: Any, now: float, block_size: int) -> StepRecord:
    """What an observer sees of a step; before `take_in`, with the rows as they were before the step."""
    rows: Sequence[Running] = flight.rows
    owners = zip(rows, flight.admissions, packet.count.tolist(), strict=False)
    ours = [r.holds(admission) and count > 0 for r, admission, count in owners]
    kept: Any = slice(0, len(rows))
    if not all(ours):
        kept = np.flatnonzero(ours)
        rows = [rows[i] for i in kept]
    drafted = flight.drafted[kept]
    confidence = np.full((len(rows), block_size), np.nan, np.float32)
    if packet.confidence.shape[1]:
        np.copyto(confidence, packet.confidence[kept], where=drafted[:, None])
    sampled = np.array([r.sampled for r in rows], bool)
    return StepRecord(
        number=flight.number,
        rows=flight.shape.rows,
        verify_tokens=flight.shape.verify_tokens,
        prefill_tokens=flight.shape.prefill[0] if flight.shape.prefill else 0,
        dispatched=flight.dispatched,
        collected=now,
        request=np.array([r.request.id for r in rows], np.int64),
        position=np.array([r.position for r in rows], np.int64),
        sampled=sampled,
        drafted=np.where(drafted, block_size, 0).astype(np.int32),
        window=packet.window[kept],
        accepted=packet.accepted[kept],
        block_accepted=packet.block_accepted[kept],
        count=packet.count[kept],
        finished=packet.finished[kept] > 0,
        confidence=confidence,
        survival=np.cumprod(calibrated(confidence, sampled.astype(int), flight.temperatures), axis=1),
        prompt=np.array([len(r.request.prompt) for r in rows], np.int64),
        arrived=np.array([r.arrived for r in rows], float),
    )
