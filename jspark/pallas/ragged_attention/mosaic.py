"""The Mosaic GPU kernel: Hopper's copy engine and matrix units, one persistent block of threads on each SM.

Knows: one memory warpgroup whose warps stream pages of keys and values into rings in shared memory, and compute
warpgroups that hold a tile of queries in registers and fold the blocks into it (online softmax, base 2). Each
compute warpgroup is a worker of the plan with a ring of its own (`shared=False`: verification and decode), or all
compute warpgroups of an SM work on one tile, each on its share of the rows, and read one ring (`shared=True`:
prefill, where the keys are worth sharing).
Does not know: what the rows mean, or how the work was cut (plan.py).

A task cut over several workers is merged by the worker that opens it: the others leave their part, normalised, and
its log-sum-exp in global memory and raise a semaphore. Every worker is resident, so waiting cannot deadlock.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jspark.pallas.ragged_attention.plan import MosaicPlan

ROWS = 64  # rows of one wgmma tile
MASKED = -1e30  # finite: a part that sees nothing weighs exp2(-1e30 - m) = 0, never NaN
SMEM_BYTES = 227 * 1024


@dataclass(frozen=True)
class Config:
    """Static choices of one kernel.

    block: keys of a block. stages: blocks in flight in each ring. warpgroups: compute warpgroups of an SM.
    shared: one ring for all of them.
    """

    block: int = 64
    stages: int = 2
    warpgroups: int = 2
    shared: bool = False

    def tile(self, group: int) -> int:
        """Query rows (tokens) of a task of the plan."""
        return ROWS // group * (self.warpgroups if self.shared else 1)

    def workers(self, multiprocessors: int) -> int:
        return multiprocessors * (1 if self.shared else self.warpgroups)

    def smem(self, head_dim: int) -> int:
        rings = 1 if self.shared else self.warpgroups
        return 2 * head_dim * (2 * rings * self.stages * self.block + 2 * self.warpgroups * ROWS)


def _kernel(
    config: Config,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    ctas: int,
    causal: bool,
    window: int | None,
    scale: float,
    interpret: bool,
):
    group = heads // kv_heads
    tile = ROWS // group
    wgs, stages, block = config.warpgroups, config.stages, config.block
    copies = max(1, block // page)
    f32, i32 = jnp.float32, jnp.int32
    to_log2 = scale * math.log2(math.e)

    def worker_of(wg):
        return lax.axis_index("cta") if config.shared else wg * ctas + lax.axis_index("cta")

    def ring_of(wg):
        return i32(0) if config.shared else wg

    def next_task(t, h):
        wrap = h + 1 == kv_heads
        return jnp.where(wrap, t + 1, t), jnp.where(wrap, 0, h + 1)

    def compute(wg, tiles, work, out, parts, lse, smem, bars, sems):
        q_smem, o_smem, lse_smem, k_smem, v_smem = smem
        q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared = bars
        w, ring = worker_of(wg), ring_of(wg)
        part_slots = 1 if not interpret else 2

        def part_at(worker, opens):
            slot = (worker * wgs + wg) if config.shared else worker
            return slot if part_slots == 1 else slot * 2 + jnp.where(opens, 1, 0)

        def task(_, carry):
            t, h, b, left, used = carry
            token, rows = tiles[t, 0], tiles[t, 1]
            first, last, low, blocks = tiles[t, 3], tiles[t, 4], tiles[t, 5], tiles[t, 6]
            if config.shared:
                token, rows = token + wg * tile, jnp.clip(rows - wg * tile, 0, tile)
                if causal:
                    first = jnp.minimum(first + wg * tile, last)
            end = jnp.minimum(b + left, blocks)

            plgpu.barrier_wait(q_full.at[wg])
            queries = plgpu.load(q_smem.at[wg], layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()
            plgpu.barrier_arrive(q_empty.at[wg])

            def fold(j, state, *, masked):
                acc, m, l = state
                slot = ring * stages + lax.rem(used + (j - b), i32(stages))
                position = (low + j) * block
                plgpu.barrier_wait(k_full.at[slot])
                if interpret:
                    s = jnp.dot(queries, k_smem[slot].T, preferred_element_type=f32)
                    plgpu.commit_smem()
                else:

                    def scores(acc_ref):
                        plgpu.wgmma(acc_ref, queries, k_smem.at[slot].transpose((1, 0)))
                        return acc_ref[...]

                    s = pl.run_scoped(scores, plgpu.ACC((ROWS, block), f32))
                plgpu.barrier_arrive(k_empty.at[slot])
                s = s * to_log2
                if masked:
                    iota = functools.partial(plgpu.broadcasted_iota, i32, (ROWS, block), layout=plgpu.Layout.WGMMA)
                    seen = iota(0) * 0 + first
                    if causal:
                        seen = lax.rem(iota(0), jnp.full((ROWS, block), tile, i32)) + first
                    at = iota(1) + position
                    visible = at < seen
                    if window is not None:
                        visible = visible & (at >= seen - window)
                    s = jnp.where(visible, s, MASKED)
                top = jnp.maximum(m, s.max(axis=1))
                alpha = jnp.exp2(m - top)
                p = jnp.exp2(s - lax.broadcast_in_dim(top, s.shape, [0]))
                l = l * alpha + p.sum(axis=1)
                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                p16 = p.astype(k_smem.dtype)
                plgpu.barrier_wait(v_full.at[slot])
                if masked:
                    # Rows of V that no query sees may hold NaN, and 0·NaN is NaN.
                    def clear_tail():
                        iota = plgpu.broadcasted_iota(i32, (block, head_dim), 0, layout=plgpu.Layout.WGMMA)
                        values = plgpu.load(v_smem.at[slot], layout=plgpu.Layout.WGMMA)
                        v_smem[slot] = jnp.where(iota + position < last, values, jnp.zeros_like(values))
                        plgpu.commit_smem()

                    @pl.when(position + block > last)
                    def _():
                        if not config.shared:
                            return clear_tail()
                        pl.when(wg == 0)(clear_tail)
                        plgpu.barrier_arrive(cleared)
                        plgpu.barrier_wait(cleared)

                if interpret:
                    acc = acc + jnp.dot(p16, v_smem[slot], preferred_element_type=f32)
                    plgpu.commit_smem()
                else:

                    def output(acc_ref):
                        plgpu.wgmma(acc_ref, p16, v_smem.at[slot])

                    acc = pl.run_state(output)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_empty.at[slot])
                return acc, top, l

            state = (
                plgpu.layout_cast(jnp.zeros((ROWS, head_dim), f32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((ROWS,), MASKED, f32), plgpu.Layout.WGMMA.reduce(1)),
                plgpu.layout_cast(jnp.zeros((ROWS,), f32), plgpu.Layout.WGMMA.reduce(1)),
            )
            clear = jnp.clip(lax.div(first, i32(block)) - low, b, end)
            begin = b
            if window is not None:
                whole = lax.div(jnp.maximum(last - window, 0) + block - 1, i32(block)) - low
                begin = jnp.clip(whole, b, end)
                clear = jnp.maximum(clear, begin)
                state = lax.fori_loop(b, begin, functools.partial(fold, masked=True), state)
            state = lax.fori_loop(begin, clear, functools.partial(fold, masked=False), state)
            acc, m, l = lax.fori_loop(clear, end, functools.partial(fold, masked=True), state)

            opens, closes = b == 0, end == blocks
            finishes = opens
            if interpret:
                finishes = opens & closes
            else:

                def merge(i, state):
                    acc, m, l = state
                    at = part_at(w + i, False)
                    plgpu.semaphore_wait(sems.at[at], 1, memory_scope="gpu")
                    other = plgpu.load(parts.at[at], layout=plgpu.Layout.WGMMA, optimized=False).astype(f32)
                    other_lse = plgpu.load(lse.at[at], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                    top = jnp.maximum(m, other_lse)
                    alpha, beta = jnp.exp2(m - top), jnp.exp2(other_lse - top)
                    spread = functools.partial(lax.broadcast_in_dim, shape=acc.shape, broadcast_dimensions=[0])
                    return acc * spread(alpha) + other * spread(beta), top, l * alpha + beta

                merges = jnp.where(opens & ~closes, work[w, 5], 1)
                acc, m, l = lax.fori_loop(i32(1), merges, merge, (acc, m, l))

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            result = acc * lax.broadcast_in_dim(1.0 / l, acc.shape, [0])
            o_smem[wg] = result.astype(o_smem.dtype)

            @pl.when(~finishes)
            def _():
                lse_smem[wg] = m + jnp.log2(l)

            plgpu.commit_smem()

            @pl.when(finishes)
            def _():
                # The copy engine stores powers of two of tokens, for each head of the group.
                size = 1 << (tile.bit_length() - 1)
                while size:

                    def store(size=size):
                        done = rows & -(2 * size)
                        for g in range(group):
                            plgpu.copy_smem_to_gmem(
                                o_smem.at[wg, pl.ds(done + g * tile, size)],
                                out.at[pl.ds(token + done, size), h * group + g],
                            )

                    pl.when((rows & size) != 0)(store)
                    size //= 2

            @pl.when(~finishes)
            def _():
                at = part_at(w, opens)
                plgpu.copy_smem_to_gmem(o_smem.at[wg], parts.at[at])
                plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse.at[at])
                if not interpret:
                    plgpu.wait_smem_to_gmem(0)
                    plgpu.semaphore_signal(sems.at[at], 1, memory_scope="gpu")

            t, h = next_task(t, h)
            return t, h, i32(0), left - (end - b), used + (end - b)

        start = (work[w, 0], work[w, 1], work[w, 2], work[w, 3], i32(0))
        lax.fori_loop(i32(0), work[w, 4], task, start)
        plgpu.wait_smem_to_gmem(0)

    def stream(ring, tiles, work, table, q, k, v, smem, bars):
        q_smem, _, _, k_smem, v_smem = smem
        q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
        readers = tuple(i32(g) for g in range(wgs)) if config.shared else (ring,)
        w = worker_of(ring)

        def pages_of(row, position, last):
            """The pages of a block; past the last visible key, the last page again: the table may hold anything."""
            top = lax.div(jnp.maximum(last - 1, 0), i32(page))
            return tuple(table[row, jnp.minimum(lax.div(position, i32(page)) + i, top)] for i in range(copies))

        def copy_block(source, target, full, slot, pages, h, position):
            if copies == 1:
                offset = lax.rem(position, i32(page))
                plgpu.copy_gmem_to_smem(source.at[pages[0], h, pl.ds(offset, block)], target.at[slot], full.at[slot])
                return
            for i, number in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    source.at[number, h], target.at[slot, pl.ds(i * page, page)], full.at[slot]
                )

        def task(n, carry):
            t, h, b, left, used = carry
            token, row, last = tiles[t, 0], tiles[t, 2], tiles[t, 4]
            low, blocks = tiles[t, 5], tiles[t, 6]
            end = jnp.minimum(b + left, blocks)
            pages = pages_of(row, (low + b) * block, last)
            for reader in readers:

                @pl.when(n > 0)
                def _(reader=reader):
                    plgpu.barrier_wait(q_empty.at[reader])

                size = min(tile, q.shape[0])
                at = token + (reader * tile if config.shared else 0)
                for g in range(group):
                    plgpu.copy_gmem_to_smem(
                        q.at[pl.ds(at, size), h * group + g],
                        q_smem.at[reader, pl.ds(g * tile, size)],
                        q_full.at[reader],
                    )

            def step(j, pages):
                count = used + (j - b)
                slot = ring * stages + lax.rem(count, i32(stages))
                position = (low + j) * block
                ahead = pages_of(row, position + block, last)

                @pl.when(count >= stages)
                def _():
                    plgpu.barrier_wait(k_empty.at[slot])

                copy_block(k, k_smem, k_full, slot, pages, h, position)

                @pl.when(count >= stages)
                def _():
                    plgpu.barrier_wait(v_empty.at[slot])

                copy_block(v, v_smem, v_full, slot, pages, h, position)
                return ahead

            lax.fori_loop(b, end, step, pages)
            t, h = next_task(t, h)
            return t, h, i32(0), left - (end - b), used + (end - b)

        start = (work[w, 0], work[w, 1], work[w, 2], work[w, 3], i32(0))
        *_, used = lax.fori_loop(i32(0), work[w, 4], task, start)

        # Every phase of a barrier is waited for, the last ones too.
        @pl.when(work[w, 4] > 0)
        def _():
            for reader in readers:
                plgpu.barrier_wait(q_empty.at[reader])

        @pl.loop(jnp.maximum(used - stages, 0), used)
        def _(count):
            slot = ring * stages + lax.rem(count, i32(stages))
            plgpu.barrier_wait(k_empty.at[slot])
            plgpu.barrier_wait(v_empty.at[slot])

    def body(tiles, work, table, q, k, v, out, parts, lse, *scratch):
        smem, bars = scratch[:5], scratch[5:]
        sems = None
        if not interpret:
            sems = pl.get_global(plgpu.SemaphoreType.REGULAR((parts.shape[0],)))
        wg = lax.axis_index("wg")

        @pl.when(wg < wgs)
        def _():
            if not interpret:
                plgpu.set_max_registers({1: 240, 2: 232, 3: 152}[wgs], action="increase")
            compute(wg, tiles, work, out, parts, lse, smem, bars, sems)

        @pl.when(wg == wgs)
        def _():
            if not interpret:
                plgpu.set_max_registers(40 if wgs > 1 else 24, action="decrease")

            def warp(index):
                @pl.when(index < (1 if config.shared else wgs))
                def _():
                    stream(index, tiles, work, table, q, k, v, smem, bars)

            plgpu.warp_map(warp)

    def scratch(dtype):
        rings = 1 if config.shared else wgs
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        ring = plgpu.SMEM((rings * stages, block, head_dim), dtype, transforms=transforms)
        readers = wgs if config.shared else 1
        return (
            plgpu.SMEM((wgs, ROWS, head_dim), dtype),
            plgpu.SMEM((wgs, ROWS, head_dim), dtype),
            plgpu.SMEM((wgs, ROWS), f32),
            ring,
            ring,
            plgpu.Barrier(num_arrivals=group, num_barriers=wgs),
            plgpu.Barrier(num_arrivals=1, num_barriers=wgs),
            plgpu.Barrier(num_arrivals=copies, num_barriers=rings * stages),
            plgpu.Barrier(num_arrivals=readers, num_barriers=rings * stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=rings * stages),
            plgpu.Barrier(num_arrivals=readers, num_barriers=rings * stages),
            plgpu.Barrier(num_arrivals=wgs),
        )

    return body, scratch


def attend(
    q: Float[Array, "t n d"],
    k_pool: Float[Array, "pages k s d"],
    v_pool: Float[Array, "pages k s d"],
    table: Int[Array, "r p"],
    plan: MosaicPlan,
    config: Config,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "t n d"]:
    """Attention of the plan's rows over their pages; rows of no segment are left unwritten.

    q, pools: bfloat16 (or float16). interpret: run in the interpreter, without a GPU; the merge is then done by
    XLA, since the interpreter has no semaphores.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, page = k_pool.shape[1], k_pool.shape[2]
    rings = 1 if config.shared else config.warpgroups
    workers = plan.work.shape[0]
    ctas = workers // rings
    body, scratch = _kernel(
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
            jax.ShapeDtypeStruct((slots, ROWS, head_dim), q.dtype),
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
    )(plan.tiles, plan.work, table.astype(jnp.int32), q, k_pool, v_pool)
    if interpret is None:
        return out
    return _merge(out, parts, lse, plan, config, kv_heads)


