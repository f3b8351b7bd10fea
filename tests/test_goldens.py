"""The reference implementations' outputs: targets, and speculative runs of every drafter step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    GOLDENS,
    LAYOUTS,
    Result,
    arrays,
    drafter,
    exact,
    full_logits,
    make_engine,
    mesh,
    prompts,
    run,
    target,
)

from jspark import kv
from jspark.batch import pack
from jspark.budget import Full, Threshold
from jspark.config import EngineConfig
from jspark.eagle import chain_step
from jspark.engine import Engine
from jspark.models.eagle3 import Eagle3
from jspark.propose import block_hidden
from jspark.request import Request, SamplingParams
from jspark.verify import forward

TARGETS = ["qwen3_tiny", "qwen3_tiny_tied", "llama_tiny"]
DSPARK = sorted(p.name for p in GOLDENS.glob("dspark_*") if p.name != "dspark_loss")
DFLASH = sorted(p.name for p in GOLDENS.glob("dflash_*"))
EAGLE3 = sorted(p.name for p in GOLDENS.glob("eagle3_*"))


def check_close(got, want):
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_target_hidden_states_and_logits(name):
    model, config = target(name)
    inputs, outputs = arrays(name)
    layers = tuple(range(-1, config.num_layers - 1))
    pages = 33
    pool = kv.make_pool(config, pages, 4, jnp.float32, mesh())
    for i in range(sum(k.startswith("seq_") for k in inputs)):
        tokens = inputs[f"seq_{i}"]
        size = len(tokens)
        table = np.random.default_rng(i).permutation(np.arange(1, pages, dtype=np.int32))[None]
        batch = pack(
            jnp.asarray(tokens)[None],
            jnp.zeros(1, jnp.int32),
            jnp.full(1, size - 1, jnp.int32),
            jnp.ones(1, bool),
            jnp.asarray(table),
            None,
            verify_tokens=size + 3,
            page_size=4,
        )
        with exact:
            logits, features, _ = jax.jit(
                lambda batch, size=size: forward(
                    model, config, pool, batch, logit_rows=size, feature_layers=layers
                )
            )(batch)
        check_close(logits, outputs[f"logits_{i}"])
        hidden = np.asarray(features)[:size].reshape(size, len(layers), -1)
        check_close(hidden.swapaxes(0, 1), outputs[f"hidden_{i}"][:-1])


@pytest.mark.parametrize("name", TARGETS)
def test_target_greedy_tokens(name):
    _, outputs = arrays(name)
    engine = make_engine(EngineConfig(max_running_requests=4, page_size=8, context_length=128), target(name))
    greedy = SamplingParams(temperature=0, max_tokens=48)
    results = run(engine, [Request(i, p, greedy) for i, p in enumerate(prompts(name))])
    for i, result in enumerate(results):
        assert result.tokens == outputs[f"greedy_{i}"].tolist()
        logits = full_logits(prompts(name)[i] + tuple(result.tokens[:-1]), name)
        check_close(logits[-1], outputs[f"greedy_last_logits_{i}"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_of_the_weights(layout, monkeypatch):
    """Target and drafter in the layouts of CPUs and GPUs: the reference's tokens, in as many steps."""
    monkeypatch.setattr("jspark.weights.layout", lambda mesh, scanned=False: layout)
    name = "dspark_qwen3_tiny_gated_trained"
    engine = engines(name, target.__wrapped__("qwen3_tiny"), drafter.__wrapped__(name))
    _, outputs = arrays(name)
    for i, prompt in enumerate(prompts(name)[:2]):
        want = outputs[f"p{i}_output_ids"][len(prompt) :].tolist()
        lengths = outputs[f"p{i}_acceptance_lengths"]
        greedy = SamplingParams(temperature=0, max_tokens=len(want))
        result = run(engine, [Request(0, prompt, greedy)])[0]
        assert result.tokens == want
        assert result.stats is not None
        # The first token comes from the prompt.
        assert result.stats.steps == np.searchsorted(1 + np.cumsum(lengths), len(want)) + 1


