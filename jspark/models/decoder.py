"""The target: a dense decoder of the Llama and Qwen3 kind, defined by its config alone.

Knows: its layers, in either of two layouts behind `layer(i)`: one set of arrays a layer (fastest on CPUs) or
stacked `[L, …]` arrays read by static slices (few arguments, fastest on GPUs).
Does not know: caches, batches or attention; verify.py runs the layers.
"""

from __future__ import annotations

import jax
from flax import nnx

from jspark.config import DecoderConfig
from jspark.models.layers import Block, Embed, Head, Make, RMSNorm, Vocabulary


class LayerStack(nnx.Module):
    """The layers of a model behind one accessor, whatever their layout."""

    def __init__(self, make: Make, config: DecoderConfig, *, stacked: bool):
        if stacked:
            self.blocks = Block(Make(make.dtype, config.num_layers), config)
        else:
            self.blocks = nnx.List([Block(make, config) for _ in range(config.num_layers)])

    def layer(self, i: int) -> Block:
        """Layer i."""
        if isinstance(self.blocks, Block):
            return jax.tree.map(lambda p: p[i], self.blocks)
        return self.blocks[i]


class Decoder(nnx.Module):
    """Embedding, layers, final norm and output projection."""

    def __init__(self, config: DecoderConfig, dtype, *, stacked: bool):
        make = Make(dtype)
        self.embed = Embed(make, config.vocab_size, config.hidden_size)
        self.layers = LayerStack(make, config, stacked=stacked)
        self.norm = RMSNorm(make, config.hidden_size, config.rms_norm_eps)
        self.head = None if config.tie_embeddings else Head(make, config.hidden_size, config.vocab_size)

    @property
    def vocabulary(self) -> Vocabulary:
        """The embedding and the output projection, as a drafter may share them."""
        return Vocabulary(self.embed, self.head or self.embed)
