"""The parameters that a decoder or drafter has, written out by hand from the architecture."""

from __future__ import annotations

from jspark.config import DecoderConfig, DrafterConfig

Shapes = dict[str, tuple[int, ...]]


def layers(c: DecoderConfig) -> Shapes:
    h, f, d = c.hidden_size, c.intermediate_size, c.head_dim
    q, kv = c.num_heads * d, c.num_kv_heads * d
    shapes: Shapes = {}
    for i in range(c.num_layers):
        p = f"layers.{i}."
        shapes[p + "input_norm.scale"] = shapes[p + "post_norm.scale"] = (h,)
        if c.qk_norm:
            shapes[p + "attn.q_norm.scale"] = shapes[p + "attn.k_norm.scale"] = (d,)
        linears = {
            "attn.q": (h, q, c.qkv_bias),
            "attn.k": (h, kv, c.qkv_bias),
            "attn.v": (h, kv, c.qkv_bias),
            "attn.o": (q, h, c.output_bias),
            "mlp.gate": (h, f, c.mlp_bias),
            "mlp.up": (h, f, c.mlp_bias),
            "mlp.down": (f, h, c.mlp_bias),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[p + name + ".kernel"] = (rows, columns)
            if bias:
                shapes[p + name + ".bias"] = (columns,)
    return shapes | {"norm.scale": (h,)}


def decoder(c: DecoderConfig) -> Shapes:
    shapes = layers(c) | {"embed.embedding": (c.vocab_size, c.hidden_size)}
    return shapes if c.tie_embeddings else shapes | {"head.kernel": (c.hidden_size, c.vocab_size)}


def drafter(c: DrafterConfig) -> Shapes:
    b, r = c.backbone, c.markov_rank
    h, v = b.hidden_size, b.vocab_size
    shapes = layers(b) | {"fc.kernel": (len(c.target_layer_ids) * h, h)}
    if c.eagle3 is None:
        shapes["hidden_norm.scale"] = (h,)
    else:
        shapes["layers.0.hidden_norm.scale"] = (h,)
        for name in ("q", "k", "v"):
            shapes[f"layers.0.attn.{name}.kernel"] = (2 * h, shapes[f"layers.0.attn.{name}.kernel"][1])
    if c.eagle3 is not None and c.eagle3.norm_before_fc:
        shapes["input_norm.scale"] = (len(c.target_layer_ids) * h,)
    if c.eagle3 is not None and c.eagle3.fc_norm:
        shapes |= {f"fc_norm.{i}.scale": (h,) for i in range(len(c.target_layer_ids))}
    if c.own_embedding:
        shapes["embed.embedding"] = (v, h)
    if c.own_head:
        shapes["head.kernel"] = (h, v)
    if c.draft_vocab_size:
        shapes["vocab_mask"] = (v,)
    if c.markov != "none":
        shapes |= {"markov.w1": (v, r), "markov.w2": (r, v)}
    if c.markov == "gated":
        shapes |= {"markov.gate.kernel": (h + r, r), "markov.gate.bias": (r,)}
    if c.markov == "rnn":
        shapes |= {"markov.joint.kernel": (h + 2 * r, 3 * r), "markov.joint.bias": (3 * r,)}
    if c.confidence != "none":
        rows = h + (r if c.confidence == "hidden+markov" else 0)
        shapes |= {"confidence.kernel": (rows, 1), "confidence.bias": (1,)}
    return shapes


def of(c: DecoderConfig | DrafterConfig) -> Shapes:
    return decoder(c) if isinstance(c, DecoderConfig) else drafter(c)
