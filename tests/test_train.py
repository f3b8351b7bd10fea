"""Training runs on a tiny target: text, packing, checkpoints, and drafters of use to the real engine."""

from __future__ import annotations

import gc
import json
import resource
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from support import GOLDENS, mesh
from text_model import text_model

from jspark import axes
from jspark.cli import main
from jspark.errors import UserError
from jspark.llm import LLM
from jspark.loading import load_target
from jspark.request import SamplingParams
from jspark.train import conversations, loop, select
from jspark.train.config import DrafterShape, TrainConfig
from jspark.train.loop import Run, train
from jspark.train.pipeline import Packed, batches
from jspark.train.text import Conversation, Text, TextFolder
from jspark.train.writer import Writer, Writing

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}z{% endif %}"
)
SHAPE = DrafterShape(layers=1, block_size=5, markov_rank=16, target_layer_ids=(1, 3, 4))
CONFIG = TrainConfig(
    drafter=SHAPE,
    batch_size=4,
    sequence_length=96,
    anchors=16,
    steps=8,
    learning_rate=3e-3,
    dtype="float32",
    chunk=32,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = text_model(GOLDENS / "qwen3_tiny", tmp_path_factory.mktemp("train") / "tiny", {})
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tiny(model):
    return load_target(str(model), "float32", mesh())


def write(model, folder, *more):
    """`jspark data` on the tiny target."""
    command = ["data", "--model-path", str(model), "--output", str(folder), "--rows", "16", "--part-size", "8"]
    command += ["--max-question-tokens", "10", "--max-answer-tokens", "40", "--answer-temperatures", "1.0,0.0,0.5"]
    return main([*command, *more])


@pytest.fixture(scope="session")
def text(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "text"
    assert write(model, folder, "--tokens", "6000") == 0
    return folder


def by_id(folder):
    return {c.id: c for c in Text([folder])}


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_written_text_is_what_the_engine_answers_with_that_seed(tiny):
    script = conversations.self_written(tiny, ["hello", "how"], 1)
    assert [script.tokens[i, : script.shared].tolist() for i in range(4)] == [script.tokens[0, :5].tolist()] * 4
    writing = Writing(
        rows=4,
        max_question=8,
        max_answer=20,
        question_temperatures=(1.0,),
        answer_temperatures=(1.0, 0.0, 0.7),
        loop=100,
        stop_ids=tiny.eos_token_ids,
        seed=3,
        steps=16,
    )
    written = [w for part in Writer(tiny.model, tiny.config, script, writing).write([], 0, 6) for w in part]
    assert sorted(w.id for w in written) == list(range(6))
    llm = LLM(tiny, context_length=128, max_running_requests=1, row_buckets=(1,))
    for w in written:
        opening = script.tokens[script.of(np.int64(w.id))][: script.lengths[script.of(np.int64(w.id))]]
        assert w.tokens[: len(opening)].tolist() == opening.tolist()
        connector = script.connectors[0].tolist()
        question = w.tokens[len(opening) : w.answer_start - len(connector)]
        assert w.tokens[w.answer_start - len(connector) : w.answer_start].tolist() == connector

        def same(prompt, want, temperature, number=w.id):
            params = SamplingParams(
                temperature=temperature,
                seed=writing.seed_of(number),
                speculative_sampling="coupled",
                max_tokens=len(want),
            )
            return llm.generate([prompt.tolist()], params)[0].output_ids == want.tolist()

        assert same(opening, question, 1.0)
        assert same(w.tokens[: w.answer_start], w.tokens[w.answer_start :], writing.temperature_of(w.id))


def test_text_goes_on_where_a_killed_run_was(model, text, tmp_path, monkeypatch):
    folder = tmp_path / "text"
    added = 0
    real = TextFolder.add

    def dying(self, conversation):
        nonlocal added
        added += 1
        if added > 20:
            raise KeyboardInterrupt
        real(self, conversation)

    monkeypatch.setattr(TextFolder, "add", dying)
    assert write(model, folder, "--tokens", "6000") == 130
    monkeypatch.setattr(TextFolder, "add", real)
    # What a kill in the middle of a write leaves.
    (folder / "part-00009.array_record.partial").write_bytes(b"half")
    assert len(Text([folder])) == 16
    assert write(model, folder, "--tokens", "6000") == 0
    whole, again = by_id(text), by_id(folder)
    common = whole.keys() & again.keys()
    assert len(common) > 0.9 * len(whole)
    assert all(np.array_equal(whole[i].tokens, again[i].tokens) for i in common)
    report = json.loads((folder / "report.json").read_text())
    assert report["tokens"] == sum(len(c.tokens) for c in again.values()) >= 6000
    assert not list(folder.glob("*.partial"))
    assert write(model, folder, "--tokens", "6000", "--max-answer-tokens", "41") == 2


def test_evaluation_text_never_enters(tmp_path, text, tiny):
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": ["abcdefghijklmnopq", "second"]}) + "\n")
    texts = list(conversations.evaluation_tokens(tiny, tmp_path / "eval.jsonl"))
    selection = select.Selection(near=False)
    assert selection.exclude(texts) == 17 - select.OVERLAP_NGRAM + 1
    clean = next(c for c in Text([text]) if len(c.tokens) > 40)
    assert selection.keep(select.Written(0, clean.tokens, 20, True))
    for size, kept in ((select.OVERLAP_NGRAM - 1, True), (select.OVERLAP_NGRAM, False)):
        copied = np.concatenate([clean.tokens, texts[0][2 : 2 + size], [7]])
        assert selection.keep(select.Written(size, copied, 20, True)) is kept
    assert selection.report()["refused"]["evaluation_overlap"] == 1


def test_loops_and_duplicates_are_seen():
    answer = np.concatenate([np.arange(40), np.arange(40), np.arange(100, 120)])
    loops = select.looping(answer)
    assert loops.sum() == 40 - select.LOOP_NGRAM + 1
    assert not loops[:40].any()
    assert not loops[-20:].any()
    chosen = select.Selection(min_answer=4)
    first = select.Written(0, np.arange(60), 30, True)
    assert chosen.keep(first)
    assert not chosen.keep(replace(first, id=1))
    almost = first.tokens.copy()
    almost[45] = 999
    assert not chosen.keep(replace(first, id=2, tokens=almost))
    assert chosen.refused == {"duplicate": 1, "near_duplicate": 1}


def test_given_conversations_keep_every_assistant_turn(model, tmp_path, tiny):
    chat = [("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "fgh")]
    line = {"messages": [{"role": r, "content": c} for r, c in chat]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(line) + "\n")
    assert write(model, tmp_path / "text", "--conversations", str(tmp_path / "chats.jsonl"), "--tokens", "1") == 0
    stored = Text([tmp_path / "text"])[0]
    trained = tiny.need_tokenizer("test").decode(stored.tokens[stored.mask()].tolist(), skip_special_tokens=False)
    # The template opens answers with z, which these written turns have in the place of the role's name.
    assert trained.count("<eos>") == 2
    assert "cd" in trained
    assert "fgh" in trained
    assert "ab" not in trained


def test_packing_cuts_nothing_and_repeats_itself(text):
    source = Text([text])
    packed = Packed(source, 96, 0)
    assert sorted(i for members in packed.plan for i in members) == list(range(len(source)))
    row = packed[0]
    place = 0
    for segment, i in enumerate(packed.plan[0], 1):
        c = source[i]
        here = slice(place, place + len(c.tokens))
        assert np.array_equal(row["tokens"][here], c.tokens)
        assert np.array_equal(row["mask"][here], c.mask())
        assert (row["segments"][here] == segment).all()
        place += len(c.tokens)
    assert (row["segments"][place:] == 0).all()
    stream, late = batches(packed, 4, 7, 0), batches(packed, 4, 7, 3)
    for _ in range(3):
        next(stream)
    assert np.array_equal(next(stream).tokens, next(late).tokens)


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def straight(tiny, text, folder):
    """The uninterrupted run that others are compared with."""
    return train(tiny, Text([text]), CONFIG, Run(folder, log_every=1, save_every=4), mesh())


@pytest.fixture(scope="session")
def finished(tiny, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "straight"
    straight(tiny, text, folder)
    return folder


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("steps_per_second", "tokens_per_second", "model_flop_utilisation")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def test_a_killed_run_goes_on_with_the_same_losses(tiny, text, finished, tmp_path, monkeypatch):
    folder, real = tmp_path / "run", loop.Meter.read

    def dying(self, step, figures):
        if step == 7:
            raise KeyboardInterrupt
        return real(self, step, figures)

    monkeypatch.setattr(loop.Meter, "read", dying)
    run = Run(folder, log_every=1, save_every=2)
    with pytest.raises(KeyboardInterrupt):
        train(tiny, Text([text]), CONFIG, run, mesh())
    monkeypatch.setattr(loop.Meter, "read", real)
    with pytest.raises(UserError, match="--resume"):
        train(tiny, Text([text]), CONFIG, run, mesh())
    with pytest.raises(UserError, match=r"learning_rate was 0.003 and is 0.1"):
        train(tiny, Text([text]), replace(CONFIG, learning_rate=0.1), replace(run, resume=True), mesh())
    # A write that was cut off, and a newest checkpoint that was damaged afterwards.
    (folder / "state" / "7.orbax-checkpoint-tmp").mkdir()
    for file in (folder / "state" / "6").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    train(tiny, Text([text]), CONFIG, replace(run, resume=True), mesh())
    assert metrics(folder) == metrics(finished)
    ours, theirs = ((f / "drafter" / "model.safetensors").read_bytes() for f in (folder, finished))
    assert ours == theirs


@contextmanager
def small_files(size):
    """A real limit of the system on what may be written, as a full disk would be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# orbax raises in its own threads and tasks too, where nobody can catch it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_leaves_the_earlier_checkpoint(tiny, text, finished, tmp_path, monkeypatch):
    folder, real = tmp_path / "run", loop.StateFiles.save

    def full(self, state):
        if int(state.step) < 4:
            return real(self, state)
        with small_files(2000):
            return real(self, state)

    monkeypatch.setattr(loop.StateFiles, "save", full)
    run = Run(folder, log_every=1, save_every=2)
    with pytest.raises(UserError, match="cannot be written"):
        train(tiny, Text([text]), CONFIG, run, mesh())
    monkeypatch.setattr(loop.StateFiles, "save", real)
    assert train(tiny, Text([text]), CONFIG, replace(run, resume=True), mesh())["finished"]
    assert metrics(folder)[-1] == metrics(finished)[-1]
    # Its abandoned tasks complain when they are collected: here, not in whatever test comes later.
    gc.collect()


def test_only_the_drafter_is_trained(tiny, finished, text, tmp_path):
    before = [np.asarray(x).copy() for x in jax.tree.leaves(tiny.model)]
    held = json.loads((finished / "drafter" / "config.json").read_text())
    assert held["architectures"] == ["Qwen3DSparkModel"]
    train(tiny, Text([text]), replace(CONFIG, steps=1), Run(tmp_path / "run"), mesh())
    after = jax.tree.leaves(tiny.model)
    assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(before, after, strict=True))


def test_parts_and_devices_change_rounding_only(tiny, model, text, finished, tmp_path):
    auto = (jax.sharding.AxisType.Auto,) * 2
    both = jax.make_mesh((2, 1), ("data", "tensor"), auto, devices=jax.devices()[:2])
    cut = replace(CONFIG, accumulate=2, steps=8)
    spread = load_target(str(model), "float32", both)
    train(spread, Text([text]), cut, Run(tmp_path / "run", log_every=1), both)
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(finished), strict=True):
        assert ours["blocks"] == theirs["blocks"]
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=2e-3)
        np.testing.assert_allclose(ours["accept"], theirs["accept"], atol=5e-3)


def accept_length(tiny, drafter, text):
    """τ of the real engine on prompts of the text, sampled at temperature 1."""
    llm = LLM(tiny, drafter, draft_probe=False, context_length=128, row_buckets=(8,), token_tiers=(48,))
    prompts = [c.tokens[: c.spans[0, 0]].tolist() for c in (Text([text])[i] for i in range(16))]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=48, ignore_eos=True) for i in range(16)]
    outputs = llm.generate(prompts, [replace(p, speculative_sampling="rejection") for p in params])
    return sum(o.completion_tokens - 1 for o in outputs) / sum(o.steps for o in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["DSPARK", "EAGLE3"])
def test_a_minute_of_training_raises_the_accept_length(tiny, text, tmp_path, algorithm):
    layers = (0, 1, 2, 3, 4) if algorithm == "EAGLE3" else (1, 3, 4)
    shape = replace(SHAPE, algorithm=algorithm, target_layer_ids=layers)
    config = replace(CONFIG, drafter=shape, steps=70)
    if algorithm == "EAGLE3":
        from jspark.train.config import loss_weights

        config = replace(config, loss=loss_weights("EAGLE3"))
    train(tiny, Text([text]), replace(config, steps=1, learning_rate=1e-9), Run(tmp_path / "new"), mesh())
    train(tiny, Text([text]), config, Run(tmp_path / "trained"), mesh())
    before = accept_length(tiny, str(tmp_path / "new" / "drafter"), text)
    after = accept_length(tiny, str(tmp_path / "trained" / "drafter"), text)
    assert after > before + 0.1, (before, after)


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "flag", "words"),
    [
        ('{"messages": [}', "--conversations", "line 2 of .* is not JSON"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "--conversations", "line 2 .* no assistant turn"),
        ('{"prompt": 3}', "--prompts", 'line 2 .* has no "prompt"'),
        ('{"prompt": "%s"}' % ("ab" * 600), "--prompts", "line 2 .* 1[0-9]{3} tokens"),
    ],
)
def test_bad_lines_are_named(model, tmp_path, capsys, line, flag, words):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "prompt": "a"}
    (tmp_path / "in.jsonl").write_text(json.dumps(good) + "\n" + line + "\n")
    assert write(model, tmp_path / "text", flag, str(tmp_path / "in.jsonl"), "--context-length", "256") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("jspark: error: ")
    import re

    assert re.search(words, error), error


def test_what_cannot_be_trained_is_refused(tiny, model, text, tmp_path):
    source = Text([text])
    with pytest.raises(UserError, match="longer than a sequence of 32"):
        train(tiny, source, replace(CONFIG, sequence_length=32, anchors=4), Run(tmp_path / "a"), mesh())
    with pytest.raises(UserError, match="target layer 5 is outside"):
        replace(SHAPE, target_layer_ids=(1, 5)).config(tiny.config)
    with pytest.raises(UserError, match="mask token id 320 is outside"):
        replace(SHAPE, mask_token_id=320).config(tiny.config)
    with pytest.raises(UserError, match="cannot be cut into 3"):
        replace(CONFIG, accumulate=3)
    with pytest.raises(UserError, match="fewer than a batch"):
        next(batches(Packed(source, 96, 0), 10**6, 0, 0))
    plain = text_model(GOLDENS / "qwen3_tiny", tmp_path / "plain", {})
    (plain / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no chat template.*--prompts"):
        conversations.self_written(load_target(str(plain)), [], 1)
    other = TextFolder(tmp_path / "other", {"target": "another", "vocab_size": 320})
    other.open()
    other.add(Conversation(0, np.arange(20), np.array([[5, 20]])))
    other.close({})
    with pytest.raises(UserError, match="written for another"):
        train(tiny, Text([tmp_path / "other"]), CONFIG, Run(tmp_path / "b"), axes.single_device_mesh())
