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


def step(config: TrainConfig, drafter: DrafterConfig, target: DecoderConfig) -> float:
    """FLOPs of one step.

    Target: forward only, over every token; context before a token is half a sequence on average. Drafter: forward
    and both backward products; the features need no gradient. Vocabulary: the target's logits, the drafter's, and
    the drafter's gradient into its hidden rows; the output projection is frozen.
    """
    tokens = config.batch_size * config.sequence_length
    predicted = config.batch_size * config.anchors * drafter.block_size
    rows = predicted * drafter.block_rows // drafter.block_size
    b, context, h = drafter.backbone, config.sequence_length / 2, target.hidden_size
    looking = 2 * target.num_heads * target.head_dim * context
    teacher = tokens * target.num_layers * (layer_products(target) + looking)
    # EAGLE-3's attention reads two vectors side by side.
    width = 2 if drafter.eagle3 is not None else 1
    paired = (width - 1) * h * b.head_dim * (b.num_heads + 2 * b.num_kv_heads)
    projected = tokens * (
        2 * drafter.feature_count * h * h + 3 * b.num_layers * width * 2 * h * b.num_kv_heads * b.head_dim
    )
    seen = 2 * (context + drafter.block_rows) * b.num_heads * b.head_dim
    own = 3 * rows * b.num_layers * (layer_products(b) + paired + seen)
    vocabulary = predicted * target.vocab_size * (3 * h + 3 * drafter.markov_rank)
    return 2.0 * (teacher + projected + own + vocabulary)
