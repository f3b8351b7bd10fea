"""The fused kernel of kv_write.py; importing this needs triton."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def write_rows(
    k, v, page, offset, cos, sin, norm, k_in, v_in, k_pool, v_pool,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One packed row: its keys normed and rotated, keys and values to their place. The pools are aliased."""
    row = tl.program_id(0)
    half: tl.constexpr = D // 2
    head = tl.arange(0, HEADS_2)[:, None]
    there = head < HEADS
    low = tl.arange(0, half)[None, :]
    source = row * HEADS * D + head * D + low
    a = tl.load(k + source, mask=there, other=0.0).to(tl.float32)
    b = tl.load(k + source + half, mask=there, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        shrink = tl.rsqrt(squares / D + EPS)[:, None]
        # The layers round after the norm, before the rotation.
        dtype = k.dtype.element_ty
        a = (a * shrink * tl.load(norm + low).to(tl.float32)).to(dtype).to(tl.float32)
        b = (b * shrink * tl.load(norm + half + low).to(tl.float32)).to(dtype).to(tl.float32)
    c = tl.load(cos + row * half + low)
    s = tl.load(sin + row * half + low)
    place = tl.load(page + row).to(tl.int64) * HEADS * PAGE * D + tl.load(offset + row) * D
    target = place + head * PAGE * D + low
    tl.store(k_pool + target, (a * c - b * s).to(k.dtype.element_ty), mask=there)
    tl.store(k_pool + target + half, (b * c + a * s).to(k.dtype.element_ty), mask=there)
    tl.store(v_pool + target, tl.load(v + source, mask=there), mask=there)
    tl.store(v_pool + target + half, tl.load(v + source + half, mask=there), mask=there)
