"""EAGLE-3 drafters: what is written into their cache, against a float64 forward in NumPy; batches; dialects."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import parameter_shapes
import pytest
from safetensors.numpy import load_file, save_file
from support import GOLDENS, arrays, drafter, exact, make_engine, mesh, prompts, run, target
from test_other_shapes import HIDDEN, Shape, layer_tensors, linear, target_tensors, write

from jspark import kv
from jspark.batch import pack
from jspark.checkpoint import describe, open_drafter
from jspark.checkpoint.export import export_drafter
from jspark.cli import main
from jspark.config import Eagle3Config, EngineConfig, with_layer_ids
from jspark.eagle import inject, propose
from jspark.engine import Engine
from jspark.errors import UserError
from jspark.loading import find_drafter
from jspark.models.eagle3 import Eagle3
from jspark.request import Request, SamplingParams
from jspark.sampling import RowSampling

TRAINED = "eagle3_qwen3_tiny_trained"
#: One more than the goldens hold, so that no step of theirs is missing.
GREEDY = SamplingParams(temperature=0, max_tokens=49)


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────

SHAPE = Shape("llama", 4, 2, 10, {"rope_theta": 300.0, "num_hidden_layers": 2})
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def tensors_of(rng, flags: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Two layers, of which the first reads twice the width; embedding and head of its own."""
    tensors = {
        f"layers.{i}." + k: v for i in range(2) for k, v in layer_tensors(rng, "", SHAPE, qk_norm=False).items()
    }
    for name, size in (("q", 40), ("k", 20), ("v", 20)):
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = linear(rng, size, 2 * HIDDEN)
    norms = {"layers.0.hidden_norm": HIDDEN, "norm": HIDDEN}
    norms |= {"input_norm": 3 * HIDDEN} if "norm_before_fc" in flags else {}
    norms |= {f"fc_norm.{i}": HIDDEN for i in range(3)} if "fc_norm" in flags else {}
    tensors |= {f"{name}.weight": rng.uniform(0.5, 1.5, size) for name, size in norms.items()}
    whole = target_tensors(rng, SHAPE)
    tensors["embed_tokens.weight"] = whole["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = whole["lm_head.weight"]
    return tensors | {"fc.weight": linear(rng, HIDDEN, 3 * HIDDEN)}


class Judge:
    """The same model in float64, from the EAGLE-3 paper and what speculators says of its flags."""

    def __init__(self, tensors: dict[str, np.ndarray], flags: tuple[str, ...]):
        self.tensors = {k: v.astype(np.float32).astype(np.float64) for k, v in tensors.items()}
        self.flags = flags
        self.cache: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.tensors[name + ".weight"]

    def fuse(self, features):
        if "norm_before_fc" in self.flags:
            features = self.norm(features, "input_norm")
        if "fc_norm" in self.flags:
            parts = np.split(features, 3, axis=-1)
            features = np.concatenate([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        return features @ self.tensors["fc.weight"].T

    def slot(self, position: int, token: int, hidden: np.ndarray) -> np.ndarray:
        """The output of one slot; its entry is added to the cache."""
        x, d = hidden, SHAPE.head_dim
        angles = position * 300.0 ** (-np.arange(0, d, 2) / d)
        cos, sin = np.cos(angles), np.sin(angles)

        def heads(y, name, rotate):
            z = (y @ self.tensors[name + ".weight"].T).reshape(-1, d)
            a, b = np.split(z, 2, axis=-1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1) if rotate else z

        for i in range(2):
            p = f"layers.{i}."
            y, residual = self.norm(x, p + "input_layernorm") if i else None, x
            if i == 0:
                normed = self.norm(x, p + "hidden_norm")
                embedded = self.norm(self.tensors["embed_tokens.weight"][token], p + "input_layernorm")
                y = np.concatenate([embedded, normed])
                residual = normed if "norm_before_residual" in self.flags else x
            q, k = heads(y, p + "self_attn.q_proj", True), heads(y, p + "self_attn.k_proj", True)
            self.cache[i].append((k, heads(y, p + "self_attn.v_proj", False)))
            keys, values = (np.repeat(np.stack(z, 1), 2, axis=0) for z in zip(*self.cache[i], strict=True))
            weights = np.exp(np.einsum("nd,ncd->nc", q, keys) / math.sqrt(d))
            attended = np.einsum("nc,ncd->nd", weights / weights.sum(-1, keepdims=True), values)
            x = residual + attended.reshape(-1) @ self.tensors[p + "self_attn.o_proj.weight"].T
            y = self.norm(x, p + "post_attention_layernorm")
            gate, up = (y @ self.tensors[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.tensors[p + "mlp.down_proj.weight"].T
        return x

    def chain(self, position: int, output: np.ndarray, size: int) -> tuple[list[int], np.ndarray]:
        tokens, outputs = [], [output]
        for k in range(size):
            tokens.append(int(np.argmax(self.norm(outputs[-1], "norm") @ self.tensors["lm_head.weight"].T)))
            last = self.norm(outputs[-1], "norm") if "norm_output" in self.flags else outputs[-1]
            outputs.append(self.slot(position + k, tokens[-1], last))
        return tokens, np.stack(outputs[:-1])


@pytest.mark.parametrize("flags", [(), FLAGS[::2], FLAGS])
def test_two_rows_are_injected_and_drafted_as_the_model_says(tmp_path, rng, flags):
    tensors = tensors_of(rng, flags)
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": SHAPE.json,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        **dict.fromkeys(flags, True),
    }
    folder = write(tmp_path / "draft", config, tensors)
    whole = write(tmp_path / "target", SHAPE.json | {"num_hidden_layers": 3}, target_tensors(rng, SHAPE))
    model, settings = drafter(folder, whole)
    assert isinstance(model, Eagle3)
    assert settings.target_layer_ids == (-1, 0, 1)
    assert settings.eagle3 == Eagle3Config(**dict.fromkeys(flags, True))

    # Nine committed tokens of one row and five of the other, of which the step verified two more than it accepted.
    counts, verified = np.array([9, 5]), np.array([9, 7])
    features = rng.normal(0, 1, (2, 9, 3 * HIDDEN))
    tokens = rng.integers(0, 7, (2, 9)).astype(np.int32)
    pool = kv.make_pool(settings.backbone, 13, 4, jnp.float32, mesh())
    table = jnp.asarray(rng.permutation(np.arange(1, 13, dtype=np.int32)).reshape(2, 6))
    start = jnp.zeros(2, jnp.int32)
    batch = pack(
        jnp.zeros((2, 9), jnp.int32),
        start,
        jnp.asarray(verified - 1),
        jnp.ones(2, bool),
        table,
        None,
        verify_tokens=20,
        page_size=4,
    )
    packed = np.zeros((20, 3 * HIDDEN), np.float32)
    packed[:16] = np.concatenate([features[0], features[1, :7]])
    view = model.vocabulary(target(whole)[0].vocabulary)
    zeros, ones = jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)
    rows = RowSampling(zeros, start, ones, zeros, start.astype(jnp.uint32), jnp.zeros(2, bool))

    @jax.jit
    @exact
    def ours():
        args = (jnp.asarray(packed), batch, jnp.asarray(tokens), jnp.asarray(counts), None)
        filled, carried = inject(model, view, settings, pool, *args)
        position = jnp.asarray(counts, jnp.int32)
        call = (filled, carried, position, table, rows)
        size = {"block_size": 4, "sampled": False, "filtered": False, "keep_q": True}
        return carried, propose(model, view, settings, *call, **size)[0]

    carried, proposal = ours()
    for r in range(2):
        judge, output = Judge(tensors, flags), np.zeros(HIDDEN)
        for i in range(counts[r]):
            output = judge.slot(i, int(tokens[r, i]), judge.fuse(features[r, i]))
        np.testing.assert_allclose(carried[r], output, atol=2e-4, rtol=2e-4)
        want, outputs = judge.chain(int(counts[r]), output, 4)
        assert proposal.tokens[r].tolist() == want
        logits = judge.norm(outputs, "norm") @ judge.tensors["lm_head.weight"].T
        np.testing.assert_allclose(proposal.log_q[r], logits, atol=5e-4, rtol=5e-4)


# ── through the engine ────────────────────────────────────────────────────────────────────────────────────────


def engine(checkpoint=None, **options) -> Engine:
    settings = EngineConfig(
        max_running_requests=4,
        page_size=8,
        context_length=128,
        chunked_prefill_size=7,
        row_buckets=(4,),
        token_tiers=(32,),
        overlap=True,
    )
    model = drafter(TRAINED) if checkpoint is None else drafter(str(checkpoint))
    return make_engine(replace(settings, **options), target("qwen3_tiny"), model)


def check_golden(results) -> None:
    """A batch that prefills in chunks beside rows that draft accepts what the reference accepts one at a time."""
    _, outputs = arrays(TRAINED)
    for i, (prompt, result) in enumerate(zip(prompts(TRAINED), results, strict=True)):
        assert result.tokens[:48] == outputs[f"p{i}_output_ids"][len(prompt) :].tolist()
        assert result.stats.accepted == Counter(outputs[f"p{i}_accepted_draft_lengths"].tolist())


def test_a_batch_accepts_what_single_requests_do():
    check_golden(run(engine(), [Request(i, p, GREEDY) for i, p in enumerate(prompts(TRAINED))]))


def test_the_chain_may_be_shorter_and_longer_than_in_training():
    _, outputs = arrays(TRAINED)
    prompt = prompts(TRAINED)[3]
    for size in (1, 9):
        e = engine(block_size=size, row_buckets=(), token_tiers=())
        result = run(e, [Request(0, prompt, GREEDY)])[0]
        assert result.tokens[:48] == outputs["p3_output_ids"][len(prompt) :].tolist()
        assert max(result.stats.windows) == size
    with pytest.raises(UserError, match="32 or less"):
        engine(block_size=33)


# ── dialects ──────────────────────────────────────────────────────────────────────────────────────────────────


def golden() -> tuple[dict, dict[str, np.ndarray]]:
    folder = GOLDENS / TRAINED
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def speculators(config: dict, **changes) -> dict:
    ids = config.pop("target_layer_ids")
    for key in ("ttt_length", "architectures", "draft_num_hidden_layers", "num_target_layers"):
        config.pop(key)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 7}]},
    } | changes