class Recorder:
    """The engine's own programs, with what went through them kept."""

    def __init__(self, engine: Engine, name: str):
        self.engine = engine
        self.drafter, self.target = drafter(name), target("qwen3_tiny")
        self.programs = engine.programs
        self.report = engine.programs.report
        self.hidden = jax.jit(exact(self._hidden))
        engine.programs = self  # type: ignore[assignment]
        self.steps: list[dict] = []

    def __getattr__(self, name):
        return getattr(self.programs, name)

    def _hidden(self, pool, slots, args):
        (model, config), (whole, _) = self.drafter, self.target
        rows = slots.take(args)
        view = model.vocabulary(whole.vocabulary)
        size = self.engine.block_size
        if isinstance(model, Eagle3):
            outputs: list[jax.Array] = [rows.carried]
            chain = [[]]
            for _ in range(size - 1):
                token = jnp.argmax(model.logits(view, outputs[-1]), axis=-1)
                call = (pool, outputs[-1], token, rows.position, args.table, chain)
                outputs.append(chain_step(model, view, config, *call))
            return jnp.stack(outputs, axis=1)
        return block_hidden(model, view, config, pool, rows.anchor, rows.position, args.table, size)[0]

    def propose(self, shape, pools, slots, args, tables):
        pools, proposal = self.programs.propose(shape, pools, slots, args, tables)
        step = args.unpack(*args.arrays)
        rows = slots.take(step)
        self.steps.append(
            {
                "anchor": int(rows.anchor[0]),
                "tokens": np.asarray(proposal.tokens[0]),
                "confidence": np.asarray(proposal.confidence[0]),
                "hidden": np.asarray(self.hidden(pools.drafter, slots, step))[0],
            }
        )
        return pools, proposal

    def verify(self, shape, pools, slots, args, proposal, tables, mask):
        pools, slots, tables, packet = self.programs.verify(shape, pools, slots, args, proposal, tables, mask)
        if proposal is not None:
            host = packet.host()
            self.steps[-1] |= {
                "count": int(host.count[0]),
                "accepted": int(host.accepted[0]),
                "window": int(host.window[0]),
            }
        return pools, slots, tables, packet


def record(engine: Engine, name: str, prompt, stop: tuple[int, ...], new: int) -> tuple[Result, list[dict]]:
    recorder = Recorder(engine, name)
    params = SamplingParams(temperature=0, max_tokens=new)
    result = run(engine, [Request(0, prompt, params, stop)])[0]
    engine.programs = recorder.programs
    return result, recorder.steps


def engines(name: str, *models) -> Engine:
    """models: target and drafter, where they are loaded anew."""
    # Pages of 16 and chunks of 16: contexts cross pages, prompts cross chunks.
    config = EngineConfig(max_running_requests=1, page_size=16, context_length=128, chunked_prefill_size=16)
    return make_engine(config, *(models or (target("qwen3_tiny"), drafter(name))))


