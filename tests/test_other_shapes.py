"""Checkpoints of shapes that no golden has, written here with random weights: the target against a float64 forward
in NumPy, and speculative decoding against plain decoding.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import drafter, full_logits, make_engine, run, target

from jspark.config import EngineConfig, VerifyMode
from jspark.request import Request, SamplingParams

#: So few words that a random drafter is right now and then.
VOCABULARY = 7
HIDDEN = 40


@dataclass(frozen=True)
class Shape:
    """A target's config.json beside the common part, and how its files are written."""

    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    config: dict = field(default_factory=dict)
    shards: int = 1

    @property
    def json(self) -> dict:
        name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]
        common = {"architectures": [name], "model_type": self.model_type, "vocab_size": VOCABULARY}
        common |= {"hidden_size": HIDDEN, "intermediate_size": 56, "num_hidden_layers": 3, "rms_norm_eps": 1e-5}
        common |= {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        return common | {"head_dim": self.head_dim, "max_position_embeddings": 256} | self.config


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPES = {
    "biases, linear, three shards": Shape(
        "llama",
        6,
        3,
        8,
        {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 4.0}},
        shards=3,
    ),
    "tied, yarn": Shape(
        "qwen3", 6, 2, 10, {"tie_word_embeddings": True, "rope_theta": 5000.0, "rope_scaling": YARN}
    ),
    "as many KV heads, llama3": Shape(
        "llama",
        4,
        4,
        16,
        {"rope_parameters": LLAMA3 | {"rope_theta": 1000.0, "original_max_position_embeddings": 64}},
    ),
    "one KV head, attention bias": Shape("qwen3", 5, 1, 6, {"rope_theta": 300.0, "attention_bias": True}),
    "sliding windows": Shape(
        "qwen3", 4, 2, 8, {"rope_theta": 300.0, "layer_types": SLIDING, "sliding_window": 11}
    ),
}


def linear(rng, out: int, size: int) -> np.ndarray:
    return rng.normal(0, 1.5 / math.sqrt(size), (out, size))


def layer_tensors(rng, prefix: str, shape: Shape, *, qk_norm: bool) -> dict[str, np.ndarray]:
    q, kv, c = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.json
    attention = {"q_proj": (q, HIDDEN), "k_proj": (kv, HIDDEN), "v_proj": (kv, HIDDEN), "o_proj": (HIDDEN, q)}
    mlp = {"gate_proj": (56, HIDDEN), "up_proj": (56, HIDDEN), "down_proj": (HIDDEN, 56)}
    tensors = {}
    for part, sizes, bias in (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias")):
        for name, (out, size) in sizes.items():
            tensors[f"{prefix}{part}.{name}.weight"] = linear(rng, out, size)
            if c.get(bias):
                tensors[f"{prefix}{part}.{name}.bias"] = rng.normal(0, 0.5, out)
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    if qk_norm:
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
    return tensors | {f"{prefix}{name}.weight": rng.uniform(0.5, 1.5, size) for name, size in norms.items()}


def target_tensors(rng, shape: Shape) -> dict[str, np.ndarray]:
    tensors = {"model.embed_tokens.weight": rng.normal(0, 1, (VOCABULARY, HIDDEN))}
    tensors["model.norm.weight"] = rng.uniform(0.5, 1.5, HIDDEN)
    if not shape.config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = linear(rng, VOCABULARY, HIDDEN)
    for i in range(3):
        tensors |= layer_tensors(rng, f"model.layers.{i}.", shape, qk_norm=shape.model_type == "qwen3")
    return tensors


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray], shards: int = 1) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return str(folder)
    where = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: x for name, x in tensors.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return str(folder)


def draft(folder: Path, rng, kind: str) -> tuple[str, int]:
    """A drafter of two layers whose heads are not the target's, and its γ."""
    shape = Shape("qwen3", 3, 1, 14, {"rope_theta": 500.0})
    config = shape.json | {"num_hidden_layers": 2, "block_size": 5, "mask_token_id": VOCABULARY - 1}
    if kind.startswith("sliding "):
        kind = kind.removeprefix("sliding ")
        config |= {"layer_types": SLIDING[:2], "sliding_window": 7, "use_sliding_window": True}
    prefix = "model." if kind == "dflash" else ""
    tensors = {f"{prefix}fc.weight": linear(rng, HIDDEN, 3 * HIDDEN)}
    for name in ("hidden_norm", "norm"):
        tensors[f"{prefix}{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN)
    for i in range(2):
        tensors |= layer_tensors(rng, f"{prefix}layers.{i}.", shape, qk_norm=True)
    if kind == "dflash":
        config |= {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, -1, 0]}}
        return write(folder, config, tensors, shards=2), 4
    config |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [-1, 0, 1]}
    config |= {"markov_rank": 8, "markov_head_type": kind, "enable_confidence_head": True}
    tensors["markov_head.markov_w1.weight"] = rng.normal(0, 1, (VOCABULARY, 8))
    tensors["markov_head.markov_w2.weight"] = linear(rng, VOCABULARY, 8)
    joint = {"vanilla": {}, "gated": {"gate_proj": (8, HIDDEN + 8)}, "rnn": {"joint_proj": (24, HIDDEN + 16)}}
    for name, (out, size) in joint[kind].items():
        tensors[f"markov_head.{name}.weight"] = linear(rng, out, size)
        tensors[f"markov_head.{name}.bias"] = rng.normal(0, 0.5, out)
    tensors["confidence_head.proj.weight"] = linear(rng, 1, HIDDEN)
    tensors["confidence_head.proj.bias"] = rng.normal(0, 0.5, 1)
    tensors["embed_tokens.weight"] = rng.normal(0, 1, (VOCABULARY, HIDDEN))
    tensors["lm_head.weight"] = linear(rng, VOCABULARY, HIDDEN)
    return write(folder, config, tensors), 5


