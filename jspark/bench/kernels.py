"""`jspark bench kernels`: every version of every op beside its floor, XLA's and cuDNN's way of doing it.

Knows: how an op is timed (many calls in one program, over pages beyond the L2 cache) and how it is checked.
Does not know: the cases (pallas/*/shapes.py), how versions work, flags, records.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jspark.bench import ceilings, report
from jspark.errors import UserError
from jspark.pallas.ragged_attention import Backend, HeadShape, attend, make_plan, reference, shapes, versions
from jspark.pallas.ragged_attention.shapes import Arrays, Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Bytes of pages that a program's calls go through at least: several times the L2 of 60 MB.
_BEYOND_CACHE = 2**29
_BATCHES = 7
#: Seconds of a timed batch, about.
_BATCH_SECONDS = 0.02
_WARM_SECONDS = 0.05
_COLOURS = {"mosaic": "#2a6f97", "triton": "#61a5c2", "cudnn": "#bc9a5f", "xla": "#a9b4c2"}
#: Cases of a CPU: they show that the command works, not how fast anything is.
_ON_A_CPU = (
    Case("r2 c64 q4", 2, 64, 4, heads=8, kv_heads=2, head_dim=64, page_size=16),
    Case("mixed r3", 3, (16, 200), (1, 4), heads=6, kv_heads=2, head_dim=64),
    Case("draft block r2 c64 q4", 2, 64, 4, heads=8, kv_heads=2, head_dim=64, causal=False),
)


@dataclass(frozen=True)
class Timed:
    """A compiled program of `calls` ops, and what it is called with."""

    compiled: Callable[..., Any]
    args: tuple[Any, ...]
    calls: int

    def seconds(self) -> list[float]:
        """Seconds an op in each of several batches of programs one behind the other."""
        # An idle device has lowered its clocks.
        awake = time.perf_counter() + _WARM_SECONDS
        while True:
            started = time.perf_counter()
            jax.block_until_ready(self.compiled(*self.args))
            seconds = time.perf_counter() - started
            if started > awake:
                break
        repeats = max(2, math.ceil(_BATCH_SECONDS / seconds))
        batches = []
        for _ in range(_BATCHES):
            started = time.perf_counter()
            for _ in range(repeats):
                out = self.compiled(*self.args)
            jax.block_until_ready(out)
            batches.append((time.perf_counter() - started) / repeats / self.calls)
        return batches


def measure(mesh: Mesh, dtype: str) -> report.Record:
    """Everything that the record's `results` holds (benchmarks/README.md)."""
    device, number = mesh.devices.flat[0], jnp.dtype(dtype)
    cases = _ON_A_CPU if device.platform == "cpu" else shapes.BARS
    with jax.default_device(device):
        # Compiling takes minutes when it is done one program after the other.
        with ThreadPoolExecutor() as pool:
            prepared = [_prepare(case, number, device.platform, pool) for case in cases]
        limits = ceilings.measure(mesh, dtype)
        measured = [row for one in prepared for row in _measure_case(one, number, limits)]
        with ThreadPoolExecutor() as pool:
            checked = [row for row in measured if "us" in row and row["version"] != "cudnn"]
            by_name = {case.name: case for case in cases}
            errors = [pool.submit(error, by_name[row["case"]], number, row["version"]) for row in checked]
            for row, off in zip(checked, errors, strict=True):
                # One failed check must not cost the figures of all.
                if problem := off.exception():
                    row["unchecked"] = f"{type(problem).__name__}: {str(problem)[:200]}"
                else:
                    row["error"] = off.result()
        return {
            "dtype": dtype,
            "ceilings": {
                "copy_bytes_per_second": ceilings.copy_bandwidth(mesh),
                "read_bytes_per_second": limits.read_bandwidth,
                "matmul_flops_per_second": limits.matmul_rate,
            },
            "batches": _BATCHES,
            "ops": measured,
        }


