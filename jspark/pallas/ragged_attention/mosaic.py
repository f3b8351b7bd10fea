"""Ragged attention in Mosaic GPU, for Hopper GPUs.

Knows: which kernel a class of shapes runs best with (tuned/h200.json), launches, and the interpreter's
stand-in for merging. Does not know: when it is the right version (dispatch.py), how work is cut (plan.py), or the
kernel (mosaic_kernel.py).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jspark.pallas.ragged_attention.plan import ROWS, Config, Cuts, cut
from jspark.pallas.ragged_attention.segments import HeadShape, Segments

if TYPE_CHECKING:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

__all__ = ["Config", "Plan", "attend", "available", "make_plan", "supports"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """The cuts of one step, and the kernel that they were made for."""

    cuts: Cuts
    config: Config = field(metadata={"static": True})


@cache
def available() -> bool:
    """There is a Hopper GPU (the kernel uses wgmma)."""
    try:
        return all(d.compute_capability == "9.0" for d in jax.devices("gpu"))
    except RuntimeError:
        return False


def supports(heads: HeadShape, max_rows: int, causal: bool) -> bool:
    """Whether this version computes such shapes."""
    sizes = heads.head_dim in (64, 128) and heads.page_size in (16, 32, 64, 128) and heads.group <= 16
    return sizes and heads.dtype in ("bfloat16", "float16")


def config_for(heads: HeadShape, max_rows: int, mean_rows: float) -> Config:
    """The tuned kernel of a class of shapes; sharing keys pays where most segments fill more than a tile."""
    tile = ROWS // heads.group
    kind = "prefill" if max_rows > tile and mean_rows >= 2 * tile else "decode"
    return Config(**_tuned()[f"{kind} {heads.head_dim}"])


@cache
def _tuned() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parent / "tuned" / "h200.json"
    return json.loads(path.read_text(encoding="utf-8"))["mosaic"]


@cache
def multiprocessors() -> int:
    """Streaming multiprocessors of the GPU; those of an H200 where there is none to ask."""
    try:
        return jax.devices("gpu")[0].core_count
    except RuntimeError:
        return 132


def make_plan(
    segments: Segments,
    heads: HeadShape,
    *,
    tokens: int,
    causal: bool,
    window: int | None = None,
    config: Config | None = None,
    ctas: int | None = None,
) -> Plan:
    """Cuts the work of these segments over the device.

    tokens: packed rows of the queries. config: in place of the tuned one. ctas: blocks of threads, by
    default one a multiprocessor.
    """
    if config is None:
        config = config_for(heads, segments.max_rows, tokens / segments.row.shape[0])
    cuts = cut(
        segments, heads, config, tokens=tokens, ctas=ctas or multiprocessors(), causal=causal, window=window
    )
    return Plan(cuts, config)


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale", "interpret"))
def attend(
    q: Float[Array, "t n d"],
    k_pool: Float[Array, "pages k s d"],
    v_pool: Float[Array, "pages k s d"],
    table: Int[Array, "r p"],
    segments: Segments,
    plan: Plan,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    interpret: InterpretGPUParams | None = None,
) -> Float[Array, "t n d"]:
    """The op (dispatch.attend) with a plan of `make_plan` for the same segments, `causal` and `window`.

    A function of its own to the compiler, so that the layers of a model lower it once. interpret: run in the
    interpreter, without a GPU; the merge is then XLA's, since the interpreter has no semaphores.
    """
    # Not every installation of JAX has the compiler's Python half; only a GPU needs it.
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from jspark.pallas.ragged_attention.mosaic_kernel import build

    del segments
    config, cuts = plan.config, plan.cuts
    tokens, heads, head_dim = q.shape
    kv_heads, page = k_pool.shape[1], k_pool.shape[2]
    ctas = cuts.work.shape[0] // config.workers
    body, scratch = build(
        config,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        ctas=ctas,
        causal=causal,
        window=window,
        scale=head_dim**-0.5 if scale is None else scale,
        interpret=interpret is not None,
    )
    slots = ctas * config.warpgroups * (1 if interpret is None else 2)
    if interpret is not None:  # the interpreter does not fill copies past the last row with zeros
        q = jnp.pad(q, ((0, 2 * ROWS), (0, 0), (0, 0)))
    out, parts, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tokens, heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((slots, ROWS, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((slots, ROWS), jnp.float32),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch(q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
        kernel_name="ragged_attention",
    )(cuts.tiles, cuts.work, table.astype(jnp.int32), q, k_pool, v_pool)
    return out if interpret is None else _merge(out, parts, lse, plan, kv_heads)


def _merge(out, parts, lse, plan: Plan, kv_heads: int):
    """The merge of cut tasks, for the interpreter: worker by worker, for the task that it opens last."""
    tokens, heads, head_dim = out.shape
    group = heads // kv_heads
    config = plan.config
    tile, shares = ROWS // group, config.warpgroups // config.workers
    tiles, work = plan.cuts.tiles, plan.cuts.work
    workers = jnp.arange(work.shape[0], dtype=jnp.int32)
    parts = parts.reshape(-1, shares, 2, ROWS, head_dim)
    lse = lse.reshape(-1, shares, 2, ROWS)
    one = jnp.arange(ROWS, dtype=jnp.int32)

    def worker(w, out):
        t, h, offset, units, tasks, _, _, count = work[w]
        opens = (units > 0) & ((tasks > 1) | (offset == 0)) & (count > 1)
        task = t * kv_heads + h + tasks - 1
        t, h = task // kv_heads, task % kv_heads
        others = (workers > w) & (workers < w + count)
        for share in range(shares):
            logs = jnp.concatenate(
                [lse[w, share, 1][None], jnp.where(others[:, None], lse[:, share, 0], -jnp.inf)]
            )
            values = jnp.concatenate([parts[w, share, 1][None], parts[:, share, 0]])
            weights = jnp.exp2(logs - jnp.max(logs, axis=0, keepdims=True))[..., None]
            values = jnp.sum(jnp.where(weights > 0, values * weights, 0.0), axis=0) / jnp.sum(weights, axis=0)
            row = one % tile
            valid = opens & (row < tiles[t, 1] - share * tile) & (one < group * tile)
            at = jnp.where(valid, tiles[t, 0] + share * tile + row, tokens)
            out = out.at[at, h * group + one // tile].set(values.astype(out.dtype), mode="drop")
        return out

    return lax.fori_loop(0, work.shape[0], worker, out)
