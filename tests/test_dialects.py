"""Drafters as SpecForge and speculators write them: what they mean, and what is refused with a reason."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import parameter_shapes
import pytest
from safetensors.numpy import load_file, save_file
from support import Result, drafter, make_engine, mesh, prompts, run, target

from jspark.checkpoint import describe, open_drafter
from jspark.cli import main
from jspark.config import EngineConfig
from jspark.engine import Engine
from jspark.errors import UserError
from jspark.llm import LLM
from jspark.loading import find_drafter
from jspark.request import Request, SamplingParams
from jspark.weights import load_drafter

DSPARK = "dspark_qwen3_tiny_"
TRAINED = DSPARK + "vanilla_trained"
DFLASH = "dflash_qwen3_tiny"
HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
#: What a drafter's config.json has beside the backbone's keys.
OWN_KEYS = (*HEAD_KEYS, "block_size", "mask_token_id", "target_layer_ids", "num_anchors", "dflash_config")
OWN_KEYS += ("architectures", "num_target_layers")


def specforge(config: dict) -> dict:
    nested = {key: config.pop(key) for key in (*HEAD_KEYS, "mask_token_id", "target_layer_ids") if key in config}
    nested |= {"projector_type": "dspark", "confidence_head_alpha": 1.0, "attention_mode": "gqa"}
    return config | {"architectures": ["DSparkDraftModel"], "dflash_config": nested}


def specforge_as_dflash(config: dict) -> dict:
    return specforge(config) | {"architectures": ["DFlashDraftModel"]}


def specforge_by_rank(config: dict) -> dict:
    """Keys of one meaning in four places, of which the first in SGLang's order counts."""
    made = specforge_as_dflash(config)
    nested = made.pop("dflash_config")
    wrong = dict.fromkeys(nested, 1) | {"projector_type": "domino"}
    first = {"dspark_" + key: nested.pop(key) for key in ("mask_token_id", "target_layer_ids")}
    return made | first | {"dspark_config": nested, "dflash_config": wrong, "mask_token_id": 2}


def specforge_flat(config: dict) -> dict:
    made = specforge_as_dflash(config)
    return made | made.pop("dflash_config")


def speculators(config: dict) -> dict:
    own = {key: config.pop(key) for key in OWN_KEYS if key in config}
    own |= own.pop("dflash_config", {})
    kind = "dspark" if "markov_rank" in own else "dflash"
    ids = own.pop("target_layer_ids")
    return own | {
        # The class that wrote it, which is also the name of SpecForge's.
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "somewhere/qwen3"},
        },
        "transformer_layer_config": config,
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "draft_vocab_size": 320,
        "sample_from_anchor": kind == "dspark",
        "target_hidden_size": None,
    }


WRITERS = {
    "specforge": (specforge, "specforge", ""),
    "specforge as DFlash": (specforge_as_dflash, "specforge", ""),
    "specforge, keys by rank": (specforge_by_rank, "specforge", ""),
    "specforge, keys on the top level": (specforge_flat, "specforge", ""),
    "specforge's older names": (specforge, "specforge", "logit_head."),
    "speculators": (speculators, "speculators", ""),
}


@pytest.fixture
def rewrite(goldens, tmp_path):
    """A golden in another dialect. Changes to the top level of config.json; None deletes a key."""

    def make(name: str, writer=speculators, head_prefix: str = "", tensors=None, **changes) -> Path:
        folder = tmp_path / f"drafter{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        config = writer(json.loads((goldens / name / "config.json").read_text())) | changes
        config = {k: v for k, v in config.items() if k not in changes or v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        stored = load_file(goldens / name / "model.safetensors")
        renamed = {(head_prefix + k if "_head." in k and "lm_head" not in k else k): v for k, v in stored.items()}
        save_file(renamed if tensors is None else tensors(renamed), folder / "model.safetensors")
        return folder

    return make


def refused(folder, *words: str, anchor_predicts: bool | None = None) -> None:
    with pytest.raises(UserError) as e:
        open_drafter(str(folder), anchor_predicts)
    message = str(e.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


def same_parameters(a, b) -> None:
    want = dict(a.parameters(parameter_shapes.drafter(a.config)))
    got = dict(b.parameters(parameter_shapes.drafter(b.config)))
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("written", WRITERS)
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "vanilla_b5", "nomarkov"])
def test_dspark_is_the_same_in_every_dialect(goldens, rewrite, kind, written):
    writer, dialect, head_prefix = WRITERS[written]
    want = open_drafter(str(goldens / (DSPARK + kind)))
    got = open_drafter(str(rewrite(DSPARK + kind, writer, head_prefix)))
    assert got.config == replace(want.config, dialect=dialect)
    same_parameters(want, got)


