"""The op, whichever version computes it, and the choice of one.

Knows: which device and shapes each version serves, what each class of shapes runs best with (tuned/*.json), and
how the user overrides that. Does not know: how any version works.

A version is a module with
    available() -> bool
    supports(heads: HeadShape, max_rows: int, causal: bool) -> bool
    Plan, a pytree class, and make_plan(segments, heads: HeadShape, *, tokens, causal, window) -> Plan
    attend(q, k_pool, v_pool, table, segments, plan, *, causal, window, scale) -> [t, n, d].
"""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from jax import Array
from jaxtyping import Float, Int

from jspark.errors import UserError
from jspark.pallas.ragged_attention import reference, triton
from jspark.pallas.ragged_attention.segments import HeadShape, Segments

Backend = Literal["mosaic", "triton", "xla"]
#: A plan of one of the kernels (a pytree made on the device); None for the reference, which needs none.
Plan = Any

_log = logging.getLogger(__name__)
_KERNELS: dict[Backend, ModuleType] = {"triton": triton}


def versions(platform: str, heads: HeadShape, max_rows: int, causal: bool) -> tuple[Backend, ...]:
    """The versions that run here and serve these shapes; the reference always does."""
    fitting: tuple[Backend, ...] = ()
    if platform in ("gpu", "cuda"):
        fitting = tuple(n for n, m in _KERNELS.items() if m.available() and m.supports(heads, max_rows, causal))
    return (*fitting, "xla")


def choose(
    wanted: Backend | Literal["auto"], platform: str, heads: HeadShape, max_rows: int, causal: bool
) -> Backend:
    """The version to use: the one wanted or, for `auto`, the fastest of the tuned table that serves these shapes.

    Where `auto` has to make do with the reference on a GPU, one warning says so.

    Raises:
        UserError: the version asked for does not run here or does not serve these shapes.
    """
    possible = versions(platform, heads, max_rows, causal)
    if wanted in possible:
        return wanted
    if wanted != "auto":
        raise UserError(
            f"the attention backend {wanted} is not installed, or does not serve {heads.dtype} with "
            f"{heads.heads}/{heads.kv_heads} heads of {heads.head_dim} and pages of {heads.page_size} on this "
            f"{platform}; choose auto or one of {', '.join(possible)}"
        )
    kind = "prefill" if max_rows > 16 else "decode"
    order: list[Backend] = _preference()[f"{kind} {heads.head_dim}"] if possible != ("xla",) else ["xla"]
    chosen = next(name for name in (*order, *possible) if name in possible)
    if chosen == "xla" and platform in ("gpu", "cuda"):
        _warn(heads)
    return chosen


@cache
def _warn(heads: HeadShape) -> None:
    _log.warning(
        "attention runs in XLA, several times slower than a kernel: no installed kernel serves %s with %d/%d "
        "heads of %d and pages of %d",
        heads.dtype,
        heads.heads,
        heads.kv_heads,
        heads.head_dim,
        heads.page_size,
    )


@cache
def _preference() -> dict[str, list[Backend]]:
    path = Path(__file__).parent / "tuned" / "h200.json"
    return json.loads(path.read_text(encoding="utf-8"))["preference"]


def make_plan(
    backend: Backend,
    segments: Segments,
    heads: HeadShape,
    *,
    tokens: int,
    causal: bool,
    window: int | None = None,
    **tuning: Any,
) -> Plan:
    """How a kernel shares the work of these segments out over the device: once a step, for all layers alike.

    tokens: packed rows of the queries, static; it bounds how many pieces long segments can have. tuning: sizes
    in place of the version's tuned ones.
    """
    if backend == "xla":
        return None
    return _KERNELS[backend].make_plan(segments, heads, tokens=tokens, causal=causal, window=window, **tuning)


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
    for module in _KERNELS.values():
        if isinstance(plan, module.Plan):
            return module.attend(
                q, k_pool, v_pool, table, segments, plan, causal=causal, window=window, scale=scale
            )
    return reference.attend(q, k_pool, v_pool, table, segments, causal=causal, window=window, scale=scale)
