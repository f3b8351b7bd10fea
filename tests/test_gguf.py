"""GGUF files: written here with the `gguf` package as llama.cpp's converter would, read back, and damaged."""

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import parameter_shapes
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from jspark.checkpoint import describe, open_target
from jspark.checkpoint.gguf_file import GGUFFile
from jspark.config import RopeConfig
from jspark.errors import UserError

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
HEADS = {"attn_q": 4, "attn_k": 2}
GOLDEN = {"llama": "llama_tiny", "qwen3": "qwen3_tiny"}


def converted(folder: Path, arch: str, biases: bool = False) -> dict[str, np.ndarray]:
    """A golden's tensors under llama.cpp's names; q and k of llama interleaved for its rotary kernel."""
    out = {}
    tensors = load_file(folder / GOLDEN[arch] / "model.safetensors")
    if biases:
        for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
            for i in range(6):
                key = f"model.layers.{i}.self_attn.{name}.bias"
                tensors[key] = np.arange(heads * 16, dtype=np.float32) + i
    for name, array in tensors.items():
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        short = NAMES[stem]
        if arch == "llama" and short in HEADS:
            rows = array.reshape(HEADS[short], 2, 8, *array.shape[1:])
            array = rows.swapaxes(1, 2).reshape(array.shape)
        out[f"{prefix}{short}.{kind}"] = array
    return out


def write(
    path: Path,
    arch: str,
    tensors: dict[str, np.ndarray],
    kind: Kind = Kind.F32,
    meta=(),
    endian=gguf.GGUFEndian.LITTLE,
) -> Path:
    """The file; matrices as `kind`, vectors in F32, metadata of the goldens with `meta` over it."""
    writer = gguf.GGUFWriter(str(path), arch, endianess=endian)
    pairs = {
        "block_count": 6,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5 if arch == "llama" else 1e-6,
        "rope.freq_base": 1e5 if arch == "llama" else 1e6,
        "rope.dimension_count": 16,
    }
    if arch == "qwen3":
        pairs |= {"attention.key_length": 16, "attention.value_length": 16}
    for key, value in ({f"{arch}.{k}": v for k, v in pairs.items()} | dict(meta)).items():
        add(writer, key, value)
    for name, array in tensors.items():
        if array.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value) -> None:
    match value:
        case None:
            pass
        case _ if key == "general.alignment":
            writer.add_custom_alignment(value)
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


@pytest.fixture
def made(goldens, tmp_path):
    """Writes the golden of an architecture as GGUF, with changes to tensors, metadata and element type."""

    def make(arch: str, kind: Kind = Kind.F32, extra=None, drop=(), biases=False, **meta) -> Path:
        tensors = converted(goldens, arch, biases) | (extra or {})
        tensors = {k: v for k, v in tensors.items() if k not in drop}
        return write(
            tmp_path / f"{arch}.gguf", arch, tensors, kind, {k.replace("__", "."): v for k, v in meta.items()}
        )

    return make


def arrays(target) -> dict[str, np.ndarray]:
    return dict(target.parameters(parameter_shapes.decoder(target.config)))


@pytest.mark.parametrize("arch", GOLDEN)
def test_float32_round_trip_is_bit_exact(goldens, made, arch):
    want, got = open_target(str(goldens / GOLDEN[arch])), open_target(str(made(arch)))
    assert got.config == want.config
    theirs, ours = arrays(want), arrays(got)
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize("arch", GOLDEN)
@pytest.mark.parametrize(
    ("kind", "error"), [(Kind.F16, 1e-3), (Kind.BF16, 5e-3), (Kind.Q8_0, 1e-2), (Kind.Q4_0, 0.13)]
)
def test_smaller_types_load_close_to_the_original(goldens, made, arch, kind, error):
    want, got = arrays(open_target(str(goldens / GOLDEN[arch]))), arrays(open_target(str(made(arch, kind))))
    for name, array in got.items():
        assert array.dtype == np.float32 or kind in (Kind.F16, Kind.BF16)
        scale = np.abs(want[name]).max()
        assert np.abs(array.astype(np.float32) - want[name]).max() <= error * scale, name


