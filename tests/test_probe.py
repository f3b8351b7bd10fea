"""What is said at load about drafters that will not do: drafts never accepted, another target, a short range."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import GOLDENS, drafter, make_engine, target

from jspark.budget import Fixed
from jspark.checkpoint import open_drafter
from jspark.cli import main
from jspark.config import EngineConfig
from jspark.errors import JsparkWarning, UserError
from jspark.llm import LLM
from jspark.loading import load_target
from jspark.probe import other_readings

TARGET, TRAINED, DFLASH = "qwen3_tiny", "dspark_qwen3_tiny_vanilla_trained", "dflash_qwen3_tiny_trained"
SIZES: dict[str, Any] = {
    "max_running_requests": 1,
    "page_size": 16,
    "context_length": 96,
    "chunked_prefill_size": 16,
}


@pytest.fixture(scope="module")
def whole():
    return load_target(str(GOLDENS / TARGET))


@pytest.fixture
def rewrite(tmp_path):
    """A golden drafter with changes to config.json, in the form of speculators if `wrap` is given."""

    def make(name: str, wrap: dict | None = None, **changes) -> Path:
        config = json.loads((GOLDENS / name / "config.json").read_text()) | changes
        if wrap is not None:
            ids = config.pop("target_layer_ids")
            own = {k: config.pop(k) for k in ("block_size", "mask_token_id", "markov_rank", "markov_head_type")}
            own |= {k: config.pop(k) for k in ("enable_confidence_head", "confidence_head_with_markov")}
            config = own | {
                "speculators_model_type": "dspark",
                "transformer_layer_config": config,
                "aux_hidden_state_layer_ids": [i + 1 for i in ids],
            }
            config |= wrap
        folder = tmp_path / "draft"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        shutil.copy(GOLDENS / name / "model.safetensors", folder)
        return folder

    return make


def warned(run) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in seen if w.category is JsparkWarning]


@pytest.mark.parametrize("name", [DFLASH, pytest.param("eagle3_qwen3_tiny_trained", marks=pytest.mark.slow)])
def test_a_good_drafter_passes_in_silence(whole, name):
    llm = LLM(whole, str(GOLDENS / name), policy="fixed:0", **SIZES)
    assert llm.engine.idle
    assert llm.engine.policy == Fixed(0), "the user's policy is back"


def test_the_other_anchor_convention_is_named(whole, rewrite, capsys):
    folder = rewrite(DFLASH, sample_from_anchor=True)
    assert warned(lambda: LLM(whole, str(folder), draft_probe=False, **SIZES)) == []
    command = ["generate", "--model-path", str(GOLDENS / TARGET), "--token-ids", "5,6", "--max-new-tokens", "2"]
    command += ["--speculative-draft-model-path", str(folder)]
    command += [f for k, v in SIZES.items() for f in ("--" + k.replace("_", "-"), str(v))]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(command) == 0
    error = capsys.readouterr().err
    assert error.startswith("jspark: warning: the drafter brings 1.")
    assert "probably made with sample_from_anchor false, or --draft-anchor-predicts no" in error
    assert sum("warning" in line for line in error.splitlines()) == 1


def test_layers_off_by_one_are_tried_where_the_target_has_them():
    config, whole = drafter(TRAINED)[1], target(TARGET)[1]
    assert config.target_layer_ids == (1, 3, 4)
    tried = dict(other_readings(config, whole))
    assert [c.target_layer_ids for c in tried.values()] == [(1, 3, 4), (0, 2, 3)]
    tried = dict(other_readings(replace(config, target_layer_ids=(-1, 2), markov="rnn"), whole))
    assert [c.target_layer_ids for c in tried.values()] == [(0, 3)]


def test_an_untrained_drafter_fits_no_reading(whole):
    message = "\n".join(warned(lambda: LLM(whole, str(GOLDENS / "dspark_qwen3_tiny_rnn"), **SIZES)))
    assert "other readings of its configuration do no better" in message
    assert "decode without it" in message


def test_the_range_of_rotary_positions(tmp_path, rewrite):
    config = EngineConfig(max_running_requests=1, context_length=96)
    short = drafter(str(rewrite(TRAINED, max_position_embeddings=64)))
    with pytest.warns(JsparkWarning, match="reach 64 tokens and the context holds 96"):
        make_engine(config, target(TARGET), short)
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
    shutil.rmtree(tmp_path / "draft")
    folder = rewrite(TRAINED, max_position_embeddings=64, rope_parameters=rope)
    assert open_drafter(str(folder)).config.backbone.reach == 128


def test_the_target_that_a_drafter_was_made_for(rewrite, tmp_path):
    def load(**verifier):
        shutil.rmtree(tmp_path / "draft", ignore_errors=True)
        wrap = {"sample_from_anchor": True, "speculators_config": {"algorithm": "dspark", "verifier": verifier}}
        verifier = open_drafter(str(rewrite(TRAINED, wrap))).verifier
        assert verifier is not None
        return verifier

    config = target(TARGET)[1]
    right = {"name_or_path": "somewhere/Qwen3-Tiny", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}
    assert warned(lambda: load(**right).compare(TARGET, config)) == []
    assert warned(lambda: load(hidden_size=64).compare(TARGET, config)) == []
    name = warned(lambda: load(**right | {"name_or_path": "somewhere/Llama-9"}).compare(TARGET, config))
    assert "made for somewhere/Llama-9" in name[0]
    kind = warned(lambda: load(**right | {"architectures": ["LlamaForCausalLM"]}).compare(TARGET, config))
    assert "LlamaForCausalLM, and the target is qwen3_tiny (qwen3)" in kind[0]
    with pytest.raises(UserError, match="num_hidden_layers 7, and here it is 6"):
        load(**right | {"num_hidden_layers": 7}).compare(TARGET, config)
