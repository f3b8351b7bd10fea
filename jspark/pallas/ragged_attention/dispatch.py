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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jspark.errors import UserError
from jspark.pallas.ragged_attention import reference, triton
from jspark.pallas.ragged_attention.segments import HeadShape, Segments

Backend = Literal["mosaic", "triton", "xla"]
#: A plan of one of the kernels (a pytree made on the device); None for the reference, which needs none.
Plan = Any

_log = logging.getLogger(__name__)


@cache
def _kernels() -> dict[Backend, ModuleType]:
    """The kernel versions; Mosaic GPU takes a while to import, and a CPU has no use for it."""
    from jspark.pallas.ragged_attention import mosaic

    return {"mosaic": mosaic, "triton": triton}


def versions(platform: str, heads: HeadShape, max_rows: int, causal: bool) -> tuple[Backend, ...]:
    """The versions that run here and serve these shapes; the reference always does."""
    fitting: tuple[Backend, ...] = ()
    if platform in ("gpu", "cuda"):
        kernels = _kernels().items()
        fitting = tuple(n for n, m in kernels if m.available() and m.supports(heads, max_rows, causal))
    return (*fitting, "xla")


def choose(
    wanted: Backend | Literal["auto"], platform: str, heads: HeadShape, max_rows: int, causal: bool
) -> Backend:
    """The version to use: the one wanted or, for `auto`, the fastest of the tuned table that serves these shapes.

    In float32 `auto` is the reference: kernels gain little where products are exact. Where `auto` is the reference
    on a GPU, one warning says so.

    Raises:
        UserError: the version asked for does not run here or does not serve these shapes.
    """
    possible = versions(platform, heads, max_rows, causal)
    if wanted != "auto":
        if wanted in possible:
            return wanted
        raise UserError(
            f"the attention backend {wanted} is not installed, or does not serve {heads.dtype} with "
            f"{heads.heads}/{heads.kv_heads} heads of {heads.head_dim} and pages of {heads.page_size} on this "
            f"{platform}; choose auto or one of {', '.join(possible)}"
        )
    kind = "prefill" if max_rows > 16 else "decode"
    candidates: list[Backend] = [*_preference()[f"{kind} {max(heads.head_dim, 64)}"], *possible]
    exact = heads.dtype == "float32"
    chosen: Backend = "xla" if exact else next(name for name in candidates if name in possible)
    if chosen == "xla" and platform in ("gpu", "cuda"):
        _warn(heads)
    return chosen


@dataclass(frozen=True)
class Attention:
    """The versions that an engine uses. verify, prefill: of the target's rows, one launch each; draft: of draft
    blocks. All are kernels or none is: the reference wants rows as rectangles and page tables cut to size.
    """

    verify: Backend = "xla"
    prefill: Backend = "xla"
    draft: Backend = "xla"

    @property
    def kernels(self) -> bool:
        """Kernels compute it, not the reference."""
        return self.verify != "xla"


#: The reference for everything.
REFERENCE = Attention()


def choose_all(
    wanted: Backend | Literal["auto"],
    platform: str,
    target: HeadShape,
    drafter: HeadShape | None,
    *,
    width: int,
    chunk: int,
) -> Attention:
    """The versions of an engine that verifies `width` rows a request and prefills `chunk` at a time.

    Raises UserError as `choose` does; the version asked for need not serve chunks or blocks.
    """
    verify = choose(wanted, platform, target, width, True)
    # Of the kernels, Triton's alone computes draft blocks; Mosaic's may leave chunks to it.
    serves_chunks = wanted in versions(platform, target, chunk, True)
    prefill = choose(wanted if serves_chunks else "auto", platform, target, chunk, True)
    blocks = drafter is None or "triton" in versions(platform, drafter, width, False)
    if "xla" in (verify, prefill):
        return REFERENCE
    if not blocks:
        assert drafter is not None
        _warn(drafter)
        return REFERENCE
    return Attention(verify, prefill, "triton")


@cache
def _warn(heads: HeadShape) -> None:
    _log.warning(
        "attention runs in XLA, several times slower than a kernel would: none is installed, or none is meant for "
        "%s with %d/%d heads of %d and pages of %d",
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
    return _kernels()[backend].make_plan(segments, heads, tokens=tokens, causal=causal, window=window, **tuning)


def block_attend(
    q: Float[Array, "r b n d"],
    k: Float[Array, "r b k d"],
    v: Float[Array, "r b k d"],
    k_pool: Float[Array, "pages k p d"],
    v_pool: Float[Array, "pages k p d"],
    table: Int[Array, "r n_pages"],
    context: Int[Array, " r"],
    plan: Plan,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Float[Array, "r b n d"]:
    """Attention of draft blocks, whose own keys and values are in no page (reference.block_attention).

    plan: of `make_block_plan` for the same arguments.
    """
    if plan is None:
        return reference.block_attention(q, k, v, k_pool, v_pool, table, context, window=window, causal=causal)
    flat_q, *own = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    segments = block_segments(context, q.shape[1])
    out = triton.attend(
        flat_q, k_pool, v_pool, table, segments, plan, causal=causal, window=window, own=(own[0], own[1])
    )
    return out.reshape(q.shape)


def block_segments(context: Int[Array, " r"], rows: int) -> Segments:
    """Draft blocks of `rows` rows, all of them, behind `context` tokens each."""
    every = jnp.arange(context.shape[0] + 1, dtype=jnp.int32)
    return Segments(every * rows, every[:-1], context + rows, rows)


def make_block_plan(
    backend: Backend,
    context: Int[Array, " r"],
    rows: int,
    heads: HeadShape,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Plan:
    """The plan of `block_attend`, for all draft layers alike. Of the kernels only Triton's computes it."""
    if backend == "xla":
        return None
    tokens = context.shape[0] * rows
    return triton.make_plan(
        block_segments(context, rows), heads, tokens=tokens, causal=causal, window=window, own=True
    )


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
    else 0 to length − 1; with a `window` only positions less than `window` away from its own. Keys and values of
    the rows themselves are in the pages already. What no row may see can hold anything, NaN too. Packed rows in no
    segment come out as zeros. scale: of the scores, d^−½ by default.
    """
    if plan is not None:
        module = next(m for m in _kernels().values() if isinstance(plan, m.Plan))
        return module.attend(q, k_pool, v_pool, table, segments, plan, causal=causal, window=window, scale=scale)
    return reference.attend(q, k_pool, v_pool, table, segments, causal=causal, window=window, scale=scale)
