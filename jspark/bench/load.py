"""A load: which prompts are asked for, by how many at a time, who goes away, and what the askers see.

Knows: how requests are drawn, and how what comes of them is counted. Does not know: who answers them, a server
(serve.py) or an engine in this process (engine_alone.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Settings:
    """concurrency: askers at a time, a run each. per_asker: requests that each has at most, on average; `requests`
    bounds all of a run. cancelled: share of requests given up after one to three pieces.

    Prompts are random token ids, `prompts` different ones. prompt_tokens: their shortest and longest length; the
    others' logarithms are spread evenly between. Answers have `new_tokens` and are greedy, but for the share
    `seeded`, which is sampled at temperature 1 with a seed.
    """

    concurrency: tuple[int, ...]
    requests: int
    cancelled: float
    seeded: float
    prompts: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    seed: int
    per_asker: int | None = None

    def count(self, concurrency: int) -> int:
        """Requests of a run."""
        return min(self.requests, concurrency * (self.per_asker or self.requests))


@dataclass(frozen=True)
class Load:
    """The requests that settings describe, for a vocabulary of this size."""

    settings: Settings
    vocabulary: int

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids; the first prompt is as short, the second as long as they get."""
        settings = self.settings
        chance = random.Random(settings.seed)
        low, high = settings.prompt_tokens
        ends = [low, high] if low < high else [low]
        lengths = [round(low * (high / low) ** chance.random()) for _ in range(settings.prompts)]
        lengths = (ends + lengths)[: settings.prompts]
        return [[chance.randrange(self.vocabulary) for _ in range(length)] for length in lengths]

    @cached_property
    def sampling(self) -> list[dict[str, Any]]:
        """Sampling parameters of each prompt, under the names that the API and jspark share."""
        chance = random.Random(self.settings.seed + 1)
        shared = {"max_tokens": self.settings.new_tokens, "ignore_eos": True}
        return [
            shared
            | ({"temperature": 1.0, "seed": i} if chance.random() < self.settings.seeded else {"temperature": 0.0})
            for i in range(self.settings.prompts)
        ]

    def leaves(self, concurrency: int, requests: int) -> dict[int, int]:
        """Request → pieces after which its asker goes away."""
        chance = random.Random(self.settings.seed + concurrency)
        return {i: chance.randrange(1, 4) for i in range(requests) if chance.random() < self.settings.cancelled}


@dataclass
class Tally:
    """What the askers of a run saw. Seconds."""

    whole: int = 0
    left: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)

    def add(self, tokens: list[int], expected: list[int], began: float, first: float, last: float) -> None:
        """A whole answer. began, first, last: when it was asked for, and when its first and last tokens came."""
        self.whole += 1
        self.wrong += tokens != expected
        self.tokens += len(tokens)
        self.first.append(first - began)
        self.total.append(last - began)
        if len(tokens) > 1:
            self.per_token.append((last - first) / (len(tokens) - 1))

    def summary(self, concurrency: int, requests: int, seconds: float) -> dict[str, Any]:
        """The fields that every run has (benchmarks/README.md)."""
        return {
            "concurrency": concurrency,
            "requests": requests,
            "whole": self.whole,
            "left": self.left,
            "wrong": self.wrong,
            "failed": len(self.failed),
            "failures": sorted(set(self.failed))[:5],
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "requests_per_second": self.whole / seconds,
            "first_token_seconds": _spread(self.first),
            "token_seconds": _spread(self.per_token),
            "total_seconds": _spread(self.total),
        }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)} | {"mean": float(np.mean(values))}
