"""Hugging Face folders: targets and drafters that load, and what of them is read."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import parameter_shapes
import pytest
from folders import DSPARK, LLAMA3, edit, split
from safetensors.numpy import load_file, save_file

from jspark.checkpoint import describe, open_drafter, open_target
from jspark.config import RopeConfig
from jspark.errors import UserError

TARGETS = ("llama_tiny", "qwen3_tiny", "qwen3_tiny_tied")


def load(checkpoint, shapes) -> dict[str, np.ndarray]:
    arrays = dict(checkpoint.parameters(shapes))
    assert list(arrays) == list(shapes)
    assert {k: a.shape for k, a in arrays.items()} == shapes
    return arrays


@pytest.mark.parametrize("name", TARGETS)
def test_targets_load_in_our_orientation(goldens, name):
    target = open_target(str(goldens / name))
    c = target.config
    assert (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers) == (320, 64, 128, 6)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.max_position) == (4, 2, 16, 512)
    llama = name == "llama_tiny"
    assert c.rope == RopeConfig(theta=1e5 if llama else 1e6)
    assert c.rms_norm_eps == (1e-5 if llama else 1e-6)
    assert c.qk_norm is not llama
    assert c.tie_embeddings is (name != "qwen3_tiny")
    stored = load_file(goldens / name / "model.safetensors")
    arrays = load(target, parameter_shapes.decoder(c))
    assert sum(a.size for a in arrays.values()) == sum(a.size for a in stored.values())
    np.testing.assert_array_equal(arrays["embed.embedding"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        arrays["layers.5.attn.k.kernel"], stored["model.layers.5.self_attn.k_proj.weight"].T
    )
    np.testing.assert_array_equal(
        arrays["layers.0.post_norm.scale"], stored["model.layers.0.post_attention_layernorm.weight"]
    )


@pytest.mark.parametrize(
    ("name", "markov", "rank", "confidence", "own"),
    [
        (DSPARK + "vanilla", "vanilla", 16, "hidden+markov", True),
        (DSPARK + "gated", "gated", 16, "hidden+markov", True),
        (DSPARK + "rnn_trained", "rnn", 16, "hidden+markov", True),
        (DSPARK + "vanilla_b5", "vanilla", 12, "hidden", True),
        (DSPARK + "nomarkov", "none", 0, "none", True),
        ("dflash_qwen3_tiny", "none", 0, "none", False),
    ],
)
def test_drafters_load(goldens, name, markov, rank, confidence, own):
    drafter = open_drafter(str(goldens / name))
    c = drafter.config
    b5 = name.endswith("b5")
    dflash = name.startswith("dflash")
    assert c.block_size == (5 if b5 else 7)
    assert c.block_rows == (8 if dflash else c.block_size)
    assert c.target_layer_ids == ((-1, 2, 4) if b5 else (1, 3, 4))
    assert (c.markov, c.markov_rank, c.confidence) == (markov, rank, confidence)
    assert (c.own_embedding, c.own_head, c.mask_token_id) == (own, own, 319)
    assert c.predicts_from_anchor is not dflash
    stored = load_file(goldens / name / "model.safetensors")
    arrays = load(drafter, parameter_shapes.drafter(c))
    assert len(arrays) == len(stored)
    np.testing.assert_array_equal(arrays["fc.kernel"], stored["fc.weight"].T)
    if rank:
        np.testing.assert_array_equal(arrays["markov.w2"], stored["markov_head.markov_w2.weight"].T)


def test_a_drafter_can_be_loaded_without_its_own_embedding(goldens):
    drafter = open_drafter(str(goldens / (DSPARK + "vanilla")))
    shapes = parameter_shapes.drafter(drafter.config)
    del shapes["embed.embedding"], shapes["head.kernel"]
    load(drafter, shapes)


def test_tied_drafter_has_its_head_in_its_embedding(copy):
    folder = copy(DSPARK + "vanilla", tie_word_embeddings=True)
    edit(folder, lambda t: t.pop("lm_head.weight"))
    drafter = open_drafter(str(folder))
    assert drafter.config.own_head
    arrays = load(drafter, parameter_shapes.drafter(drafter.config))
    np.testing.assert_array_equal(arrays["head.kernel"], arrays["embed.embedding"].T)


@pytest.mark.parametrize("name", ["qwen3_tiny", "dflash_qwen3_tiny"])
def test_the_model_prefix_does_not_matter(goldens, copy, name):
    opening = open_target if name == "qwen3_tiny" else open_drafter
    folder = copy(name)
    tensors = load_file(folder / "model.safetensors")
    moved = {(k.removeprefix("model.") if k.startswith("model.") else "model." + k): v for k, v in tensors.items()}
    save_file(moved, folder / "model.safetensors")
    plain, other = opening(str(goldens / name)), opening(str(folder))
    want = load(plain, parameter_shapes.of(plain.config))
    got = load(other, parameter_shapes.of(other.config))
    assert all(np.array_equal(got[k], want[k]) for k in want)


def test_dflash_keys_may_lie_on_the_top_level_or_be_derived(goldens, copy):
    want = open_drafter(str(goldens / "dflash_qwen3_tiny")).config
    folder = copy("dflash_qwen3_tiny", dflash_config=None, mask_token_id=319, target_layer_ids=[1, 3, 4])
    assert open_drafter(str(folder)).config == want
    nested = {"mask_token_id": 319, "target_layer_ids": [1, 3, 4], "block_size": 8}
    assert open_drafter(str(copy("dflash_qwen3_tiny", block_size=16, dflash_config=nested))).config == want
    for layers, ids in ((2, (1, 33)), (5, (1, 9, 17, 25, 33)), (1, (18,))):
        changes = {
            "num_target_layers": 36,
            "dflash_config": {"mask_token_id": 319},
            "num_hidden_layers": layers,
        }
        changes["layer_types"] = ["full_attention"] * layers
        assert open_drafter(str(copy("dflash_qwen3_tiny", **changes))).config.target_layer_ids == ids


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_give_the_same_tensors(goldens, copy, shards):
    folder = copy("qwen3_tiny")
    split(folder, shards)
    plain, sharded = open_target(str(goldens / "qwen3_tiny")), open_target(str(folder))
    assert sharded.config == plain.config
    want = load(plain, parameter_shapes.decoder(plain.config))
    got = load(sharded, parameter_shapes.decoder(plain.config))
    assert all(np.array_equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_kept_as_stored(copy, dtype):
    folder = copy("llama_tiny")
    edit(folder, lambda t: t.update({k: v.astype(dtype) for k, v in t.items()}))
    target = open_target(str(folder))
    arrays = load(target, parameter_shapes.decoder(target.config))
    assert {a.dtype for a in arrays.values()} == {np.dtype(dtype)}


def rope_of(folder: Path) -> RopeConfig:
    return open_target(str(folder)).config.rope


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"rope_type": "default"}, RopeConfig(theta=5e5)),
        ({"rope_type": "linear", "factor": 4}, RopeConfig("linear", 5e5, 4.0)),
        (LLAMA3, RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192)),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            RopeConfig("yarn", 5e5, 4.0, original_max_position=128),
        ),
        ({"rope_type": "yarn", "factor": 2.0}, RopeConfig("yarn", 5e5, 2.0, original_max_position=512)),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "attention_factor": 1.25,
                "truncate": False,
            },
            RopeConfig("yarn", 5e5, 4.0, 1.0, 4.0, 512, 16.0, 2.0, 1.25, 1.0, 0.5, False),
        ),
    ],
)
def test_old_and_new_rope_spellings_agree(copy, fields, want):
    new = copy("llama_tiny", rope_parameters={"rope_theta": 5e5, **fields})
    assert rope_of(new) == want
    assert rope_of(copy("llama_tiny", rope_parameters=fields, rope_theta=5e5)) == want
    old = dict(fields)
    kind = old.pop("rope_type")
    for spelling in ("type", "rope_type"):
        folder = copy("llama_tiny", rope_parameters=None, rope_theta=5e5, rope_scaling={spelling: kind, **old})
        assert rope_of(folder) == want


def test_defaults_of_old_configurations(copy):
    folder = copy(
        "llama_tiny",
        rope_parameters=None,
        rope_scaling=None,
        head_dim=None,
        num_key_value_heads=None,
        dtype=None,
    )
    config = open_target(str(folder)).config
    assert config.rope == RopeConfig(theta=10_000.0)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    config = open_target(str(copy("qwen3_tiny", head_dim=None, torch_dtype="bfloat16"))).config
    assert config.head_dim == 128


def test_mistral_without_a_window_is_llama_with_another_name(goldens, copy):
    folder = copy("llama_tiny", architectures=["MistralForCausalLM"], model_type="mistral")
    assert open_target(str(folder)).config.windows == (4096,) * 6
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_target(str(folder)).config.rope == open_target(str(goldens / "llama_tiny")).config.rope
    assert open_target(str(folder)).config.windows == ()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}, (0, 0, 0, 0, 9, 9)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 9}, (9, 0) * 3),
        ({"layer_types": ["full_attention"] * 6, "use_sliding_window": True, "sliding_window": 9}, ()),
        ({"use_sliding_window": False, "sliding_window": 9}, ()),
    ],
)
def test_sliding_windows(copy, changes, windows):
    assert (
        open_target(
            str(copy("qwen3_tiny", **({"layer_types": None, "use_sliding_window": None} | changes)))
        ).config.windows
        == windows
    )


def test_biases_are_expected_where_the_config_says_so(goldens, copy):
    folder = copy("llama_tiny", attention_bias=True, mlp_bias=True)
    config = open_target(str(folder)).config
    assert config.qkv_bias
    assert config.output_bias
    assert config.mlp_bias
    shapes = parameter_shapes.decoder(config)
    with pytest.raises(UserError, match=r"missing layers\.0\.attn\.q\.bias, .* and 38 more"):
        open_target(str(folder)).parameters(shapes)
    sizes = {"q": 64, "k": 32, "v": 32, "o": 64}

    def add(tensors):
        for i in range(6):
            for n, size in sizes.items():
                tensors[f"model.layers.{i}.self_attn.{n}_proj.bias"] = np.full(size, i, np.float32)
            for n, size in {"gate": 128, "up": 128, "down": 64}.items():
                tensors[f"model.layers.{i}.mlp.{n}_proj.bias"] = np.full(size, i, np.float32)

    edit(folder, add)
    arrays = load(open_target(str(folder)), shapes)
    assert (arrays["layers.3.attn.o.bias"] == 3).all()
    plain = copy("llama_tiny")
    edit(plain, add)
    target = open_target(str(plain))
    with pytest.raises(UserError, match=r"not used by this configuration: .*self_attn\.k_proj\.bias"):
        target.parameters(parameter_shapes.decoder(target.config))


@pytest.mark.parametrize(
    ("own", "generation", "want"),
    [(None, None, ()), (7, None, (7,)), ([7, 9], 9, (7, 9)), (2, [3, 2], (2, 3)), (None, 5, (5,))],
)
def test_end_tokens(copy, own, generation, want):
    folder = copy("llama_tiny")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": own}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_target(str(folder)).config.eos_token_ids == want


def test_a_spare_head_of_a_tied_model_is_ignored(copy):
    folder = copy("llama_tiny")
    edit(folder, lambda t: t.update({"lm_head.weight": np.zeros((320, 64), np.float32)}))
    target = open_target(str(folder))
    load(target, parameter_shapes.decoder(target.config))


def test_describe(goldens):
    target = describe(str(goldens / "qwen3_tiny"))
    assert target["kind"] == "target"
    assert target["dtypes"] == {"F32": target["parameters"]}
    assert target["rope"] == {"kind": "default", "theta": 1e6}
    assert target["chat_template"] is False
    assert "no tokenizer.json" in target["tokenizer"]
    drafter = describe(str(goldens / (DSPARK + "vanilla_b5")))
    assert (drafter["kind"], drafter["algorithm"], drafter["dialect"]) == ("drafter", "DSPARK", "deepspec")
    assert (drafter["block_size"], drafter["target_layer_ids"], drafter["markov_rank"]) == (5, [-1, 2, 4], 12)
    assert describe(str(goldens / "dflash_qwen3_tiny"))["algorithm"] == "DFLASH"
    json.dumps([target, drafter])  # plain data
