"""Constrained decoding through the engine: answers always fit, and speculation changes nothing about them."""

import gc
import itertools
import json
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pydantic_core
import pytest
from json_schemas import random_schema
from scipy import stats
from support import GOLDENS, drafter, forget_programs, full_logits, make_engine, prompts, row_sampling, run, target
from test_grammar import EOS, tokenizer_of
from test_lossless import DRAFTERS, Erratic, random_engine, random_requests
from text_model import text_model

from jspark import LLM, SamplingParams, StructuredOutputs, UserError
from jspark.cli import main
from jspark.config import EngineConfig, VerifyMode
from jspark.engine import Engine
from jspark.grammar import Grammar, Grammars, masks
from jspark.request import Request
from jspark.sampling import log_probs

NAME = DRAFTERS[0]
#: Tokens of the model's own answers stay words, so that drafts are accepted where a grammar lets words through.
_OUTPUTS = np.load(GOLDENS / NAME / "outputs.npz")
_OWN = {int(t) for i in range(4) for t in _OUTPUTS[f"p{i}_target_greedy"]}
_SIGNS = [bytes([b]) for b in (*range(33, 65), *range(91, 97), *range(123, 127), 10, 0xC3, 0xA9)]
_FREE = [i for i in range(27, 318) if i not in _OWN]
PIECES = dict(zip(_FREE, [b'{"', b'":', b'",', b"23", b"abc", b"bc", *_SIGNS], strict=False))
TEXTS = {i: chr(97 + i).encode() for i in range(26)} | {26: b" "} | {i: f"A{i}".encode() for i in range(27, 320)}
TEXTS = {**TEXTS, **PIECES, EOS: b""}
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "(?s:.*)"},
    {"regex": "[a-zA-Z0-9]{0,70}(!|[0-9a-zA-Z])*"},
    {"regex": "(a|bc|def)*x?"},
    {"choice": ["abc", "abd", "xyz uvw", "q" * 30]},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}},
        }
    },
    {"json": {"type": "array", "items": {"enum": ["a", "é", 1]}, "maxItems": 6}},
    {"grammar": 'start: "[" (WORD ",")* WORD "]"\nWORD: /[a-zA-Z0-9]{1,8}/'},
]


@pytest.fixture(autouse=True)
def _programs_end_with_a_slow_case(request):
    """A slow case compiles so many that those of several do not fit beside each other (see conftest.py)."""
    yield
    if request.node.get_closest_marker("slow"):
        forget_programs()
        gc.collect()


@pytest.fixture(scope="module")
def grammars(goldens, tmp_path_factory) -> Grammars:
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("structured") / "model", PIECES, EOS)
    return Grammars(tokenizer_of(model), 320, (EOS,))


def constrain(request: Request, grammars: Grammars, given: dict[str, Any]) -> Request:
    outputs = StructuredOutputs(**given)
    params = replace(request.params, structured_outputs=outputs)
    stop = tuple(dict.fromkeys((*request.stop_ids, EOS)))
    return replace(request, params=params, stop_ids=stop, grammar=grammars.compile(outputs))


def text(tokens: list[int]) -> bytes:
    return b"".join(TEXTS[t] for t in tokens)


def check_legal(request: Request, tokens: list[int], reason: str | None) -> None:
    """Every token was legal after those before it."""
    assert isinstance(request.grammar, Grammar)
    matcher = request.grammar.matcher()
    body = tokens[:-1] if tokens and tokens[-1] == EOS else tokens
    assert EOS not in body
    legal = masks([matcher], [tokens], len(tokens) + 1)[1] if tokens else [0]
    assert legal[0] == len(tokens)
    assert reason in ("stop", "length")