def store(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def refused(folder, *words: str, anchor_predicts: bool | None = None) -> None:
    with pytest.raises(UserError) as e:
        open_drafter(str(folder), anchor_predicts)
    message = str(e.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


def test_speculators_with_a_reduced_vocabulary(tmp_path):
    config, tensors = golden()
    _, outputs = arrays(TRAINED)
    drafted = {t for k, v in outputs.items() if k.endswith("step_draft_tokens") for t in v.ravel().tolist()}
    ids = np.array(sorted(drafted | {0, 5}))
    assert len(ids) < 320
    kept = np.zeros(320, bool)
    kept[ids] = True
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][ids], "d2t": ids - np.arange(len(ids)), "t2d": kept}
    tensors |= {"verifier_norm.weight": np.ones(64, np.float32)}
    folder = store(tmp_path / "draft", speculators(config, draft_vocab_size=len(ids)), tensors)
    want = open_drafter(str(GOLDENS / TRAINED)).config
    assert open_drafter(str(folder)).config == replace(want, dialect="speculators", draft_vocab_size=len(ids))
    assert describe(str(folder))["algorithm"] == "EAGLE3"
    check_golden(run(engine(folder), [Request(i, p, GREEDY) for i, p in enumerate(prompts(TRAINED))]))
    with pytest.raises(UserError, match="drafts only"):
        export_drafter(open_drafter(str(folder)), tmp_path / "out")


