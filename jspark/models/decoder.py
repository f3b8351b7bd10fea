"""The target: a dense decoder of the Llama and Qwen3 kind, defined by its config alone.

Knows: its layers, in several layouts behind `layer(i)`: one set of arrays a layer, or stacked `[L, …]` arrays;
projections of the same input apart, or joined.
Does not know: caches, batches or attention; verify.py runs the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jspark.config import DecoderConfig
from jspark.models.layers import Block, Embed, Head, Make, RMSNorm, Vocabulary


@dataclass(frozen=True)
class Layout:
    """How weights lie on the devices: layers stacked or apart, projections of the same input joined or apart."""

    stacked: bool = False
    joined: bool = False


class LayerStack(nnx.Module):
    """The layers of a model behind one accessor, whatever their layout. together: as of Attention."""

    def __init__(self, dtype, config: DecoderConfig, layout: Layout, *, together: bool = False):
        count = config.num_layers
        if layout.stacked:
            self.blocks = Block(Make(dtype, count, layout.joined), config, together=together)
        else:
            make = Make(dtype, joined=layout.joined)
            self.blocks = nnx.List([Block(make, config, together=together) for _ in range(count)])

    def layer(self, i: int) -> Block:
        """Layer i."""
        if isinstance(self.blocks, Block):
            return jax.tree.map(lambda p: p[i], self.blocks)
        return self.blocks[i]


class Decoder(nnx.Module):
    """Embedding, layers, final norm and output projection."""

    def __init__(self, config: DecoderConfig, dtype, layout: Layout):
        make = Make(dtype)
        self.embed = Embed(make, config.vocab_size, config.hidden_size)
        self.layers = LayerStack(dtype, config, layout, together=True)
        self.norm = RMSNorm(make, config.hidden_size, config.rms_norm_eps)
        self.head = None if config.tie_embeddings else Head(make, config.hidden_size, config.vocab_size)

    @property
    def vocabulary(self) -> Vocabulary:
        """The embedding and the output projection, as a drafter may share them."""
        return Vocabulary(self.embed, self.head or self.embed)