def plain_constrained(request: Request) -> list[int]:
    """One forward over the whole sequence a token, masked on the host: independent of the engine."""
    assert request.grammar is not None
    matcher, tokens = request.grammar.matcher(), []
    assert isinstance(request.params.max_tokens, int)
    while len(tokens) < request.params.max_tokens:
        bits = masks([matcher], [[]], 1)[0][0, 0]
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:320] > 0
        logits = np.where(allowed, full_logits(request.prompt + tuple(tokens))[-1], -np.inf)
        if not allowed.any():
            break
        tokens.append(int(np.argmax(logits)))
        if tokens[-1] in request.stop_ids:
            break
        matcher.advance(tokens[-1:])
    return tokens


def small_engine(mode: VerifyMode = "compact", **options) -> Engine:
    config = EngineConfig(
        max_running_requests=4,
        page_size=16,
        context_length=128,
        chunked_prefill_size=32,
        verify_mode=mode,
        row_buckets=(4,),
        token_tiers=(12,),
    )
    return make_engine(replace(config, **options), target("qwen3_tiny"), drafter(NAME))


@pytest.fixture(scope="module")
def overlapped() -> Engine:
    return small_engine(overlap=True)


@pytest.fixture(scope="module")
def alone() -> Engine:
    config = EngineConfig(max_running_requests=1, context_length=128, chunked_prefill_size=64)
    return make_engine(config, target("qwen3_tiny"))


def check_mixed_batch(requests: list[Request], engine: Engine, alone: Engine) -> int:
    """Greedy and coupled rows equal plain decoding's, rows with a grammar are legal; drafts accepted in these."""
    accepted = 0
    for request, result in zip(requests, run(engine, requests), strict=True):
        if request.grammar:
            accepted += sum(k * n for k, n in result.stats.accepted.items())
            # A stop token of the request's own may stand where the grammar does not end.
            if not set(result.tokens[-1:]) & set(request.stop_ids) - {EOS}:
                check_legal(request, result.tokens, result.reason)
        if request.params.temperature == 0 or request.params.seed is not None:
            assert result.tokens == run(alone, [request])[0].tokens
    return accepted


