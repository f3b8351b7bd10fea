"""Traces: what an engine's steps did, as a file that a simulator can replay.

Knows: the file's form (docs/traces.md), its writer and its reader. Does not know: engines (a `TraceWriter` is an
observer of one), or what traces are read for.
"""

from __future__ import annotations

import atexit
import itertools
import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jspark.errors import UserError, warn
from jspark.record import StepRecord
from jspark.request import FinishReason

#: Of the file's form.
VERSION = 1
#: Steps that wait for the disk at most; further ones are counted and left out.
BUFFER = 4096


@dataclass(frozen=True)
class Header:
    """What a trace is of. policy: its repr. temperatures: of the confidence at the start, greedy and sampled."""

    model: str
    drafter: str | None
    block_size: int
    verify_mode: str
    policy: str
    page_size: int
    overlap: bool
    temperatures: list[list[float]] | None
    versions: dict[str, str]
    device: str


@dataclass(frozen=True)
class Arrival:
    """A request, told with its first step. arrived: seconds on the clock of steps. prompt: tokens."""

    request: int
    arrived: float
    prompt: int
    sampled: bool


@dataclass(frozen=True)
class End:
    """The end of a request. output: tokens committed. finish_reason: abort of one that was given up, stop of one
    whose text came to a stop string; None of one that its own steps ended: a stop token, its limit, its grammar.
    Requests without an end were there when the trace ended, or their line was lost.
    """

    request: int
    output: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Step:
    """A step; lists have an entry a row that committed tokens. See `StepRecord`: rows is R, verify_tokens and
    prefill_tokens are T; survival is None where nothing was drafted."""

    number: int
    rows: int
    verify_tokens: int
    prefill_tokens: int
    context: int
    dispatched: float
    collected: float
    request: list[int]
    position: list[int]
    drafted: list[int]
    window: list[int]
    accepted: list[int]
    block_accepted: list[int]
    count: list[int]
    survival: list[list[float] | None]


@dataclass(frozen=True)
class Trace:
    """A trace as read. lost: steps that the writer left out since the disk did not keep up."""

    header: Header
    arrivals: list[Arrival]
    steps: list[Step]
    ends: list[End]
    lost: int

    @property
    def seconds(self) -> list[float]:
        """Of each step but the first: from the results of the step before it to its own."""
        times = [step.collected for step in self.steps]
        return [b - a for a, b in itertools.pairwise(times)]


class TraceWriter:
    """Writes what it observes to a file, on a thread of its own; the engine's only hands records over.

    The file is begun anew. A line is written at once and whole. `close` waits for the lines that are on their way;
    it is called at the interpreter's end too, so that an interrupt loses nothing. Where the disk fails, the trace
    ends there with a warning, and the engine goes on.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: Header, buffer: int = BUFFER):
        try:
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as e:
            raise _unwritable(path, e) from None
        try:
            self._write("header", {"version": VERSION, **asdict(header)})
        except OSError as e:
            self._file.close()
            raise _unwritable(path, e) from None
        self._path, self.lost = path, 0
        self._output: dict[int, int] = {}
        # An interrupt in the middle of a `queue.Queue` leaves it locked for good; this one is a single call of C.
        self._queue: queue.SimpleQueue[StepRecord | tuple[int, FinishReason] | None] = queue.SimpleQueue()
        self._buffer = buffer
        self._thread = threading.Thread(target=self._run, name="jspark-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, record: StepRecord) -> None:
        """Takes a step's record; never waits."""
        if self._queue.qsize() < self._buffer:
            self._queue.put(record)
        else:
            self.lost += 1

    def end(self, request: int, reason: FinishReason) -> None:
        """Takes the end of a request from outside its steps; never waits. Requests that have ended, or have no
        tokens yet, are no longer or not yet in the trace: nothing is written of them."""
        if self._queue.qsize() < self._buffer:
            self._queue.put((request, reason))

    def close(self) -> None:
        """Writes what is left and ends the file; once is enough."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._file.close()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                lines = self._lines(item) if isinstance(item, StepRecord) else self._end(*item)
                for kind, content in lines:
                    self._write(kind, content)
            if self.lost:
                self._write("lost", {"steps": self.lost})
        except OSError as e:
            warn(f"the trace {self._path} ends early, since it cannot be written ({e.strerror})")
            while self._queue.get() is not None:
                pass

    def _lines(self, record: StepRecord) -> Iterator[tuple[str, dict[str, Any]]]:
        for i, request in enumerate(record.request.tolist()):
            if request not in self._output:
                self._output[request] = 0
                arrival = Arrival(
                    request, float(record.arrived[i]), int(record.prompt[i]), bool(record.sampled[i])
                )
                yield "arrival", asdict(arrival)
            self._output[request] += int(record.count[i])
        lists = ("request", "position", "drafted", "window", "accepted", "block_accepted", "count")
        yield (
            "step",
            {
                "number": record.number,
                "rows": record.rows,
                "verify_tokens": record.verify_tokens,
                "prefill_tokens": record.prefill_tokens,
                "context": record.context,
                "dispatched": record.dispatched,
                "collected": record.collected,
                **{name: getattr(record, name).tolist() for name in lists},
                "survival": [
                    None if np.isnan(row).any() else [round(v, 5) for v in row]
                    for row in record.survival.astype(float).tolist()
                ],
            },
        )
        for request in record.request[record.finished].tolist():
            yield from self._end(request, None)

    def _end(self, request: int, reason: FinishReason | None) -> Iterator[tuple[str, dict[str, Any]]]:
        if (output := self._output.pop(request, None)) is not None:
            yield "end", asdict(End(request, output, reason))

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, **content}, separators=(",", ":"), allow_nan=False)
        left = memoryview(line.encode() + b"\n")
        while left:
            left = left[self._file.write(left) :]


def _unwritable(path: str | Path, e: OSError | ValueError) -> UserError:
    why = e.strerror if isinstance(e, OSError) else e
    return UserError(f"the trace {path} cannot be written ({why}); pass a file in a folder that exists")


def read(path: str | Path) -> Trace:
    """The trace in a file. A last line that was cut off is left out.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise UserError(f"the trace {path} cannot be read ({why}); pass a file that --trace-out wrote") from None
    kinds: dict[str, Any] = {"header": Header, "arrival": Arrival, "step": Step, "end": End}
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    lost = 0
    try:
        for line in text.split("\n")[:-1]:
            content = json.loads(line)
            kind = content.pop("kind")
            if kind == "header" and content.pop("version") != VERSION:
                raise UserError(f"the trace {path} is of another version; record it again with this jspark")
            if kind == "lost":
                lost += int(content["steps"])
            else:
                found[kind].append(kinds[kind](**content))
        (header,) = found["header"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is no trace; pass a file that --trace-out wrote") from None
    return Trace(header, found["arrival"], found["step"], found["end"], lost)
