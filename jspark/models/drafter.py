"""The block-diffusion drafter of DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Knows: its layers, the projection of target features, its heads, and which row predicts which position.
Does not know: caches or sampling; propose.py runs it.
"""

from __future__ import annotations

from flax import nnx
from jax import Array
from jaxtyping import Float

from jspark.config import DrafterConfig
from jspark.models.decoder import LayerStack, Layout
from jspark.models.heads import ConfidenceHead, MarkovHead
from jspark.models.layers import Embed, Head, Linear, Make, RMSNorm, Vocabulary


class Drafter(nnx.Module):
    """Features → context; anchor and mask rows → hidden rows; heads on top."""

    def __init__(self, config: DrafterConfig, dtype, layout: Layout):
        b, make = config.backbone, Make(dtype)
        h = b.hidden_size
        self.fc = Linear(make, (len(config.target_layer_ids) * h, h), (None, None))
        self.hidden_norm = RMSNorm(make, h, b.rms_norm_eps)
        self.layers = LayerStack(dtype, b, layout)
        self.norm = RMSNorm(make, h, b.rms_norm_eps)
        self.embed = Embed(make, b.vocab_size, h) if config.own_embedding else None
        self.head = Head(make, h, b.vocab_size) if config.own_head else None
        #: 0 where a token can be drafted, −inf elsewhere; added to the logits.
        self.vocab_mask = make((b.vocab_size,), ("vocab",)) if config.draft_vocab_size else None
        rank, kind = config.markov_rank, config.markov
        self.markov = MarkovHead(make, kind, b.vocab_size, h, rank) if kind != "none" else None
        seen = rank if config.confidence == "hidden+markov" else 0
        self.confidence = ConfidenceHead(make, h, seen) if config.confidence != "none" else None

    def context(self, features: Float[Array, "t f"]) -> Float[Array, "t h"]:
        """H_ctx = RMSNorm(W_c [features of the chosen target layers]) (DFlash, equation 2)."""
        return self.hidden_norm(self.fc(features))

    def vocabulary(self, target: Vocabulary) -> Vocabulary:
        """Its own embedding and output projection where it has them, else the target's."""
        return Vocabulary(self.embed or target.embed, self.head or target.head)
