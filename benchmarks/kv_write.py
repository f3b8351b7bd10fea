"""Norm, rotary embedding and the write of keys and values into pages: XLA beside one fused Triton kernel.

    python benchmarks/kv_write.py OUTPUT.json

Should the engine leave this stage to XLA? Random rows at random places of the pages; each program does the stage
of `LAYERS` layers, one behind the other, and its pools are donated as in the engine. Without a GPU only XLA's side
runs, on small shapes.
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspark import kv
from jspark.axes import single_device_mesh
from jspark.bench import ceilings, report

LAYERS, STEPS, BATCHES, PAGE, EPS = 30, 20, 7, 64, 1e-6
#: Rows, KV heads, head size, whether keys have a norm.
CASES = tuple((t, *heads) for heads in ((8, 128, True), (3, 64, False)) for t in (8, 64, 256, 1024, 2048))
ON_A_CPU = ((8, 2, 64, True), (64, 2, 64, False))


def xla(k, v, k_pool, v_pool, page, offset, cos, sin, scale):
    """The stage as the model's layers state it."""
    if scale is not None:
        y = k.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPS)
        k = (y * scale.astype(jnp.float32)[None, None, :]).astype(k.dtype)
    a, b = jnp.split(k.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    k = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(k.dtype)
    return kv.write(k_pool, page, offset, k), kv.write(v_pool, page, offset, v)


def triton(k, v, k_pool, v_pool, page, offset, cos, sin, scale):
    """The stage as one launch: a program takes all heads of one row."""
    import jax_triton  # pyright: ignore[reportMissingImports]
    from kv_write_kernel import write_rows  # pyright: ignore[reportMissingImports]

    rows, heads, size = k.shape
    return jax_triton.triton_call(
        k, v, page, offset, cos, sin, k[0, 0] if scale is None else scale, k_pool, v_pool,
        kernel=write_rows,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_pool, v_pool)],
        input_output_aliases={7: 0, 8: 1},
        grid=(rows,), num_warps=4, name="kv_write",
        HEADS=heads, HEADS_2=1 << (heads - 1).bit_length(), D=size, PAGE=k_pool.shape[2],
        NORM=scale is not None, EPS=EPS,
    )  # fmt: skip


def inputs(case, dtype, pages):
    """Random rows of every layer, pools, and distinct random places."""
    t, heads, size, norm = case
    rng = np.random.default_rng(t)
    keys = jax.random.split(jax.random.key(t), 3)
    rows = jax.random.normal(keys[0], (2, LAYERS, t, heads, size), dtype)
    angle = jax.random.uniform(keys[1], (t, size // 2), jnp.float32, 0, 2 * np.pi)
    place = rng.permutation((pages - 1) * PAGE)[:t]
    where = [jnp.asarray(x, jnp.int32) for x in (place // PAGE + 1, place % PAGE)]
    scale = jax.random.normal(keys[2], (size,), dtype) if norm else None
    pools = [
        [jax.random.normal(jax.random.key(i), (pages, heads, PAGE, size), dtype) for i in range(LAYERS)]
        for _ in range(2)
    ]
    return rows, pools, (*where, jnp.cos(angle), jnp.sin(angle)), scale


def program(stage, rows, pools, where, scale):
    """The stage of all layers, compiled with its pools donated."""

    def run(pools, rows, where, scale):
        pairs = [stage(rows[0, i], rows[1, i], pools[0][i], pools[1][i], *where, scale) for i in range(LAYERS)]
        return [[p[0] for p in pairs], [p[1] for p in pairs]]

    options = {} if jax.default_backend() == "cpu" else {"xla_gpu_enable_triton_gemm": False}
    return jax.jit(run, donate_argnums=0).lower(pools, rows, where, scale).compile(options)


def timed(compiled, rows, pools, where, scale) -> tuple[float, list[list[Array]]]:
    """Microseconds a layer: median over batches, one wait a batch."""
    seconds = []
    for _ in range(BATCHES):
        jax.block_until_ready(pools)
        started = time.perf_counter()
        for _ in range(STEPS):
            pools = compiled(pools, rows, where, scale)
        jax.block_until_ready(pools)
        seconds.append((time.perf_counter() - started) / STEPS / LAYERS)
    return statistics.median(seconds) * 1e6, pools


def measure(mesh) -> report.Record:
    """Every case with every version; the versions' pools must agree to rounding."""
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    dtype, pages = jnp.dtype("bfloat16"), 256 if on_gpu else 16
    bandwidth, results = ceilings.copy_bandwidth(mesh), []
    for case in CASES if on_gpu else ON_A_CPU:
        written, row = {}, {"rows": case[0], "kv_heads": case[1], "head_dim": case[2], "norm": case[3]}
        for name, stage in {"xla": xla, "triton": triton}.items() if on_gpu else [("xla", xla)]:
            rows, pools, where, scale = inputs(case, dtype, pages)
            compiled = program(stage, rows, pools, where, scale)
            row[f"{name}_us"], pools = timed(compiled, rows, pools, where, scale)
            written[name] = np.asarray(jnp.stack([pools[0][-1], pools[1][-1]]).astype(jnp.float32))
        if on_gpu:
            row["largest_difference"] = float(np.abs(written["xla"] - written["triton"]).max())
        # Keys and values are read once and written once.
        row["floor_us"] = 4 * case[0] * case[1] * case[2] * dtype.itemsize / bandwidth * 1e6
        results.append(row)
        print(row, flush=True)
    return {"layers": LAYERS, "copy_bytes_per_second": bandwidth, "cases": results}


def draw(results, axes) -> None:
    """Microseconds a layer by rows."""
    for heads, line in ((8, "-"), (3, "--"), (2, ":")):
        cases = [c for c in results["cases"] if c["kv_heads"] == heads]
        for name, colour in (("xla_us", "#2a6f97"), ("triton_us", "#d1495b"), ("floor_us", "#a9b4c2")):
            points = [(c["rows"], c[name]) for c in cases if name in c]
            if points:
                axes.plot(
                    *zip(*points, strict=True), line, color=colour, marker="o", label=f"{name[:-3]}, {heads} heads"
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows")
    axes.set_ylabel("µs a layer")
    axes.legend(frameon=False, fontsize=8)


def main() -> None:
    """Measures and saves."""
    mesh = single_device_mesh()
    record = report.describe("kv_write", " ".join(["python benchmarks/kv_write.py", *sys.argv[1:]]), mesh)
    record["results"] = measure(mesh)
    report.save(record, Path(sys.argv[1]), partial(draw, record["results"]))


if __name__ == "__main__":
    main()
