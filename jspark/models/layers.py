"""The layers that targets and drafters are made of.

Knows: one transformer block of the Llama and Qwen3 kind, its norms, projections and rotary embedding, and the
logical axes of every parameter.
Does not know: how many layers a model has, where keys and values are kept, or who attends to whom: a block
hands out q, k, v and takes the attention's result back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from jspark.config import DecoderConfig, RopeConfig


@dataclass(frozen=True)
class Make:
    """Declares parameters: a dtype, how many layers are stacked along a leading axis (0: not stacked), and whether
    projections of the same input are one array.
    """

    dtype: jnp.dtype
    stack: int = 0
    joined: bool = False

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], parts: tuple[tuple[str, int], ...] = ()
    ) -> nnx.Param:
        """A parameter of `shape` whose dimensions carry the logical names `axes`.

        parts: names and widths of what lies side by side in the last dimension.
        """
        if self.stack:
            shape, axes = (self.stack, *shape), ("layers", *axes)
        return nnx.Param(jnp.zeros(shape, self.dtype), axes=axes, parts=parts)


class Linear(nnx.Module):
    """x @ kernel (+ bias); kernel is [in, out]."""

    def __init__(self, make: Make, shape: tuple[int, int], axes: tuple[str | None, str | None], *, bias=False):
        self.kernel = make(shape, axes)
        self.bias = make(shape[1:], axes[1:]) if bias else None

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        """Projects the last dimension."""
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class Joined(nnx.Module):
    """Several projections of the same input as one product.

    A GPU is faster with it, and XLA's own way of joining products copies their weights in every run.
    """

    def __init__(self, make: Make, inputs: int, *parts: tuple[str, int], bias: bool):
        self.widths = tuple(width for _, width in parts)
        self.kernel = make((inputs, sum(self.widths)), (None, None), parts)
        self.bias = make((sum(self.widths),), (None,), parts) if bias else None

    def __call__(self, x: Float[Array, "*b i"]) -> list[Float[Array, "*b o"]]:
        """The result of each part."""
        y = x @ self.kernel[...]
        if self.bias is not None:
            y = y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))
        return jnp.split(y, np.cumsum(self.widths)[:-1].tolist(), axis=-1)


def _each(x: Float[Array, "*b i"], joined: Joined | None, *apart: Linear | None) -> list[Float[Array, "*b o"]]:
    """Several projections of x, from whichever of the two layouts is there."""
    return joined(x) if joined is not None else [linear(x) for linear in apart if linear is not None]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, make: Make, size: int, eps: float):
        self.scale = make((size,), (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
        """Normalises and scales; the result has x's dtype."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (y * scale).astype(x.dtype)


