"""`jspark bench serve`: a server under load, from clients that read streams, and from some that go away.

Knows: how load is made and what is counted at both ends. Does not know: flags (cli_bench.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from jspark.bench import report
from jspark.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Settings:
    """concurrency: clients at a time, a run each. cancelled: share of requests that are left after a few chunks.

    Prompts are random token ids, `prompts` different ones of `prompt_tokens` each; answers are greedy and have
    `new_tokens`.
    """

    concurrency: tuple[int, ...]
    requests: int
    cancelled: float
    prompts: int
    prompt_tokens: int
    new_tokens: int
    seed: int


@dataclass
class Tally:
    """What the clients of a run saw. Seconds."""

    whole: int = 0
    left: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


def measure(address: str, settings: Settings, process: int | None = None) -> report.Record:
    """Everything that the record's `results` holds (benchmarks/README.md).

    address: of a server that is ready, without /v1. process: its id, where it runs on this machine. Raises
    UserError when there is no such server.
    """
    return asyncio.run(_measure(address, settings, process))


async def _measure(address: str, settings: Settings, process: int | None) -> report.Record:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max(settings.concurrency))
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        try:
            info = (await client.get("/model_info")).json()
            before = await _state(client)
        except (httpx.HTTPError, ValueError, KeyError) as e:
            raise UserError(f"no server of jspark answers at {address} ({e}); start one, or drop --url") from None
        chance = random.Random(settings.seed)
        vocabulary = info["vocab_size"]
        prompts = [
            [chance.randrange(vocabulary) for _ in range(settings.prompt_tokens)] for _ in range(settings.prompts)
        ]
        expected = [await _alone(client, prompt, settings) for prompt in prompts]
        runs = []
        for concurrency in settings.concurrency:
            # Compiles what this many rows need, and is not counted.
            await _run(client, settings, prompts, expected, concurrency, min(2 * concurrency, settings.requests))
            start, lags, memory = await _state(client), await _lags(client), _memory(process)
            began = time.perf_counter()
            tally = await _run(client, settings, prompts, expected, concurrency, settings.requests)
            seconds = time.perf_counter() - began
            end = await _settled(client)
            summary = _summary(concurrency, settings, tally, seconds, start, end)
            runs.append(summary | _late(lags, await _lags(client)) | _memory_of(memory, process))
    return {"settings": vars(settings), "runs": runs, "server": before["server"]}


async def _run(client, settings, prompts, expected, concurrency: int, requests: int) -> Tally:
    tally, numbers = Tally(), iter(range(requests))
    chance = random.Random(settings.seed + concurrency)
    leave = {i: chance.randrange(1, 4) for i in range(requests) if chance.random() < settings.cancelled}

    async def one_client() -> None:
        for i in numbers:
            which = i % len(prompts)
            try:
                await _ask(client, settings, prompts[which], expected[which], leave.get(i), tally)
            except (httpx.HTTPError, ValueError, KeyError) as e:
                tally.failed.append(f"{type(e).__name__}: {e}"[:200])

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return tally


async def _ask(client, settings, prompt, expected, leave_after: int | None, tally: Tally) -> None:
    """A streamed request; leave_after: chunks after which the client goes away."""
    body = _body(prompt, settings) | {"stream": True, "stream_options": {"include_usage": True}}
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
    tally.whole += 1
    tally.wrong += tokens != expected
    tally.tokens += len(tokens)
    tally.first.append(first - began)
    tally.total.append(last - began)
    if len(tokens) > 1:
        tally.per_token.append((last - first) / (len(tokens) - 1))


async def _alone(client: httpx.AsyncClient, prompt: list[int], settings: Settings) -> list[int]:
    answer = await client.post("/v1/completions", json=_body(prompt, settings))
    if answer.status_code != 200:
        raise UserError(f"the server refuses the benchmark's requests: {answer.text[:300]}")
    return answer.json()["choices"][0]["token_ids"]


def _body(prompt: list[int], settings: Settings) -> dict[str, Any]:
    more = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": settings.new_tokens, **more}


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


def _summary(concurrency: int, settings: Settings, tally: Tally, seconds: float, start: Any, end: Any) -> Any:
    drafts = end["num_drafts"] - start["num_drafts"]
    accepted = end["num_accepted_tokens"] - start["num_accepted_tokens"]
    cpu = {k: end["thread_cpu_seconds"][k] - start["thread_cpu_seconds"][k] for k in end["thread_cpu_seconds"]}
    return {
        "concurrency": concurrency,
        "requests": settings.requests,
        "whole": tally.whole,
        "left": tally.left,
        "wrong": tally.wrong,
        "failed": len(tally.failed),
        "failures": sorted(set(tally.failed))[:5],
        "seconds": seconds,
        "tokens_per_second": tally.tokens / seconds,
        "requests_per_second": tally.whole / seconds,
        "first_token_seconds": _spread(tally.first),
        "token_seconds": _spread(tally.per_token),
        "total_seconds": _spread(tally.total),
        "accept_length": 1 + accepted / drafts if drafts else None,
        "http_cpu_share": cpu["http"] / seconds,
        "engine_thread_cpu_share": cpu["engine"] / seconds,
        "http_cpu_ms_per_request": 1e3 * cpu["http"] / settings.requests,
        "leaked_slots": end["num_running_reqs"] + end["num_queue_reqs"] + end["num_live_reqs"],
        "leaked_pages": end["pages"] - end["free_pages"],
    }


async def _lags(client: httpx.AsyncClient) -> dict[float, int]:
    """How many looks at the server's event loop found it late by no more than so many seconds."""
    page = (await client.get("/metrics")).text
    samples = (s for f in text_string_to_metric_families(page) for s in f.samples)
    buckets = [s for s in samples if s.name.endswith(":event_loop_lag_seconds_bucket")]
    return {float(s.labels["le"]): int(s.value) for s in buckets}