def _merge(out, parts, lse, plan: MosaicPlan, config: Config, kv_heads: int):
    """The merge of cut tasks, for the interpreter: the same weights, worker by worker."""
    tokens, heads, head_dim = out.shape
    group = heads // kv_heads
    tile, wgs = ROWS // group, config.warpgroups
    shares = wgs if config.shared else 1
    parts = parts.reshape(-1, shares, 2, ROWS, head_dim).astype(jnp.float32)
    lse = lse.reshape(-1, shares, 2, ROWS)
    workers = plan.work.shape[0]
    one = jnp.arange(ROWS, dtype=jnp.int32)
    for w in range(workers):
        t, h, offset, units, tasks, count = (plan.work[w, i] for i in range(6))
        task = t * kv_heads + h + tasks - 1
        t, h = task // kv_heads, task % kv_heads
        own = (jnp.arange(workers, dtype=jnp.int32) > w) & (jnp.arange(workers, dtype=jnp.int32) < w + count)
        opens = ((tasks > 1) | (offset == 0)) & (count > 1)
        for share in range(shares):
            logs = jnp.concatenate([lse[w, share, 1][None], jnp.where(own[:, None], lse[:, share, 0], -jnp.inf)])
            values = jnp.concatenate([parts[w, share, 1][None], parts[:, share, 0]])
            weights = jnp.exp2(logs - jnp.max(logs, axis=0, keepdims=True))
            values = jnp.where(weights[..., None] > 0, values, 0.0) * weights[..., None]
            merged = jnp.sum(values, axis=0) / jnp.sum(weights, axis=0)[:, None]
            row = one % tile
            rows = plan.tiles[t, 1] - share * tile
            valid = opens & (row < rows) & (one < group * tile)
            at = jnp.where(valid, plan.tiles[t, 0] + share * tile + row, tokens)
            out = out.at[at, h * group + one // tile].set(merged.astype(out.dtype), mode="drop")
    return out