class Embed(nnx.Module):
    """Token embedding [V, H]; also the output projection of a model with tied embeddings."""

    def __init__(self, make: Make, vocab_size: int, hidden_size: int):
        self.embedding = make((vocab_size, hidden_size), ("vocab", None))

    def __call__(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b h"]:
        """Rows of the table."""
        return self.embedding.get_value().at[tokens].get(mode="clip")

    def attend(self, x: Float[Array, "*b h"]) -> Float[Array, "*b v"]:
        """Float32 logits against every row of the table."""
        return jax.lax.platform_dependent(x, self.embedding[...], cpu=_logits_on_a_cpu, default=_logits)


def _logits(x: Float[Array, "*b h"], table: Float[Array, "v h"]) -> Float[Array, "*b v"]:
    return jnp.einsum("...h,vh->...v", x, table, preferred_element_type=jnp.float32)


def _logits_on_a_cpu(x: Float[Array, "*b h"], table: Float[Array, "v h"]) -> Float[Array, "*b v"]:
    """The product with the table on the left, which XLA's CPU library packs with two thirds of the work.

    The barrier keeps XLA from turning it round again.
    """
    rows = x.reshape(-1, x.shape[-1])
    logits = jnp.einsum("vh,nh->vn", table, rows, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(logits).T.reshape(*x.shape[:-1], -1)


class Head(nnx.Module):
    """Untied output projection, [H, V], to float32 logits."""

    def __init__(self, make: Make, hidden_size: int, vocab_size: int):
        self.kernel = make((hidden_size, vocab_size), (None, "vocab"))

    def attend(self, x: Float[Array, "*b h"]) -> Float[Array, "*b v"]:
        """Float32 logits."""
        return jnp.einsum("...h,hv->...v", x, self.kernel[...], preferred_element_type=jnp.float32)


class Vocabulary(nnx.Module):
    """The two ends of a model: tokens → hidden, hidden → logits. A view of modules that others own."""

    def __init__(self, embed: Embed, head: Embed | Head):
        self.embed = embed
        self.head = head


class Rotary(nnx.Module):
    """cos and sin of every position, [..., D/2], float32; made once a forward, shared by its layers."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, positions: Int[Array, "*b"]):
        inverse, scale = rope_frequencies(rope, head_dim, max_position)
        shape = (1,) * positions.ndim + (-1,)
        angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(inverse).reshape(shape)
        self.cos, self.sin = nnx.data(jnp.cos(angle) * scale), nnx.data(jnp.sin(angle) * scale)

    def __call__(self, x: Float[Array, "*b n d"]) -> Float[Array, "*b n d"]:
        """Rotates the halves of each head (Hugging Face's layout) in float32; the result has x's dtype."""
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.cos[..., None, :], self.sin[..., None, :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [D/2] (float32) and the factor on cos and sin, as transformers computes them.

    Sources: RoPE (arXiv 2104.09864), YaRN (arXiv 2309.00071, sections 3.2 to 3.4), Llama 3.1's scaling.
    """
    base = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    original = rope.original_max_position or max_position
    if rope.kind == "default":
        return base.astype(np.float32), 1.0
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        low, high = original / rope.low_freq_factor, original / rope.high_freq_factor
        smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blended = (1 - smooth) * base / rope.factor + smooth * base
        slow = np.where(wavelength > low, base / rope.factor, base)
        medium = (wavelength <= low) & (wavelength >= high)
        return np.where(medium, blended, slow).astype(np.float32), 1.0
    return _yarn(rope, base, head_dim, original)


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int, original: int) -> tuple[np.ndarray, float]:
    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    def magnitude(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low if high > low else 0.001), 0, 1)
    inverse = base / rope.factor * ramp + base * (1 - ramp)
    if rope.attention_factor is not None:
        factor = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        factor = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
    else:
        factor = magnitude(rope.factor, 1.0)
    return inverse.astype(np.float32), factor


class Attention(nnx.Module):
    """Projections, per-head norms and rotary embedding of grouped-query attention.

    together: queries are always wanted with their keys and values, as a target's are; a drafter projects keys and
    values of its context alone.
    """

    def __init__(self, make: Make, config: DecoderConfig, inputs: int | None = None, *, together: bool = False):
        c, d, bias = config, config.head_dim, config.qkv_bias
        h, n, k = inputs or c.hidden_size, c.num_heads * d, c.num_kv_heads * d
        whole = make.joined and together
        q, keys, values = ("q", n), ("k", k), ("v", k)
        self.qkv = Joined(make, h, q, keys, values, bias=bias) if whole else None
        self.q = None if whole else Linear(make, (h, n), (None, "heads"), bias=bias)
        self.kv = Joined(make, h, keys, values, bias=bias) if make.joined and not whole else None
        self.k = None if make.joined else Linear(make, (h, k), (None, "kv_heads"), bias=bias)
        self.v = None if make.joined else Linear(make, (h, k), (None, "kv_heads"), bias=bias)
        self.o = Linear(make, (n, c.hidden_size), ("heads", None), bias=c.output_bias)
        self.q_norm = RMSNorm(make, d, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(make, d, c.rms_norm_eps) if c.qk_norm else None
        self.head_dim = d

    def queries(self, x: Float[Array, "*b h"], rotary: Rotary) -> Float[Array, "*b n d"]:
        """Normed and rotated queries."""
        assert self.q is not None
        return self._finished(self.q(x), self.q_norm, rotary)

    def keys_values(
        self, x: Float[Array, "*b h"], rotary: Rotary
    ) -> tuple[Float[Array, "*b k d"], Float[Array, "*b k d"]]:
        """Normed and rotated keys, and values: what a cache holds."""
        k, v = _each(x, self.kv, self.k, self.v)
        return self._finished(k, self.k_norm, rotary), self._heads(v)

    def all(
        self, x: Float[Array, "*b h"], rotary: Rotary
    ) -> tuple[Float[Array, "*b n d"], Float[Array, "*b k d"], Float[Array, "*b k d"]]:
        """Queries, keys and values."""
        if self.qkv is None:
            return (self.queries(x, rotary), *self.keys_values(x, rotary))
        q, k, v = self.qkv(x)
        return self._finished(q, self.q_norm, rotary), self._finished(k, self.k_norm, rotary), self._heads(v)

    def _heads(self, x: Float[Array, "*b o"]) -> Float[Array, "*b n d"]:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def _finished(self, x: Float[Array, "*b o"], norm: RMSNorm | None, rotary: Rotary) -> Float[Array, "*b n d"]:
        heads = self._heads(x)
        return rotary(heads if norm is None else norm(heads))


class MLP(nnx.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, make: Make, config: DecoderConfig):
        h, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Joined(make, h, ("gate", f), ("up", f), bias=bias) if make.joined else None
        self.gate = None if make.joined else Linear(make, (h, f), (None, "mlp"), bias=bias)
        self.up = None if make.joined else Linear(make, (h, f), (None, "mlp"), bias=bias)
        self.down = Linear(make, (f, h), ("mlp", None), bias=bias)

    def __call__(self, x: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
        """down(silu(gate(x)) · up(x))."""
        gate, up = _each(x, self.gate_up, self.gate, self.up)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """One pre-norm layer, in the two halves between which attention happens.

    inputs: width of what it reads; together: as of Attention.
    """

    def __init__(self, make: Make, config: DecoderConfig, inputs: int | None = None, *, together: bool = False):
        self.input_norm = RMSNorm(make, config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(make, config, inputs, together=together)
        self.post_norm = RMSNorm(make, config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(make, config)

    def qkv(
        self, x: Float[Array, "*b h"], rotary: Rotary
    ) -> tuple[Float[Array, "*b n d"], Float[Array, "*b k d"], Float[Array, "*b k d"]]:
        """Queries, keys and values of the rows of x."""
        return self.attn.all(self.input_norm(x), rotary)

    def finish(self, x: Float[Array, "*b h"], attended: Float[Array, "*b n d"]) -> Float[Array, "*b h"]:
        """The rest of the layer, given what the queries attended to."""
        x = x + self.attn.o(attended.reshape(*x.shape[:-1], -1))
        return x + self.mlp(self.post_norm(x))
