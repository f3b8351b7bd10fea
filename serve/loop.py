"""The engine's own thread, and how it meets the event loop.

Knows: one thread owns the engine: it loads the model, warms it, then takes commands between steps and steps while
there is work. Everything else here runs on the event loop: answers grow there from the updates of each step, one
wake-up a step. Does not know: HTTP and JSON, or what the answers are for.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from jspark.errors import UserError
from jspark.request import FinishReason, SamplingParams, Stats, Update
from jspark.warmup import warm_set
from serve.figures import Load, Speculation, Steps
from serve.metrics import Metrics

if TYPE_CHECKING:
    from jspark.answer import Answer, Delta
    from jspark.cost import CostFigures
    from jspark.engine import Engine
    from jspark.llm import LLM
    from jspark.online_sts import CalibrationFigures
    from jspark.record import Observer, StepRecord

State = Literal["loading", "warming", "ready", "stopping", "dead"]
#: Steps whose updates may wait for the event loop; after that the engine waits.
_MAX_UNREAD = 16
#: Seconds between two looks at the engine's figures while it is busy; a look takes longer than the rest of `Load`.
_FIGURES = 1.0


class Unavailable(Exception):
    """The engine does not take requests, or has dropped one. The message is for the client."""


class Full(Exception):
    """As many answers wait as may. seconds: when to try again."""

    def __init__(self, message: str, seconds: int):
        super().__init__(message)
        self.seconds = seconds


class Call:
    """The answers to one HTTP request while they grow; on the event loop only.

    An answer is its own buffer: a reader that is slow finds more in the next delta, and no answer is longer than
    its limit. started: seconds on `time.perf_counter`'s clock when the request arrived.
    """

    def __init__(self, answers: Sequence[Answer], started: float):
        self.answers, self.started = answers, started
        self.first_token: float | None = None
        self.unfinished = {a.request.id for a in answers}
        self._news: dict[int, Answer] = {}
        self._problem: Exception | None = None
        self._wake = asyncio.Event()

    async def deltas(self) -> AsyncIterator[list[tuple[Answer, Delta]]]:
        """What is new, again and again, until all answers have ended. Raises what ended the call before."""
        left = len(self.answers)
        while left:
            await self._wake.wait()
            self._wake.clear()
            if self._problem is not None:
                raise self._problem
            news, self._news = self._news, {}
            deltas = [(answer, answer.delta()) for answer in news.values()]
            left -= sum(delta.output is not None for _, delta in deltas)
            yield deltas

    def tell(self, answer: Answer) -> None:
        """There is news of `answer`."""
        self._news[answer.request.id] = answer
        self._wake.set()

    def fail(self, problem: Exception) -> None:
        """Ends the call with an error."""
        self._problem = self._problem or problem
        self._wake.set()


@dataclass
class _Live:
    """An answer in progress, and when its last tokens came."""

    answer: Answer
    call: Call
    seen: float = field(default_factory=time.perf_counter)


class _Unwanted(Exception):
    """The server ends before its model is there."""


class DeviceLoop:
    """The engine's thread, seen from the event loop; every method is called there.

    load: makes the model, on the engine's thread; what it is given observes the steps. max_queued: answers that
    may wait for a slot. changed: called when `state` changes.
    """

    def __init__(
        self,
        load: Callable[[Observer], LLM],
        metrics: Callable[[LLM, DeviceLoop], Metrics],
        max_queued: int,
        changed: Callable[[], None] = lambda: None,
    ):
        self.state: State = "loading"
        self.problem: BaseException | None = None
        self.load = Load()
        self.speculation, self.steps = Speculation(), Steps()
        self.metrics: Metrics | None = None
        self._open, self._make_metrics, self._changed = load, metrics, changed
        self._max_queued = max_queued
        self._llm: LLM | None = None
        self._live: dict[int, _Live] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unread = threading.BoundedSemaphore(_MAX_UNREAD)
        self._stop = threading.Event()
        # The engine's own figures, and when they were asked for.
        self._figures: tuple[CalibrationFigures | None, CostFigures | None] = None, None
        self._figures_at = 0.0
        self._asked: set[asyncio.Future] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ── for the server ────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begins to load; to be called on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The model; raises Unavailable before there is one, and when requests cannot be served any more."""
        if self._llm is None or self.state not in ("ready", "stopping"):
            raise Unavailable(self.why)
        return self._llm

    @property
    def loaded(self) -> LLM | None:
        """The model, whatever the state."""
        return self._llm

    @property
    def live(self) -> int:
        """Answers in progress, waiting ones included."""
        return len(self._live)

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    def check_room(self, answers: int) -> None:
        """Raises Unavailable or Full when `answers` more cannot be taken now, UserError when they never can."""
        if self.state != "ready":
            raise Unavailable(self.why)
        slots = self.llm.engine.config.max_running_requests
        if answers > slots + self._max_queued:
            raise UserError(
                f"{answers} answers were asked for at a time, and this server holds {slots} and "
                f"{self._max_queued} waiting ones; ask for fewer"
            )
        # A burst into free slots does not wait; what the engine itself left waiting does, whatever slots are free.
        waiting = max(self.load.waiting, len(self._live) - slots)
        if len(self._live) + answers > slots + self._max_queued or (waiting > 0 and waiting >= self._max_queued):
            raise Full(
                f"{len(self._live)} answers are in progress or waiting, {answers} more were asked for, and there "
                f"is room for {slots} and {self._max_queued} waiting ones; try again later",
                seconds=1 + len(self._live) // max(slots, 1),
            )

    def submit(self, call: Call) -> None:
        """Queues the answers of `call`. Raises Unavailable or Full."""
        self.check_room(len(call.answers))
        for answer in call.answers:
            self._live[answer.request.id] = _Live(answer, call)
        engine = self.llm.engine

        def add() -> None:
            for answer in call.answers:
                engine.add(answer.request, answer.limit)

        self._commands.put(add)

    def abort(self, call: Call) -> None:
        """Ends what of `call` has not ended; its slots and pages are free before the next step but one."""
        ids = [i for i in call.unfinished if self._live.pop(i, None)]
        call.unfinished.clear()
        self._forget(ids)

    def _forget(self, ids: Sequence[int], reason: FinishReason = "abort") -> None:
        """Has the engine end these; ids that it does not know are fine."""
        if not ids or self._llm is None:
            return
        engine = self._llm.engine

        def run() -> None:
            for i in ids:
                engine.abort(i, reason)

        self._commands.put(run)

    async def ask(self, question: Callable[[LLM], Any]) -> Any:
        """What `question` finds when it is asked on the engine's thread, between two steps."""
        llm, answer = self.llm, self._loop.create_future()
        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)

        def run() -> None:
            try:
                result, error = question(llm), None
            except Exception as e:
                result, error = None, e
            self._tell(_settle, answer, result, error)

        self._commands.put(run)
        return await answer

    def drain(self) -> None:
        """Takes no more requests."""
        if self.state in ("loading", "warming", "ready"):
            self._enter("stopping")

    def fail_all(self, message: str) -> None:
        """Ends every call with `message`."""
        for live in list(self._live.values()):
            live.call.fail(Unavailable(message))

    def close(self) -> None:
        """Ends the thread after its step, and what is compiled in the background after its program."""
        self._stop.set()
        if self._llm is not None:
            self._llm.engine.programs.background.drop()
        self._commands.put(None)

    def go_on(self) -> None:
        """Ends the thread that asks, while it loads, if nobody wants the model any more."""
        if self._stop.is_set():
            raise _Unwanted

    def join(self, seconds: float) -> None:
        """Waits for the thread's end."""
        self._thread.join(seconds)

    # ── on the event loop, told by the thread ─────────────────────────────────────────────────────────────────

    def _enter(self, state: State, problem: BaseException | None = None) -> None:
        if self.state == "dead" or (self.state == "stopping" and state != "dead"):
            return
        self.state, self.problem = state, problem
        if state == "dead":
            self.fail_all(self.why)
            self._live.clear()
            for future in list(self._asked):
                _settle(future, None, Unavailable(self.why))
        self._changed()

    def _loaded(self, llm: LLM) -> None:
        self._llm, self.metrics = llm, self._make_metrics(llm, self)
        self._enter("warming")

    def _take(self, load: Load) -> None:
        self.load = load

    def _deliver(self, updates: list[Update], load: Load) -> None:
        """A step's news to their answers."""
        self._unread.release()
        self._take(load)
        now = time.perf_counter()
        for update in updates:
            live = self._live.get(update.id)
            if live is None:
                continue
            self._observe(live, update, now)
            call, answer = live.call, live.answer
            try:
                answer.take(update)
            except UserError as e:  # a tokenizer that fails on these tokens
                call.fail(e)
                self.abort(call)
                continue
            call.tell(answer)
            if answer.finish_reason:
                del self._live[update.id]
                call.unfinished.discard(update.id)
                self._finished(live, now)
                if not update.finish_reason:  # a stop string: the engine knows nothing of it
                    self._forget([update.id], "stop")

    def _observe(self, live: _Live, update: Update, now: float) -> None:
        assert self.metrics is not None
        if live.call.first_token is None:
            live.call.first_token = now
        self.metrics.tokens(live.call.started, live.seen, now, update, first=update.stats.steps == 0)
        live.seen = now

    def _finished(self, live: _Live, now: float) -> None:
        assert self.metrics is not None
        self.metrics.finished(live.answer, live.call.started, now)

    @property
    def why(self) -> str:
        """Why requests are not taken, while `state` is not ready."""
        match self.state:
            case "loading" | "warming":
                return "the model is being loaded; try again later"
            case "stopping":
                return "the server is shutting down; try again later"
            case _:
                return f"the engine has failed ({type(self.problem).__name__}) and the server is shutting down"

    # ── the thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        # After the loop has closed nobody is left to hear.
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(function, *args)
            except RuntimeError:
                self._stop.set()

    def _run(self) -> None:
        try:
            llm = self._open(self._count)
            self._tell(self._loaded, llm)
            warm_up(llm)
            self.speculation.forget()
            self.steps.forget()
            self._tell(self._take, self._look(llm.engine, 0))
            # While nobody waits: a full collection looks at every object, of which loading made many.
            gc.collect()
            self._tell(self._enter, "ready")
            if llm.engine.config.background_compile:
                llm.engine.programs.background.add(warm_set(llm.engine))
            self._serve(llm)
        except _Unwanted:
            return
        except BaseException as e:
            if not isinstance(e, UserError):
                traceback.print_exc()
            self._tell(self._enter, "dead", e)

    def _serve(self, llm: LLM) -> None:
        engine, steps = llm.engine, 0
        while self._obey(wait=engine.idle):
            if engine.idle:
                # Commands may have left nothing to do, and no step will tell so.
                self._tell(self._take, self._look(engine, steps))
                continue
            updates = [u._replace(stats=_copy(u.stats)) for u in engine.step()]
            steps += 1
            load = self._look(engine, steps)
            while not self._unread.acquire(timeout=1):
                if self._stop.is_set():
                    return
            self._tell(self._deliver, updates, load)

    def _count(self, record: StepRecord) -> None:
        self.speculation.observe(record)
        self.steps.observe(record)

    def _look(self, engine: Engine, steps: int) -> Load:
        """The engine as it is after so many steps."""
        scheduler, now = engine.scheduler, time.perf_counter()
        if engine.idle or now - self._figures_at > _FIGURES:
            self._figures, self._figures_at = (engine.calibration, engine.cost_figures), now
        calibration, cost = self._figures
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free=scheduler.allocator.capacity - scheduler.allocator.in_use,
            pages=scheduler.allocator.capacity,
            steps=steps,
            cache_asked=scheduler.cache.stats.asked if scheduler.cache else 0,
            cache_found=scheduler.cache.stats.found if scheduler.cache else 0,
            cpu_seconds=time.thread_time(),
            calibration=calibration,
            cost=cost,
        )

    def _obey(self, wait: bool) -> bool:
        """Runs the commands that have come, waiting for one if told to; False at the end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False


def warm_up(llm: LLM) -> None:
    """Compiles what the first requests need: a greedy one and a sampled one, prefilled and drafted for."""
    config, size = llm.engine.config, llm.engine.block_size
    prompt = [0] * min(4, config.context_length - 1)
    tokens = min(size + 3, config.context_length - len(prompt))
    for temperature in (0.0, 1.0):
        llm.generate([prompt], SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True))


def _copy(stats: Stats) -> Stats:
    """The figures as they are now; the engine goes on counting in its own."""
    return replace(stats, blocks=stats.blocks.copy())


def _settle(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
