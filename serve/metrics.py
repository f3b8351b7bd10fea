"""Figures for Prometheus: vLLM's names behind a prefix of our own.

Knows: what is counted, and when. Does not know: who asks, or how the figures come about.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jspark.calibration import CLASSES
from jspark.request import Update
from serve.figures import STEP_SECONDS, Load, Speculation, Steps, calibration_errors

if TYPE_CHECKING:
    from jspark.answer import Answer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 1)
_TOKENS = tuple(2**i for i in range(18))
#: What a family has, by the values of its labels.
_Values = Iterable[tuple[tuple[str, ...], float]]


class Metrics:
    """A registry of its own, so that several servers can live in one process.

    load: the engine as of now. whole_blocks: whole blocks are verified, whatever their windows.
    """

    def __init__(
        self,
        prefix: str,
        model: str,
        speculation: Speculation,
        steps: Steps,
        load: Callable[[], Load],
        whole_blocks: bool,
    ):
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
        self.registry.register(_Counts(prefix, model, speculation, steps, load, whole_blocks))

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
    """What the engine's thread counts: drafts, steps, the prefix cache; and how well it knows itself."""

    def __init__(
        self,
        prefix: str,
        model: str,
        speculation: Speculation,
        steps: Steps,
        load: Callable[[], Load],
        whole_blocks: bool,
    ):
        self._prefix, self._model, self._speculation, self._load = prefix, model, speculation, load
        self._steps, self._whole_blocks = steps, whole_blocks

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        yield from self._drafts()
        yield from self._of_steps()
        yield self._counter("prefix_cache_queries", "Prompt tokens it was asked for.", load.cache_asked)
        yield self._counter("prefix_cache_hits", "Prompt tokens that it held.", load.cache_found)
        yield from self._calibration(load)
        yield from self._cost(load)

    def _drafts(self) -> Iterator[Metric]:
        drafts, tokens, accepted, positions = self._speculation.snapshot()
        yield self._counter("spec_decode_num_drafts", "Blocks of which something was verified.", drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens sent to verification.", tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", accepted)
        yield self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their position in the block.",
            ("position",),
            (((str(position),), count) for position, count in enumerate(positions)),
        )
        if self._whole_blocks:
            yield self._counter(
                "spec_decode_num_block_accepted_tokens",
                "Drafted tokens that would have been accepted without windows; accepted ones over these is "
                "utilisation.",
                self._speculation.block_accepted,
            )
        if (recent := self._speculation.recent_accept_length) is not None:
            text = "Tokens a draft brings lately, the target's own one included; near 1 the drafter is of no use."
            yield self._gauge("spec_accept_length", text, recent)

    def _of_steps(self) -> Iterator[Metric]:
        counts = self._steps.snapshot()
        yield self._counters(
            "engine_steps",
            "Steps by kind (drafted, plain: without a draft, prompt: prompts and first tokens) and verify tier.",
            ("kind", "verify_tokens"),
            (((kind, str(tier)), count) for (kind, tier), count in sorted(counts.kinds.items())),
        )
        names = [*(str(float(bound)) for bound in STEP_SECONDS), "+Inf"]
        buckets = list(zip(names, itertools.accumulate(counts.buckets), strict=True))
        text = "From a step's dispatch to its results; with the rest of the step before it where steps overlap."
        family = HistogramMetricFamily(f"{self._prefix}:engine_step_seconds", text, labels=["model_name"])
        family.add_metric([self._model], buckets, counts.seconds)
        yield family

    def _calibration(self, load: Load) -> Iterator[Metric]:
        figures = load.calibration
        if figures is None:
            return
        yield self._counter("calibration_refits", "Times that temperatures were replaced.", figures.refits)
        yield self._counters(
            "calibration_blocks",
            "Blocks that counted, by class of request.",
            ("class",),
            (((kind,), blocks) for kind, blocks in zip(CLASSES, figures.blocks, strict=True)),
        )
        text = "Expected calibration error of the drafter's confidence lately, the mean over positions."
        errors = calibration_errors(figures).items()
        yield self._gauges("calibration_error_ratio", text, ("class",), (((k,), error) for k, error in errors))

    def _cost(self, load: Load) -> Iterator[Metric]:
        figures = load.cost
        if figures is None:
            return
        yield self._counter("cost_compared_steps", "Steps held against the cost table.", figures.steps)
        if figures.steps:
            text = "What the cost table said of a step lately, on average."
            yield self._gauge("cost_predicted_step_seconds", text, figures.predicted)
            yield self._gauge("cost_measured_step_seconds", "What the same steps took.", figures.measured)
        yield self._gauges(
            "cost_correction_ratio",
            "What steps have made of a tier's verification in the cost table; 1 is as measured.",
            ("verify_tokens",),
            (((str(tier),), factor) for tier, factor in sorted(figures.factors.items())),
        )

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, (), (((), value),))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, (), (((), value),))

    def _counters(self, name: str, text: str, labels: tuple[str, ...], values: _Values) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", *labels])
        return self._filled(family, values)

    def _gauges(self, name: str, text: str, labels: tuple[str, ...], values: _Values) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", *labels])
        return self._filled(family, values)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: _Values) -> Metric:
        for labels, value in values:
            family.add_metric([self._model, *labels], value)
        return family
