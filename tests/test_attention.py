"""Ragged attention on the CPU: the reference against a plain loop, and the plans that kernels work by."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jspark.errors import UserError
from jspark.pallas.ragged_attention import HeadShape, Segments, attend, choose_all, shapes, triton

CASES = {case.name: case for case in shapes.EDGES}
HEADS = HeadShape(8, 2, 64, 16, "bfloat16")


def run(case: shapes.Case, arrays: shapes.Arrays, segments: Segments):
    a = arrays
    return np.asarray(
        attend(a.q, a.k_pool, a.v_pool, a.table, segments, None, causal=case.causal, window=case.window)
    )


def loop(case: shapes.Case, arrays: shapes.Arrays) -> np.ndarray:
    """Row by row and head by head, in float64."""
    q, k_pool, v_pool, table, start, row = (
        np.asarray(x) for x in (*(arrays.q, arrays.k_pool, arrays.v_pool, arrays.table),
                                arrays.segments.start, arrays.segments.row)
    )  # fmt: skip
    out = np.zeros(q.shape)
    lengths, rows = case.lengths()
    for s, (length, m) in enumerate(zip(lengths, rows, strict=True)):
        pages = table[row[s], : -(-length // case.page_size)]
        k, v = (np.concatenate(list(pool[pages]), 1)[:, :length].astype(float) for pool in (k_pool, v_pool))
        for i in range(m):
            position = length - m + i
            last = position + 1 if case.causal else length
            first = 0 if case.window is None else max(0, position - case.window + 1)
            if case.window is not None and not case.causal:
                last = min(last, position + case.window)
            for head in range(case.heads):
                own = head * case.kv_heads // case.heads
                scores = k[own, first:last] @ q[start[s] + i, head] * case.head_dim**-0.5
                weights = np.exp(scores - scores.max())
                out[start[s] + i, head] = weights / weights.sum() @ v[own, first:last]
    return out


@pytest.mark.parametrize("name", ["group 3 page 16", "window 40", "pads", "draft block in a window", "chunks"])
def test_reference_is_attention(name):
    """With NaN in all that no row may see; rows in no segment are zeros."""
    case = replace(CASES[name], requests=3)
    arrays = shapes.make(case, jnp.float32)
    got = run(case, arrays, arrays.segments)
    np.testing.assert_allclose(got, loop(case, arrays), atol=2e-5, rtol=2e-5)
    assert not got[int(arrays.segments.start[-1]) :].any()


def test_cut_segments_are_the_same_rows():
    case = CASES["chunk in a window"]
    arrays = shapes.make(case, jnp.float32)
    cut = arrays.segments.split(32, arrays.q.shape[0])
    assert int(jnp.max(cut.rows)) <= 32
    np.testing.assert_allclose(run(case, arrays, cut), run(case, arrays, arrays.segments), atol=1e-6, rtol=1e-6)


def random_segments(rng, most_rows: int) -> tuple[Segments, int]:
    count = int(rng.integers(1, 40))
    rows = rng.integers(0, most_rows + 1, size=count)
    rows[rng.random(count) < 0.2] = 0
    length = rows + rng.integers(0, rng.choice([1, 50, 5000]), size=count)
    arrays = {
        "start": jnp.asarray(np.concatenate([[0], np.cumsum(rows)]), jnp.int32),
        "row": jnp.arange(count, dtype=jnp.int32),
        "length": jnp.asarray(length, jnp.int32),
    }
    return Segments(**arrays, max_rows=most_rows), int(rows.sum()) + 3


@pytest.mark.parametrize(
    ("most_rows", "window", "causal"),
    [(8, None, True), (8, 33, True), (90, None, True), (90, 100, True), (7, None, False), (7, 20, False)],
)
def test_plan_covers_every_block_once(most_rows, window, causal, rng):
    """Every (piece of a segment, KV head, block of keys that a row sees) belongs to exactly one program."""
    for programs, least in ((1, 1), (7, 1), (64, 3)):
        segments, tokens = random_segments(rng, most_rows)
        blocks = triton.Blocks(16, programs, least, 4, 2, False)
        plan = triton.make_plan(segments, HEADS, tokens=tokens, causal=causal, window=window, blocks=blocks)
        tiles = plan.tiles
        start, length, units, cut, first_tile = (
            np.asarray(x) for x in (tiles.start, tiles.length, plan.units, plan.cut, plan.first_tile)
        )
        # The pieces are the segments' rows, in order and at their positions.
        piece = np.diff(start)
        positions = [length[i] - piece[i] + np.arange(piece[i]) for i in range(len(piece))]
        keys, rows = np.asarray(segments.length), np.asarray(segments.rows)
        want = [keys[i] - rows[i] + np.arange(rows[i]) for i in range(len(rows))]
        np.testing.assert_array_equal(np.concatenate(positions), np.concatenate(want))
        # Blocks of a piece: all those that hold a key it sees, and no more.
        for i, rows in enumerate(piece):
            last = length[i]
            first = 0 if window is None else max(0, length[i] - rows - window + 1)
            seen = {key // 16 for key in range(min(first, last), last)} if rows else set()
            assert units[i + 1] - units[i] == len(seen)
        total = units[-1] * HEADS.kv_heads
        assert cut[0] == 0
        assert cut[-1] == total
        assert (np.diff(cut) >= 0).all()
        used = np.diff(cut)[np.diff(cut) > 0]
        assert used.size == 0 or used.max() - used.min() <= 1
        for program in range(programs):
            if cut[program] < total:
                tile = first_tile[program]
                assert units[tile] * HEADS.kv_heads <= cut[program] < units[tile + 1] * HEADS.kv_heads
        # What `merge` computes from the two numbers in `share`.
        each, longer = np.asarray(plan.share)
        np.testing.assert_array_equal(np.diff(cut)[: used.size], each + (np.arange(used.size) < longer))


def test_a_backend_that_cannot_run_is_refused():
    with pytest.raises(UserError, match=r"attention backend triton .* choose auto or one of xla"):
        choose_all("triton", "cpu", HEADS, None, width=8, chunk=512)
    assert not choose_all("auto", "cpu", HEADS, HEADS, width=8, chunk=512).kernels


@pytest.mark.parametrize(("head_dim", "group", "max_rows"), [(128, 4, 8), (64, 3, 8), (128, 4, 512)])
def test_triton_compiles_for_hopper(head_dim, group, max_rows):
    """To machine code, without registers spilt to memory; no GPU is needed for that."""
    compiler = pytest.importorskip("triton.backends.compiler")
    import triton as triton_package  # pyright: ignore[reportMissingImports]

    from jspark.pallas.ragged_attention import triton_kernels as kernels

    heads = HeadShape(2 * group, 2, head_dim, 64, "bfloat16")
    blocks = triton.blocks_for(heads, max_rows)
    constants = {
        "KV_HEADS": 2, "G": group, "D": head_dim, "PAGE": 64, "N": blocks.n, "CAUSAL": True,
        "M": triton.tile_size(heads, max_rows), "WINDOW": 0, "TWO_LOOPS": blocks.two_loops,
        "ROW_SIZE": 2048,
    }  # fmt: skip
    scalars = {"tokens": "i32", "tiles": "i32", "pages": "i32", "scale": "fp32"}
    tensors = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | dict.fromkeys(("part", "part_level"), "*fp32")
    names = kernels.attend.arg_names
    signature = {n: "constexpr" if n in constants else (scalars | tensors).get(n, "*i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = triton_package.compiler.ASTSource(
        fn=kernels.attend, signature=signature, constexprs=constants, attrs=aligned
    )
    compiled = triton_package.compile(
        source,
        target=compiler.GPUTarget("cuda", 90, 32),
        options={"num_warps": blocks.num_warps, "num_stages": blocks.num_stages},
    )
    assert compiled.metadata.shared < 228 * 1024
    assert "cp.async" in compiled.asm["ptx"]
