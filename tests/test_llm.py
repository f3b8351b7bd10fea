"""The Python interface on the tiny goldens: tokens, text, stops, streams, interruptions, bad input."""

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from text_model import text_model

from jspark import LLM, SamplingParams, UserError
from jspark.budget import Full
from jspark.llm import Output

#: Prompt 3 of the trained vanilla drafter continues 154 | 216 65 299 | 259 | 311 | 281 3 207 82 190 | 317 …, with
#: a step between two bars. So € is split over two steps and ï over two tokens of one step.
PIECES = {299: b"\xe2\x82", 259: b"\xac", 207: b"na\xc3", 82: b"\xafve"}
BEGINNING = "A154A216A65€A311A281dnaïveA190A317A154"
#: Fifth token of prompt 0's answer, and in no other answer.
EOS = 257
#: One bucket of rows, pages and prefill: few programs to compile.
SIZES = {"max_running_requests": 2, "row_buckets": (2,), "page_size": 16, "context_length": 128}
SIZES |= {"chunked_prefill_size": 32, "draft_probe": False}
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def golden(goldens, name):
    """(prompts, greedy answers, accepted drafts by step) of a drafter's folder."""
    inputs, outputs = np.load(goldens / name / "inputs.npz"), np.load(goldens / name / "outputs.npz")
    prompts = [inputs[f"prompt_{i}"].tolist() for i in range(4)]
    answers = [outputs[f"p{i}_target_greedy"].tolist() for i in range(4)]
    lengths = [outputs[f"p{i}_acceptance_lengths"] for i in range(4)]
    # Some runs there have a step more than 48 tokens need.
    lengths = [n[np.cumsum(n) - n < 47] for n in lengths]
    return prompts, answers, [np.bincount(n - 1, minlength=8).tolist() for n in lengths]


@pytest.fixture(scope="module")
def dspark(goldens, tmp_path_factory) -> LLM:
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("llm") / "model", PIECES, EOS)
    return LLM(str(model), str(goldens / "dspark_qwen3_tiny_vanilla_trained"), **SIZES)


@pytest.fixture(scope="module")
def plain(dspark) -> LLM:
    return LLM(dspark.target, **SIZES)


@pytest.fixture(scope="module")
def vanilla(goldens):
    return golden(goldens, "dspark_qwen3_tiny_vanilla_trained")


def assert_free(llm: LLM) -> None:
    """Nothing waits or runs, and every page is back."""
    scheduler = llm.engine.scheduler
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.allocator.in_use == 0


def test_dspark_gives_the_targets_tokens_with_more_prompts_than_slots(dspark, vanilla):
    prompts, answers, accepted = vanilla
    outputs = dspark.generate(prompts * 2, GREEDY)
    assert [o.output_ids for o in outputs] == answers * 2
    for output, prompt, histogram in zip(outputs, prompts * 2, accepted * 2, strict=True):
        assert output.accepted_histogram == histogram
        assert output.window_histogram == [0] * 7 + [output.steps]
        assert output.accept_length == pytest.approx(47 / sum(histogram))
        assert (output.prompt_tokens, output.completion_tokens) == (len(prompt), 48)
        assert (output.finish_reason, output.stop_reason) == ("length", None)
        assert output.decode_seconds > 0
        assert output.prefill_seconds > 0
    assert_free(dspark)


def test_plain_decoding_gives_the_same_text(dspark, plain, vanilla):
    prompts, answers, _ = vanilla
    outputs = plain.generate(prompts, GREEDY)
    assert plain.algorithm == "NONE"
    assert [o.output_ids for o in outputs] == answers
    assert [o.text for o in outputs] == [o.text for o in dspark.generate(prompts, GREEDY)]
    assert [(o.steps, o.accept_length, o.window_histogram) for o in outputs] == [(47, 1.0, [47])] * 4


def test_dflash_gives_the_targets_tokens(dspark, goldens):
    name = "dflash_qwen3_tiny_trained"
    prompts, answers, accepted = golden(goldens, name)
    llm = LLM(dspark.target, str(goldens / name), "DFLASH", **SIZES)
    outputs = llm.generate(prompts, GREEDY)
    assert [o.output_ids for o in outputs] == answers
    assert [o.accepted_histogram for o in outputs] == accepted


