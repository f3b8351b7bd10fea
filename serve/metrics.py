"""Figures for Prometheus: vLLM's names behind a prefix of our own.

Knows: what is counted, and when. Does not know: who asks, or how the figures come about.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jspark.record import StepRecord
from jspark.request import Update

if TYPE_CHECKING:
    from jspark.answer import Answer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 1)
_TOKENS = tuple(2**i for i in range(18))
#: Share of a step in the recent accept length.
_RECENT = 0.01


class Speculation:
    """Drafts and their fate since the start. The engine's thread counts, others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Begins anew."""
        with self._lock:
            self.drafts = self.draft_tokens = self.accepted = 0
            self.per_position = np.zeros(0, np.int64)
            self._recent: float | None = None

    def observe(self, record: StepRecord) -> None:
        """Counts a step; rows that had nothing to verify, such as those of a first token, are left out."""
        drafted = record.window > 0
        rows = int(drafted.sum())
        if not rows:
            return
        accepted = record.accepted[drafted]
        size = record.confidence.shape[1]
        with self._lock:
            if len(self.per_position) < size:
                self.per_position = np.pad(self.per_position, (0, size - len(self.per_position)))
            self.per_position[:size] += (accepted[:, None] > np.arange(size)).sum(0)
            self.drafts += rows
            self.draft_tokens += int(record.window[drafted].sum())
            self.accepted += int(accepted.sum())
            length = 1 + float(accepted.mean())
            self._recent = length if self._recent is None else self._recent + _RECENT * (length - self._recent)

    @property
    def accept_length(self) -> float | None:
        """Tokens a draft brought on average, the target's own one included; None before the first draft."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def recent_accept_length(self) -> float | None:
        """The same of the last hundred steps or so."""
        return self._recent

    def snapshot(self) -> tuple[int, int, int, list[int]]:
        """Drafts, tokens in them, accepted ones, and these by position."""
        with self._lock:
            return self.drafts, self.draft_tokens, self.accepted, self.per_position.tolist()


@dataclass(frozen=True)
class Load:
    """The engine after a step. pages: of the KV pool; free: of these, or kept only for prompts to come.

    cache_asked, cache_found: tokens that the prefix cache was asked for, and that it held. cpu_seconds: of the
    engine's thread.
    """

    running: int = 0
    waiting: int = 0
    free: int = 0
    pages: int = 0
    steps: int = 0
    cache_asked: int = 0
    cache_found: int = 0
    cpu_seconds: float = 0.0

    @property
    def usage(self) -> float:
        """Share of the pages in use."""
        return 1 - self.free / self.pages if self.pages else 0.0


class Metrics:
    """A registry of its own, so that several servers can live in one process.

    load: the engine as of now.
    """

    def __init__(self, prefix: str, model: str, speculation: Speculation, load: Callable[[], Load]):
        self.registry = CollectorRegistry()
        labels = {"model_name": model}

        def counter(name: str, text: str, *extra: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, ["model_name", *extra], registry=self.registry)

        def gauge(name: str, text: str, *extra: str) -> Gauge:
            return Gauge(f"{prefix}:{name}", text, ["model_name", *extra], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            made = Histogram(f"{prefix}:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(**labels)

        for name, text, value in (
            ("num_requests_running", "Answers that hold a slot.", lambda: load().running),
            ("num_requests_waiting", "Answers that wait for a slot.", lambda: load().waiting),
            ("kv_cache_usage_perc", "Share of the KV pages in use; 1 is all.", lambda: load().usage),
        ):
            gauge(name, text).labels(**labels).set_function(value)
        self._prompt = counter("prompt_tokens", "Prompt tokens of answers that ended.").labels(**labels)
        self._generated = counter("generation_tokens", "Tokens generated.").labels(**labels)
        self._success = counter("request_success", "Answers that ended.", "finished_reason")
        self._aborted = counter("request_aborted", "Answers whose client went away or ran out of time.").labels(
            **labels
        )
        self._http = counter("http_requests", "Requests by path and status.", "path", "status")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to first token.")
        self._itl = histogram("inter_token_latency_seconds", "Time a token, of every token after the first.")
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = histogram("request_queue_time_seconds", "From arrival to a slot.")
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_sizes = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._lag = histogram("event_loop_lag_seconds", "How late the event loop is, every 20 ms.", _LAGS)
        self._busy = histogram("event_loop_busy_seconds", "Processor time it took meanwhile.", _LAGS)
        self.lag_max = 0.0
        self.cpu_seconds = {"http": 0.0, "http_workers": 0.0, "engine": 0.0}
        longest = gauge("event_loop_lag_max_seconds", "The longest since the start.")
        longest.labels(**labels).set_function(lambda: self.lag_max)
        cpu = gauge("thread_cpu_seconds", "Processor time of the event loop, its helpers, the engine.", "thread")
        for thread in self.cpu_seconds:
            cpu.labels(**labels, thread=thread).set_function(lambda name=thread: self.cpu_seconds[name])
        ProcessCollector(registry=self.registry)
        self._labels = labels
        self.registry.register(_Counts(prefix, model, speculation, load))

    def tokens(self, started: float, seen: float, now: float, update: Update, first: bool) -> None:
        """Tokens of an answer have come. started, seen: arrival, and when the last ones came."""
        count = len(update.tokens)
        if first:
            self._ttft.observe(now - started)
            self._queue.observe(max(0.0, now - started - update.stats.prefill_seconds))
        else:
            for _ in range(count):
                self._itl.observe((now - seen) / count)
        self._generated.inc(count)

    def finished(self, answer: Answer, started: float, now: float) -> None:
        """An answer has ended by itself."""
        output = answer.output()
        self._success.labels(**self._labels, finished_reason=output.finish_reason).inc()
        self._prompt.inc(output.prompt_tokens)
        self._e2e.observe(now - started)
        self._prompt_sizes.observe(output.prompt_tokens)
        self._answer_sizes.observe(output.completion_tokens)

    def aborted(self, answers: int) -> None:
        """Answers were given up."""
        self._aborted.inc(answers)

    def answered(self, path: str, status: int) -> None:
        """A request has been answered. path: of a route, so that there are few."""
        self._http.labels(**self._labels, path=path, status=str(status)).inc()

    def beat(self, lag: float, http_cpu: float, engine_cpu: float) -> None:
        """lag: seconds that the event loop was late. The others: processor seconds of the two threads."""
        self._lag.observe(max(lag, 0.0))
        self._busy.observe(http_cpu - self.cpu_seconds["http"])
        self.lag_max = max(self.lag_max, lag)
        self.cpu_seconds.update(http=http_cpu, engine=engine_cpu)

    def page(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self.registry)


class _Counts(Collector):
    """What the engine's thread counts: drafts and the prefix cache."""

    def __init__(self, prefix: str, model: str, speculation: Speculation, load: Callable[[], Load]):
        self._prefix, self._model, self._speculation, self._load = prefix, model, speculation, load

    def collect(self) -> Iterator[Metric]:
        drafts, tokens, accepted, positions = self._speculation.snapshot()
        recent, load = self._speculation.recent_accept_length, self._load()
        for name, text, value in (
            ("spec_decode_num_drafts", "Blocks of which something was verified.", drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens sent to verification.", tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", accepted),
            ("prefix_cache_queries", "Prompt tokens that the prefix cache was asked for.", load.cache_asked),
            ("prefix_cache_hits", "Prompt tokens that it held.", load.cache_found),
        ):
            family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        family = CounterMetricFamily(
            f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their position in the block.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(positions):
            family.add_metric([self._model, str(position)], count)
        yield family
        if recent is not None:
            gauge = GaugeMetricFamily(
                f"{self._prefix}:spec_accept_length",
                "Tokens a draft brings lately, the target's own one included; near 1 the drafter is of no use.",
                labels=["model_name"],
            )
            gauge.add_metric([self._model], recent)
            yield gauge
