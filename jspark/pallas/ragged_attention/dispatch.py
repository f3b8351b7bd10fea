"""The op, whichever version computes it, and the choice of one.

Knows: which device and shapes each version serves, what each class of shapes runs best with (tuned/*.json), and
how the user overrides that. Does not know: how any version works.

A version is a module with
    supports(heads: HeadShape, max_rows: int, causal: bool) -> bool
    make_plan(segments, heads: HeadShape, *, causal, window) -> a pytree class of its own
    attend(q, k_pool, v_pool, table, segments, plan, *, causal, window, scale) -> [t, n, d].
"""

from __future__ import annotations

from typing import Any, Literal

from jax import Array
from jaxtyping import Float, Int

from jspark.pallas.ragged_attention import reference
from jspark.pallas.ragged_attention.segments import HeadShape, Segments

Backend = Literal["mosaic", "triton", "xla"]
#: A plan of one of the kernels (a pytree made on the device); None for the reference, which needs none.
Plan = Any


def make_plan(
    backend: Backend, segments: Segments, heads: HeadShape, *, causal: bool, window: int | None = None
) -> Plan:
    """How a kernel shares the work of these segments out over the device: once a step, for all layers alike."""
    assert backend == "xla"
    return None


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
) -> Float[Array, "t n d"]:
    """Grouped-query attention of packed rows over the pages of their own requests.

    Row i of a segment of m rows stands at position length − m + i. It sees positions 0 to its own when `causal`,
    else 0 to length − 1; with a `window` only positions above its own minus `window`. Keys and values of the
    rows themselves are in the pages already. What no row may see can hold anything, NaN too. Packed rows in no
    segment come out as zeros. scale: of the scores, d^−½ by default.
    """
    assert plan is None
    return reference.attend(q, k_pool, v_pool, table, segments, causal=causal, window=window, scale=scale)