def test_folder_without_tokenizer_takes_and_gives_ids(goldens, vanilla):
    llm = LLM(str(goldens / "qwen3_tiny"), **SIZES)
    prompts, answers, _ = vanilla
    [output] = llm.generate(tuple(np.asarray(prompts[0])), GREEDY)
    assert (output.text, output.output_ids) == (None, answers[0])
    deltas = list(llm.stream(prompts[0], GREEDY))
    assert "".join(d.text for d in deltas) == ""
    assert [t for d in deltas for t in d.token_ids] == answers[0]
    for call in (lambda: llm.generate("abc"), lambda: llm.chat([{"role": "user", "content": "a"}])):
        with pytest.raises(UserError, match=r"needs a tokenizer: .*has no tokenizer\.json"):
            call()
    with pytest.raises(UserError, match="a stop string needs a tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))


def test_each_prompt_has_its_own_parameters(plain, vanilla):
    prompts, answers, _ = vanilla
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    each = [SamplingParams(temperature=0, max_tokens=3), sampled, GREEDY, sampled]
    outputs = plain.generate([prompts[0], [1], prompts[0], [1]], each)
    assert outputs[0].output_ids == answers[0][:3]
    assert outputs[2].output_ids == answers[0]
    assert outputs[1].output_ids == outputs[3].output_ids
    with pytest.raises(UserError, match="1 sampling parameters were given for 2 prompts"):
        plain.generate([[1], [2]], [GREEDY])


def test_seed_of_the_llm_makes_runs_repeatable(dspark):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def run(seed):
        outputs = LLM(dspark.target, seed=seed, **SIZES).generate([[1], [1]], params)
        return [o.output_ids for o in outputs]

    first = run(7)
    assert first[0] != first[1]
    assert run(7) == first


def test_text_prompts_and_chats(plain):
    [by_ids], [by_text] = plain.generate([1, 2, 0], GREEDY), plain.generate("bca", GREEDY)
    assert by_text.output_ids == by_ids.output_ids
    messages = [{"role": "user", "content": "bca"}]
    [answer] = plain.chat(messages, GREEDY)
    assert answer.prompt_tokens == len("bca z")
    assert answer.output_ids == plain.generate("bca z", GREEDY)[0].output_ids
    assert [o.output_ids for o in plain.chat([messages, messages], GREEDY)] == [answer.output_ids] * 2
    assert "".join(d.text for d in plain.stream_chat(messages, GREEDY)) == answer.text


def test_end_of_text_and_stop_tokens(dspark, vanilla):
    prompts, answers, _ = vanilla
    [output] = dspark.generate(prompts[0], SamplingParams(temperature=0, max_tokens=48))
    assert (output.output_ids, output.finish_reason, output.stop_reason) == (answers[0][:5], "stop", EOS)
    assert output.text == "A71A284A192A298"
    [output] = dspark.generate(prompts[3], SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[65, 318]))
    assert (output.output_ids, output.stop_reason) == ([154, 216, 65], 65)
    assert output.text == "A154A216"


def test_stop_string_across_tokens_inside_a_step(dspark, plain, vanilla):
    prompts, answers, _ = vanilla
    params = SamplingParams(temperature=0, max_tokens=48, stop=["nothing", "1dnaï"])
    [output] = dspark.generate(prompts[3], params)
    assert output.text == "A154A216A65€A311A28"
    assert output.output_ids == answers[3][:10]
    assert (output.finish_reason, output.stop_reason) == ("stop", "1dnaï")
    assert (output.completion_tokens, output.steps, output.accept_length) == (10, 4, 2.25)
    assert_free(dspark)
    [other] = plain.generate(prompts[3], params)
    assert (other.text, other.output_ids, other.finish_reason) == (output.text, output.output_ids, "stop")