def test_dflash_of_speculators(goldens, rewrite):
    want = open_drafter(str(goldens / DFLASH))
    for changes in ({}, {"sample_from_anchor": None}):
        got = open_drafter(str(rewrite(DFLASH, **changes)))
        assert got.config == replace(want.config, dialect="speculators")
        same_parameters(want, got)
    assert open_drafter(str(rewrite(DFLASH, sample_from_anchor=True))).config.block_size == 8


def test_layer_ids_of_speculators_count_the_embedding(goldens, rewrite):
    folder = rewrite(DSPARK + "vanilla_b5")
    assert json.loads((folder / "config.json").read_text())["aux_hidden_state_layer_ids"] == [0, 3, 5]
    assert open_drafter(str(folder)).config.target_layer_ids == (-1, 2, 4)
    refused(rewrite(DSPARK + "vanilla", aux_hidden_state_layer_ids=[-1, 2]), "aux_hidden_state_layer_ids")


def test_absent_keys_mean_what_the_writer_means_by_them(rewrite):
    folder = rewrite(TRAINED, **dict.fromkeys((*HEAD_KEYS, "draft_vocab_size")) | {"markov_rank": 16})
    config = open_drafter(str(folder)).config
    assert (config.markov, config.markov_rank, config.confidence) == ("vanilla", 16, "hidden+markov")


def test_tensors_of_the_target_are_ignored(rewrite):
    extra = {"verifier_lm_head.weight": np.zeros((320, 64), np.float32), "verifier_norm.weight": np.ones(64)}
    checkpoint = open_drafter(str(rewrite(TRAINED, tensors=lambda t: t | extra)))
    checkpoint.parameters(parameter_shapes.drafter(checkpoint.config))
    other = open_drafter(str(rewrite(TRAINED, specforge, tensors=lambda t: t | extra)))
    with pytest.raises(UserError, match="verifier_norm"):
        other.parameters(parameter_shapes.drafter(other.config))


def test_nobody_guesses_whether_the_anchor_predicts(rewrite):
    folder = rewrite(DSPARK + "vanilla", sample_from_anchor=None)
    refused(folder, "config.json", "sample_from_anchor is missing", "--draft-anchor-predicts yes|no")
    yes, no = (open_drafter(str(folder), answer).config for answer in (True, False))
    assert (yes.predicts_from_anchor, yes.block_size, yes.block_rows) == (True, 7, 7)
    assert (no.predicts_from_anchor, no.block_size, no.block_rows) == (False, 6, 7)
    for answer in (True, False):
        draft = find_drafter(str(folder), None, answer)
        assert draft is not None
        assert draft.algorithm == "DSPARK"
        assert describe(str(folder), answer)["predicts_from_anchor"] is answer
    rnn = rewrite(DSPARK + "rnn", sample_from_anchor=None)
    assert open_drafter(str(rnn), True).config.markov == "rnn"
    refused(rnn, "markov_head_type", "does not predict from the anchor", anchor_predicts=False)


def test_the_flag_does_not_overrule_the_checkpoint(goldens, rewrite):
    refused(goldens / TRAINED, "predicts from the anchor", "drop the flag", anchor_predicts=False)
    refused(goldens / DFLASH, "does not predict", "--draft-anchor-predicts yes", anchor_predicts=True)
    refused(rewrite(TRAINED, specforge), "predicts", anchor_predicts=False)
    refused(rewrite(TRAINED), "predicts", anchor_predicts=False)
    refused(rewrite(TRAINED, sample_from_anchor=False), "does not", anchor_predicts=True)
    refused(rewrite(TRAINED, sample_from_anchor="yes"), "sample_from_anchor is 'yes'")
    for spec in (None, "untrained"):
        with pytest.raises(UserError, match="draft_anchor_predicts"):
            find_drafter(spec, None, True)