def test_a_mixed_batch_equals_plain_decoding(grammars, overlapped, alone):
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}]
    params = [SamplingParams(max_tokens=30, **kind) for kind in kinds]
    requests = [Request(i, prompts(NAME)[i % 4], params[i // 2 % 2]) for i in range(12)]
    requests = [constrain(r, grammars, CONSTRAINTS[r.id % 7]) if r.id % 3 else r for r in requests]
    assert check_mixed_batch(requests, overlapped, alone) > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches_equal_plain_decoding_at_length(seed, grammars, alone):
    """Engines, filters, stop tokens and samplers at random."""
    rng = np.random.default_rng(seed)
    requests = [
        constrain(r, grammars, CONSTRAINTS[rng.integers(len(CONSTRAINTS))]) if rng.random() < 0.6 else r
        for r in random_requests(rng, 12, "greedy coupled sampled")
    ]
    check_mixed_batch(requests, random_engine(rng, DRAFTERS[seed % len(DRAFTERS)]), alone)


GREEDY = SamplingParams(temperature=0, max_tokens=40)


def test_every_mode_equals_a_loop_of_whole_forwards(grammars, overlapped):
    requests = [
        constrain(Request(i, prompts(NAME)[i % 4], GREEDY), grammars, given) for i, given in enumerate(CONSTRAINTS)
    ]
    want = [plain_constrained(r) for r in requests]
    assert len({tuple(w) for w in want}) == len(want)
    for e in (overlapped, small_engine("static"), small_engine("cap-accept")):
        results = run(e, requests)
        assert [r.tokens for r in results] == want
        for request, result in zip(requests, results, strict=True):
            check_legal(request, result.tokens, result.reason)


def check_schemas(rng: np.random.Generator, count: int, grammars: Grammars, engine: Engine) -> None:
    """`count` schemas at temperature 0, as many at 1 with a seed, as many without."""
    whole = 0
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 5}, {}]
    for kind in kinds:
        schemas = [random_schema(rng) for _ in range(count)]
        params = SamplingParams(max_tokens=90, **kind)
        requests = [
            constrain(Request(i, prompts(NAME)[i % 4], params), grammars, {"json": schema})
            for i, schema in enumerate(schemas)
        ]
        for schema, result in zip(schemas, run(engine, requests), strict=True):
            got = text(result.tokens)
            if result.reason == "stop":
                whole += 1
                assert jsonschema_rs.is_valid(schema, json.loads(got.decode())), (schema, got)
            else:
                assert result.reason == "length"
                pydantic_core.from_json(got, allow_partial="trailing-strings")
    assert whole > 2 * count


@pytest.mark.slow
def test_answers_fit_their_random_schemas(grammars, overlapped, rng):
    check_schemas(rng, 8, grammars, overlapped)


@pytest.mark.slow
def test_answers_fit_two_thousand_random_schemas(grammars, overlapped, rng):
    check_schemas(rng, 700, grammars, overlapped)


@pytest.mark.slow
def test_rejection_sampling_keeps_the_constrained_distribution(grammars, rng):
    given = {"regex": "[ab ](bc|c|[d-g]xy|x)?"}
    params = SamplingParams(temperature=1.5, max_tokens=3, top_p=0.95)
    request = constrain(Request(0, prompts(NAME)[2], params), grammars, given)
    config = EngineConfig(
        max_running_requests=32,
        page_size=16,
        context_length=64,
        chunked_prefill_size=512,
        row_buckets=(32,),
        token_tiers=(80,),
        block_size=3,
    )
    e = make_engine(config, target("qwen3_tiny"), drafter(NAME), policy=Erratic(rng))
    trials = 1500
    results = run(e, [replace(request, id=i) for i in range(trials)])
    probabilities: dict[tuple[int, ...], float] = {}
    open_ = {(): 1.0}
    assert request.grammar is not None
    while open_:
        longer = {}
        for prefix, mass in open_.items():
            if len(prefix) == 3 or EOS in prefix:
                probabilities[prefix] = mass
                continue
            matcher = request.grammar.matcher()
            matcher.advance(prefix)
            bits = masks([matcher], [[]], 1)[0][0, 0]
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:320] > 0
            logits = np.where(allowed, full_logits(request.prompt + prefix)[-1], -np.inf)[None]
            p = np.exp(np.asarray(log_probs(logits, row_sampling(params, False), filtered=True)))[0]
            longer |= {(*prefix, int(t)): mass * float(p[t]) for t in np.flatnonzero(p)}
        open_ = longer
    counts = dict.fromkeys(probabilities, 0)
    for result in results:
        counts[tuple(result.tokens)] += 1  # An illegal answer is a KeyError.
    expected, seen = np.array(list(probabilities.values())) * trials, np.array(list(counts.values()))
    small = expected < 5
    if small.any():
        seen, expected = (np.append(x[~small], x[small].sum()) for x in (seen, expected))
    assert len(seen) > 4
    assert stats.chisquare(seen, expected * (trials / expected.sum())).pvalue > 1e-4


def test_the_end_of_the_grammar_beats_min_tokens_and_ignore_eos(grammars, overlapped):
    prompt = prompts(NAME)[0]
    base = constrain(Request(0, prompt, GREEDY), grammars, {"choice": ["abc", "xyz"]})
    ended = run(overlapped, [base])[0]
    assert ended.tokens[-1] == EOS
    patient = replace(base, id=1, params=replace(base.params, min_tokens=20))
    outputs = StructuredOutputs(choice=["abc", "xyz"])
    endless = replace(base, id=2, stop_ids=(), grammar=grammars.compile(outputs, ignore_eos=True))
    for result in run(overlapped, [patient, endless]):
        assert result.tokens == ended.tokens[:-1]
        assert result.reason == "stop"


def test_min_tokens_wait_while_the_grammar_can_go_on(grammars, overlapped):
    base = constrain(Request(0, prompts(NAME)[1], GREEDY), grammars, {"regex": "a{0,30}"})
    patient = replace(base, params=replace(base.params, min_tokens=12, logit_bias={EOS: 1000.0}))
    eager = replace(patient, id=1, params=replace(patient.params, min_tokens=0))
    first, second = run(overlapped, [patient, eager])
    assert first.tokens == [0] * 12 + [EOS]
    assert second.tokens == [EOS]