def test_stop_string_in_the_first_and_in_the_last_token(dspark, vanilla):
    prompts, answers, _ = vanilla
    [output] = dspark.generate(prompts[3], SamplingParams(temperature=0, max_tokens=9, stop="15"))
    assert (output.text, output.output_ids, output.steps, output.accept_length) == ("A", [154], 0, None)
    [output] = dspark.generate(prompts[3], SamplingParams(temperature=0, max_tokens=3, stop="65"))
    assert (output.text, output.output_ids) == ("A154A216A", answers[3][:3])
    assert (output.finish_reason, output.stop_reason) == ("stop", "65")


def test_stream_joins_to_the_text_and_splits_no_character(dspark, vanilla):
    prompts, answers, _ = vanilla
    [output] = dspark.generate(prompts[3], GREEDY)
    assert output.text is not None
    assert output.text.startswith(BEGINNING)
    deltas = list(dspark.stream(prompts[3], GREEDY))
    assert "".join(d.text for d in deltas) == output.text
    assert [t for d in deltas for t in d.token_ids] == answers[3]
    assert len(deltas) == 1 + output.steps
    assert [d.text for d in deltas[:4]] == ["A154", "A216A65", "€", "A311"]
    assert [d.finish_reason for d in deltas] == [None] * output.steps + ["length"]
    last = deltas[-1].output
    assert isinstance(last, Output)
    assert (last.text, last.accepted_histogram) == (output.text, output.accepted_histogram)


def test_stream_never_shows_the_beginning_of_a_stop_string(dspark, vanilla):
    prompts, _, _ = vanilla
    params = SamplingParams(temperature=0, max_tokens=48, stop="€A311A281dna")
    shown = [d.text for d in dspark.stream(prompts[3], params)]
    assert shown == ["A154", "A216A65", "", "", ""]
    unfulfilled = SamplingParams(temperature=0, max_tokens=5, stop="€A")
    assert [d.text for d in dspark.stream(prompts[3], unfulfilled)] == ["A154", "A216A65", "€"]


def test_answers_come_as_they_are_complete(plain, vanilla):
    prompts, answers, _ = vanilla
    each = [GREEDY, *[SamplingParams(temperature=0, max_tokens=2)] * 3]
    done = [(i, o.output_ids) for i, o in plain.as_completed(prompts, each)]
    assert [i for i, _ in done] == [1, 2, 3, 0]
    assert done[-1][1] == answers[0]


def test_interleaved_iterators_share_the_engine(dspark, vanilla):
    prompts, answers, _ = vanilla
    streams = [dspark.stream(p, GREEDY) for p in prompts[:2]]
    begun = [next(s) for s in streams]
    # Both slots are taken: this waits for them, and their tokens are kept for their own iterators.
    [output] = dspark.generate(prompts[2], GREEDY)
    assert output.output_ids == answers[2]
    for stream, first, answer in zip(streams, begun, answers, strict=False):
        assert first.token_ids + [t for d in stream for t in d.token_ids] == answer
    assert_free(dspark)


def test_closing_a_stream_gives_its_pages_back(dspark, vanilla):
    prompts, answers, _ = vanilla
    stream = dspark.stream(prompts[1], GREEDY)
    assert_free(dspark)  # nothing is queued before the first token is asked for
    assert next(stream).token_ids == answers[1][:1]
    assert dspark.engine.scheduler.running
    stream.close()
    assert_free(dspark)
    with contextlib.closing(dspark.as_completed(prompts * 3, GREEDY)) as completed:
        next(completed)
    assert_free(dspark)
    assert dspark.generate(prompts[3], GREEDY)[0].output_ids == answers[3]


class AtStep(Full):
    """Does something while the given number of steps is planned."""

    def __init__(self, step, action):
        self._wait, self._action = step, action

    def plan(self, state):
        object.__setattr__(self, "_wait", self._wait - 1)
        if self._wait == 0:
            self._action()
        return super().plan(state)

    __setattr__ = object.__setattr__


