"""Drafters written to folders: nothing is lost on the way, and nothing of the user's is."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import parameter_shapes
import pytest
from safetensors.numpy import load_file, save_file
from support import LAYOUTS, drafter, mesh

from jspark.checkpoint import open_drafter
from jspark.checkpoint.export import export_drafter
from jspark.cli import main
from jspark.config import RopeConfig
from jspark.errors import UserError
from jspark.models.drafter import Drafter
from jspark.weights import random_drafter

DRAFTERS = sorted(p.name for p in (Path(__file__).parent / "goldens").glob("*_qwen3_tiny*"))
TRAINED = "dspark_qwen3_tiny_vanilla_trained"


def load(checkpoint) -> dict[str, np.ndarray]:
    return dict(checkpoint.parameters(parameter_shapes.drafter(checkpoint.config)))


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    assert all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


def refused(source, folder, *words: str, **options) -> None:
    with pytest.raises(UserError) as e:
        export_drafter(source, folder, **options)
    message = str(e.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_comes_back_bit_for_bit(goldens, tmp_path, name):
    source = open_drafter(str(goldens / name))
    written = export_drafter(source, tmp_path / "out")
    again = open_drafter(str(tmp_path / "out"))
    assert again.config == source.config == written
    assert again.target_layers == source.target_layers == 6
    same(load(again), load(source))
    # The reference implementation's own names.
    same(load_file(tmp_path / "out" / "model.safetensors"), load_file(goldens / name / "model.safetensors"))
    keys = json.loads((tmp_path / "out" / "config.json").read_text())
    golden = json.loads((goldens / name / "config.json").read_text())
    assert {k: golden[k] for k in keys if k in golden and k != "rope_parameters"} == {
        k: v for k, v in keys.items() if k in golden and k != "rope_parameters"
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["dspark_qwen3_tiny_rnn", "dflash_qwen3_tiny"])
def test_a_drafter_on_devices_is_written_from_every_layout(tmp_path, monkeypatch, name, layout):
    monkeypatch.setattr("jspark.weights.layout", lambda mesh, scanned=False: layout)
    _, config = drafter(name)
    model = random_drafter(config, jnp.float32, mesh(), 1)
    export_drafter((model, config), tmp_path / "out")
    again = open_drafter(str(tmp_path / "out"))
    assert again.config == config
    arrays = load(again)
    assert isinstance(model, Drafter)
    attn = model.layers.layer(1).attn
    assert attn.q is not None
    if attn.kv is None:
        assert attn.v is not None
        values = attn.v.kernel[...]
    else:
        values = attn.kv.kernel[...][:, attn.kv.widths[0] :]
    np.testing.assert_array_equal(arrays["layers.1.attn.q.kernel"], attn.q.kernel[...])
    np.testing.assert_array_equal(arrays["layers.1.attn.v.kernel"], values)
    np.testing.assert_array_equal(arrays["fc.kernel"], model.fc.kernel[...])


def test_what_is_shared_with_the_target_is_not_written(tmp_path):
    model, config = drafter(TRAINED)
    assert config.own_embedding
    assert model.embed is None
    written = export_drafter((model, config), tmp_path / "out")
    assert (written.own_embedding, written.own_head) == (False, False)
    assert open_drafter(str(tmp_path / "out")).config == written
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "out" / "model.safetensors").keys()


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig("linear", 5e5, 4.0),
        RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192),
        RopeConfig("yarn", 5e5, 4.0, 1.0, 4.0, 128, 16.0, 2.0, 1.25, 1.0, 0.5, False),
        RopeConfig("yarn", 5e5, 4.0, original_max_position=128),
    ],
)
def test_settings_that_the_goldens_lack(tmp_path, rope):
    _, config = drafter(TRAINED)
    changed = {"rope": rope, "qkv_bias": True, "output_bias": True, "eos_token_ids": (3, 5)}
    config = replace(config, backbone=replace(config.backbone, **changed))
    export_drafter((random_drafter(config, jnp.float32, mesh()), config), tmp_path / "out")
    again = open_drafter(str(tmp_path / "out"))
    assert again.config == config
    load(again)
    # The spelling of transformers 4 says the same.
    file = tmp_path / "out" / "config.json"
    values = json.loads(file.read_text())
    del values["rope_parameters"]
    file.write_text(json.dumps(values))
    assert open_drafter(str(tmp_path / "out")).config == config


def test_convert(goldens, tmp_path, capsys):
    config = json.loads((goldens / TRAINED / "config.json").read_text())
    ids = config.pop("target_layer_ids")
    own = {k: config.pop(k) for k in ("block_size", "mask_token_id", "markov_rank")}
    folder = tmp_path / "speculators"
    folder.mkdir()
    values = own | {
        "speculators_model_type": "dspark",
        "transformer_layer_config": config,
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
    }
    (folder / "config.json").write_text(json.dumps(values))
    save_file(load_file(goldens / TRAINED / "model.safetensors"), folder / "model.safetensors")
    out = tmp_path / "new" / "out"
    assert main(["convert", str(folder), str(out)]) == 2
    assert "--draft-anchor-predicts" in capsys.readouterr().err
    assert not out.parent.exists()
    assert main(["convert", str(folder), str(out), "--draft-anchor-predicts", "yes"]) == 0
    assert "from the dialect speculators to deepspec" in capsys.readouterr().out
    want = open_drafter(str(goldens / TRAINED))
    assert open_drafter(str(out)).config == want.config
    same(load(open_drafter(str(out))), load(want))
    assert main(["convert", str(out), str(out), "--dtype", "bfloat16"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["convert", str(out), str(out), "--dtype", "bfloat16", "--overwrite"]) == 0
    half = load(open_drafter(str(out)))
    same(half, {k: v.astype(ml_dtypes.bfloat16) for k, v in load(want).items()})
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_is_made_like_any_other_and_alone(goldens, tmp_path):
    (tmp_path / "out").mkdir()
    export_drafter(open_drafter(str(goldens / TRAINED)), tmp_path / "out")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").touch()
    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()}
    assert modes == {stat.S_IMODE((plain / "file").stat().st_mode)}
    assert {p.name for p in tmp_path.iterdir()} == {"out", "plain"}


def test_nothing_of_the_users_is_replaced(goldens, tmp_path):
    source = open_drafter(str(goldens / TRAINED))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("important")
    refused(source, folder, "not empty")
    refused(source, folder, "notes.txt", "not replaced", overwrite=True)
    refused(source, folder / "notes.txt", "cannot be written", overwrite=True)
    refused(source, folder / "notes.txt" / "below", "cannot be written")
    refused(source, Path("a\0b"), "cannot be written")
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "notes.txt"]
    assert (folder / "notes.txt").read_text() == "important"


def test_a_failure_leaves_the_old_drafter_in_place(goldens, tmp_path, monkeypatch):
    source = open_drafter(str(goldens / TRAINED))
    export_drafter(source, tmp_path / "out")
    rename = Path.rename

    def failing(self, to):
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, to)

    with monkeypatch.context() as m:
        m.setattr(Path, "rename", failing)
        other = open_drafter(str(goldens / "dflash_qwen3_tiny"))
        refused(other, tmp_path / "out", "No space left", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    same(load(open_drafter(str(tmp_path / "out"))), load(source))


def test_drafters_that_cannot_be_said(goldens, tmp_path):
    checkpoint = open_drafter(str(goldens / TRAINED))
    b = checkpoint.config.backbone
    for change, words in (
        ({"draft_vocab_size": 100}, ("drafts only 100 of 320",)),
        ({"predicts_from_anchor": False}, ("heads", "anchor")),
        ({"backbone": replace(b, qk_norm=False)}, ("another kind than Qwen3's",)),
        ({"backbone": replace(b, mlp_bias=True)}, ("another kind",)),
        ({"backbone": replace(b, qkv_bias=True)}, ("another kind",)),
    ):
        refused(replace(checkpoint, config=replace(checkpoint.config, **change)), tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_a_file_that_does_not_fit_its_configuration_is_not_exported(goldens, tmp_path):
    checkpoint = open_drafter(str(goldens / TRAINED))
    wrong = replace(checkpoint, config=replace(checkpoint.config, markov="gated"))
    refused(wrong, tmp_path / "out", "missing", "markov.gate.kernel")