def test_where_other_parameters_forbid_all_that_is_legal_the_answer_ends(grammars, overlapped):
    base = constrain(Request(0, prompts(NAME)[0], GREEDY), grammars, {"regex": "[ab]{2}x"})
    words = ((ID_X,),)
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0}]
    for kind in kinds:
        banned = replace(base, bad_words=words, params=replace(base.params, **kind, bad_words=words))
        result = run(overlapped, [banned])[0]
        assert result.reason == "stop"
        assert set(text(result.tokens).decode()) <= set("ab")
        assert len(text(result.tokens)) == 2


ID_X = 23


def test_an_answer_whose_grammar_gives_up_breaks_off_with_the_reason(grammars, overlapped):
    names = ["".join(n) for n in itertools.product("abcdefgh", "abcdefgh", "abcdefghij")]
    schema = {"type": "object", "properties": {n: {} for n in names}}
    # One token opens the first property; after it more may follow than the parser has rows for.
    opening = replace(GREEDY, logit_bias={next(t for t, x in PIECES.items() if x == b'{"'): 1000.0})
    broken = constrain(Request(0, prompts(NAME)[0], opening), grammars, {"json": schema})
    fine = Request(1, prompts(NAME)[1], GREEDY)
    alone = run(overlapped, [replace(fine, id=2)])[0].tokens
    overlapped.add(broken)
    overlapped.add(fine)
    got: dict[int, list[int]] = {0: [], 1: []}
    problems = []
    while not overlapped.idle:
        for update in overlapped.step():
            got[update.id] += update.tokens
            problems += [(update.finish_reason, update.problem)] if update.problem else []
    assert len(problems) == 1
    assert problems[0][0] == "abort"
    assert got[1] == alone


def test_abort_at_any_moment_leaves_the_others_alone(grammars, overlapped, rng):
    requests = [
        constrain(Request(i, prompts(NAME)[i % 4], GREEDY), grammars, CONSTRAINTS[i % 6])
        if i % 3
        else Request(i, prompts(NAME)[i % 4], GREEDY)
        for i in range(12)
    ]
    want = [r.tokens for r in run(overlapped, requests)]
    for request in requests:
        overlapped.add(request)
    got: dict[int, list[int]] = {r.id: [] for r in requests}
    aborted: set[int] = set()
    while not overlapped.idle:
        for update in overlapped.step():
            assert update.id not in aborted
            got[update.id] += update.tokens
        if rng.random() < 0.3:
            aborted.add(int(rng.integers(12)))
            for victim in aborted:
                overlapped.abort(victim)
    assert overlapped.scheduler.allocator.in_use == 0
    assert aborted
    assert all(got[i] == want[i] for i in range(12) if i not in aborted)


# ── the Python interface ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model(goldens, tmp_path_factory) -> str:
    return str(text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("structured") / "model", PIECES, EOS))


@pytest.fixture(scope="module")
def llm(goldens, model) -> LLM:
    sizes = {"max_running_requests": 2, "row_buckets": (2,), "page_size": 16, "context_length": 128}
    return LLM(model, str(goldens / NAME), **sizes)