@pytest.mark.parametrize("name", DSPARK)
def test_dspark_runs_step_by_step(name):
    _, outputs = arrays(name)
    engine = engines(name)
    has_confidence = drafter(name)[1].confidence != "none"
    for i, prompt in enumerate(prompts(name)):
        for run_name, policy in ((f"p{i}", Full()), (f"p{i}_thr50", Threshold(0.5)), (f"p{i}_stop", Full())):
            if f"{run_name}_output_ids" not in outputs:
                continue
            stop = (int(outputs[f"p{i}_stop_token"]),) if run_name.endswith("stop") else ()
            engine.policy = policy
            result, steps = record(engine, name, prompt, stop, new=60)
            want = outputs[f"{run_name}_output_ids"][len(prompt) :].tolist()
            assert result.tokens[: len(want)] == want
            if stop and result.reason == "stop":
                assert result.tokens == want
            if f"{run_name}_acceptance_lengths" not in outputs:
                continue
            lengths = outputs[f"{run_name}_acceptance_lengths"]
            steps = steps[: len(lengths)]
            proposals = outputs[f"{run_name}_proposal_lengths"].tolist()
            accepted = outputs[f"{run_name}_accepted_draft_lengths"].tolist()
            assert len(steps) == len(lengths)
            assert [s["anchor"] for s in steps] == outputs[f"{run_name}_step_anchor"].tolist()
            drafts = outputs[f"{run_name}_step_draft_tokens"]
            np.testing.assert_array_equal([s["tokens"] for s in steps], drafts)
            if has_confidence:
                confidence = outputs[f"{run_name}_step_confidence_logits"]
                check_close([s["confidence"] for s in steps], confidence)
            # The reference reports a stop inside the accepted draft as the whole proposal.
            for k, step in enumerate(steps):
                if stop and k == len(steps) - 1:
                    assert step["count"] == lengths[k]
                else:
                    assert (step["window"], step["accepted"]) == (proposals[k], accepted[k])
                    assert step["count"] == lengths[k]
            if run_name == f"p{i}":
                hidden = outputs[f"p{i}_step_block_hidden"]
                check_close([s["hidden"] for s in steps], hidden)


@pytest.mark.parametrize("name", DFLASH)
def test_dflash_runs_step_by_step(name):
    _, outputs = arrays(name)
    engine = engines(name)
    for i, prompt in enumerate(prompts(name)):
        result, steps = record(engine, name, prompt, (), new=60)
        want = outputs[f"p{i}_output_ids"][len(prompt) :].tolist()
        assert result.tokens[: len(want)] == want
        lengths = outputs[f"p{i}_acceptance_lengths"].tolist()
        steps = steps[: len(lengths)]
        assert [s["count"] for s in steps] == lengths
        np.testing.assert_array_equal([s["tokens"] for s in steps], outputs[f"p{i}_step_draft_tokens"])
        hidden = outputs[f"p{i}_step_block_hidden"][:, 1:]
        check_close([s["hidden"] for s in steps], hidden)
        result, _ = record(engine, name, prompt, (int(outputs[f"p{i}_stop_token"]),), new=48)
        assert result.tokens == outputs[f"p{i}_stop_output_ids"][len(prompt) :].tolist()


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_runs_step_by_step(name):
    _, outputs = arrays(name)
    engine = engines(name)
    model, view = drafter(name)[0], drafter(name)[0].vocabulary(target("qwen3_tiny")[0].vocabulary)
    assert isinstance(model, Eagle3)
    for i, prompt in enumerate(prompts(name)):
        result, steps = record(engine, name, prompt, (), new=60)
        want = outputs[f"p{i}_output_ids"][len(prompt) :].tolist()
        assert result.tokens[: len(want)] == want
        lengths = outputs[f"p{i}_acceptance_lengths"].tolist()
        steps = steps[: len(lengths)]
        assert [s["count"] for s in steps] == lengths
        assert [s["accepted"] for s in steps] == outputs[f"p{i}_accepted_draft_lengths"].tolist()
        np.testing.assert_array_equal([s["tokens"] for s in steps], outputs[f"p{i}_step_draft_tokens"])
        assert all(np.isposinf(s["confidence"]).all() for s in steps)
        check_close(steps[0]["hidden"], outputs[f"p{i}_first_chain_hidden"])
        with exact:
            check_close(model.logits(view, jnp.asarray(steps[0]["hidden"])), outputs[f"p{i}_first_draft_logits"])
        result, steps = record(engine, name, prompt, (int(outputs[f"p{i}_stop_token"]),), new=48)
        assert result.tokens == outputs[f"p{i}_stop_output_ids"][len(prompt) :].tolist()
        assert [s["count"] for s in steps if s["count"]] == outputs[f"p{i}_stop_acceptance_lengths"].tolist()
