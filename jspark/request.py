"""What is asked of the engine and what comes back, in token ids.

Knows: sampling parameters and their limits, the figures kept of each request.
Does not know: text (llm.py), slots or pages (engine.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from jspark.errors import UserError

FinishReason = Literal["stop", "length", "abort"]
Sampler = Literal["auto", "coupled", "rejection"]


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    temperature: 0 is greedy. top_k: 0 or −1 is off. top_p: 1 is off. min_p: 0 is off. seed: makes the output a
    function of the prompt and the seed. max_tokens: None fills the context. stop: strings that end the text and
    are cut from it. speculative_sampling: the coupled sampler gives exactly plain decoding's tokens for the seed,
    the rejection sampler its distribution; auto is coupled for requests with a seed.

    Raises:
        UserError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    speculative_sampling: Sampler = "auto"

    def __post_init__(self) -> None:
        def refuse(name: str, allowed: str) -> None:
            raise UserError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

        # NaN fails every comparison. The device computes in float32.
        if not (_real(self.temperature) and (self.temperature == 0 or 1e-30 <= self.temperature <= 1e30)):
            refuse("temperature", "0 (greedy) or a positive number from 1e-30 to 1e30")
        if not (_whole(self.top_k) and self.top_k >= -1):
            refuse("top_k", "a positive whole number, or 0 for no limit")
        if not (_real(self.top_p) and 0 < self.top_p <= 1):
            refuse("top_p", "above 0 and at most 1")
        if not (_real(self.min_p) and 0 <= self.min_p <= 1):
            refuse("min_p", "between 0 and 1")
        if self.seed is not None and not (_whole(self.seed) and -(2**63) <= self.seed < 2**64):
            refuse("seed", "a 64-bit integer")
        if self.max_tokens is not None and not (_whole(self.max_tokens) and self.max_tokens >= 1):
            refuse("max_tokens", "a whole number of at least 1")
        if self.speculative_sampling not in ("auto", "coupled", "rejection"):
            refuse("speculative_sampling", "auto, coupled or rejection")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not (isinstance(stop, Iterable) and all(isinstance(s, str) and s for s in stop)):
            refuse("stop", "non-empty strings")
        ids = self.stop_token_ids
        if not (isinstance(ids, Iterable) and all(_whole(t) and t >= 0 for t in ids)):
            refuse("stop_token_ids", "a list of token ids of 0 and more")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))

    @property
    def filtered(self) -> bool:
        """Any of top-k, top-p and min-p is in use."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Request:
    """One prompt for the engine. stop_ids: every token that ends it, end-of-text ids included."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()


@dataclass
class Stats:
    """Figures of one request. Histograms count decode steps, that is, steps after the first token.

    steps: target forwards that committed tokens of this prompt after its prefill. windows: drafted tokens sent to
    verification. accepted: of these, accepted. block_accepted: accepted without the window's cut, where the whole
    block was verified (static and cap-accept). cached_tokens: prompt tokens found in the prefix cache. Seconds run
    from admission to the first token, and on to the last.
    """

    steps: int = 0
    windows: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    block_accepted: Counter[int] = field(default_factory=Counter)
    cached_tokens: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Update:
    """New tokens of one request, and why it ended if it did."""

    id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats
