"""Hugging Face folders that are refused, each in one sentence."""

import json

import numpy as np
import parameter_shapes
import pytest
from folders import DSPARK, LLAMA3, edit, refused, split

from jspark.checkpoint import open_drafter, open_target
from jspark.errors import UserError


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
        (DSPARK + "vanilla", {"architectures": ["LlamaForCausalLMMedusa"]}, "LlamaForCausalLMMedusa"),
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
        refused(open_target, spec, "there is no file or folder", "pass a local")
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


@pytest.mark.parametrize("rope", [{"rope_theta": 1e-300}, {"rope_theta": 1.0}, {"factor": 1e-320}])
def test_rotary_positions_that_overflow_are_refused(copy, rope):
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0} | rope
    with pytest.raises(UserError, match=f"{next(iter(rope))} is .*, but it must be a number above"):
        open_target(str(copy("llama_tiny", rope_parameters=parameters)))
