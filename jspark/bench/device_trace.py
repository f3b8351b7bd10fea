"""How much of the time a device was busy, from the trace that JAX's profiler writes.

Knows: the trace's form (Chrome's trace events, as `jax.profiler` exports them) and which of its lines are kernels.
Does not know: what ran, or why the device was idle.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class DeviceTime:
    """Between the begin of a device's first kernel and the end of its last, in seconds.

    gaps: the device's pauses, longest first. idle_share: their sum over span. between: the part of it in which no
    program was under way, None where the trace has no line of programs; the rest lies between a program's kernels.
    """

    span: float
    busy: float
    gaps: tuple[float, ...]
    between: float | None = None

    @property
    def idle_share(self) -> float:
        """The share of the span in which nothing ran."""
        return 1 - self.busy / self.span if self.span else 0.0

    @property
    def between_share(self) -> float | None:
        """The share of the span in which no program was under way."""
        return None if self.between is None else self.between / self.span if self.span else 0.0


@dataclass
class Trace:
    """What a traced stretch left; None where the device has no kernels in its trace, as a CPU has not."""

    time: DeviceTime | None = None


@contextlib.contextmanager
def traced(wanted: bool) -> Iterator[Trace]:
    """Profiles what runs inside; the result is there once the block has ended."""
    trace = Trace()
    if not wanted:
        yield trace
        return
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield trace
        for file in Path(folder).rglob("*.trace.json.gz"):
            trace.time = trace.time or device_time(read_trace(file))


def read_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a trace file."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        return json.load(text)["traceEvents"]


def device_time(events: list[dict[str, Any]]) -> DeviceTime | None:
    """Busy and idle time of the first device that ran kernels; None without one.

    Kernels are the complete events ("X", with `ts` and `dur` in microseconds) on the stream lines of processes
    named "/device:…". Streams run side by side, so what counts is the union of their events. Of the lines that
    only group kernels, "XLA Modules" tells which time belongs to no program.
    """
    processes, threads = {}, {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    kernels: dict[Any, list[tuple[float, float]]] = {}
    programs: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        pid = event["pid"]
        if not processes.get(pid, "").startswith("/device:"):
            continue
        line = threads.get((pid, event.get("tid")), "")
        if line.startswith("Stream") or line == "XLA Modules":
            kind = kernels if line.startswith("Stream") else programs
            kind.setdefault(pid, []).append((event["ts"], event["ts"] + event.get("dur", 0.0)))
    if not kernels:
        return None
    first = min(kernels)
    span, pauses = _pauses(kernels[first])
    between = float(_pauses(programs[first])[1].sum()) * 1e-6 if first in programs else None
    gaps = tuple(sorted((float(p) * 1e-6 for p in pauses if p > 0), reverse=True))
    return DeviceTime(span * 1e-6, (span - float(pauses.sum())) * 1e-6, gaps, between)


def _pauses(stretches: list[tuple[float, float]]) -> tuple[float, np.ndarray]:
    """(from the first begin to the last end, time between each stretch's begin and the end of all before it)."""
    ordered = np.array(sorted(stretches))
    reached = np.maximum.accumulate(ordered[:, 1])
    return float(reached[-1] - ordered[0, 0]), np.maximum(ordered[1:, 0] - reached[:-1], 0.0)
