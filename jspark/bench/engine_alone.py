"""The same load on an engine in this process, without HTTP: what a server's figures are held against.

Knows: how an engine is driven by askers that ask again as soon as they have an answer. Does not know: HTTP.
Run as a program it takes a JSON object from standard input, and leaves the device's memory when it ends.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jspark.bench.load import Load, Settings, Tally
from jspark.errors import UserError
from jspark.request import SamplingParams

if TYPE_CHECKING:
    from jspark.answer import Answer
    from jspark.llm import LLM


def apart(server: str, settings: Settings) -> dict[str, Any]:
    """What `measure` finds, in a process of its own. server: flags of `jspark serve`. Raises UserError."""
    done = subprocess.run(
        [sys.executable, "-m", "jspark.bench.engine_alone"],
        input=json.dumps({"server": server, "settings": asdict(settings)}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UserError(f"the engine could not be measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(llm: LLM, settings: Settings) -> dict[str, Any]:
    """`expected`: what LLM.generate answers to each prompt; `runs`: a closed loop for each concurrency."""
    load = Load(settings, llm.target.config.vocab_size)
    params = [SamplingParams(**sampling) for sampling in load.sampling]
    expected = [output.output_ids for output in llm.generate(load.prompts, params)]
    runs = []
    for concurrency in settings.concurrency:
        count = settings.count(concurrency)
        _run(llm, load, params, expected, concurrency, min(2 * concurrency, count))
        _forget_prompts(llm)
        began = time.perf_counter()
        tally = _run(llm, load, params, expected, concurrency, count)
        runs.append(tally.summary(concurrency, count, time.perf_counter() - began))
        _forget_prompts(llm)
    return {"expected": expected, "runs": runs}


def _forget_prompts(llm: LLM) -> None:
    """What the server is told by /flush_cache."""
    cache = llm.engine.scheduler.cache
    if cache is not None:
        cache.clear()


@dataclass
class _Asker:
    """A request in progress; leaves: pieces after which it is given up, 0 never."""

    answer: Answer
    which: int
    began: float
    leaves: int
    first: float = 0.0
    pieces: int = 0


def _run(
    llm: LLM,
    load: Load,
    params: list[SamplingParams],
    expected: list[list[int]],
    concurrency: int,
    requests: int,
) -> Tally:
    engine, tally, numbers = llm.engine, Tally(), iter(range(requests))
    leaves, askers = load.leaves(concurrency, requests), {}

    def ask() -> None:
        number = next(numbers, None)
        if number is None:
            return
        which, began = number % len(load.prompts), time.perf_counter()
        [answer] = llm.prepare([load.prompts[which]], params[which])
        engine.add(answer.request, answer.limit)
        askers[answer.request.id] = _Asker(answer, which, began, leaves.get(number, 0))

    for _ in range(concurrency):
        ask()
    while not engine.idle:
        for update in engine.step():
            asker = askers.get(update.id)
            if asker is None:
                continue
            now = time.perf_counter()
            asker.answer.take(update)
            asker.pieces += 1
            asker.first = asker.first or now
            ended = asker.answer.finish_reason is not None
            if ended:
                tokens = asker.answer.output().output_ids
                tally.add(tokens, expected[asker.which], asker.began, asker.first, now)
            elif asker.pieces == asker.leaves:
                engine.abort(update.id)
                tally.left += 1
                ended = True
            if ended:
                del askers[update.id]
                ask()
    return tally


def _main() -> None:
    import tyro

    from jspark.cli import STYLE
    from jspark.cli_serve import Serve
    from jspark.flags import open_llm

    asked = json.loads(sys.stdin.read())
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in asked["settings"].items()}
    settings = Settings(**given)
    flags = tyro.cli(Serve, args=shlex.split(asked["server"]), config=STYLE)
    try:
        # As the server does it (cli_serve.py), but that programs are compiled before they are timed.
        llm = open_llm(flags.model, flags.speculation, flags.engine, measure_cost=True)
        print(json.dumps(measure(llm, settings)))
    except UserError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    _main()