def test_the_answer_can_be_given_to_every_command(goldens, rewrite, capsys):
    folder = str(rewrite(TRAINED, sample_from_anchor=None))
    generate = ["generate", "--model-path", str(goldens / "qwen3_tiny"), "--token-ids", "5,6"]
    generate += ["--speculative-draft-model-path"]
    for command in (["info", folder], [*generate, folder]):
        assert main(command) == 2
        assert "--draft-anchor-predicts yes|no" in capsys.readouterr().err
    assert main(["info", folder, "--json", "--draft-anchor-predicts", "no"]) == 0
    assert json.loads(capsys.readouterr().out)["block_size"] == 6
    assert main([*generate, str(goldens / TRAINED), "--draft-anchor-predicts", "no"]) == 2
    assert "drop the flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "writer", "changes", "word"),
    [
        (TRAINED, specforge, {"architectures": ["DSparkDraftModel2"]}, "DSparkDraftModel2"),
        (TRAINED, specforge, {"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino'"),
        (TRAINED, specforge_as_dflash, {"dflash_config": {"projector_type": ["dspark"]}}, "projector_type"),
        (TRAINED, specforge, {"is_causal": True}, "is_causal"),
        (TRAINED, specforge, {"dflash_config": {"attention_mode": "mla"}}, "attention_mode"),
        (TRAINED, specforge, {"dflash_config": {"attention_modes": ["gqa", "kda"]}}, "attention_modes"),
        (TRAINED, specforge, {"dflash_config": {"attention_modes": "gqa"}}, "attention_modes"),
        (TRAINED, specforge, {"dflash_config": {"mask_token_id": 3}}, "target_layer_ids"),
        (TRAINED, speculators, {"speculators_model_type": "dflash2"}, "speculators_model_type 'dflash2'"),
        (TRAINED, speculators, {"speculators_model_type": ["dspark"]}, "speculators_model_type"),
        (TRAINED, speculators, {"speculators_config": {"algorithm": "eagle3"}}, "algorithm is 'eagle3'"),
        (TRAINED, speculators, {"transformer_layer_config": None}, "transformer_layer_config"),
        (TRAINED, speculators, {"transformer_layer_config": {}}, "num_attention_heads is missing"),
        (TRAINED, speculators, {"mask_token_id": None}, "mask_token_id is missing"),
        (TRAINED, speculators, {"draft_vocab_size": 321}, "draft_vocab_size is 321"),
        (TRAINED, speculators, {"draft_vocab_size": 100}, "no tensor d2t"),
        (TRAINED, speculators, {"block_size": 1, "sample_from_anchor": False}, "block_size is 1"),
        (DFLASH, speculators, {"projector_type": "domino"}, "projector_type is 'domino'"),
        (DFLASH, lambda c: c, {"dflash_config": {"mask_token_id": 3, "shift_label": True}}, "shift_label"),
    ],
)
def test_variants_that_are_refused(rewrite, name, writer, changes, word):
    refused(rewrite(name, writer, **changes), "config.json", word)


# ── through the engine ────────────────────────────────────────────────────────────────────────────────────────


def engine(checkpoint=None) -> Engine:
    """With the drafter that `support` loads, or with one from a folder."""
    model, config = target("qwen3_tiny")
    draft = drafter(TRAINED)
    if checkpoint is not None:
        draft = load_drafter(checkpoint, checkpoint.config, jnp.float32, mesh(), model), checkpoint.config
    settings = EngineConfig(
        max_running_requests=2,
        page_size=8,
        context_length=96,
        chunked_prefill_size=16,
        row_buckets=(2,),
        token_tiers=(32,),
    )
    return make_engine(settings, (model, config), draft)


def figures(results: list[Result]) -> list:
    return [(r.tokens, r.reason, r.stats.steps, r.stats.accepted) for r in results]


GREEDY = SamplingParams(temperature=0, max_tokens=40)


def request(params: SamplingParams = GREEDY, index: int = 0) -> Request:
    """One at a time, and prompts within a chunk: every further shape of a batch is compiled for seconds."""
    return Request(index, prompts(TRAINED)[index][:16], params)