def soak(mesh: Mesh, dtype: str, seconds: float, seed: int) -> report.Record:
    """Random shapes for `seconds` in place of figures: each version's errors against float32.

    Raises:
        UserError: an error beyond rounding, with the case and the seed.
    """
    device, number = mesh.devices.flat[0], jnp.dtype(dtype)
    rng, started = np.random.default_rng(seed), time.perf_counter()
    found: dict[str, list[float]] = {}
    bound = 1e-5 if dtype == "float32" else 5e-3
    with jax.default_device(device), ThreadPoolExecutor() as pool:
        while time.perf_counter() - started < seconds:
            # Compiling takes longer than running: several shapes at a time.
            batch = [shapes.random_case(rng) for _ in range(1 if device.platform == "cpu" else 8)]
            pairs = [
                (case, name)
                for case in batch
                for name in versions(device.platform, _heads(case, number), case.max_rows, case.causal)
                if name != "xla" or device.platform == "cpu"
            ]
            errors = pool.map(lambda pair: error(pair[0], number, pair[1]), pairs)
            for (case, name), off in zip(pairs, errors, strict=True):
                if off > bound:
                    raise UserError(f"{name} is off by {off:.1e} (seed {seed}): {case}")
                found.setdefault(name, []).append(off)
    return {
        "dtype": dtype,
        "seconds": time.perf_counter() - started,
        "seed": seed,
        "bound": bound,
        "errors": found,
    }


def show_soak(results: report.Record) -> None:
    """Prints the results of a soak."""
    report.show(
        f"Random shapes, {results['dtype']}, {results['seconds']:.0f} s, seed {results['seed']}",
        ("version", "runs", "median error", "worst error", "bound"),
        [
            (name, str(len(off)), f"{statistics.median(off):.1e}", f"{max(off):.1e}", f"{results['bound']:.0e}")
            for name, off in results["errors"].items()
        ],
        ("A shape that is off would have ended the run.",),
    )


def draw_soak(results: report.Record, axes: Axes) -> None:
    """How many shapes had which error."""
    for name, off in results["errors"].items():
        axes.hist(
            off,
            bins=40,
            range=(0, results["bound"]),
            histtype="step",
            label=f"{name}, {len(off)} shapes",
            color=_COLOURS[name],
        )
    axes.axvline(results["bound"], color="#d1495b", linewidth=1)
    axes.set_xlabel("error relative to float32")
    axes.set_ylabel("shapes")
    axes.set_title(f"Ragged attention on random shapes, {results['dtype']}", loc="left")
    axes.legend(frameon=False)


def _heads(case: Case, dtype) -> HeadShape:
    return HeadShape(case.heads, case.kv_heads, case.head_dim, case.page_size, dtype.name)