def test_the_original_form(tmp_path):
    config, tensors = golden()
    tensors = {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items() if "q_norm" not in k}
    tensors = {k: v for k, v in tensors.items() if "k_norm" not in k}
    tensors["fc.weight"] = tensors["fc.weight"][:, : 3 * 64]
    for key in ("target_layer_ids", "ttt_length", "num_target_layers", "draft_num_hidden_layers"):
        del config[key]
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    folder = store(tmp_path / "draft", config, tensors)
    checkpoint = open_drafter(str(folder))
    settings = with_layer_ids(checkpoint.config, target("qwen3_tiny")[1])
    assert (settings.target_layer_ids, settings.block_size) == ((1, 2, 2), 5)
    arrays_ = dict(checkpoint.parameters(parameter_shapes.drafter(settings)))
    np.testing.assert_array_equal(arrays_["layers.0.attn.q.kernel"], tensors["midlayer.self_attn.q_proj.weight"].T)
    assert describe(str(folder))["target_layer_ids"] == "chosen by the target"
    explicit = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    explicit = open_drafter(str(store(tmp_path / "explicit", explicit, tensors)))
    assert explicit.config.target_layer_ids == (0, 2, 4)
    with pytest.raises(UserError, match="another kind than Qwen3"):
        export_drafter(explicit, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"target_layer_ids": [-1, 0, 1, 2, 3]}, "target_layer_ids"),
        ({"draft_num_hidden_layers": 2}, "draft_num_hidden_layers"),
        ({"ttt_length": 0}, "ttt_length"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_variants_of_deepspecs_that_are_refused(tmp_path, changes, word):
    config, tensors = golden()
    refused(store(tmp_path / "draft", config | changes, tensors), "config.json", word)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"target_hidden_size": 128}, "target_hidden_size"),
        ({"norm_before_residual": "yes"}, "norm_before_residual"),
        ({"draft_vocab_size": 100}, "no tensor d2t"),
        ({"speculators_config": {"algorithm": "eagle"}}, "algorithm"),
        ({"speculators_config": {"proposal_methods": [3]}}, "proposal_methods"),
        ({"eagle_aux_hidden_state_layer_ids": [-1]}, "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_variants_of_speculators_that_are_refused(tmp_path, changes, word):
    config, tensors = golden()
    refused(store(tmp_path / "draft", speculators(config) | changes, tensors), "config.json", word)


def test_flags_that_do_not_belong_to_it(tmp_path, capsys):
    refused(GOLDENS / TRAINED, "--draft-anchor-predicts", anchor_predicts=True)
    with pytest.raises(UserError, match="EAGLE3 drafter, not DSPARK"):
        find_drafter(str(GOLDENS / TRAINED), "DSPARK")
    with pytest.raises(UserError, match="EAGLE3 needs a drafter"):
        find_drafter(None, "EAGLE3")
    with pytest.raises(UserError, match="untrained drafter is a DSpark one"):
        find_drafter("untrained", "EAGLE3")
    generate = ["generate", "--model-path", str(GOLDENS / "qwen3_tiny"), "--token-ids", "5,6"]
    generate += ["--speculative-draft-model-path", str(GOLDENS / TRAINED), "--speculative-num-steps", "3"]
    generate += ["--skip-draft-probe"]
    assert main([*generate, "--speculative-algorithm", "DSPARK"]) == 2
    assert "--speculative-num-steps is EAGLE3's" in capsys.readouterr().err
    assert main([*generate, "--speculative-algorithm", "EAGLE3", "--max-new-tokens", "9", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["window_histogram"]) == 4


def test_convert(tmp_path, capsys):
    config, tensors = golden()
    source = store(tmp_path / "draft", speculators(config), tensors)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    assert "from the dialect speculators to deepspec" in capsys.readouterr().out
    assert open_drafter(str(tmp_path / "out")).config == open_drafter(str(GOLDENS / TRAINED)).config
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[k], tensors[k]) for k in tensors)