class Drafts:
    """An engine's own programs; keeps which tokens were drafted for rows in use."""

    def __init__(self, engine: Engine):
        self.programs = engine.programs
        self.seen: set[int] = set()
        engine.programs = self  # type: ignore[assignment]

    def __getattr__(self, name):
        return getattr(self.programs, name)

    def propose(self, *args):
        pools, proposal = self.programs.propose(*args)
        self.seen |= set(np.asarray(proposal.tokens).ravel().tolist())
        return pools, proposal


@pytest.fixture(scope="module")
def whole():
    """(what the golden drafter's requests gave, the tokens it drafted)."""
    e = engine()
    drafts = Drafts(e)
    return run(e, [request()]), drafts.seen


@pytest.mark.parametrize("writer", [specforge, speculators])
def test_the_engine_does_the_same_in_every_dialect(rewrite, whole, writer):
    results = run(engine(open_drafter(str(rewrite(TRAINED, writer)))), [request()])
    assert figures(results) == figures(whole[0])
    assert len(results[0].tokens) > 1.5 * results[0].stats.steps


def narrowed(ids: np.ndarray, head: bool = True):
    """Output rows of `ids` alone, with the maps; without the head, the target's is masked instead."""

    def change(tensors: dict) -> dict:
        kept = np.zeros(320, bool)
        kept[ids] = True
        names = ["markov_head.markov_w2.weight", "lm_head.weight"]
        tensors = tensors | {n: np.ascontiguousarray(tensors[n][ids]) for n in names}
        if not head:
            del tensors["lm_head.weight"]
        return tensors | {"d2t": ids - np.arange(len(ids)), "t2d": kept}

    return change


@pytest.mark.parametrize("head", [True, False])
def test_a_reduced_vocabulary_with_all_that_matters_changes_nothing(rewrite, whole, head):
    ids = np.array(sorted(whole[1] | {0, 7}), np.int64)
    assert len(ids) < 320
    checkpoint = open_drafter(str(rewrite(TRAINED, tensors=narrowed(ids, head), draft_vocab_size=len(ids))))
    assert checkpoint.config.draft_vocab_size == len(ids)
    assert figures(run(engine(checkpoint), [request()])) == figures(whole[0])


def test_a_reduced_vocabulary_is_never_left(rewrite, whole, rng):
    ids = rng.permutation(sorted(whole[1])[::2])
    checkpoint = open_drafter(str(rewrite(TRAINED, tensors=narrowed(ids), draft_vocab_size=len(ids))))
    assert describe(str(checkpoint.path))["draft_vocab_size"] == len(ids)
    e = engine(checkpoint)
    drafts = Drafts(e)
    assert run(e, [request()])[0].tokens == whole[0][0].tokens
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=16, speculative_sampling="rejection")
    assert len(run(e, [request(params)])[0].tokens) == 16
    assert drafts.seen <= set(ids.tolist())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t | {"d2t": t["d2t"] + 400}, "d2t does not map"),
        (lambda t: t | {"d2t": -np.arange(len(t["d2t"]))}, "d2t does not map"),
        (lambda t: t | {"d2t": t["d2t"][:-1]}, "d2t of shape"),
        (lambda t: t | {"d2t": t["d2t"].astype(np.float32)}, "whole numbers"),
        (lambda t: t | {"t2d": ~t["t2d"]}, "different tokens"),
        (lambda t: t | {"t2d": t["t2d"].astype(np.int64)}, "true or false"),
        (lambda t: {k: v for k, v in t.items() if k != "d2t"}, "no tensor d2t"),
    ],
)
def test_maps_that_are_refused(rewrite, change, word):
    ids = np.arange(10, 110)
    refused(rewrite(TRAINED, tensors=lambda t: change(narrowed(ids)(t)), draft_vocab_size=100), word)


def test_the_python_interface_takes_the_answer_too(goldens, rewrite):
    folder = str(rewrite(TRAINED, sample_from_anchor=None))
    with pytest.raises(UserError, match="draft-anchor-predicts"):
        LLM(str(goldens / "qwen3_tiny"), folder)
    llm = LLM(
        str(goldens / "qwen3_tiny"), folder, draft_anchor_predicts=False, draft_probe=False, context_length=64
    )
    assert llm.algorithm == "DSPARK"
    assert llm.engine.block_size == 6
