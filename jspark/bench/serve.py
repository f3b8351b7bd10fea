"""`jspark bench serve`: a server under load, from clients that read streams, and from some that go away.

Knows: clients in a closed loop, and what is read off the server before and after. Does not know: flags
(cli_bench.py), how requests are drawn (load.py), how servers are started (server_process.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import TYPE_CHECKING, Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from jspark.bench import report
from jspark.bench.load import Load, Settings, Tally
from jspark.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def measure(
    address: str, settings: Settings, process: int | None = None, expected: list[list[int]] | None = None
) -> report.Record:
    """Everything about the server that the record's `results` holds (benchmarks/README.md).

    address: of a server that is ready, without /v1. process: its id, where it runs on this machine. expected: the
    answers' token ids; None: what the server says when nothing else goes on. Raises UserError when there is no
    such server.
    """
    return asyncio.run(_measure(address, settings, process, expected))


async def _measure(
    address: str, settings: Settings, process: int | None, expected: list[list[int]] | None
) -> report.Record:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max(settings.concurrency, default=1))
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        try:
            info = (await client.get("/model_info")).json()
            before = await _state(client)
        except (httpx.HTTPError, ValueError, KeyError) as e:
            raise UserError(f"no server of jspark answers at {address} ({e}); start one, or drop --url") from None
        load = Load(settings, info["vocab_size"])
        if expected is None:
            expected = [await _alone(client, _body(load, i)) for i in range(len(load.prompts))]
        watch = _Watch(client, process)
        runs = []
        for concurrency in settings.concurrency:
            # Compiles what this many rows need, and is not counted.
            count = settings.count(concurrency)
            await _run(client, load, expected, concurrency, min(2 * concurrency, count))
            await _settled(client)
            await watch.begin()
            began = time.perf_counter()
            half = asyncio.Event()
            run = _run(client, load, expected, concurrency, count, half)
            tally, _ = await asyncio.gather(run, watch.middle(half))
            seconds = time.perf_counter() - began
            summary = tally.summary(concurrency, count, seconds)
            runs.append(summary | await watch.end(seconds, count))
    return {"settings": vars(settings), "runs": runs, "server": before["server"]}


async def _run(
    client: httpx.AsyncClient,
    load: Load,
    expected: list[list[int]],
    concurrency: int,
    requests: int,
    half: asyncio.Event | None = None,
) -> Tally:
    """half: set when half of the requests have been asked for."""
    tally, numbers = Tally(), iter(range(requests))
    leaves = load.leaves(concurrency, requests)

    async def one_client() -> None:
        for i in numbers:
            if half is not None and i >= requests // 2:
                half.set()
            which = i % len(load.prompts)
            try:
                await _ask(client, _body(load, which), expected[which], leaves.get(i), tally)
            except (httpx.HTTPError, ValueError, KeyError) as e:
                tally.failed.append(f"{type(e).__name__}: {e}"[:200])

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return tally


async def _ask(
    client: httpx.AsyncClient, body: dict[str, Any], expected: list[int], leave_after: int | None, tally: Tally
) -> None:
    """A streamed request; leave_after: chunks after which the client goes away."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    tokens: list[int] = []
    first = last = began
    ended = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {(await response.aread())[:150]!r}")
        chunks = 0
        async for line in response.aiter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                ended = True
                break
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                last = time.perf_counter()
                first = first if tokens else last
                tokens += choice["token_ids"]
            chunks += 1
            if chunks == leave_after:
                tally.left += 1
                return
    if not ended or len(tokens) != len(expected):
        raise ValueError(f"a stream ended after {len(tokens)} of {len(expected)} tokens")
    tally.add(tokens, expected, began, first, last)


