"""Attention of packed, ragged query rows, and of draft blocks, over paged keys and values."""

from jspark.pallas.ragged_attention.dispatch import (
    REFERENCE,
    Attention,
    Backend,
    Plan,
    attend,
    block_segments,
    choose_all,
    make_plan,
    versions,
)
from jspark.pallas.ragged_attention.reference import Tiles, block_attention, ragged_attention
from jspark.pallas.ragged_attention.segments import HeadShape, Segments

__all__ = [
    "REFERENCE",
    "Attention",
    "Backend",
    "HeadShape",
    "Plan",
    "Segments",
    "Tiles",
    "attend",
    "block_attention",
    "block_segments",
    "choose_all",
    "make_plan",
    "ragged_attention",
    "versions",
]
