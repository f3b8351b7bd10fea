"""The Mosaic GPU kernel: Hopper's copy engine and matrix units, one persistent block of threads on each SM.

Knows: one memory warpgroup whose warps stream pages of keys and values into rings in shared memory, and compute
warpgroups that hold a tile of queries in registers and fold the blocks into it (online softmax, base 2). What the
compute warpgroups of an SM do together is a choice: nothing, each being a worker of the plan (verification and
decode), or the rows of one tile, reading one ring (prefill, where keys are worth sharing).
Does not know: what the rows mean, or how the work was cut (plan.py).

The parts of a task that was cut over several workers are merged as a binary tree: a worker leaves its part,
normalised, and its log-sum-exp in global memory and raises its semaphore; the one that opens the task ends up with
the result. Every worker is resident, so waiting cannot deadlock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jspark.pallas.ragged_attention.plan import ROWS, Config

MASKED = -1e30  # finite: a part that sees nothing weighs exp2(-1e30 - m) = 0, never NaN


def build(
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
) -> tuple[Callable[..., None], Callable[[DTypeLike], tuple]]:
    """The body of the kernel, and its scratch for a dtype of queries, keys and values.

    tokens: rows of the output. ctas: blocks of threads.
    """
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
        q_smem, o_smem, k_smem, v_smem = smem
        q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared = bars
        w, ring = worker_of(wg), ring_of(wg)
        part_slots = 1 if not interpret else 2

        def part_at(worker, opens):
            slot = worker * wgs + wg if config.shared else worker
            return slot if part_slots == 1 else slot * 2 + jnp.where(opens, 1, 0)

        def task(_, carry):
            t, h, b, left, used = carry
            token, rows = tiles[t, 0], tiles[t, 1]
            first, last, low, blocks, own = (tiles[t, i] for i in range(3, 8))
            last_own = own + rows - 1
            if config.shared:
                token, rows = token + wg * tile, jnp.clip(rows - wg * tile, 0, tile)
                own = jnp.minimum(own + wg * tile, last_own)
                first = own if causal else first
            end = jnp.minimum(b + left, blocks)

            plgpu.barrier_wait(q_full.at[wg])
            queries = plgpu.load(q_smem.at[wg], layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()
            plgpu.barrier_arrive(q_empty.at[wg])

            def fold(j, state, *, masked):
                acc, top, total = state
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

                    s = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((ROWS, block), f32))
                plgpu.barrier_arrive(k_empty.at[slot])
                s = s * to_log2
                if masked:
                    iota = functools.partial(plgpu.broadcasted_iota, i32, (ROWS, block), layout=plgpu.Layout.WGMMA)
                    at = iota(1) + position
                    row = lax.rem(iota(0), jnp.full((ROWS, block), tile, i32))
                    visible = (at - row < first) if causal else (at < first)
                    if window is not None:
                        visible = visible & (at - row >= own - window)
                        if not causal:
                            visible = visible & (at - row < own - 1 + window)
                    s = jnp.where(visible, s, MASKED)
                new = jnp.maximum(top, s.max(axis=1))
                alpha = jnp.exp2(top - new)
                p = jnp.exp2(s - lax.broadcast_in_dim(new, s.shape, [0]))
                total = total * alpha + p.sum(axis=1)
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

                    acc = pl.run_state(output)(plgpu.WGMMAAccumulatorRef.init(acc))
                plgpu.barrier_arrive(v_empty.at[slot])
                return acc, new, total

            state = (
                plgpu.layout_cast(jnp.zeros((ROWS, head_dim), f32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((ROWS,), MASKED, f32), plgpu.Layout.WGMMA.reduce(1)),
                plgpu.layout_cast(jnp.zeros((ROWS,), f32), plgpu.Layout.WGMMA.reduce(1)),
            )
            all_see = first if causal or window is None else jnp.minimum(first, own - 1 + window)
            clear = jnp.clip(lax.div(all_see, i32(block)) - low, b, end)
            begin = b
            if window is not None:
                whole = lax.div(jnp.maximum(last_own - window, 0) + block - 1, i32(block)) - low
                begin = jnp.clip(whole, b, end)
                clear = jnp.maximum(clear, begin)
                state = lax.fori_loop(b, begin, functools.partial(fold, masked=True), state)
            state = lax.fori_loop(begin, clear, functools.partial(fold, masked=False), state)
            acc, top, total = lax.fori_loop(clear, end, functools.partial(fold, masked=True), state)

            opens, closes = b == 0, end == blocks
            finishes = opens
            if interpret:
                finishes = opens & closes
            else:

                def merge(i, state):
                    acc, top, total = state
                    at = part_at(w + lax.shift_left(i32(1), i), False)
                    plgpu.semaphore_wait(sems.at[at], 1, memory_scope="gpu")
                    other = plgpu.load(parts.at[at], layout=plgpu.Layout.WGMMA, optimized=False)
                    other_lse = plgpu.load(lse.at[at], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                    new = jnp.maximum(top, other_lse)
                    alpha, beta = jnp.exp2(top - new), jnp.exp2(other_lse - new)
                    spread = functools.partial(lax.broadcast_in_dim, shape=acc.shape, broadcast_dimensions=[0])
                    return acc * spread(alpha) + other * spread(beta), new, total * alpha + beta

                acc, top, total = lax.fori_loop(i32(0), jnp.where(closes, 0, work[w, 5]), merge, (acc, top, total))

            result = acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [0])

            @pl.when(finishes)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[wg] = result.astype(o_smem.dtype)
                plgpu.commit_smem()
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
                parts[at] = result
                lse[at] = top + jnp.log2(total)
                if not interpret:
                    plgpu.commit_smem()  # a barrier of the warpgroup: one of its threads signals for all
                    plgpu.semaphore_signal(sems.at[at], 1, memory_scope="gpu")

            t, h = next_task(t, h)
            return t, h, i32(0), left - (end - b), used + (end - b)

        start = (work[w, 0], work[w, 1], work[w, 2], work[w, 3], i32(0))
        lax.fori_loop(i32(0), work[w, 4], task, start)

        # Packed rows of no segment: zeros, shared out over the workers.
        every = ctas * wgs
        begin = work[w, 6] + (w * wgs + wg if config.shared else w)

        @pl.when(begin < tokens)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_smem[wg] = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), o_smem.dtype), plgpu.Layout.WGMMA)
            plgpu.commit_smem()

            @pl.loop(i32(0), lax.div(tokens - begin + every - 1, i32(every)))
            def _(i):
                for h in range(0, heads, ROWS):
                    size = min(ROWS, heads - h)
                    plgpu.copy_smem_to_gmem(
                        o_smem.at[wg, pl.ds(0, size)], out.at[begin + i * every, pl.ds(h, size)]
                    )

        plgpu.wait_smem_to_gmem(0)

    def stream(ring, tiles, work, table, q, k, v, smem, bars):
        q_smem, _, k_smem, v_smem = smem
        q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
        readers = tuple(i32(g) for g in range(wgs)) if config.shared else (ring,)
        w = worker_of(ring)

        def pages_of(row, position, last):
            """The pages of a block; past the last visible key, the last page again: the table ends there."""
            top = lax.div(jnp.maximum(last - 1, 0), i32(page))
            return tuple(table[row, jnp.minimum(lax.div(position, i32(page)) + i, top)] for i in range(copies))

        def copy_block(source, target, full, slot, pages, h, position):
            if copies == 1:
                offset = lax.rem(position, i32(page))
                plgpu.copy_gmem_to_smem(
                    source.at[pages[0], h, pl.ds(offset, block)], target.at[slot], full.at[slot]
                )
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
        _, _, _, _, used = lax.fori_loop(i32(0), work[w, 4], task, start)

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
        smem, bars = scratch[:4], scratch[4:]
        sems: Any = None if interpret else pl.get_global(plgpu.SemaphoreType.REGULAR((parts.shape[0],)))
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
                @pl.when(index < config.workers)
                def _():
                    stream(index, tiles, work, table, q, k, v, smem, bars)

            plgpu.warp_map(warp)

    def scratch(dtype):
        rings = config.workers
        # What wgmma reads: tiles of 8 rows of 128 bytes, swizzled.
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore
        ring = plgpu.SMEM((rings * stages, block, head_dim), dtype, transforms=transforms)
        readers = wgs if config.shared else 1
        return (
            plgpu.SMEM((wgs, ROWS, head_dim), dtype),
            plgpu.SMEM((wgs, ROWS, head_dim), dtype),
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
