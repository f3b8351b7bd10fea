"""GGUF metadata and tensor names → DecoderConfig and rules.

Knows: llama.cpp's keys and tensor names for the llama and qwen3 architectures, and that its converter
interleaves the rows of q and k for llama (its rotary kernel there pairs neighbours), not for qwen3.
Does not know: the container or the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jspark.checkpoint.gguf_file import GGUFFile
from jspark.checkpoint.settings import MAX_LAYERS, MAX_POSITION, MIN_FACTOR, Settings, check_heads
from jspark.checkpoint.source import KEEP, TRANSPOSE, Rule, Shape, Transform, rule
from jspark.config import DecoderConfig, RopeConfig
from jspark.errors import UserError

ARCHITECTURES = ("llama", "qwen3")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROPE_FACTORS = "rope_freqs.weight"
#: The constants of Llama 3.1 and later; a GGUF holds only the factors computed from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def decoder_config(file: GGUFFile) -> DecoderConfig:
    """The decoder in `file`; UserError for other architectures, missing keys and unsupported settings."""
    meta = Settings({k: _single(v) for k, v in file.metadata.items()}, str(file.path))
    arch = meta.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: the architecture {arch!r} is not supported; use one of {', '.join(ARCHITECTURES)}"
        )
    if meta.integer("split.count", 1, low=0) > 1:
        raise UserError(f"{file.path} is one part of a split GGUF; merge the parts into one file first")
    embedding = file.infos.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path} has no token_embd.weight matrix; fetch the file again")
    vocab = embedding.shape[0]
    heads = meta.integer(f"{arch}.attention.head_count")
    hidden = meta.integer(f"{arch}.embedding_length")
    head_dim = meta.integer(f"{arch}.attention.key_length", hidden // heads)
    max_position = meta.integer(f"{arch}.context_length", high=MAX_POSITION)
    _refuse_unsupported(meta, arch, head_dim, max_position)
    ends = [i for key in _END_KEYS for i in meta.integers(f"tokenizer.ggml.{key}", 0, vocab - 1)]
    config = DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=meta.integer(f"{arch}.feed_forward_length"),
        num_layers=meta.integer(f"{arch}.block_count", high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=meta.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest(meta.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        max_position=max_position,
        rope=_rope(meta, arch, file, head_dim, max_position),
        qk_norm=arch == "qwen3",
        qkv_bias="blk.0.attn_q.bias" in file.infos,
        output_bias="blk.0.attn_output.bias" in file.infos,
        mlp_bias="blk.0.ffn_gate.bias" in file.infos,
        tie_embeddings="output.weight" not in file.infos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        model_type=arch,
    )
    return check_heads(config, meta.origin)


def rules(config: DecoderConfig) -> tuple[Rule, ...]:
    """Tensor names of llama.cpp → our parameters, in our orientation and half-split head layout."""
    return tuple(_rules(config))


def _rules(config: DecoderConfig) -> Iterator[Rule]:
    yield rule(r"token_embd\.weight", "embed.embedding")
    yield rule(r"output_norm\.weight", "norm.scale")
    yield rule(r"output\.weight", "head.kernel", TRANSPOSE)
    layer = r"blk\.(\d+)\."
    norms = {
        "attn_norm": "input_norm",
        "ffn_norm": "post_norm",
        "attn_q_norm": "attn.q_norm",
        "attn_k_norm": "attn.k_norm",
    }
    for theirs, ours in norms.items():
        yield rule(layer + theirs + r"\.weight", rf"layers.\1.{ours}.scale")
    linears = {
        "attn_q": ("attn.q", config.num_heads),
        "attn_k": ("attn.k", config.num_kv_heads),
        "attn_v": ("attn.v", 0),
        "attn_output": ("attn.o", 0),
        "ffn_gate": ("mlp.gate", 0),
        "ffn_up": ("mlp.up", 0),
        "ffn_down": ("mlp.down", 0),
    }
    for theirs, (ours, heads) in linears.items():
        interleaved = heads > 0 and config.model_type == "llama"
        weight = _half_split(heads, transpose=True) if interleaved else TRANSPOSE
        bias = _half_split(heads, transpose=False) if interleaved else KEEP
        yield rule(layer + theirs + r"\.weight", rf"layers.\1.{ours}.kernel", weight)
        yield rule(layer + theirs + r"\.bias", rf"layers.\1.{ours}.bias", bias)


def _half_split(heads: int, transpose: bool) -> Transform:
    """Undoes the converter's interleaving of each head's two halves; rows are [heads × head_dim]."""

    def array(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(heads, -1, 2, *x.shape[1:])
        rows = pairs.swapaxes(1, 2).reshape(x.shape)
        return rows.T if transpose else rows

    def shape(s: Shape) -> Shape:
        return s[::-1] if transpose else s

    return Transform(shape, array)


def _rope(meta: Settings, arch: str, file: GGUFFile, head_dim: int, max_position: int) -> RopeConfig:
    prefix = f"{arch}.rope."
    theta = _shortest(meta.number(prefix + "freq_base", 10_000.0, low=1.0))
    kind = meta.text(prefix + "scaling.type", "none")
    factor_key = prefix + "scaling.factor"
    if meta.get(prefix + "scaling.type") is None and meta.get(prefix + "scale_linear") is not None:
        kind, factor_key = "linear", prefix + "scale_linear"  # the spelling of old files
    if _ROPE_FACTORS in file.infos:
        if kind != "none":
            raise UserError(
                f"{meta.origin} scales rotary positions twice ({kind} and {_ROPE_FACTORS}); use another file"
            )
        return _llama3(file, theta, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = _shortest(meta.number(factor_key, low=MIN_FACTOR))
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind != "yarn" or meta.get(prefix + "scaling.yarn_log_multiplier"):
        raise UserError(
            f"{meta.origin}: rotary positions of type {kind!r} with these settings are not supported; "
            "use a model with default, linear, llama3 or yarn"
        )
    if meta.number(prefix + "scaling.yarn_ext_factor", 1.0, low=-2.0) not in (1.0, -1.0):
        raise meta.bad(prefix + "scaling.yarn_ext_factor", "1, since a partial mix is not supported")
    extra = meta.number(prefix + "scaling.attn_factor", 1.0) * meta.number(
        prefix + "scaling.yarn_attn_factor", 1.0
    )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=meta.integer(
            prefix + "scaling.original_context_length", max_position, high=MAX_POSITION
        ),
        beta_fast=_shortest(meta.number(prefix + "scaling.yarn_beta_fast", 32.0)),
        beta_slow=_shortest(meta.number(prefix + "scaling.yarn_beta_slow", 1.0)),
        # llama.cpp multiplies by this on top of YaRN's own factor.
        attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
    )


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> RopeConfig:
    """The llama3 scaling whose per-frequency divisors are `rope_freqs.weight`; UserError when none fits."""
    stored = np.asarray(file.read(_ROPE_FACTORS), np.float64) if file.readable(_ROPE_FACTORS) else np.zeros(0)
    factor = _shortest(float(stored.max(initial=0.0)))
    rope = RopeConfig(kind="llama3", theta=theta, factor=factor, **_LLAMA3)
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((rope.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)
    if factor >= 1.0 and stored.shape == smooth.shape:
        divisors = 1.0 / ((1.0 - smooth) / factor + smooth)
        if np.allclose(stored, divisors, rtol=1e-4):
            return rope
    raise UserError(
        f"{file.path}: the rotary factors in {_ROPE_FACTORS} are not those of Llama 3, the supported ones; "
        "use the safetensors checkpoint of this model"
    )


def _refuse_unsupported(meta: Settings, arch: str, head_dim: int, max_position: int) -> None:
    def refuse(what: str) -> UserError:
        return UserError(f"{meta.origin}: {what} not supported; use another checkpoint of this model")

    if meta.integer(f"{arch}.expert_count", 0, low=0) > 0:
        raise refuse("mixtures of experts are")
    if meta.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise refuse("partial rotary positions are")
    if meta.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise refuse("value heads of another size than key heads are")
    if 0 < meta.integer(f"{arch}.attention.sliding_window", 0, low=0, high=MAX_POSITION) < max_position:
        raise refuse("sliding-window attention is")
    if meta.flag(f"{arch}.attention.causal", True) is False:
        raise refuse("attention to later tokens is")


def _single(value: object) -> object:
    """A per-layer array of equal numbers as that number; anything else as it is."""
    if isinstance(value, list) and value and len(value) <= MAX_LAYERS and len(set(map(repr, value))) == 1:
        return value[0]
    return value


def _shortest(x: float) -> float:
    """The shortest decimal of a number stored in float32, so that 1e-5 reads as in a config.json."""
    return float(str(np.float32(x)))
