"""The autoregressive drafter of EAGLE-3 (arXiv 2503.01840), as a chain.

Knows: how a target feature, or the drafter's own last hidden state, is paired with the token that follows it, and
its layers. Does not know: caches, attention or sampling; eagle.py drafts with it, training unrolls it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jspark.config import DecoderConfig, DrafterConfig
from jspark.models.layers import Block, Embed, Head, Linear, Make, RMSNorm, Rotary, Vocabulary


class PairedBlock(Block):
    """The first layer: its attention reads a token's embedding and a hidden state side by side."""

    def __init__(self, make: Make, config: DecoderConfig, *, norm_before_residual: bool):
        super().__init__(make, config, inputs=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(make, config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def pair(
        self, embedded: Float[Array, "*b h"], hidden: Float[Array, "*b h"]
    ) -> tuple[Float[Array, "*b h2"], Float[Array, "*b h"]]:
        """What attention projects, and the residual."""
        normed = self.hidden_norm(hidden)
        inputs = jnp.concatenate([self.input_norm(embedded), normed], axis=-1)
        return inputs, normed if self.norm_before_residual else hidden


class Eagle3(nnx.Module):
    """Slot i pairs a hidden state of position i with token i + 1, at rotary position i, and predicts token i + 2.

    The hidden state is a projection of the target's features where the target has run, else this model's own
    output one slot earlier.
    """

    def __init__(self, config: DrafterConfig, dtype):
        b, kind, make = config.backbone, config.eagle3, Make(dtype)
        assert kind is not None
        h, eps, count = b.hidden_size, b.rms_norm_eps, config.feature_count
        self.input_norm = RMSNorm(make, count * h, eps) if kind.norm_before_fc else None
        self.fc_norm = nnx.List([RMSNorm(make, h, eps) for _ in range(count)]) if kind.fc_norm else None
        self.fc = Linear(make, (count * h, h), (None, None))
        first = PairedBlock(make, b, norm_before_residual=kind.norm_before_residual)
        self.layers = nnx.List([first, *(Block(make, b) for _ in range(b.num_layers - 1))])
        self.norm = RMSNorm(make, h, eps)
        self.embed = Embed(make, b.vocab_size, h) if config.own_embedding else None
        self.head = Head(make, h, b.vocab_size) if config.own_head else None
        #: 0 where a token can be drafted, −inf elsewhere; added to the logits.
        self.vocab_mask = make((b.vocab_size,), ("vocab",)) if config.draft_vocab_size else None
        self.norm_output = kind.norm_output

    def fuse(self, features: Float[Array, "*b f"]) -> Float[Array, "*b h"]:
        """The hidden state that the features of the chosen target layers stand for."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = jnp.split(features, len(self.fc_norm), axis=-1)
            features = jnp.concatenate([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], axis=-1)
        return self.fc(features)

    def inputs(
        self, layer: int, embedded: Float[Array, "*b h"], x: Float[Array, "*b h"]
    ) -> tuple[Float[Array, "*b i"], Float[Array, "*b h"]]:
        """What a layer's attention projects, and the residual; x: the output of the layer before."""
        block = self.layers[layer]
        return block.pair(embedded, x) if isinstance(block, PairedBlock) else (block.input_norm(x), x)

    def __call__(
        self,
        embedded: Float[Array, "*b h"],
        hidden: Float[Array, "*b h"],
        rotary: Rotary,
        attend: Callable[[int, Array, Array, Array], Array],
    ) -> Float[Array, "*b h"]:
        """The output of each slot, before the final norm: one step of the chain, or of training's unrolling.

        embedded: of token i + 1. hidden: `fuse` of features, or `feedback` of the output one slot earlier.
        attend(layer, q, k, v): what the queries [*b, n, d] see of these keys and values [*b, k, d], and of those
        that the caller keeps of earlier slots and steps.
        """
        x = hidden
        for i, block in enumerate(self.layers):
            y, residual = self.inputs(i, embedded, x)
            q, (k, v) = block.attn.queries(y, rotary), block.attn.keys_values(y, rotary)
            x = block.finish(residual, attend(i, q, k, v))
        return x

    def feedback(self, output: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
        """An output as the next slot's hidden state."""
        return self.norm(output) if self.norm_output else output

    def logits(self, vocabulary: Vocabulary, output: Float[Array, "*b h"]) -> Float[Array, "*b v"]:
        """Float32 logits over the target's vocabulary, −inf for tokens that cannot be drafted."""
        logits = vocabulary.head.attend(self.norm(output))
        if self.vocab_mask is None:
            return logits
        return logits + self.vocab_mask[...].astype(logits.dtype).reshape((1,) * (logits.ndim - 1) + (-1,))

    def vocabulary(self, target: Vocabulary) -> Vocabulary:
        """Its own embedding and output projection where it has them, else the target's."""
        return Vocabulary(self.embed or target.embed, self.head or target.head)
