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

    def chosen(heads: HeadShape, max_rows: int, causal: bool) -> Backend:
        serves = wanted in versions(platform, heads, max_rows, causal)
        return choose(wanted if serves else "auto", platform, heads, max_rows, causal)

    verify = choose(wanted, platform, target, width, True)
    prefill = chosen(target, chunk, True)
    draft = verify if drafter is None else chosen(drafter, width, False)
    return REFERENCE if "xla" in (verify, prefill, draft) else Attention(verify, prefill, draft)


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


def block_segments(context: Int[Array, " r"], rows: int) -> Segments:
    """Draft blocks of `rows` rows, all of them, behind `context` tokens each."""
    every = jnp.arange(context.shape[0] + 1, dtype=jnp.int32)
    return Segments(every * rows, every[:-1], context + rows, rows)


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
