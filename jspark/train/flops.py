"""Floating-point operations that a training step must do, for the share of the device's rate that it reaches.

Knows: shapes and which products no program could leave out (nothing is counted twice for being computed again).
Does not know: programs or times.
"""

from __future__ import annotations

from jspark.config import DecoderConfig, DrafterConfig
from jspark.train.config import TrainConfig


def layer_products(c: DecoderConfig) -> int:
    """Multiply-adds of one layer's projections for one row."""
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return attention + 3 * c.hidden_size * c.intermediate_size


def block_step(config: TrainConfig, drafter: DrafterConfig, target: DecoderConfig) -> float:
    """FLOPs of one step of a block drafter.

    Target: forward only, over every token; context before a token is half a sequence on average. Drafter: forward
    and both backward products; its context needs no gradient into the features. Vocabulary: the target's
    logits, the drafter's, and the drafter's gradient into its hidden rows; the head is frozen.
    """
    tokens = config.batch_size * config.sequence_length
    rows = config.batch_size * config.anchors * drafter.block_rows
    predicted = config.batch_size * config.anchors * drafter.block_size
    b, context = drafter.backbone, config.sequence_length / 2
    h = target.hidden_size
    teacher = (
        tokens * target.num_layers * (layer_products(target) + 2 * context * target.num_heads * target.head_dim)
    )
    projected = tokens * (
        2 * len(drafter.target_layer_ids) * h * h + 3 * b.num_layers * 2 * h * b.num_kv_heads * b.head_dim
    )
    seen = context + drafter.block_rows
    own = 3 * rows * b.num_layers * (layer_products(b) + 2 * seen * b.num_heads * b.head_dim)
    vocabulary = predicted * target.vocab_size * (3 * h + 3 * drafter.markov_rank)
    return 2.0 * (teacher + projected + own + vocabulary)