async def _alone(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise UserError(f"the server refuses the benchmark's requests: {answer.text[:300]}")
    return answer.json()["choices"][0]["token_ids"]


def _body(load: Load, which: int) -> dict[str, Any]:
    return {"prompt": load.prompts[which], "return_token_ids": True} | load.sampling[which]


class _Watch:
    """The server around a run: its counters, its event loop, its memory. process: None where it is elsewhere."""

    def __init__(self, client: httpx.AsyncClient, process: int | None):
        self._client, self._process = client, process
        self._middle: int | None = None

    async def begin(self) -> None:
        """Before the run."""
        self._state, self._looks = await _state(self._client), await _looks(self._client)
        self._before = report.resident_bytes(self._process)

    async def middle(self, half: asyncio.Event) -> None:
        """When half of the requests have been asked for."""
        await half.wait()
        self._middle = report.resident_bytes(self._process)

    async def end(self, seconds: float, requests: int) -> dict[str, Any]:
        """What the run did to the server."""
        memory = report.resident_bytes(self._process)
        start, end = self._state, await _settled(self._client)
        drafts = end["num_drafts"] - start["num_drafts"]
        accepted = end["num_accepted_tokens"] - start["num_accepted_tokens"]
        cpu = {k: v - start["cpu_seconds"][k] for k, v in end["cpu_seconds"].items()}
        http = cpu["http"] + cpu["http_workers"]
        return {
            "accept_length": 1 + accepted / drafts if drafts else None,
            "steps": end["steps"] - start["steps"],
            "http_cpu_share": http / seconds,
            "event_loop_cpu_share": cpu["http"] / seconds,
            "engine_thread_cpu_share": cpu["engine"] / seconds,
            "http_share_of_process_cpu": http / cpu["process"] if cpu["process"] else None,
            "http_cpu_ms_per_request": 1e3 * http / requests,
            "leaked_slots": end["num_running_reqs"] + end["num_queue_reqs"] + end["num_live_reqs"],
            "leaked_pages": end["pages"] - end["free_pages"],
            **_late(self._looks, await _looks(self._client)),
            "event_loop_lag_max_seconds_since_start": end["event_loop_lag_max_seconds"],
            "resident_bytes_before": self._before,
            "resident_bytes_middle": self._middle,
            "resident_bytes_after": memory,
            "load_average": os.getloadavg()[0],
        }


async def _state(client: httpx.AsyncClient) -> dict[str, Any]:
    info = (await client.get("/server_info")).json()
    state = info.pop("internal_states")[0]
    return state | {"server": info}


async def _settled(client: httpx.AsyncClient) -> dict[str, Any]:
    """The state once nothing runs; what is left after ten seconds has leaked."""
    for _ in range(100):
        await client.post("/flush_cache")
        state = await _state(client)
        if not (state["num_running_reqs"] or state["num_queue_reqs"] or state["num_live_reqs"]):
            break
        await asyncio.sleep(0.1)
    return state


Counts = dict[float, int]


async def _looks(client: httpx.AsyncClient) -> tuple[Counts, Counts]:
    """How many looks at the server's event loop found it late, or busy, for no more than so many seconds."""
    page = (await client.get("/metrics")).text
    samples = [s for f in text_string_to_metric_families(page) for s in f.samples]

    def counts(name: str) -> Counts:
        found = (s for s in samples if s.name.endswith(f":event_loop_{name}_seconds_bucket"))
        return {float(s.labels["le"]): int(s.value) for s in found}

    return counts("lag"), counts("busy")


def _late(before: tuple[Counts, Counts], after: tuple[Counts, Counts]) -> dict[str, Any]:
    """Looks at the event loop during a run, how many found it over 250 ms late, bounds of the longest."""
    lag, busy = (
        {bound: now[bound] - then.get(bound, 0) for bound in sorted(now)}
        for then, now in zip(before, after, strict=True)
    )
    return {
        "event_loop_looks": lag[float("inf")],
        "event_loop_late_250ms": lag[float("inf")] - lag[0.25],
        "event_loop_lag_at_most_seconds": _bound(lag),
        "event_loop_busy_at_most_seconds": _bound(busy),
    }


def _bound(counts: Counts) -> float | None:
    longest = next(bound for bound, count in counts.items() if count == counts[float("inf")])
    return None if longest == float("inf") else longest


def draw(results: report.Record, axes: Axes) -> None:
    """Tokens a second and time to the first token, by concurrency; bars of the starts where nothing else ran."""
    runs, engine = results["runs"], results["engine_alone"] or []
    if not runs:
        _draw_starts(results["starts"], axes)
        return
    if len(runs) == 1:
        _draw_one(results, axes)
        return
    at = [run["concurrency"] for run in runs]
    axes.plot(at, [run["tokens_per_second"] for run in runs], "o-", color="#2a6f97", label="over HTTP")
    if engine:
        rates = [run["tokens_per_second"] for run in engine]
        axes.plot(at, rates, "D:", color="#a9b4c2", label="the engine alone")
    axes.set_xlabel("clients")
    axes.set_ylabel("tokens/s")
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(n) for n in at])
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    other = axes.twinx()
    waits = [(run["first_token_seconds"] or {}).get("p50", 0) * 1e3 for run in runs]
    other.plot(at, waits, "s--", color="#d1495b", label="first token, median")
    other.set_ylabel("ms to the first token")
    other.set_ylim(bottom=0)
    axes.set_title(f"{results['server']['model_path']}: closed loop, {runs[-1]['requests']} requests", loc="left")
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="best", frameon=False)


