"""`jspark bench cpu`: plain decoding of one request on the CPU, beside transformers and beside the memory's floor.

Knows: how the two are timed alike: the same prompt, one after the other, never both at once.
Does not know: how transformers is called (transformers_reference.py), flags, or how a record is kept (report.py).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jspark.axes import single_device_mesh
from jspark.bench import ceilings, report
from jspark.checkpoint import open_target
from jspark.demo import cache_hits
from jspark.errors import UserError
from jspark.llm import LLM
from jspark.loading import Target
from jspark.request import SamplingParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT = (
    "The river rises in the hills north of the town, where snow lies until late spring, and reaches the sea after "
    "four hundred kilometres. On its way it drives three old mills, waters the orchards of the valley and carries "
    "barges from the brickworks to the harbour. "
)
#: Seconds between two arms: thread pools that wait for work by spinning have gone to sleep by then.
_PAUSE = 0.5


def measure(
    model_path: str, reference_python: str | None, new_tokens: int, context: int, repeats: int
) -> report.Record:
    """Everything that the record's `results` holds (benchmarks/README.md); float32, batch 1, greedy.

    context: tokens of the prompt. Raises UserError for a model or a reference interpreter that does not work.
    """
    for name, value, least in (("new-tokens", new_tokens, 2), ("context", context, 1), ("repeats", repeats, 1)):
        if value < least:
            raise UserError(f"--{name} is {value}; it must be at least {least}")
    with reference(reference_python, model_path) as ask:
        starts = _starts(model_path, new_tokens, context)
        llm = _llm(model_path, new_tokens, context)
        prompt = prompt_ids(llm.target, context)
        arms = {"jspark": lambda: _decode(llm, prompt, new_tokens)}
        trial: dict[int, float] = {}
        if ask is not None:
            trial = _thread_trial(ask, prompt, new_tokens)
            threads = min(trial, key=trial.__getitem__)
            arms["transformers"] = lambda: _generate(ask, prompt, new_tokens, threads)
        tokens, seconds = _interleaved(arms, repeats)
        bandwidth = ceilings.read_bandwidth(llm.target.mesh)
    work = ceilings.target_pass(
        llm.target.model, llm.target.config, rows=1, tokens=1, context=context + new_tokens // 2
    )
    floor = work.bytes / bandwidth * 1e3
    ours = _figures(seconds["jspark"])
    results = {
        "model": llm.target.name,
        "dtype": llm.target.dtype,
        "prompt_tokens": context,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "jspark": ours,
        **starts,
        "floor": {
            "ms_per_token": floor,
            "bytes_per_token": work.bytes,
            "read_bytes_per_second": bandwidth,
            "ratio": ours["ms_per_token"] / floor,
        },
        "transformers": None,
    }
    if ask is not None:
        theirs = _figures(seconds["transformers"])
        results["transformers"] = {
            **theirs,
            "load_seconds": ask.loaded["load_seconds"],
            "versions": ask.loaded["versions"],
            "ms_per_token_by_threads_in_trial": trial,
            "threads": min(trial, key=trial.__getitem__),
            "times_our_ms": theirs["ms_per_token"] / ours["ms_per_token"],
            "tokens_equal": tokens["jspark"] == tokens["transformers"],
        }
    return results


def prompt_ids(target: Target, count: int) -> list[int]:
    """`count` tokens of a plain text, repeated as needed; random ones for a model without a tokenizer."""
    if target.tokenizer is None:
        return np.random.default_rng(0).integers(target.config.vocab_size, size=count).tolist()
    ids = target.text_ids(_TEXT)
    return (ids * (count // len(ids) + 1))[:count]


def _interleaved(arms: dict[str, Any], repeats: int) -> tuple[dict[str, list[int]], dict[str, list[list[float]]]]:
    """Tokens of each arm, and seconds a token of each of its runs; one warm-up, then turns in changing order."""
    tokens = {name: run()[0] for name, run in arms.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in arms}
    for i in range(repeats):
        for name in list(arms)[:: -1 if i % 2 else 1]:
            time.sleep(_PAUSE)
            got, times = arms[name]()
            if got != tokens[name]:
                raise RuntimeError(f"{name} gave different tokens for the same prompt")
            seconds[name].append(times)
    return tokens, seconds


def _figures(runs: list[list[float]]) -> dict[str, Any]:
    """Figures of one arm. Each run: seconds of the prefill, then of every step."""
    steps = [statistics.median(run[1:]) * 1e3 for run in runs]
    return {
        "ms_per_token": statistics.median(steps),
        "ms_per_token_of_repeats": steps,
        "tokens_per_second": statistics.median((len(run) - 1) / sum(run[1:]) for run in runs),
        "prefill_ms": statistics.median(run[0] for run in runs) * 1e3,
    }


# ── our side ──────────────────────────────────────────────────────────────────────────────────────────────────


def _llm(model_path: str, new_tokens: int, context: int) -> LLM:
    mesh = single_device_mesh(jax.devices("cpu")[0])
    sizes: dict[str, Any] = {"max_running_requests": 1, "context_length": context + new_tokens}
    return LLM(model_path, dtype="float32", mesh=mesh, **sizes)


def _decode(llm: LLM, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens, and seconds of the prefill and of every step."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    tokens, times = [], [time.perf_counter()]
    for delta in llm.stream(prompt, params):
        times.append(time.perf_counter())
        tokens += delta.token_ids
    return tokens, np.diff(times).tolist()


def _starts(model_path: str, new_tokens: int, context: int) -> dict[str, Any]:
    """A first start in a fresh compilation cache, a second with what the first left there, and their memory."""
    request = [model_path, str(new_tokens), str(context)]
    starts = []
    with tempfile.TemporaryDirectory() as cache:
        # The cache's threshold is the one that `use_compilation_cache` sets for the user's own cache.
        own = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
        own["JAX_PLATFORMS"] = "cpu"
        for _ in range(2):
            started = time.perf_counter()
            child = subprocess.run(
                [sys.executable, "-m", "jspark.bench.cpu", *request],
                env=os.environ | own,
                capture_output=True,
                text=True,
            )
            if child.returncode:
                raise UserError(f"a fresh start failed: {child.stderr.strip().splitlines()[-1:]}")
            starts.append({"seconds": time.perf_counter() - started, **json.loads(child.stdout)})
    return {
        "memory": {key: starts[0][key] for key in ("peak_rss_bytes", "weight_bytes", "kv_pool_bytes")},
        **{
            name: {
                key: start[key] for key in ("seconds", "load_seconds", "compile_seconds", "programs", "cache_hits")
            }
            for name, start in zip(("first_start", "second_start"), starts, strict=True)
        },
    }


def _start(model_path: str, new_tokens: int, context: int) -> dict[str, Any]:
    """One start in this process, until the last token of one answer."""
    started = time.perf_counter()
    llm = _llm(model_path, new_tokens, context)
    loaded = time.perf_counter()
    with cache_hits() as hits:
        _decode(llm, prompt_ids(llm.target, context), new_tokens)
    compiled = llm.engine.programs.report
    return {
        "load_seconds": loaded - started,
        "compile_seconds": compiled.seconds,
        "programs": compiled.programs,
        "cache_hits": len(hits),
        # Linux counts in KiB.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "weight_bytes": ceilings.weight_bytes(llm.target.model),
        "kv_pool_bytes": llm.engine.kv_bytes,
    }


# ── their side ────────────────────────────────────────────────────────────────────────────────────────────────


class Reference:
    """A process that runs transformers_reference.py and has a model loaded. loaded: its answer to the load."""

    def __init__(self, process: subprocess.Popen, checkpoint: Path):
        self._process = process
        gguf = checkpoint.is_file()
        self.loaded = self.ask(
            load=str(checkpoint.parent if gguf else checkpoint),
            gguf_file=checkpoint.name if gguf else None,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request of the protocol; UserError when it is an error or there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "it ended without an answer"}
        if "error" in answer:
            raise UserError(
                f"the reference interpreter failed ({answer['error']}); it needs the packages that "
                "benchmarks/README.md names"
            )
        return answer


@contextmanager
def reference(python: str | None, model_path: str) -> Iterator[Reference | None]:
    """The model of `model_path` loaded in the interpreter `python`; None without one."""
    if python is None:
        yield None
        return
    script = Path(__file__).with_name("transformers_reference.py")
    # Local files only, and none of the variables that would give it our packages.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen([python, str(script)], text=True, env=env, **pipes)
    except OSError as e:
        raise UserError(f"{python} cannot be run ({e.strerror}); pass a Python interpreter") from None
    with process:
        try:
            yield Reference(process, open_target(model_path).path)
        finally:
            process.kill()


def _generate(
    reference: Reference, prompt: list[int], new_tokens: int, threads: int
) -> tuple[list[int], list[float]]:
    answer = reference.ask(prompt=prompt, new_tokens=new_tokens, threads=threads)
    return answer["tokens"], answer["seconds"]


def _thread_trial(reference: Reference, prompt: list[int], new_tokens: int) -> dict[int, float]:
    """Thread count → ms a token, for one thread and one a core, after a warm-up.

    Where others use the machine too, torch's threads wait for each other so long that one alone is faster; the
    comparison is with the faster one.
    """
    counts = sorted({1, report.cores()})
    few = min(new_tokens, 16)
    for threads in counts:
        _generate(reference, prompt, few, threads)
    return {n: statistics.median(_generate(reference, prompt, few, n)[1][1:]) * 1e3 for n in counts}


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────────


def show(results: report.Record) -> None:
    """Prints the results."""
    ours, theirs, floor = results["jspark"], results["transformers"], results["floor"]
    rows = [
        ("jspark", f"{ours['ms_per_token']:.1f}", f"{ours['tokens_per_second']:.1f}", f"{ours['prefill_ms']:.0f}")
    ]
    if theirs is not None:
        rows.append(
            (
                "transformers",
                f"{theirs['ms_per_token']:.1f}",
                f"{theirs['tokens_per_second']:.1f}",
                f"{theirs['prefill_ms']:.0f}",
            )
        )
    rows.append(("floor (reading the weights)", f"{floor['ms_per_token']:.1f}", "", ""))
    first, second, memory = results["first_start"], results["second_start"], results["memory"]
    if theirs is None:
        comparison = "The comparison with transformers was left out; --reference-python brings it in."
    else:
        same = "the same tokens" if theirs["tokens_equal"] else "DIFFERENT tokens"
        comparison = (
            f"transformers ({theirs['threads']} of {report.cores()} threads, its faster choice) takes "
            f"{theirs['times_our_ms']:.2f} times our time a token and gives {same}."
        )
    report.show(
        f"Plain decode of {results['model']}, {results['dtype']}, batch 1",
        ("", "ms/token", "tokens/s", "prefill ms"),
        rows,
        (
            comparison,
            f"We take {floor['ratio']:.2f} times the floor: {floor['bytes_per_token'] / 1e6:.0f} MB a token "
            f"at {floor['read_bytes_per_second'] / 1e9:.1f} GB/s.",
            f"Load {first['load_seconds']:.1f} s; compile {first['compile_seconds']:.1f} s on the first start, "
            f"{second['compile_seconds']:.1f} s on the second ({second['cache_hits']} of {second['programs']} "
            "programs from the cache).",
            f"Peak memory {memory['peak_rss_bytes'] / 1e6:.0f} MB, of which weights "
            f"{memory['weight_bytes'] / 1e6:.0f} MB and KV pool {memory['kv_pool_bytes'] / 1e6:.0f} MB.",
        ),
    )


def draw(results: report.Record, axes: Axes) -> None:
    """Bars of ms a token, a dot for every repeat, the floor as a line."""
    arms = [name for name in ("jspark", "transformers") if results[name] is not None]
    axes.barh(
        arms,
        [results[name]["ms_per_token"] for name in arms],
        height=0.5,
        color=["#2a6f97", "#a9b4c2"][: len(arms)],
    )
    for i, name in enumerate(arms):
        repeats = results[name]["ms_per_token_of_repeats"]
        axes.plot(repeats, [i] * len(repeats), "o", color="black", markersize=3)
    floor = results["floor"]["ms_per_token"]
    axes.axvline(floor, color="#d1495b", linestyle="--", label=f"floor, {floor:.1f} ms: reading the weights")
    axes.invert_yaxis()
    axes.set_xlabel("ms per token (median step; dots: repeats)")
    axes.set_title(f"Plain decode of {results['model']}, {results['dtype']}, batch 1", loc="left")
    axes.legend(frameon=False)


if __name__ == "__main__":
    _model, _new, _context = sys.argv[1:]
    print(json.dumps(_start(_model, int(_new), int(_context))))
