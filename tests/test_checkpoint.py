"""Hugging Face folders: targets and drafters that load, and bad ones that are refused in one sentence."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import parameter_shapes
import pytest
from safetensors.numpy import load_file, save_file

from jspark.checkpoint import describe, open_drafter, open_target
from jspark.config import RopeConfig
from jspark.errors import UserError

TARGETS = ("llama_tiny", "qwen3_tiny", "qwen3_tiny_tied")
DSPARK = "dspark_qwen3_tiny_"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def copy(goldens, tmp_path):
    """Copies a golden's files, with changes to its config.json; a value of None deletes the key."""

    def make(name: str, **changes) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        shutil.copy(goldens / name / "model.safetensors", folder)
        config = json.loads((goldens / name / "config.json").read_text()) | changes
        config = {k: v for k, v in config.items() if k not in changes or v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def refused(opening, spec, *words: str) -> None:
    """Opening raises one sentence in which all `words` occur."""
    with pytest.raises(UserError) as e:
        opening(str(spec))
    message = str(e.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


def load(checkpoint, shapes) -> dict[str, np.ndarray]:
    arrays = dict(checkpoint.parameters(shapes))
    assert list(arrays) == list(shapes)
    assert {k: a.shape for k, a in arrays.items()} == shapes
    return arrays


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


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


def split(folder: Path, shards: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "model.safetensors").unlink()


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


def test_all_misfits_are_listed_before_anything_is_yielded(copy):
    folder = copy("qwen3_tiny")

    def spoil(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.1.self_attn.q_proj.weight"] = np.zeros((64, 60), np.float32)
        tensors["model.layers.6.self_attn.q_proj.weight"] = np.zeros((64, 64), np.float32)
        tensors["model.vision.weight"] = np.zeros(1, np.float32)
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((64, 128), np.int32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    edit(folder, spoil)
    target = open_target(str(folder))
    with pytest.raises(UserError) as e:
        target.parameters(parameter_shapes.decoder(target.config))
    message = str(e.value)
    for part in (
        "missing layers.2.mlp.up.kernel, norm.scale",
        "layers.1.attn.q.kernel has shape [60, 64] instead of [64, 64]",
        "model.layers.6.self_attn.q_proj.weight",
        "model.vision.weight",
        "layers.0.mlp.down.kernel is stored as I32",
    ):
        assert part in message
    assert "inv_freq" not in message


def test_a_spare_head_of_a_tied_model_is_ignored(copy):
    folder = copy("llama_tiny")
    edit(folder, lambda t: t.update({"lm_head.weight": np.zeros((320, 64), np.float32)}))
    target = open_target(str(folder))
    load(target, parameter_shapes.decoder(target.config))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 5 + ["linear_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 5, "use_sliding_window": True}, "a list of 6 layers"),
        ({"layer_types": ["sliding_attention"] * 6, "use_sliding_window": True, "sliding_window": 0}, "sliding"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"num_experts": 8}, "mixtures of experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 1e4, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": [1]}, "must be an object"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"intermediate_size": "128"}, "'128'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"head_dim": 15}, "odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [320]}, "eos_token_id"),
    ],
)
def test_configurations_that_are_refused(copy, changes, word):
    refused(open_target, copy("qwen3_tiny", **changes), "config.json", word)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        (DSPARK + "vanilla", {"block_size": 0}, "block_size is 0"),
        (DSPARK + "vanilla", {"block_size": None}, "block_size is missing"),
        (DSPARK + "vanilla", {"mask_token_id": None}, "mask_token_id is missing"),
        (DSPARK + "vanilla", {"mask_token_id": 320}, "mask_token_id is 320"),
        (DSPARK + "vanilla", {"target_layer_ids": []}, "target_layer_ids"),
        (DSPARK + "vanilla", {"target_layer_ids": [1, -2]}, "target_layer_ids"),
        (DSPARK + "vanilla", {"markov_head_type": "lstm"}, "lstm"),
        (DSPARK + "vanilla", {"markov_rank": -1}, "markov_rank is -1"),
        (DSPARK + "vanilla", {"markov_rank": 0}, "confidence_head_with_markov"),
        (DSPARK + "vanilla", {"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        (DSPARK + "vanilla", {"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ("dflash_qwen3_tiny", {"block_size": 1}, "block_size is 1"),
        ("dflash_qwen3_tiny", {"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
        ("dflash_qwen3_tiny", {"dflash_config": [1]}, "dflash_config"),
        (
            "dflash_qwen3_tiny",
            {"dflash_config": {"mask_token_id": 1}, "num_target_layers": None},
            "num_target_layers",
        ),
        ("dflash_qwen3_tiny", {"dflash_config": {"projector_type": "domino"}}, "z-lab's DFlashDraftModel"),
    ],
)
def test_drafter_configurations_that_are_refused(copy, name, changes, word):
    refused(open_drafter, copy(name, **changes), "config.json", word)


def test_heads_that_the_config_forgot_are_noticed(copy):
    folder = copy(DSPARK + "gated", markov_head_type="vanilla", enable_confidence_head=False)
    drafter = open_drafter(str(folder))
    with pytest.raises(UserError) as e:
        drafter.parameters(parameter_shapes.drafter(drafter.config))
    assert "markov_head.gate_proj.weight" in str(e.value)
    assert "confidence_head.proj.bias" in str(e.value)


def test_target_and_drafter_are_not_mixed_up(goldens):
    refused(open_target, goldens / "dflash_qwen3_tiny", "is a drafter")
    refused(open_target, goldens / (DSPARK + "rnn"), "is a drafter")
    refused(open_drafter, goldens / "llama_tiny", "is a target")


def test_missing_and_wrong_paths(tmp_path, goldens):
    for spec in ("", str(tmp_path / "nowhere"), "someone/some-model", "x" * 5000, "a\0b"):
        refused(open_target, spec, "there is no file or folder", "smollm2-135m")
        refused(open_drafter, spec, "there is no file or folder")
    refused(open_target, tmp_path, "config.json")
    refused(open_drafter, goldens / "llama_tiny" / "config.json", "is a file")
    refused(open_target, goldens / "llama_tiny" / "config.json", "GGUF")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\x00", '"text"'])
def test_malformed_config(copy, text):
    folder = copy("llama_tiny")
    (folder / "config.json").write_text(text)
    refused(open_target, folder, "config.json")


def test_pickles_are_never_opened(copy):
    folder = copy("llama_tiny")
    (folder / "model.safetensors").unlink()
    refused(open_target, folder, "neither model.safetensors nor")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(open_target, folder, "pytorch_model.bin", "pickles", "convert")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_safetensors(copy, keep):
    folder = copy("llama_tiny")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(open_target, folder, "model.safetensors", "fetch that file again")


def test_corrupt_safetensors_header(copy):
    folder = copy("llama_tiny")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for spoiled in (b"\xff" * 8 + data[8:], data[:8] + b"\x00" * 40 + data[48:], b"not a model at all"):
        file.write_bytes(spoiled)
        refused(open_target, folder, "fetch that file again")


def test_bad_shard_indexes(copy):
    folder = copy("qwen3_tiny")
    split(folder, 2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    where = good["weight_map"]
    first, second = sorted(set(where.values()))
    for weight_map, word in (
        ({}, "no weight_map"),
        (where | {"model.norm.weight": "gone.safetensors"}, "gone.safetensors"),
        (where | {"model.norm.weight": "../x.safetensors"}, "outside its folder"),
        (where | {"extra": first}, "lacks it"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(open_target, folder, word)
    index.write_text(json.dumps(good))
    (folder / second).unlink()
    refused(open_target, folder, second)


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


@pytest.mark.parametrize("rope", [{"rope_theta": 1e-300}, {"rope_theta": 1.0}, {"factor": 1e-320}])
def test_rotary_positions_that_overflow_are_refused(copy, rope):
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0} | rope
    with pytest.raises(UserError, match=f"{next(iter(rope))} is .*, but it must be a number above"):
        open_target(str(copy("llama_tiny", rope_parameters=parameters)))