def test_ctrl_c_ends_the_requests_and_leaves_the_llm_usable(dspark, vanilla):
    prompts, answers, _ = vanilla
    bystander = dspark.stream(prompts[1], GREEDY)
    told = next(bystander).token_ids
    before = signal.getsignal(signal.SIGINT)
    dspark.engine.policy = AtStep(5, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        dspark.generate([prompts[3], prompts[2]], GREEDY)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(dspark.engine.scheduler.running) == 1
    assert told + [t for d in bystander for t in d.token_ids] == answers[1]
    assert_free(dspark)
    assert dspark.generate(prompts[3], GREEDY)[0].output_ids == answers[3]


def test_a_step_that_fails_ends_all_requests_and_leaves_the_llm_usable(dspark, vanilla):
    prompts, answers, _ = vanilla

    def fail():
        raise RuntimeError("a policy's own error")

    bystander = dspark.stream(prompts[1], GREEDY)
    told = next(bystander)
    dspark.engine.policy = AtStep(4, fail)
    with pytest.raises(RuntimeError, match="a policy's own error"):
        dspark.generate(prompts, GREEDY)
    rest = list(bystander)
    assert rest[-1].finish_reason == "abort"
    tokens = told.token_ids + [t for d in rest for t in d.token_ids]
    assert tokens == answers[1][: len(tokens)]
    assert_free(dspark)
    assert [o.output_ids for o in dspark.generate(prompts, GREEDY)] == answers


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([[]], {}, "the prompt is empty"),
        ([1, 320], {}, "token id 320 is outside the vocabulary of 320"),
        ([-1], {}, "token id -1 is outside the vocabulary"),
        ([1] * 128, {}, "the prompt has 128 tokens and the context holds 128"),
        ([1] * 100, {"max_tokens": 29}, "leaves room for 28 more in a context of 128"),
        ([1], {"stop_token_ids": [320]}, "stop token id 320 is outside the vocabulary of 320"),
        ([1], {"stop_token_ids": range(40)}, "41 stop token ids were given; at most 16"),
        ([1], {"logit_bias": {320: 1.0}}, "logit_bias: token id 320 is outside the vocabulary"),
        ([1], {"bad_words": [[1, 320]]}, "bad_words: token id 320 is outside the vocabulary"),
        ([1], {"bad_words": [[1] * 17]}, "16 tokens in each; 1 of up to 17 were given"),
        ([1], {"bad_words": [[i, j] for i in range(20) for j in range(20)]}, "256 entries of more than one token"),
        ([1], {"bad_words": [[i] for i in range(320)]}, "leave no token to choose"),
        (
            [1] * 100,
            {"max_tokens": None, "min_tokens": 29},
            "min_tokens is 29 and this prompt of 100 tokens gets 28",
        ),
        ([[1], "\ud800"], {}, "prompt 1: the prompt is not valid Unicode"),
        ([[1], 2.5], {}, "prompt 1: a prompt is a text or a list of token ids, not 2.5"),
        ([[1], [2.5]], {}, r"prompt 1: a prompt is a text or a list of token ids, not \[2.5\]"),
        ([[1], [1], [400]], {}, "prompt 2: token id 400"),
        (None, {}, "prompts are a text, a list of token ids or a list of these, not None"),
        (b"abc", {}, "a prompt is a text or a list of token ids, not b'abc'"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(plain, prompt, params, message):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 4} | params)
    with pytest.raises(UserError, match=message):
        plain.generate(prompt, params)
    with pytest.raises(UserError, match=message):
        plain.as_completed(prompt, params)
    assert_free(plain)


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], "greedy", 5])
def test_other_things_than_sampling_params_are_refused(plain, params):
    with pytest.raises(UserError, match="sampling parameters are SamplingParams or a list of them"):
        plain.generate([[1]], params)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", ["hot", None, True, -1, float("nan"), float("inf"), 1e-40, 1e39]),
        ("top_k", ["3", 1.5, float("nan"), -2]),
        ("top_p", ["x", 0, 1.1, float("nan")]),
        ("min_p", ["x", -0.1, 1.1, float("nan")]),
        ("seed", ["x", 1.5, True, 2**64, -(2**63) - 1]),
        ("max_tokens", ["3", 2.5, True, 0]),
        ("stop", [None, 5, [1], ["a", ""]]),
        ("n", ["2", 0, 1.5, True]),
        ("min_tokens", ["1", -1, 1.5]),
        ("repetition_penalty", ["x", 0, -1, float("nan"), float("inf")]),
        ("presence_penalty", ["x", 2.1, float("nan")]),
        ("frequency_penalty", [None, -2.1]),
        ("logit_bias", [[1], {"a": 1}, {-1: 1}, {1: "x"}, {1: float("nan")}, {1: float("-inf")}]),
        ("bad_words", [5, None, [5], [""], [[]], [[1.5]], [["a"]], [[-1]]]),
        ("logprobs", ["1", -1, 21, True]),
        ("prompt_logprobs", [1.5, -1, 21]),
        ("echo", [1, None]),
        ("skip_special_tokens", ["no"]),
        ("speculative", [0]),
        ("stop_token_ids", [None, 5, ["a"], [1.5], [-1]]),
    ],
)
def test_sampling_parameters_out_of_range_or_of_another_type_are_refused(name, values):
    for value in values:
        with pytest.raises(UserError, match=f"^{name} is .*; it must be "):
            SamplingParams(**{name: value})


