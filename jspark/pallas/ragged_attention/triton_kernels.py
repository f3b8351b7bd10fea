"""The Triton kernels of ragged attention; importing this needs triton.

Knows: the inner loops over key blocks, and how parts of a split task are merged.
Does not know: how work is shared out (triton.py makes the plan), or JAX.

Words: a tile is a segment, or a piece of one, of at most M // G tokens; a task is a tile and one KV head; a unit
is one task's block of N keys. All units stand in one line, tile after tile and head after head, and every program
computes one stretch of that line: a task that a cut goes through is finished by `merge`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# ruff: noqa: SIM108  (a choice at compile time is an if statement of its own in Triton)

import triton
import triton.language as tl


@triton.jit
def _seen(key, row_position, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which rows (down) see which keys (across), both by position."""
    seen = key[None, :] < length
    if CAUSAL:
        seen = seen & (key[None, :] <= row_position[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > row_position[:, None] - WINDOW)
        if not CAUSAL:
            seen = seen & (key[None, :] < row_position[:, None] + WINDOW)
    return seen


@triton.jit
def _weigh(scores, peak, total, MASKED: tl.constexpr):
    """One step of online softmax in base 2: weights of these scores, what earlier sums shrink by, peak, total."""
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    if MASKED:
        # A row that has seen nothing yet: −inf − −inf would be NaN.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    else:
        level = new_peak
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(peak - level)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def _blocks(
    accumulator,
    peak,
    total,
    q,
    k,
    v,
    table,
    head,
    row_position,
    length,
    begin,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attention over the key blocks begin..end−1 of a task; `table` points at the request's row."""
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    for block in range(begin, end):
        key = block * N
        if N <= PAGE:
            page = tl.load(table + key // PAGE).to(tl.int64)
            rows = (page * KV_HEADS + head) * PAGE + key % PAGE + n
        elif MASKED:
            page = tl.load(table + (key + n) // PAGE, mask=key + n < length, other=0).to(tl.int64)
            rows = (page * KV_HEADS + head) * PAGE + (key + n) % PAGE
        else:
            page = tl.load(table + (key + n) // PAGE).to(tl.int64)
            rows = (page * KV_HEADS + head) * PAGE + (key + n) % PAGE
        if MASKED:
            keys = tl.load(k + rows[None, :] * D + d[:, None], mask=(key + n)[None, :] < length, other=0.0)
        else:
            keys = tl.load(k + rows[None, :] * D + d[:, None])
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        if MASKED:
            seen = _seen(key + n, row_position, length, CAUSAL, WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, peak, total = _weigh(scores, peak, total, MASKED)
        if MASKED:
            # What no row sees may be NaN, and 0 · NaN is NaN.
            values = tl.load(v + rows[:, None] * D + d[None, :], mask=(key + n)[:, None] < length, other=0.0)
        else:
            values = tl.load(v + rows[:, None] * D + d[None, :])
        accumulator = tl.dot(
            weights.to(values.dtype), values, accumulator * shrink[:, None], input_precision="ieee"
        )
    return accumulator, peak, total


@triton.jit
def attend(
    q,
    k,
    v,
    table,
    start,
    row,
    length,
    units,
    cut,
    first_tile,
    tokens,
    tiles,
    pages,
    scale,
    out,
    part,
    part_level,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
    ROW_SIZE: tl.constexpr,
):
    """One stretch of units; whole tasks go to `out` [t, n, D], the rest to slots of `part` [2·programs, M, D].

    The slot of a piece is twice its program, and one more where the piece begins its task. `part_level`: base-2
    logarithm of the weight of each row of a part.
    """
    program = tl.program_id(0)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    # Packed rows in no segment come out as zeros.
    wide = tl.arange(0, ROW_SIZE)
    for pad in range(tl.load(start + tiles) + program, tokens, tl.num_programs(0)):
        at = pad * (KV_HEADS * G * D) + wide
        tl.store(out + at, tl.zeros([ROW_SIZE], out.dtype.element_ty), mask=wide < KV_HEADS * G * D)

    unit = tl.load(cut + program)
    stop = tl.load(cut + program + 1)
    tile = tl.load(first_tile + program)
    while unit < stop:
        while tl.load(units + tile + 1) * KV_HEADS <= unit:
            tile += 1
        before = tl.load(units + tile)
        count = tl.load(units + tile + 1) - before
        local = unit - before * KV_HEADS
        head = local // count
        begin = local - head * count
        end = tl.minimum(count, begin + stop - unit)

        first = tl.load(start + tile)
        rows = tl.load(start + tile + 1) - first
        keys = tl.load(length + tile)
        own_table = table + tl.load(row + tile).to(tl.int64) * pages
        skipped = 0
        if WINDOW > 0:
            skipped = tl.maximum(keys - rows - WINDOW + 1, 0) // N
        token = m // G
        real = token < rows
        at = ((first + token).to(tl.int64) * (KV_HEADS * G) + head * G + m % G) * D
        queries = tl.load(q + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        position = keys - rows + token

        accumulator = tl.zeros([M, D], tl.float32)
        peak = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        masked_from = begin
        if TWO_LOOPS:
            # Blocks that every row sees whole need no mask.
            if CAUSAL:
                whole = (keys - rows + 1) // N
            else:
                whole = keys // N
            masked_from = tl.maximum(begin, tl.minimum(end, whole))
            accumulator, peak, total = _blocks(
                accumulator, peak, total, queries, k, v, own_table, head, position, keys, begin, masked_from,
                scale, KV_HEADS, D, PAGE, N, False, CAUSAL, WINDOW,
            )  # fmt: skip
        accumulator, peak, total = _blocks(
            accumulator, peak, total, queries, k, v, own_table, head, position, keys, skipped + masked_from,
            skipped + end, scale, KV_HEADS, D, PAGE, N, True, CAUSAL, WINDOW,
        )  # fmt: skip
        # A part may hold nothing that a row sees: its weight is 0, its level −inf.
        result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
        if end - begin == count:
            tl.store(out + at[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=real[:, None])
        else:
            slot = (2 * program + tl.where(begin == 0, 1, 0)).to(tl.int64)
            target = part + (slot * M + m)[:, None] * D + d[None, :]
            tl.store(target, result.to(part.dtype.element_ty), mask=real[:, None])
            tl.store(part_level + slot * M + m, peak + tl.log2(total), mask=real)
        unit += end - begin


@triton.jit
def merge(
    part,
    part_level,
    start,
    units,
    cut,
    share,
    first_tile,
    unmerged,
    tiles,
    out,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merges the parts of each task that a cut goes through; `out` is `unmerged`, in place.

    Program (c, i) is about cut c + 1 and ROWS rows of its task; it works if no earlier cut goes through that task.
    """
    c = tl.program_id(0) + 1
    unit = tl.load(cut + c)
    if unit < tl.load(units + tiles) * KV_HEADS:
        tile = tl.load(first_tile + c)
        before = tl.load(units + tile)
        count = tl.load(units + tile + 1) - before
        local = unit - before * KV_HEADS
        head = local // count
        task = unit - (local - head * count)
        if (task < unit) & (tl.load(cut + c - 1) <= task):
            first = tl.load(start + tile)
            rows = tl.load(start + tile + 1) - first
            m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
            d = tl.arange(0, D)
            real = m // G < rows
            # The last program that has units of this task: `share` units a program, one more for the first few.
            each = tl.load(share)
            longer = tl.load(share + 1)
            if task + count <= longer * (each + 1):
                last = (task + count - 1) // (each + 1)
            else:
                last = (task + count - 1 - longer) // each
            accumulator = tl.zeros([ROWS, D], tl.float32)
            peak = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            for base in range(c - 1, last + 1, PARTS):
                source = base + tl.arange(0, PARTS)
                slot = (2 * source + tl.where(source == c - 1, 1, 0)).to(tl.int64)
                at = slot[:, None] * M + m[None, :]
                there = (source <= last)[:, None] & real[None, :]
                level = tl.load(part_level + at, mask=there, other=float("-inf"))
                new_peak = tl.maximum(peak, tl.max(level, axis=0))
                safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                weight = tl.exp2(level - safe[None, :])
                shrink = tl.exp2(peak - safe)
                values = tl.load(part + at[:, :, None] * D + d[None, None, :], mask=there[:, :, None], other=0.0)
                mixed = tl.sum(values.to(tl.float32) * weight[:, :, None], axis=0)
                accumulator = accumulator * shrink[:, None] + mixed
                total = total * shrink + tl.sum(weight, axis=0)
                peak = new_peak
            result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
            to = ((first + m // G).to(tl.int64) * (KV_HEADS * G) + head * G + m % G) * D
            tl.store(out + to[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=real[:, None])