def inputs(case: Case, dtype, seed: int = 0) -> tuple[Arrays, Array]:
    """Arrays of a case with its pages in a pool beyond the cache, and one table a call [calls, r, p]."""
    page_bytes = 2 * case.kv_heads * case.page_size * case.head_dim * dtype.itemsize
    length, _ = case.lengths(seed)
    own = int((-(-length // case.page_size)).sum())
    on_cpu = jax.default_backend() == "cpu"
    calls = 2 if on_cpu else min(48, max(6, -(-_BEYOND_CACHE // (own * page_bytes))))
    arrays = shapes.make(case, dtype, seed=seed, pool_pages=own * calls + 1 if calls > 6 else 0, poison=False)
    rng = np.random.default_rng(seed)
    table, pages = np.asarray(arrays.table), arrays.k_pool.shape[0]
    tables = []
    for _ in range(calls):
        used = table > 0
        other = np.zeros_like(table)
        other[used] = rng.permutation(pages - 1)[: used.sum()] + 1
        tables.append(other)
    return arrays, jnp.asarray(np.stack(tables))


def program(backend: Backend, case: Case, arrays: Arrays, tables: Array, dtype, **tuning: Any) -> Timed:
    """One call for each table, compiled as one program; the plan is made before, as it is made once a step."""
    plan = _planner(backend, case, arrays.q.shape[0], dtype, **tuning)(arrays.segments)

    def run(q, k_pool, v_pool, tables, segments, plan):
        return [
            attend(q, k_pool, v_pool, tables[i], segments, plan, causal=case.causal, window=case.window)
            for i in range(tables.shape[0])
        ]

    args = (arrays.q, arrays.k_pool, arrays.v_pool, tables, arrays.segments, plan)
    return Timed(_compile(run, *args), args, tables.shape[0])


def _compile(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Without XLA's tuning of its own Triton products, minutes that the engine does not spend either."""
    options: dict[str, Any] = {} if jax.default_backend() == "cpu" else {"xla_gpu_enable_triton_gemm": False}
    return jax.jit(function).lower(*args).compile(options)


def _planner(backend: Backend, case: Case, tokens: int, dtype, **tuning: Any) -> Callable[[Any], Any]:
    heads = _heads(case, dtype)
    return jax.jit(
        lambda segments: make_plan(
            backend, segments, heads, tokens=tokens, causal=case.causal, window=case.window, **tuning
        )
    )


def error(case: Case, dtype, backend: Backend, **tuning: Any) -> float:
    """‖out − reference‖ / ‖reference‖ against float32, with poisoned pages and a poisoned output; 1 for NaN."""
    smaller = replace(case, pad_rows=case.pad_rows or 5, pad_segments=case.pad_segments or 2)
    arrays = shapes.make(smaller, dtype, seed=1)
    plan = _planner(backend, smaller, arrays.q.shape[0], dtype, **tuning)(arrays.segments)

    def run(q, k_pool, v_pool, table, segments, plan):
        return attend(q, k_pool, v_pool, table, segments, plan, causal=case.causal, window=case.window)

    args = (arrays.q, arrays.k_pool, arrays.v_pool, arrays.table, arrays.segments, plan)
    compiled = _compile(run, *args)
    # The allocator hands out what was freed last: outputs and scratch of the run begin as NaN.
    poison = [jnp.full(arrays.q.shape, jnp.nan, dtype) for _ in range(8)]
    jax.block_until_ready(poison)
    del poison
    out = compiled(*args)
    exact = _exact(smaller, arrays)
    wrong = jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    return float(jnp.where(jnp.isfinite(wrong), wrong, 1.0))


def _exact(case: Case, arrays: Arrays) -> Array:
    """The reference in float32, some segments at a time: a rectangle of all of them may not fit."""
    segments = arrays.segments
    with jax.default_matmul_precision("highest"):

        def run(q, k_pool, v_pool, table, segments):
            q, k_pool, v_pool = (x.astype(jnp.float32) for x in (q, k_pool, v_pool))
            return reference.attend(q, k_pool, v_pool, table, segments, causal=case.causal, window=case.window)

        out = jnp.zeros(arrays.q.shape, jnp.float32)
        compiled: dict[int, Callable[..., Array]] = {}
        for i in range(0, segments.row.shape[0], 32):
            some = replace(
                segments,
                start=segments.start[i : i + 33],
                row=segments.row[i : i + 32],
                length=segments.length[i : i + 32],
            )
            args = (arrays.q, arrays.k_pool, arrays.v_pool, arrays.table, some)
            size = some.row.shape[0]
            compiled[size] = compiled.get(size) or _compile(run, *args)
            out += compiled[size](*args)
        return out


def _cudnn(case: Case, arrays: Arrays, calls: int, dtype) -> Timed:
    """cuDNN's attention over keys that lie gathered and padded already, and without the causal edge."""
    length, _ = case.lengths()
    shape = (case.requests, int(length.max()), case.kv_heads, case.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, shape, dtype) for key in keys[:2])
    q = jax.random.normal(keys[2], (calls, case.requests, case.max_rows, case.heads, case.head_dim), dtype)
    lengths = jnp.asarray(length, jnp.int32)

    def run(q, k, v, lengths):
        return [
            jax.nn.dot_product_attention(x, k, v, key_value_seq_lengths=lengths, implementation="cudnn") for x in q
        ]

    args = (q, k, v, lengths)
    return Timed(_compile(run, *args), args, calls)


@dataclass(frozen=True)
class _Prepared:
    """A case with its programs on the way: by version, cuDNN's included."""

    case: Case
    programs: dict[str, Future[Timed]]


def _prepare(case: Case, dtype, platform: str, pool: ThreadPoolExecutor) -> _Prepared:
    arrays, tables = inputs(case, dtype)
    makers: dict[str, Callable[[], Timed]] = {
        name: partial(program, name, case, arrays, tables, dtype)
        for name in versions(platform, _heads(case, dtype), case.max_rows, case.causal)
    }
    if platform == "gpu":
        makers["cudnn"] = partial(_cudnn, case, arrays, 6, dtype)
    return _Prepared(case, {name: pool.submit(make) for name, make in makers.items()})


def _measure_case(prepared: _Prepared, dtype, limits: ceilings.Ceilings) -> list[report.Record]:
    case = prepared.case
    work = ceilings.Work(shapes.kv_bytes(case, dtype.itemsize), shapes.flops(case))
    floor = limits.floor(work)
    rows = []
    for name, future in prepared.programs.items():
        row: report.Record = {
            "op": "ragged_attention",
            "case": case.name,
            "version": name,
            "heads": f"{case.heads}/{case.kv_heads}x{case.head_dim}",
            "bytes": work.bytes,
            "flops": work.flops,
            "floor_us": floor.seconds * 1e6,
            "floor_bound": floor.bound,
            "bar": case.bar,
            "unit": case.unit,
        }
        if problem := future.exception():
            rows.append(row | {"refused": f"{type(problem).__name__}: {str(problem)[:200]}"})
            continue
        batches = future.result().seconds()
        seconds = statistics.median(batches)
        achieved = {
            "TB/s": work.bytes / seconds / 1e12,
            "TFLOP/s": work.flops / seconds / 1e12,
            "µs": seconds * 1e6,
        }[case.unit]
        rows.append(
            row
            | {
                "us": seconds * 1e6,
                "us_of_batches": [b * 1e6 for b in batches],
                "calls": future.result().calls,
                "achieved": achieved,
                "ratio": seconds / floor.seconds,
                "error": None,
            }
        )
    return rows


def show(results: report.Record) -> None:
    """Prints the results."""
    limits = results["ceilings"]
    report.show(
        f"Kernels, {results['dtype']}",
        ("case", "version", "µs", "floor µs", "times floor", "achieved", "bar", "error"),
        [
            (
                op["case"],
                op["version"],
                f"{op['us']:.1f}",
                f"{op['floor_us']:.1f}",
                f"{op['ratio']:.2f}",
                f"{op['achieved']:.2f} {op['unit']}",
                "" if op["bar"] is None else f"{op['bar']:g}",
                "" if op["error"] is None else f"{op['error']:.1e}",
            )
            if "us" in op
            else (op["case"], op["version"], "refused", "", "", "", "", "")
            for op in results["ops"]
        ],
        (
            f"Measured here: copy {limits['copy_bytes_per_second'] / 1e9:.0f} GB/s, read "
            f"{limits['read_bytes_per_second'] / 1e9:.0f} GB/s, "
            f"{limits['matmul_flops_per_second'] / 1e12:.3g} TFLOP/s.",
        ),
    )


def draw(results: report.Record, axes: Axes) -> None:
    """How many times its floor each version takes, by case."""
    cases = list(dict.fromkeys(op["case"] for op in results["ops"]))
    for name, colour in _COLOURS.items():
        ops = [op for op in results["ops"] if op["version"] == name and "us" in op]
        if ops:
            axes.plot([op["ratio"] for op in ops], [op["case"] for op in ops], "o", color=colour, label=name)
    axes.axvline(1, color="#d1495b", linewidth=1)
    axes.set_yticks(range(len(cases)), cases)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("times the floor (log scale)")
    axes.set_title(f"Ragged attention, {results['dtype']}", loc="left")
    axes.legend(frameon=False)