def test_biases_of_llama_are_put_back_in_order(made):
    target = open_target(str(made("llama", biases=True)))
    assert target.config.qkv_bias
    assert not target.config.output_bias
    got = arrays(target)
    np.testing.assert_array_equal(got["layers.2.attn.q.bias"], np.arange(64) + 2)
    np.testing.assert_array_equal(got["layers.2.attn.k.bias"], np.arange(32) + 2)


@pytest.mark.parametrize("name", [k.name for k in Kind if k.name[0] not in "I" or k.name.startswith("IQ")])
def test_every_type_is_either_dequantised_or_refused_before_reading(goldens, tmp_path, name):
    kind = Kind[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 60, (4, 256 // block * size), np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "one.gguf"), "llama")
    writer.add_tensor("x", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "one.gguf")
    assert file.infos["x"].shape == (4, 256)
    try:
        want = dequantize(rows, kind)
    except NotImplementedError:
        assert not file.readable("x") or kind in (Kind.F64, Kind.F16)
        return
    assert file.readable("x")
    np.testing.assert_array_equal(file.read("x").astype(np.float32), want.reshape(4, 256))


def test_metadata_agrees_with_the_gguf_package(made):
    path = made("qwen3", general__tags=["a", "é"], tokenizer__ggml__token_type=[3, 1, 4], general__alignment=64)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.read(tensor.name), tensor.data)


def test_a_folder_with_one_file_is_enough(made, tmp_path):
    path = made("llama")
    assert open_target(str(tmp_path)).config == open_target(str(path)).config
    shutil.copy(path, tmp_path / "second.gguf")
    with pytest.raises(UserError, match="2 GGUF files"):
        open_target(str(tmp_path))


@pytest.mark.parametrize(
    ("meta", "want"),
    [
        ({"scaling.type": "none"}, RopeConfig(theta=1e5)),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, RopeConfig("linear", 1e5, 2.0)),
        ({"scale_linear": 2.0}, RopeConfig("linear", 1e5, 2.0)),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128},
            RopeConfig("yarn", 1e5, 4.0, original_max_position=128),
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 1.0},
            RopeConfig("yarn", 1e5, 4.0, original_max_position=512),
        ),
    ],
)
def test_rope_metadata(made, meta, want):
    path = made("llama", **{"llama.rope." + k: v for k, v in meta.items()})
    assert open_target(str(path)).config.rope == want


def llama3_factors(factor: float, original: float = 8192.0) -> np.ndarray:
    """The divisors as the converter computes them, one frequency at a time."""
    out = []
    for i in range(8):
        wavelength = 2 * np.pi * 1e5 ** (2 * i / 16)
        if wavelength < original / 4:
            out.append(1.0)
        elif wavelength > original:
            out.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_factors(made, factor):
    target = open_target(str(made("llama", extra={"rope_freqs.weight": llama3_factors(factor)})))
    assert target.config.rope == RopeConfig("llama3", 1e5, factor, 1.0, 4.0, 8192)
    arrays(target)


def test_other_rotary_factors_are_refused(made):
    for factors in (llama3_factors(8.0, 4096.0), np.full(8, np.nan, np.float32), np.ones(3, np.float32)):
        with pytest.raises(UserError, match="rope_freqs"):
            open_target(str(made("llama", extra={"rope_freqs.weight": factors})))


def test_end_tokens_and_vocabulary_size(made):
    path = made("llama", tokenizer__ggml__eos_token_id=5, tokenizer__ggml__eot_token_id=9)
    target = open_target(str(path))
    assert target.config.eos_token_ids == (5, 9)
    assert target.config.vocab_size == 320


@pytest.mark.parametrize(
    ("meta", "word"),
    [
        ({"general.architecture": "gemma"}, "gemma"),
        ({"split.count": 3}, "split"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 8}, "partial rotary"),
        ({"llama.attention.value_length": 8}, "value heads"),
        ({"llama.attention.sliding_window": 128}, "sliding-window"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling.factor is missing"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "cannot share 3"),
        ({"llama.attention.head_count_kv": [2, 2, 2, 2, 2, 1]}, "head_count_kv"),
        ({"llama.block_count": 2**31}, "block_count"),
        ({"llama.context_length": "long"}, "context_length"),
        ({"tokenizer.ggml.eos_token_id": 320}, "eos_token_id"),
    ],
)
def test_settings_that_are_refused(made, meta, word):
    with pytest.raises(UserError, match=word) as e:
        open_target(str(made("llama", **meta)))
    assert "llama.gguf" in str(e.value)


