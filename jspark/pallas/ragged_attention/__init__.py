"""Attention of packed, ragged query rows, and of draft blocks, over paged keys and values."""

from jspark.pallas.ragged_attention.reference import Tiles, block_attention, ragged_attention

__all__ = ["Tiles", "block_attention", "ragged_attention"]