def test_extreme_sampling_parameters_do_what_they_say(plain, vanilla):
    prompts, answers, _ = vanilla

    def answer(**params):
        return plain.generate(prompts[0], SamplingParams(max_tokens=12, ignore_eos=True, seed=2**64 - 1, **params))

    for only_the_likeliest in ({"temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-300}, {"min_p": 1}):
        assert answer(**only_the_likeliest)[0].output_ids == answers[0][:12]
    assert answer(temperature=1e30, top_k=10**30)[0].output_ids == answer(temperature=1e20)[0].output_ids


def test_threads_take_turns(dspark, vanilla):
    prompts, answers, _ = vanilla
    with ThreadPoolExecutor(4) as pool:
        batches = [pool.submit(dspark.generate, prompts, GREEDY) for _ in range(2)]
        streams = [pool.submit(lambda p=p: list(dspark.stream(p, GREEDY))) for p in prompts]
        assert [[o.output_ids for o in b.result()] for b in batches] == [answers] * 2
        for stream, answer in zip(streams, answers, strict=True):
            assert [t for d in stream.result() for t in d.token_ids] == answer
    assert_free(dspark)


def test_paths_are_paths_and_a_calibration_changes_the_windows(goldens, vanilla):
    prompts, answers, _ = vanilla
    model, draft = goldens / "qwen3_tiny", goldens / "dspark_qwen3_tiny_vanilla_trained"

    def windows(temperature):
        llm = LLM(model, draft, policy="threshold:0.7", sts=[temperature] * 7, **SIZES)
        [output] = llm.generate(prompts[0], GREEDY)
        assert output.output_ids == answers[0]
        return output.window_histogram

    # A small temperature makes every doubt a certainty, a large one everything a coin flip.
    assert windows(1e-6) != windows(1e6) == [windows(1e6)[0], *[0] * 7]


def test_several_short_prompts_prefill_in_a_small_program(dspark):
    llm = LLM(dspark.target, max_running_requests=4, context_length=128, row_buckets=(4,))
    llm.generate([[1, 2, 3]] * 4, SamplingParams(temperature=0, max_tokens=1))
    [shape] = [k for k in llm.engine.programs.report.by_shape if "prefill=(" in k]
    assert "prefill=(64, 4, 32)" in shape


def test_no_prompts_have_no_answers(plain):
    assert plain.generate([]) == []


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "a"}], ["a"], {"role": "user", "content": "a"}])
def test_bad_chats_are_refused(plain, messages):
    with pytest.raises(UserError, match="a chat is a list of at least one"):
        plain.stream_chat(messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_algorithm": "DSPARK"}, "DSPARK needs a drafter"),
        ({"speculative_algorithm": "EAGLE"}, "the algorithm is 'EAGLE'; it must be NONE, DFLASH, DSPARK"),
        ({"speculative_algorithm": "NONE", "draft": "untrained"}, "NONE uses no drafter"),
        ({"speculative_algorithm": "DFLASH", "draft": "untrained"}, "the untrained drafter is a DSpark one"),
        ({"speculative_algorithm": "DSPARK", "draft": "dflash_qwen3_tiny"}, "is a DFLASH drafter, not DSPARK"),
        (
            {"speculative_algorithm": "DFLASH", "draft": "dspark_qwen3_tiny_gated"},
            "a DSPARK drafter, not DFLASH",
        ),
        ({"draft": "llama_tiny"}, "is a target, not a drafter"),
        ({"draft": "dspark_qwen3_tiny_rnn", "block_size": 8}, "block size 8 is larger than the 7"),
        ({"block_size": 3}, "a block size was given without a drafter"),
        ({"verify_mode": "some"}, "verify_mode is 'some'"),
        ({"verify_mode": "static"}, "a verify mode was given without a drafter"),
        ({"mesh": 5}, "mesh is 5; it must be a jax.sharding.Mesh"),
        ({"draft": "dspark_qwen3_tiny_rnn", "policy": "fixed:8"}, "fixed:8 verifies more than the 7 tokens"),
        ({"policy": "some"}, "unknown verify policy 'some'"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be float32 or bfloat16"),
        ({"page_size": 0}, "page_size is 0"),
        ({"context_length": 513}, "a context of 513 is longer than the 512 positions"),
        ({"max_total_tokens": 10**13}, "there is not enough memory for a KV pool of this size"),
        ({"pages": 3}, "pages is no setting of LLM"),
        ({"model": None}, "model is None; it must be the path of a checkpoint"),
        ({"draft": 5}, "draft is 5; it must be the path of a checkpoint"),
        ({"seed": "x"}, "seed is 'x'; it must be a whole number"),
        ({"max_running_requests": "4"}, "max_running_requests is '4'; it must be a whole number"),
        ({"page_size": 2.0}, "page_size is 2.0; it must be a whole number"),
        ({"max_running_requests": 10**9}, "max_running_requests is 1000000000; it must be at most"),
        ({"row_buckets": (2.5,)}, r"row_buckets is \(2.5,\); it must be positive whole numbers"),
        ({"policy": None}, "policy is None; it must be a policy or its name"),
        ({"policy": "threshold:0.5"}, "a verify policy was given without a drafter"),
        ({"draft": "dflash_qwen3_tiny", "policy": "threshold:0.5"}, "a threshold policy needs a confidence head"),
        ({"draft": "dflash_qwen3_tiny", "sts": [1.0] * 7}, "a confidence calibration needs a confidence head"),
        ({"draft": "dspark_qwen3_tiny_rnn", "sts": [1.0] * 5}, "has 5 temperatures and the block has 7"),
        ({"draft": "dspark_qwen3_tiny_rnn", "sts": [0.0] * 7}, "must be positive numbers"),
        ({"sts": [1.0]}, "a confidence calibration was given without a drafter"),
    ],
)
def test_contradictory_arguments_are_refused(goldens, arguments, message):
    if arguments.get("draft") not in (None, 5, "untrained"):
        arguments = arguments | {"draft": str(goldens / arguments["draft"])}
    with pytest.raises(UserError, match=message):
        LLM(**{"model": str(goldens / "qwen3_tiny")} | arguments)


