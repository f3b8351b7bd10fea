"""How much of the time a device was busy, from the trace that JAX's profiler writes.

Knows: the trace's form (Chrome's trace events, as `jax.profiler` exports them) and which of its lines are kernels.
Does not know: what ran, or why the device was idle.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
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

    gaps: the device's pauses, longest first. idle_share: their sum over span. between: the part of it that lies
    between two launches; the rest lies between the kernels of one, a CUDA graph.
    """

    span: float
    busy: float
    gaps: tuple[float, ...]
    between: float

    @property
    def idle_share(self) -> float:
        """The share of the span in which nothing ran."""
        return 1 - self.busy / self.span if self.span else 0.0

    @property
    def between_share(self) -> float:
        """The share of the span that lies between two launches."""
        return self.between / self.span if self.span else 0.0


@dataclass
class Trace:
    """What a traced stretch left; None where the device has no kernels in its trace, as a CPU has not."""

    time: DeviceTime | None = None


@contextlib.contextmanager
def traced(wanted: bool) -> Iterator[Trace]:
    """Profiles what runs inside; the result is there once the block has ended.

    Only the device is watched: events of the host, of Python's calls above all, would make the loop slower, and so
    the pauses longer than they are.
    """
    trace = Trace()
    if not wanted:
        yield trace
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
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
    named "/device:…". Streams run side by side, so what counts is the union of their events. Lines that only group
    kernels (modules, steps, source) are left out. What was launched together has the same `correlation_id`.
    """
    processes, threads = {}, {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    lines: dict[Any, list[tuple[float, float, str]]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        pid = event["pid"]
        device = processes.get(pid, "").startswith("/device:")
        if device and threads.get((pid, event.get("tid")), "").startswith("Stream"):
            launch = str(event.get("args", {}).get("correlation_id", ""))
            lines.setdefault(pid, []).append((event["ts"], event["ts"] + event.get("dur", 0.0), launch))
    if not lines:
        return None
    kernels = sorted(lines[min(lines)])
    begins, ends = (np.array([k[i] for k in kernels]) for i in (0, 1))
    reached = np.maximum.accumulate(ends)
    # A pause lies before every event that begins after all earlier ones have ended.
    pauses = np.maximum(begins[1:] - reached[:-1], 0.0)
    other = np.array([not a[2] or a[2] != b[2] for a, b in itertools.pairwise(kernels)], bool)
    span = float(reached[-1] - begins[0])
    gaps = tuple(sorted((float(p) * 1e-6 for p in pauses if p > 0), reverse=True))
    busy, between = span - float(pauses.sum()), float(pauses[other].sum())
    return DeviceTime(span * 1e-6, busy * 1e-6, gaps, between * 1e-6)