def _draw_one(results: report.Record, axes: Axes) -> None:
    """Bars of the one run, and of the engine alone."""
    [run] = results["runs"]
    arms = {"over HTTP": run}
    if results["engine_alone"]:
        [arms["the engine alone"]] = results["engine_alone"]
    rates = [arm["tokens_per_second"] for arm in arms.values()]
    axes.barh(list(arms), rates, height=0.5, color=["#2a6f97", "#a9b4c2"][: len(arms)])
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s of whole answers")
    ended = f"{run['whole']} whole, {run['left']} left by their clients, {run['wrong'] + run['failed']} wrong"
    axes.set_title(f"{results['server']['model_path']}, {run['concurrency']} clients: {ended}", loc="left")


def _draw_starts(starts: Any, axes: Axes) -> None:
    for name, color in (("first_token", "#a9b4c2"), ("ready", "#2a6f97"), ("listening", "#d1495b")):
        seconds = [start[f"{name}_seconds"] for start in starts.values()]
        axes.barh(list(starts), seconds, height=0.5, color=color, label=name.replace("_", " "))
    axes.set_xlabel("seconds from the start of the process")
    axes.set_title("Start of a server", loc="left")
    axes.legend(frameon=False)


def show(results: report.Record) -> None:
    """Tables of the runs and the starts."""
    rows = []
    alone = results["engine_alone"] or [None] * len(results["runs"])
    for run, engine in zip(results["runs"], alone, strict=True):
        first, token = run["first_token_seconds"] or {}, run["token_seconds"] or {}
        rows.append(
            [
                str(run["concurrency"]),
                f"{run['whole']} + {run['left']}",
                str(run["wrong"] + run["failed"]),
                f"{run['tokens_per_second']:.1f}",
                "" if engine is None else f"{engine['tokens_per_second']:.1f}",
                f"{first.get('p50', 0) * 1e3:.0f} / {first.get('p99', 0) * 1e3:.0f}",
                f"{token.get('p50', 0) * 1e3:.1f} / {token.get('p99', 0) * 1e3:.1f}",
                f"{run['http_cpu_share']:.0%}",
                f"{run['event_loop_late_250ms']} / {run['event_loop_looks']}",
                f"{run['leaked_slots']} / {run['leaked_pages']}",
            ]
        )
    header = ["clients", "whole + left", "bad", "tokens/s", "engine alone", "first ms p50 / p99"]
    header += ["token ms p50 / p99", "HTTP CPU", "late", "leaked slots / pages"]
    notes = [
        "HTTP CPU: processor time of the server's event loop and its helpers over wall time; late: looks at that "
        "loop, of all, that found it more than 250 ms late"
    ]
    failures = sorted({f for run in results["runs"] for f in run["failures"]})
    if rows:
        report.show("serving over HTTP", header, rows, [*notes, *failures])
    if results["starts"]:
        rows = [
            [name, *(f"{start[f'{what}_seconds']:.1f}" for what in ("listening", "ready", "first_token"))]
            for name, start in results["starts"].items()
        ]
        report.show("seconds from the start", ["cache", "listening", "ready", "first token"], rows, [])
