"""Attention of packed, ragged query rows, and of draft blocks, over paged keys and values."""

from jspark.pallas.ragged_attention.dispatch import Backend, Plan, attend, make_plan
from jspark.pallas.ragged_attention.reference import Tiles, block_attention, ragged_attention
from jspark.pallas.ragged_attention.segments import HeadShape, Segments

__all__ = [
    "Backend",
    "HeadShape",
    "Plan",
    "Segments",
    "Tiles",
    "attend",
    "block_attention",
    "make_plan",
    "ragged_attention",
]
