"""Draft layers with a sliding window, against a float64 forward in NumPy; and what their configurations say."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import GOLDENS, drafter, exact, mesh, target
from test_other_shapes import HIDDEN, SHAPES, VOCABULARY, draft, target_tensors, write

from jspark import kv
from jspark.batch import pack
from jspark.checkpoint import open_drafter
from jspark.checkpoint.export import export_drafter
from jspark.errors import UserError
from jspark.models.drafter import Drafter
from jspark.propose import block_hidden, inject

CONTEXT, THETA, DIM = 23, 500.0, 14


def attend(tensors, prefix: str, x: np.ndarray, context: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """One layer of the drafter on the block's rows x; seen[row, position] over context and block."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors[name]

    def project(rows, name, positions=None):
        y = (rows @ tensors[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, DIM)
        if positions is None:
            return y
        angles = np.outer(positions, THETA ** (-np.arange(0, DIM, 2) / DIM))[:, None]
        a, b = np.split(norm(y, f"{prefix}self_attn.{name}_norm.weight"), 2, axis=-1)
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )

    here, past = CONTEXT + np.arange(len(x)), np.arange(CONTEXT)
    y = norm(x, prefix + "input_layernorm.weight")
    q = project(y, "q", here)
    k = np.concatenate([project(context, "k", past), project(y, "k", here)])
    v = np.concatenate([project(context, "v"), project(y, "v")])
    scores = np.einsum("qhd,kd->hqk", q, k[:, 0]) / math.sqrt(DIM)
    weights = np.exp(np.where(seen, scores, -np.inf))
    attended = np.einsum("hqk,kd->qhd", weights / weights.sum(-1, keepdims=True), v[:, 0])
    x = x + attended.reshape(len(x), -1) @ tensors[prefix + "self_attn.o_proj.weight"].T
    y = norm(x, prefix + "post_attention_layernorm.weight")
    gate, up = (y @ tensors[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ tensors[prefix + "mlp.down_proj.weight"].T


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, np.ndarray]:
    """A target's folder, and its embedding."""
    shape = SHAPES["one KV head, attention bias"]
    tensors = target_tensors(np.random.default_rng(0), shape)
    folder = write(tmp_path_factory.mktemp("windows") / "target", shape.json, tensors)
    return folder, tensors["model.embed_tokens.weight"].astype(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("kind", "kinds", "window", "stated", "causal"),
    [
        ("dflash", "sf", 6, {}, True),
        ("dflash", "ss", 3, {"causal": False}, False),
        ("dflash", "fs", 6, {"is_causal": False}, False),
        ("vanilla", "sf", 9, None, False),
    ],
)
def test_a_block_sees_what_its_layers_windows_hold(whole, tmp_path, rng, kind, kinds, window, stated, causal):
    path, _ = draft(tmp_path / "draft", rng, kind)
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    names = {"s": "sliding_attention", "f": "full_attention"}
    config |= {"layer_types": [names[k] for k in kinds], "sliding_window": window, "use_sliding_window": True}
    if stated is not None:
        config["dflash_config"] |= stated
    file.write_text(json.dumps(config))
    tensors = {k: v.astype(np.float64) for f in Path(path).glob("*.safetensors") for k, v in load_file(f).items()}
    prefix = "model." if kind == "dflash" else ""
    model, settings = drafter(path, whole[0])
    assert isinstance(model, Drafter)
    assert settings.backbone.windows == tuple(window if k == "s" else 0 for k in kinds)
    assert settings.causal_windows is causal

    features = rng.normal(0, 1, (CONTEXT, 3 * HIDDEN)).astype(np.float32)
    tokens = [3] + [VOCABULARY - 1] * (settings.block_rows - 1)
    embedding = tensors["embed_tokens.weight"] if kind == "vanilla" else whole[1]
    context, x = features @ tensors[prefix + "fc.weight"].T, embedding[tokens]
    context = (
        context / np.sqrt((context**2).mean(-1, keepdims=True) + 1e-5) * tensors[prefix + "hidden_norm.weight"]
    )
    row, key = CONTEXT + np.arange(len(x))[:, None], np.arange(CONTEXT + len(x))[None]
    for i, letter in enumerate(kinds):
        seen = np.ones((len(x), CONTEXT + len(x)), bool)
        if letter == "s":
            seen = np.abs(row - key) < window
            seen &= ~((key > row) & causal)
        x = attend(tensors, f"{prefix}layers.{i}.", x, context, seen)
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors[prefix + "norm.weight"]

    pool = kv.make_pool(settings.backbone, 9, 4, jnp.float32, mesh())
    table = jnp.asarray(rng.permutation(np.arange(1, 9, dtype=np.int32)))[None]
    start, rows = jnp.zeros(1, jnp.int32), jnp.zeros((1, CONTEXT), jnp.int32)
    length = jnp.full(1, CONTEXT - 1, jnp.int32)
    batch = pack(rows, start, length, jnp.ones(1, bool), table, None, verify_tokens=CONTEXT, page_size=4)
    view = model.vocabulary(target(whole[0])[0].vocabulary)

    @jax.jit
    @exact
    def ours():
        filled = inject(model, settings, pool, jnp.asarray(features), batch)
        anchor, position = jnp.full(1, 3, jnp.int32), jnp.full(1, CONTEXT, jnp.int32)
        return block_hidden(model, view, settings, filled, anchor, position, table, settings.block_size)[0]

    np.testing.assert_allclose(ours()[0], want[-settings.block_size :], atol=2e-4, rtol=2e-4)


def test_windows_survive_export(tmp_path):
    for name in ("dspark_qwen3_tiny_vanilla", "dflash_qwen3_tiny"):
        checkpoint = open_drafter(str(GOLDENS / name))
        backbone = replace(checkpoint.config.backbone, windows=(5, 0))
        config = replace(checkpoint.config, backbone=backbone, causal_windows=name.startswith("dflash"))
        export_drafter(replace(checkpoint, config=config), tmp_path / name)
        assert open_drafter(str(tmp_path / name)).config == config
    wrong = replace(checkpoint, config=replace(config, predicts_from_anchor=True))
    with pytest.raises(UserError, match="causal inside the block"):
        export_drafter(wrong, tmp_path / "wrong")


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("dflash_qwen3_tiny", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("dflash_qwen3_tiny", {"dflash_config": {"is_causal": True}}, "is_causal"),
        (
            "dflash_qwen3_tiny",
            {"layer_types": ["sliding_attention", "full_attention"], "causal": True, "use_sliding_window": True},
            "causal",
        ),
        (
            "dspark_qwen3_tiny_vanilla",
            {"architectures": ["DSparkDraftModel"], "layer_types": None, "use_swa": True, "swa_window_size": 8},
            "layer_types",
        ),
    ],
)
def test_windows_that_are_refused(tmp_path, name, changes, word):
    config = json.loads((GOLDENS / name / "config.json").read_text())
    changes = dict(changes)
    nested = changes.pop("dflash_config", {})
    config |= changes
    if "dflash_config" in config:
        config["dflash_config"] |= nested
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((GOLDENS / name / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=word):
        open_drafter(str(tmp_path))