def test_llm_answers_in_json_and_stops_where_told(llm):
    schema = {"type": "object", "properties": {"k": {"enum": ["abc", "bc"]}}, "required": ["k"]}
    schema |= {"additionalProperties": False}
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": schema}, logprobs=0)
    output = llm.generate("hello", params)[0]
    assert output.finish_reason == "stop"
    assert output.stop_reason == EOS
    assert json.loads(output.text or "")["k"] in ("abc", "bc")
    # Log-probabilities are the target's own, of tokens that it may find unlikely.
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.output_ids)
    scores = full_logits(tuple(llm.target.text_ids("hello")) + tuple(output.output_ids))
    start = len(llm.target.text_ids("hello")) - 1
    for k, (token, entry) in enumerate(zip(output.output_ids, output.logprobs, strict=True)):
        row = scores[start + k].astype(np.float64)
        np.testing.assert_allclose(entry.logprob, row[token] - np.logaddexp.reduce(row), atol=1e-3)
    cut = llm.generate("hello", replace(params, logprobs=None, stop="bc"))[0]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == "bc"
    assert (output.text or "").startswith(cut.text or "?")
    several = llm.generate("hello", replace(params, temperature=1.0, seed=5, n=3, logprobs=None))
    assert all(json.loads(o.text or "")["k"] in ("abc", "bc") for o in several)


def test_llm_refuses_what_it_cannot_do(llm, goldens):
    with pytest.raises(UserError, match="prompt 1: the JSON schema cannot be used: not is not supported"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(structured_outputs={"json": {"not": {}}})])
    with pytest.raises(UserError, match="structured_outputs is"):
        SamplingParams(structured_outputs={"yaml": ""})
    with pytest.raises(UserError, match="structured_outputs is"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
    bare = LLM(str(goldens / "qwen3_tiny"), max_running_requests=1, context_length=64)
    with pytest.raises(UserError, match="a structured output needs a tokenizer"):
        bare.generate([[1, 2]], SamplingParams(structured_outputs={"regex": "a"}))
    request = Request(0, (1,), SamplingParams(structured_outputs={"regex": "a"}))
    with pytest.raises(UserError, match="without their grammar"):
        bare.engine.add(request)


def test_the_command_line(model, tmp_path, capsys):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 3}')
    (tmp_path / "two.lark").write_text('start: "ab" "c"')
    args = ["generate", "--model-path", model, "--prompt", "hello", "--max-running-requests", "1"]
    args += ["--context-length", "64", "--json"]
    for flags, fits in (
        (["--json-schema", str(schema)], lambda t: json.loads(t) in ([1, 1], [1, 1, 1])),
        (["--json-schema", '{"const": "x"}'], lambda t: json.loads(t) == "x"),
        (["--grammar", str(tmp_path / "two.lark")], lambda t: t == "abc"),
        (["--choice", "ab", "--choice", "ba"], lambda t: t in ("ab", "ba")),
    ):
        assert main([*args, *flags]) == 0
        record = json.loads(capsys.readouterr().out)
        assert fits(record["text"])
        assert record["finish_reason"] == "stop"
    for flags, why in (
        (["--json-schema", str(tmp_path / "none.json")], "cannot be read"),
        (["--json-schema", '{"type": "objekt"}'], "objekt"),
        (["--regex", "a", "--choice", "b"], "give one of them"),
        (["--regex", "(?=a)"], "look-around"),
    ):
        assert main([*args, *flags]) == 2
        message = capsys.readouterr().err
        assert why in message
        assert message.strip().count("\n") == 0


@pytest.mark.slow
def test_the_built_in_model():
    """A real vocabulary and real weights, with an untrained drafter."""
    llm = LLM("smollm2-135m", "untrained", max_running_requests=3, row_buckets=(3,), context_length=192)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    greedy = SamplingParams(temperature=0, max_tokens=60)
    asked = [
        replace(greedy, structured_outputs={"json": schema}),
        replace(greedy, structured_outputs={"choice": ["Paris", "Berlin, or so"]}),
        replace(greedy, temperature=1.0, structured_outputs={"json": schema}),
    ]
    message = [{"role": "user", "content": "Invent a person."}]
    first, city, second = llm.chat(
        [message, [{"role": "user", "content": "The capital of France?"}], message], asked
    )
    for output in (first, second):
        assert output.finish_reason == "stop"
        assert jsonschema_rs.is_valid(schema, json.loads(output.text or ""))
    assert city.text in ("Paris", "Berlin, or so")
    plain = LLM(llm.target, max_running_requests=1, context_length=192)
    assert plain.chat(message, asked[0])[0].output_ids == first.output_ids
