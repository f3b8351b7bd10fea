"""Propose and full verify with attention kernels and with XLA's attention, side by side in one process.

    python benchmarks/step_attention.py OUTPUT.json [BACKEND …]

Random weights; `jspark bench step` measures more of one backend. Programs are compiled side by side, so a GPU is
held for a few minutes at most.
"""

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspark import weights
from jspark.axes import single_device_mesh
from jspark.bench import ceilings, report
from jspark.bench.step import SHAPES
from jspark.bench.warm_engine import WarmEngine
from jspark.config import EngineConfig

CONTEXT, BLOCK, STEPS, BATCHES = 1024, 7, 10, 5
#: What is on the device at the same time.
GROUPS = (("smollm2-135m", (1, 64, 256)), ("qwen3-8b", (1, 64)), ("qwen3-8b", (256,)))
BACKENDS = ("auto", "triton", "xla")


def prepare(name, target, drafter, rows, backend, mesh):
    """A warm engine's launches, compiled."""
    started = time.perf_counter()
    config = EngineConfig(
        max_running_requests=rows,
        context_length=CONTEXT,
        max_total_tokens=rows * (CONTEXT + 64),
        dtype="bfloat16",
        row_buckets=(rows,),
        attention_backend=backend,
    )
    engine = WarmEngine(config, target, drafter, mesh=mesh)
    engine.fill()
    launches = engine.launches(CONTEXT, np.random.default_rng(rows))
    tokens = rows * (BLOCK + 1)
    args, proposal = launches.args(tokens), launches.proposal()
    jax.block_until_ready(launches.propose(launches.slots(), args))
    jax.block_until_ready(launches.verify(tokens, launches.slots(), args, proposal))
    attention = engine.programs.spec.attention
    return launches, args, proposal, attention, time.perf_counter() - started


def timed(launch, slots):
    """Milliseconds a launch: median over batches, one wait a batch."""
    seconds = []
    for _ in range(BATCHES):
        tables = jax.block_until_ready([slots() for _ in range(STEPS)])
        started = time.perf_counter()
        for table in tables:
            out = launch(table)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - started) / STEPS)
    return statistics.median(seconds) * 1e3


def floors(target, drafter, rows, limits):
    """Milliseconds below which the two programs cannot be done, whatever computes the attention."""
    full = ceilings.target_pass(*target, rows=rows, tokens=rows * (BLOCK + 1), context=CONTEXT)
    full += ceilings.inject_pass(drafter[0], tokens=rows * (BLOCK + 1))
    block = ceilings.propose_pass(*drafter, target[0], rows=rows, block_size=BLOCK, context=CONTEXT)
    return {
        "propose_floor_ms": limits.floor(block).seconds * 1e3,
        "verify_floor_ms": limits.floor(full).seconds * 1e3,
    }


def measure(name, counts, mesh, limits):
    """Rows of the record: one shape, each count of rows with each backend."""
    config, dtype = SHAPES[name], jnp.dtype("bfloat16")
    target = (weights.random_decoder(config, dtype, mesh), config)
    draft = weights.untrained_drafter_config(config, block_size=BLOCK)
    drafter = (weights.random_drafter(draft, dtype, mesh), draft)
    results = []
    with ThreadPoolExecutor(16) as pool:
        jobs = [
            (rows, backend, pool.submit(prepare, name, target, drafter, rows, backend, mesh))
            for rows in counts
            for backend in sys.argv[2:] or BACKENDS
        ]
        ready = [(rows, backend, job.result()) for rows, backend, job in jobs]
    for rows, backend, (launches, args, proposal, attention, compiling) in ready:
        tokens = rows * (BLOCK + 1)
        row = {
            "shape": name,
            "rows": rows,
            "backend": backend,
            "attention": [attention.verify, attention.prefill, attention.draft],
            "propose_ms": timed(lambda s, x=launches, a=args: x.propose(s, a), launches.slots),
            "verify_ms": timed(
                lambda s, x=launches, a=args, p=proposal, t=tokens: x.verify(t, s, a, p), launches.slots
            ),
            "compile_seconds": compiling,
        } | floors(target, drafter, rows, limits)
        results.append(row)
        print(row, flush=True)
    return results


def main() -> None:
    """Measures and saves."""
    output = Path(sys.argv[1])
    mesh = single_device_mesh()
    record = report.describe(
        "step_attention", " ".join(["python benchmarks/step_attention.py", *sys.argv[1:]]), mesh
    )
    limits = ceilings.measure(mesh, "bfloat16")
    results = []
    for name, counts in GROUPS:
        results += measure(name, counts, mesh, limits)
    record["results"] = {"context": CONTEXT, "block_size": BLOCK, "steps": STEPS, "programs": results}
    record["results"]["ceilings"] = {
        "read_bytes_per_second": limits.read_bandwidth,
        "matmul_flops_per_second": limits.matmul_rate,
    }

    report.save(record, output, lambda axes: draw(results, axes))


def draw(results, axes) -> None:
    """Verify and propose of each backend, one bar each."""
    labels = [f"{r['shape']} R {r['rows']}\n{r['backend']}" for r in results]
    axes.barh(labels, [r["verify_ms"] for r in results], color="#2a6f97", label="verify")
    axes.barh(
        labels, [r["propose_ms"] for r in results], left=[r["verify_ms"] for r in results], color="#e9c46a",
        label="propose",
    )  # fmt: skip
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("ms, one after the other")
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