def rope_angles(config: dict, length: int) -> tuple[np.ndarray, float]:
    """Angles [length, head_dim / 2] and the factor on their cosines and sines."""
    dim = config["head_dim"]
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta", 10_000.0)
    factor, original = scaling.get("factor", 1.0), scaling.get("original_max_position_embeddings", 0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    speeds, magnitude = [], 1.0
    for pair in range(dim // 2):
        speed = theta ** (-2 * pair / dim)
        if kind == "linear":
            speed /= factor
        elif kind == "llama3":
            turns = original * speed / (2 * math.pi)
            keep = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
            speed = keep * speed + (1 - keep) * speed / factor
        elif kind == "yarn":
            ends = [dim * math.log(original / (2 * math.pi * r)) / (2 * math.log(theta)) for r in (8.0, 1.0)]
            first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
            stretch = min(max((pair - first) / (last - first), 0.0), 1.0)
            speed = speed * (1 - stretch) + speed / factor * stretch
            magnitude = 0.1 * math.log(factor) + 1
        speeds.append(speed)
    return np.outer(np.arange(length), speeds), magnitude


def judge(shape: Shape, tensors: dict[str, np.ndarray], tokens: tuple[int, ...]) -> np.ndarray:
    """Logits [len(tokens), V] of the same model in float64, straight from the papers' formulas."""
    c = shape.json
    tensors = {name: x.astype(np.float32).astype(np.float64) for name, x in tensors.items()}
    angles, magnitude = rope_angles(c, len(tokens))
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors[name + ".weight"]

    def project(x, name):
        return x @ tensors[name + ".weight"].T + tensors.get(name + ".bias", 0.0)

    def heads(x, name, rotate=True):
        y = project(x, name).reshape(len(tokens), -1, shape.head_dim)
        if rotate:
            if shape.model_type == "qwen3":
                y = norm(y, name.replace("_proj", "_norm"))
            a, b = np.split(y, 2, axis=-1)
            y = np.concatenate([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)
        return y

    x = tensors["model.embed_tokens.weight"][list(tokens)]
    for i in range(3):
        p = f"model.layers.{i}."
        y = norm(x, p + "input_layernorm")
        q, k = heads(y, p + "self_attn.q_proj"), heads(y, p + "self_attn.k_proj")
        v = heads(y, p + "self_attn.v_proj", rotate=False)
        attended = []
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(shape.head_dim)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            if c.get("layer_types", ["full_attention"] * 3)[i] == "sliding_attention":
                scores[np.tril_indices(len(tokens), -c["sliding_window"])] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
        x = x + project(np.concatenate(attended, -1), p + "self_attn.o_proj")
        y = norm(x, p + "post_attention_layernorm")
        gate = project(y, p + "mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(y, p + "mlp.up_proj"), p + "mlp.down_proj")
    return norm(x, "model.norm") @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[dict[str, np.ndarray], str]]:
    """Tensors and folder of every shape."""
    folder, made = tmp_path_factory.mktemp("shapes"), {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        tensors = target_tensors(np.random.default_rng(i), shape)
        made[name] = tensors, write(folder / str(i), shape.json, tensors, shape.shards)
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_the_target_computes_what_its_config_says(models, name, rng):
    shape, (tensors, folder) = SHAPES[name], models[name]
    tokens = tuple(rng.integers(0, VOCABULARY, 200).tolist())
    want, got = judge(shape, tensors, tokens), full_logits(tokens, folder)
    np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())
    # What the judge would say without the scaling of positions, or windows, is another answer altogether.
    flat = Shape(
        shape.model_type,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        {k: v for k, v in shape.config.items() if not k.startswith(("rope", "layer_types"))},
    )
    assert np.abs(judge(flat, tensors, tokens) - want).max() > 0.05 * np.abs(want).max()


@pytest.mark.parametrize(
    ("name", "kind", "mode", "block"),
    [
        ("biases, linear, three shards", "gated", "compact", 0),
        ("tied, yarn", "dflash", "compact", 0),
        ("as many KV heads, llama3", "rnn", "cap-accept", 1),
        ("one KV head, attention bias", "vanilla", "static", 3),
        ("sliding windows", "sliding dflash", "compact", 0),
    ],
)
def test_any_drafter_gives_plain_decodings_tokens(models, name, kind, mode: VerifyMode, block, tmp_path, rng):
    folder = models[name][1]
    path, trained = draft(tmp_path / "draft", rng, kind)
    config = EngineConfig(
        max_running_requests=3,
        row_buckets=(3,),
        token_tiers=(18,),
        page_size=7,
        context_length=60,
        chunked_prefill_size=9,
        block_size=block,
        verify_mode=mode,
    )
    engine = make_engine(config, target(folder), drafter(path, folder))
    assert engine.block_size == (block or trained)
    greedy = SamplingParams(temperature=0, max_tokens=18)
    requests = [
        Request(i, tuple(rng.integers(0, VOCABULARY, n).tolist()), greedy)
        for i, n in enumerate((1, 9, 7, 10, 42, 20))
    ]
    results = run(engine, requests)
    alone = make_engine(replace(config, block_size=0, verify_mode="compact"), target(folder))
    assert [r.tokens for r in results] == [r.tokens for r in run(alone, requests)]
    assert sum(n * count for r in results for n, count in r.stats.accepted.items()) > 0