def _late(before: dict[float, int], after: dict[float, int]) -> dict[str, Any]:
    """Looks at the event loop during a run, how many found it over 250 ms late, and a bound of the longest."""
    counts = {bound: after[bound] - before.get(bound, 0) for bound in sorted(after)}
    total = counts[float("inf")]
    longest = next(bound for bound, count in counts.items() if count == total)
    return {
        "event_loop_looks": total,
        "event_loop_late_250ms": total - counts[0.25],
        "event_loop_lag_at_most_seconds": None if longest == float("inf") else longest,
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)} | {"mean": float(np.mean(values))}


def _memory(process: int | None) -> int | None:
    """Resident bytes of a process; None where it cannot be seen."""
    try:
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _memory_of(before: int | None, process: int | None) -> dict[str, int | None]:
    return {"resident_bytes_before": before, "resident_bytes_after": _memory(process)}


@contextmanager
def started(flags: str) -> Iterator[tuple[str, int]]:
    """Address and process id of a server with these flags, once it is ready; ended at the end."""
    words = [sys.executable, "-m", "jspark", "serve", *shlex.split(flags), "--port", "0", "--access-log", "none"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    reader = None
    try:
        lines, address = [], None
        for line in process.stderr:
            lines.append(line.strip())
            found = re.search(r"listening on (http://\S+?);", line)
            address = found[1] if found else address
            if line.startswith("ready"):
                break
        else:
            raise UserError(f"the server did not start: {lines[-1] if lines else 'it said nothing'}")
        # Its later lines are few, and must not fill the pipe.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        assert address is not None
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(60)
        if reader is not None:
            reader.join(10)
        process.stderr.close()


def draw(results: report.Record, axes: Axes) -> None:
    """Tokens a second and time to the first token, by concurrency."""
    runs = results["runs"]
    at = [run["concurrency"] for run in runs]
    axes.plot(at, [run["tokens_per_second"] for run in runs], "o-", label="tokens/s")
    axes.set_xlabel("clients")
    axes.set_ylabel("tokens/s")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    waits = [(run["first_token_seconds"] or {}).get("p50", 0) * 1e3 for run in runs]
    other.plot(at, waits, "s--", color="tab:orange", label="first token, median")
    other.set_ylabel("ms to the first token")
    other.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    other.legend(loc="lower right")


def show(results: report.Record) -> None:
    """A table of the runs."""
    rows = []
    for run in results["runs"]:
        first, token = run["first_token_seconds"] or {}, run["token_seconds"] or {}
        rows.append(
            [
                str(run["concurrency"]),
                f"{run['whole']} + {run['left']}",
                str(run["wrong"] + run["failed"]),
                f"{run['tokens_per_second']:.1f}",
                f"{first.get('p50', 0) * 1e3:.0f} / {first.get('p99', 0) * 1e3:.0f}",
                f"{token.get('p50', 0) * 1e3:.1f} / {token.get('p99', 0) * 1e3:.1f}",
                f"{run['http_cpu_share']:.0%}",
                f"{run['event_loop_late_250ms']} / {run['event_loop_looks']}",
                f"{run['leaked_slots']} / {run['leaked_pages']}",
            ]
        )
    header = ["clients", "whole + left", "bad", "tokens/s", "first ms p50 / p99", "token ms p50 / p99"]
    header += ["HTTP CPU", "late", "leaked slots / pages"]
    notes = [
        "HTTP CPU: processor time of the server's event loop over wall time; late: looks at that loop, of all"
    ]
    notes[0] += ", that found it more than 250 ms late"
    failures = sorted({f for run in results["runs"] for f in run["failures"]})
    report.show("serving over HTTP", header, rows, [*notes, *failures])