def test_missing_keys_and_tensors(made):
    with pytest.raises(UserError, match=r"llama\.embedding_length is missing"):
        open_target(str(made("llama", llama__embedding_length=None)))
    with pytest.raises(UserError, match=r"token_embd\.weight"):
        open_target(str(made("llama", drop=["token_embd.weight"])))
    with pytest.raises(UserError, match=r"missing layers\.3\.mlp\.up\.kernel, norm\.scale"):
        arrays(open_target(str(made("llama", drop=["blk.3.ffn_up.weight", "output_norm.weight"]))))
    with pytest.raises(UserError, match=r"not used by this configuration: blk\.6\.attn_q\.weight"):
        arrays(open_target(str(made("llama", extra={"blk.6.attn_q.weight": np.zeros((64, 64), np.float32)}))))
    with pytest.raises(UserError, match="stored as I32"):
        arrays(open_target(str(made("llama", extra={"output_norm.weight": np.zeros(64, np.int32)}))))


def test_equal_numbers_for_every_layer_are_one_number(made):
    target = open_target(str(made("llama", **{"llama.attention.head_count_kv": [2] * 6})))
    assert target.config.num_kv_heads == 2


def test_damaged_files_are_refused_in_one_sentence(made, tmp_path):
    data = made("llama").read_bytes()
    bad = tmp_path / "bad.gguf"
    cases = {
        "empty": b"",
        "does not begin with GGUF": b"GGML" + data[4:],
        "big-endian": data[:4] + struct.pack(">I", 3) + data[8:],
        "version 1": data[:4] + struct.pack("<I", 1) + data[8:],
        "ends within its header": data[:16] + struct.pack("<Q", 2**60) + data[24:],
        "beyond the end of the file": data[:-5000],
    }
    for words, content in cases.items():
        bad.write_bytes(content)
        with pytest.raises(UserError, match=words) as e:
            open_target(str(bad))
        assert "\n" not in str(e.value)


def test_big_endian_files_are_refused(goldens, tmp_path):
    path = write(tmp_path / "big.gguf", "llama", converted(goldens, "llama"), endian=gguf.GGUFEndian.BIG)
    with pytest.raises(UserError, match="big-endian"):
        open_target(str(path))


def test_an_unknown_tensor_type_is_refused(made):
    path = made("llama")
    data = path.read_bytes()
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    path.write_bytes(data[:at] + struct.pack("<I", 999) + data[at + 4 :])
    with pytest.raises(UserError, match="tensor type 999"):
        open_target(str(path))


def test_no_damage_escapes_as_anything_but_a_user_error(made, tmp_path, rng):
    data = made("llama", tokenizer__ggml__tokens=["a", "b"], general__name="x").read_bytes()
    header = data.index(b"output_norm.weight") + 64
    bad = tmp_path / "bad.gguf"
    survived = 0
    for trial in range(400):
        spoiled = bytearray(data)
        if trial % 4 == 0:
            del spoiled[int(rng.integers(header)) :]
        for at in rng.integers(0, header, 3):
            if at < len(spoiled):
                spoiled[at] = rng.integers(256)
        bad.write_bytes(spoiled)
        try:
            arrays(open_target(str(bad)))
            survived += 1
        except UserError:
            continue
    assert survived < 400


def test_describe_counts_quantised_parameters(made):
    facts = describe(str(made("llama", Kind.Q8_0)))
    assert facts["format"] == "gguf"
    assert set(facts["dtypes"]) == {"Q8_0", "F32"}
    assert facts["parameters"] == sum(facts["dtypes"].values())
    assert facts["dtypes"]["F32"] == 64 * 13
    assert "no vocabulary" in facts["tokenizer"]
