"""Sampling parameters as a user of the Python interface meets them: text, continuations, log-probabilities."""

from dataclasses import replace

import pytest
from test_llm import EOS, PIECES, SIZES
from text_model import text_model

from jspark import LLM, SamplingParams, UserError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(goldens, tmp_path_factory) -> LLM:
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("parameters") / "model", PIECES, EOS)
    return LLM(str(model), str(goldens / "dspark_qwen3_tiny_vanilla_trained"), **SIZES)


def test_n_continuations_are_those_of_the_following_seeds(llm):
    params = SamplingParams(n=3, seed=11, max_tokens=12)
    outputs = llm.generate(["abc", "b"], [params, replace(params, n=1)])
    assert [o.index for o in outputs] == [0, 1, 2, 0]
    assert len({tuple(o.output_ids) for o in outputs[:3]}) == 3
    for output, seed in zip(outputs, (11, 12, 13), strict=False):
        [alone] = llm.generate("abc", replace(params, n=1, seed=seed))
        assert alone.output_ids == output.output_ids
    pieces: dict[int, str] = {}
    for delta in llm.stream("abc", params):
        pieces[delta.index] = pieces.get(delta.index, "") + delta.text
    assert [pieces[i] for i in range(3)] == [o.text for o in outputs[:3]]
    # The seed wraps around at 64 bits.
    assert SamplingParams(n=3, seed=2**64 - 1).continuation(2).seed == 1
    unseeded = llm.generate("abc", replace(params, seed=None, n=2))
    assert unseeded[0].output_ids != unseeded[1].output_ids


def test_logprobs_come_with_the_tokens_they_are_of(llm):
    params = replace(GREEDY, logprobs=2, prompt_logprobs=0, echo=True)
    [output] = llm.generate("abc", params)
    assert [x.token_id for x in output.logprobs or ()] == output.output_ids
    # Greedy without rules: each token is the likeliest.
    assert all(x.top[0] == (x.token_id, x.logprob) and len(x.top) == 2 for x in output.logprobs or ())
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [x and x.token_id for x in output.prompt_logprobs] == [None, 1, 2]
    [silent] = llm.generate("abc", GREEDY)
    assert (silent.logprobs, silent.prompt_logprobs) == (None, None)
    assert output.text == "abc" + (silent.text or "")
    deltas = list(llm.stream("abc", params))
    assert deltas[0].text.startswith("abc")
    assert [x for d in deltas for x in d.logprobs or ()] == output.logprobs
    # A single prompt token has no predictor, and a stop string cuts text and not log-probabilities' alignment.
    [short] = llm.generate([1], replace(params, stop=(silent.text or "")[1:3]))
    assert short.prompt_logprobs == [None]
    assert len(short.logprobs or ()) == len(short.output_ids)


def test_bad_words_never_appear(llm):
    letters = replace(GREEDY, logit_bias=dict.fromkeys(range(4), 50.0), ignore_eos=True)
    [free] = llm.generate("xyz", letters)
    word = (free.text or "")[2:5]
    [without] = llm.generate("xyz", replace(letters, bad_words=word))
    assert set(free.text or "") | set(without.text or "") <= set("abcd")
    assert word not in (without.text or "")
    assert (without.text or "")[:4] == (free.text or "")[:4]
    [neither] = llm.generate("xyz", replace(letters, bad_words=[word, free.output_ids[:1]]))
    assert (free.text or "")[0] not in (neither.text or "")
    with pytest.raises(UserError, match="'ß' has no token in this vocabulary"):
        llm.generate("xyz", replace(letters, bad_words="ß"))
    # A word that the prompt begins is not finished either.
    [second] = llm.generate("xyz", replace(letters, bad_words=[[24, 25, free.output_ids[0]]]))
    assert second.output_ids[0] != free.output_ids[0]


def test_minimum_length_holds_back_stop_tokens_and_stop_strings(llm):
    [free] = llm.generate("abc", replace(GREEDY, ignore_eos=True))
    stop = free.output_ids[3]
    [early] = llm.generate("abc", replace(GREEDY, stop_token_ids=[stop]))
    assert early.output_ids == free.output_ids[:4]
    [late] = llm.generate("abc", replace(GREEDY, stop_token_ids=[stop], min_tokens=9))
    assert len(late.output_ids) >= 9
    assert stop not in late.output_ids[:9]
    word = (free.text or "")[:3]
    [cut] = llm.generate("abc", replace(GREEDY, stop=word, ignore_eos=True))
    assert cut.text == ""
    [whole] = llm.generate("abc", replace(GREEDY, stop=word, ignore_eos=True, min_tokens=5))
    assert len(whole.output_ids) >= 5
    assert (whole.text or "").startswith(word)


def test_special_tokens_in_the_text(llm, goldens):
    params = replace(GREEDY, max_tokens=2, ignore_eos=True, logit_bias={EOS: 1e6})
    assert [o.text for o in llm.generate("abc", params)] == [""]
    assert [o.text for o in llm.generate("abc", replace(params, skip_special_tokens=False))] == ["<eos><eos>"]
    bare = LLM(str(goldens / "qwen3_tiny"), **SIZES)
    for option in ({"skip_special_tokens": False}, {"echo": True}, {"bad_words": "a"}):
        with pytest.raises(UserError, match="needs a tokenizer"):
            bare.generate([1], replace(GREEDY, **option))


def test_without_a_length_an_answer_takes_what_fits(llm):
    outputs = llm.generate([[1] * 120, [1] * 100], SamplingParams(temperature=0, ignore_eos=True))
    assert [len(o.output_ids) for o in outputs] == [8, 28]


def test_a_request_that_does_not_speculate_among_others_that_do(llm):
    alike = SamplingParams(seed=5, max_tokens=24, temperature=0.5, ignore_eos=True)
    drafted, plain = llm.generate(["abc"] * 2, [alike, replace(alike, speculative=False)])
    assert drafted.output_ids == plain.output_ids
    assert sum(plain.window_histogram[1:]) == 0
    assert plain.steps == 23
    assert sum(drafted.window_histogram[1:]) > 0
