"""What a step's results mean for its requests: tokens out, figures, ends; and what an observer sees of it.

Knows: packets on the host and the rows they belong to. Does not know: the loop, plans, programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jspark.logprobs import Logprobs, told
from jspark.programs import VerifyShape
from jspark.record import StepRecord
from jspark.request import FinishReason, Update
from jspark.scheduler import Chunk, Running
from jspark.state import PackedPacket


@dataclass(frozen=True)
class Flight:
    """A dispatched step whose results are still on their way."""

    number: int
    shape: VerifyShape
    dispatched: float
    packet: PackedPacket
    rows: list[Running]
    admissions: list[int]
    chunks: list[Chunk]


def take_in(flight: Flight, packet: Any, now: float, release: Callable[[Running], None]) -> list[Update]:
    """Hands a step's results (a `Packet` of NumPy arrays) to its requests.

    now: seconds on `time.perf_counter`'s clock. release: gives back slot and pages of a request that has ended.
    """
    _keep_prompt_logprobs(flight.chunks, packet.prompt_logprobs)
    updates = []
    for i, (running, admission) in enumerate(zip(flight.rows, flight.admissions, strict=True)):
        if not running.holds(admission):
            continue
        running.in_flight -= 1
        count = int(packet.count[i])
        if not (count or packet.finished[i]):
            continue
        tokens = tuple(packet.tokens[i, :count].tolist())
        stats = running.stats
        if running.committed == 0:
            running.first_token = now
            stats.prefill_seconds = now - running.admitted
        elif count:
            stats.steps += 1
            stats.windows[int(packet.window[i])] += 1
            stats.accepted[int(packet.accepted[i])] += 1
            stats.block_accepted[int(packet.block_accepted[i])] += 1
            stats.decode_seconds = now - running.first_token
        running.tokens += tokens
        reason: FinishReason | None = None
        problem = None
        if packet.finished[i]:
            stopped = bool(tokens) and tokens[-1] in running.request.stop_ids
            full = running.committed >= running.limit
            if running.matcher and not (stopped or full):  # nothing was legal any more
                problem = running.matcher.why_stopped(tokens)
            reason = "abort" if problem else "length" if full and not stopped else "stop"
            release(running)
        elif running.matcher:
            running.matcher.advance(tokens)
        k = running.request.params.logprobs
        asked = () if k is None or packet.logprobs is None else told(tokens, packet.logprobs, i, k)
        prompt = tuple(running.prompt_logprobs)
        running.prompt_logprobs.clear()
        updates.append(Update(running.request.id, tokens, reason, stats, asked, prompt, problem))
    return updates


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
    owners = zip(flight.rows, flight.admissions, packet.count, strict=False)
    kept = [i for i, (r, admission, count) in enumerate(owners) if r.holds(admission) and count > 0]
    rows = [flight.rows[i] for i in kept]
    confidence = np.full((len(kept), block_size), np.nan, np.float32)
    drafted = np.where([r.has_features and r.request.params.speculative for r in rows], block_size, 0)
    if packet.confidence.shape[1]:
        confidence[drafted > 0] = packet.confidence[kept][drafted > 0]
    return StepRecord(
        number=flight.number,
        rows=flight.shape.rows,
        verify_tokens=flight.shape.verify_tokens,
        prefill_tokens=flight.shape.prefill[0] if flight.shape.prefill else 0,
        dispatched=flight.dispatched,
        collected=now,
        request=np.array([r.request.id for r in rows], np.int64),
        position=np.array([r.position for r in rows], np.int64),
        sampled=np.array([r.request.params.temperature > 0 for r in rows], bool),
        drafted=drafted.astype(np.int32),
        window=packet.window[kept],
        accepted=packet.accepted[kept],
        block_accepted=packet.block_accepted[kept],
        count=packet.count[kept],
        confidence=confidence,
    )