def test_a_headless_drafter_goes_by_both_names(goldens, dspark):
    draft = str(goldens / "dspark_qwen3_tiny_nomarkov")
    assert LLM(dspark.target, draft, "DFLASH", **SIZES).algorithm == "DFLASH"
    assert LLM(dspark.target, draft, **SIZES).algorithm == "DSPARK"


def test_a_loaded_target_keeps_its_dtype(dspark):
    with pytest.raises(UserError, match="its dtype and mesh cannot be changed"):
        LLM(dspark.target, dtype="bfloat16")


def test_random_weights_need_only_a_configuration(goldens, tmp_path):
    (tmp_path / "config.json").write_bytes((goldens / "qwen3_tiny" / "config.json").read_bytes())
    with pytest.raises(UserError, match="safetensors"):
        LLM(tmp_path)
    llm = LLM(tmp_path, "untrained", load_format="dummy", **SIZES)
    assert (llm.draft_name, llm.algorithm) == ("untrained", "DSPARK")
    [output] = llm.generate([1, 2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.output_ids) == 4
    with pytest.raises(UserError, match="loaded already"):
        LLM(llm.target, load_format="dummy", **SIZES)
    with pytest.raises(UserError, match="auto or dummy"):
        LLM(tmp_path, load_format="gguf", **SIZES)  # type: ignore[arg-type]
