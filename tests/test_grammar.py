"""Masks of constrained decoding against brute force, on tiny vocabularies; bad and hostile grammars."""

import json
from typing import Any

import numpy as np
import pytest
from text_model import text_model

from jspark import UserError
from jspark.checkpoint import open_target
from jspark.grammar import CACHE, Grammars, Matcher, masks
from jspark.structured import MAX_TEXT, StructuredOutputs
from jspark.tokenizer import Tokenizer

EOS = 318
#: Every byte is a token, as in real vocabularies: two multi-byte pieces and punctuation beside a to z and space.
SEVERAL = [b'{"', b'":', b'",', b"23", b"\xe2\x82", b"\xe2\x82\xac", b"abc", b"bc", b"  "]
BYTES = [bytes([b]) for b in range(256) if b != 32 and not 97 <= b <= 122]
PIECES = dict(enumerate([*SEVERAL, *BYTES], 27))
TEXTS = {i: chr(97 + i).encode() for i in range(26)} | {26: b" "} | {i: f"A{i}".encode() for i in range(27, 320)}
TEXTS = {**TEXTS, **PIECES, EOS: b""}
ID = {text: i for i, text in TEXTS.items()}


@pytest.fixture(scope="module")
def tokenizer(goldens, tmp_path_factory):
    model = text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("grammar") / "model", PIECES, EOS)
    return tokenizer_of(model)


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, 320, (EOS,))


def tokenizer_of(folder) -> Tokenizer:
    tokenizer = open_target(str(folder)).tokenizer()
    assert tokenizer is not None
    return tokenizer


def legal_tokens(bits: np.ndarray) -> set[int]:
    """Token ids of one mask."""
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:320]).tolist())


def mask(matcher: Matcher) -> set[int]:
    return legal_tokens(masks([matcher], [[]], 1)[0][0, 0])


def expected(choices: list[bytes], before: bytes) -> set[int]:
    """Legal tokens after `before`, by trying them all."""
    legal = {t for t, text in TEXTS.items() if text and any(c.startswith(before + text) for c in choices)}
    return legal | ({EOS} if before in choices else set())


def check(bits: np.ndarray, choices: list[bytes], before: bytes) -> set[int]:
    """A mask against brute force; where one byte must follow, one way to write it is enough."""
    got, want = legal_tokens(bits), expected(choices, before)
    following = {c[len(before) :][:1] for c in choices if c.startswith(before)}
    if len(following) == 1:
        assert got <= want
        assert bool(got) == bool(want)
    else:
        assert got == want
    return got


def test_masks_of_choices_equal_brute_force(grammars, rng):
    """At every offset of drafts that are legal, illegal and beyond the end; nothing sticks to the matchers."""
    words = [b"a", b"b", b"c", b" ", b'{"', b'":', b"1", b"23", "€".encode(), b"\x04"]
    offsets = 0
    for _ in range(20):
        choices = list(
            {b"".join(words[i] for i in rng.integers(0, len(words), rng.integers(1, 7))) for _ in range(9)}
        )
        compiled = grammars.compile(StructuredOutputs(choice=[c.decode() for c in choices]))
        matchers = [compiled.matcher() for _ in range(3)]
        before = [b""] * 3
        for _ in range(4):
            drafts = []
            for prefix in before:
                own, text = [], prefix
                while len(own) < 4 and EOS not in own:
                    options = sorted(expected(choices, text))
                    if rng.random() < 0.1 or not options:
                        options = [5, EOS, 319]
                    own.append(int(rng.choice(options)))
                    text += TEXTS[own[-1]]
                drafts.append(own)
            bits, legal = masks(matchers, drafts, 5)
            for i, own in enumerate(drafts):
                text, count = before[i], 0
                for k in range(len(own) + 1):
                    got = check(bits[i, k], choices, text)
                    offsets += 1
                    if k == len(own) or own[k] not in got:
                        break
                    count += 1
                    if own[k] == EOS:
                        break
                    text += TEXTS[own[k]]
                assert legal[i] == count
                step = [t for t in own[:count] if t != EOS][: rng.integers(0, 3)]
                matchers[i].advance(step)
                before[i] += b"".join(TEXTS[t] for t in step)
    assert offsets > 400


def test_text_that_the_tokenizer_would_write_otherwise(goldens, tmp_path, grammars):
    """A tokenizer that composes accents, as Qwen's does, and one that lacks a character."""
    decomposed = "e\u0301"
    model = text_model(goldens / "qwen3_tiny", tmp_path / "nfc", PIECES, EOS)
    path = model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    nfc = tokenizer_of(model)
    matcher = Grammars(nfc, 320, (EOS,)).compile(StructuredOutputs(choice=[decomposed])).matcher()
    for byte in decomposed.encode():
        assert mask(matcher) == {ID[bytes([byte])]}
        matcher.advance([ID[bytes([byte])]])
    lacking = {i: text for i, text in PIECES.items() if text != b"\x04"}
    poor = tokenizer_of(text_model(goldens / "qwen3_tiny", tmp_path / "poor", lacking, EOS))
    grammar = Grammars(poor, 320, (EOS,)).compile(StructuredOutputs(choice=["a\x04b", "a\x04c"]))
    matcher = grammar.matcher()
    assert legal_tokens(masks([matcher], [[0, 1]], 3)[0][0, 1]) == set()
    matcher.advance([0])
    assert mask(matcher) == set()
    assert "no token" in (matcher.problem or "")
    assert "no token" in (grammar.matcher().why_stopped([0]) or "")


def test_where_the_grammar_ends_only_the_end_is_legal(grammars):
    matcher = grammars.compile(StructuredOutputs(regex="ab?")).matcher()
    matcher.advance([0])
    assert mask(matcher) == {1, EOS}
    matcher.advance([1])
    assert mask(matcher) == {EOS}


def test_without_an_end_token_nothing_is_legal_at_the_end(grammars, tokenizer):
    """Ignored, or none there: an answer goes on while its grammar can."""
    for matcher in (
        grammars.compile(StructuredOutputs(regex="ab?"), ignore_eos=True).matcher(),
        Grammars(tokenizer, 320, ()).compile(StructuredOutputs(regex="ab?")).matcher(),
    ):
        matcher.advance([0])
        assert mask(matcher) == {1}
        matcher.advance([1])
        assert mask(matcher) == set()
        assert matcher.problem is None


def test_an_end_token_is_no_text(tokenizer):
    """Id 300 is a word to the tokenizer, and ends answers by the model's configuration."""
    matcher = Grammars(tokenizer, 320, (300,)).compile(StructuredOutputs(regex=".*")).matcher()
    assert mask(matcher) >= {300, 301}
    matcher = Grammars(tokenizer, 320, (300,)).compile(StructuredOutputs(regex="A.*b")).matcher()
    assert 301 in mask(matcher)
    assert 300 not in mask(matcher)


def test_a_grammar_that_gives_up_allows_nothing(grammars):
    """After the first `{"` more properties may follow than the parser has rows for."""
    schema = {
        "type": "object",
        "properties": {f"{c}{d}{e}": {} for c in "abcd" for d in "abcdefgh" for e in "abcdefghijklmnopqrst"},
    }
    matcher = grammars.compile(StructuredOutputs(json=schema)).matcher()
    assert mask(matcher)
    matcher.advance([ID[b'{"']])
    assert mask(matcher) == set()
    assert matcher.problem is not None
    matcher.advance([0])
    assert mask(matcher) == set()


def test_json_whitespace_is_bounded_unless_the_schema_says_so(grammars):
    def spaces(schema):
        matcher = grammars.compile(StructuredOutputs(json=schema)).matcher()
        matcher.advance([ID[b"{"]])
        for n in range(60):
            if 26 not in mask(matcher):
                return n
            matcher.advance([26])
        return 60

    assert spaces({"type": "object"}) == 1
    assert spaces({"type": "object", "x-guidance": {"whitespace_pattern": "[ ]*"}}) == 60


def test_a_vocabulary_padded_beyond_its_tokenizer(tokenizer):
    """The padding is never legal, wherever the mask's own words end."""
    for size in (321, 352, 400):
        matcher = Grammars(tokenizer, size, (EOS,)).compile(StructuredOutputs(regex="(?s:.*)")).matcher()
        bits = masks([matcher], [[]], 1)[0][0, 0]
        legal = set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size]).tolist())
        broken = {ID[bytes([b])] for b in (*range(0x80, 0xC2), *range(0xF5, 0x100))}
        assert legal == set(range(320)) - broken
        assert bits.size * 32 >= size


def test_the_real_vocabulary_from_gguf():
    checkpoint = open_target("smollm2-135m")
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    grammars = Grammars(tokenizer, checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)
    text = '{"name": "Zoë 東京 \\n", "n": [1, -2.5e3, true]}'
    matcher = grammars.compile(StructuredOutputs(json_object=True)).matcher()
    ids = tokenizer.encode(text)
    assert masks([matcher], [ids], len(ids) + 1)[1][0] == len(ids)
    matcher.advance(ids)
    bits = masks([matcher], [[]], 1)[0][0, 0]
    assert np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist() == [2]


def test_gbnf_and_lark_are_told_apart(grammars):
    for text in ('root ::= "a" [bc]+', 'start: "a" /[bc]+/'):
        matcher = grammars.compile(StructuredOutputs(grammar=text)).matcher()
        matcher.advance([0])
        assert mask(matcher) == {1, 2, ID[b"bc"]}


def test_the_cache_is_bounded_and_serves_again(grammars):
    first = grammars.compile(StructuredOutputs(regex="a"))
    assert grammars.compile(StructuredOutputs(regex="a")) is first
    for i in range(CACHE):
        grammars.compile(StructuredOutputs(regex=f"a{{{i + 2}}}"))
    assert grammars.compile(StructuredOutputs(regex="a")) is not first


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"json": {"not": {}, "uniqueItems": True}}, "not, uniqueItems is not supported"),
        ({"json": {"$ref": "http://example.com/x"}}, "does not fetch"),
        ({"json": {"type": "string", "format": "klingon"}}, "klingon"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no text can satisfy it"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "root ::= ("}, "line 1"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply"),
    ],
)
def test_a_bad_constraint_is_refused_in_one_sentence(grammars, given, why):
    with pytest.raises(UserError) as e:
        grammars.compile(StructuredOutputs(**given))
    assert why in str(e.value)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"json": "{"},
        {"json": "[1]"},
        {"json": {"a": object()}},
        {"json": '{"const": NaN}'},
        {"json": "[" * 100_000},
        {"regex": 3},
        {"regex": "a" * (MAX_TEXT + 1)},
        {"regex": "\ud800"},
        {"choice": []},
        {"choice": "abc"},
        {"choice": [1]},
        {"json_object": 1},
    ],
)
def test_no_constraint_at_all(given):
    with pytest.raises(UserError) as e:
        StructuredOutputs(**given)
    assert len(str(e.value)) < 400


def chain(n: int) -> str:
    """Rules that are nested n deep without a bracket: a stack overflow inside llguidance."""
    return "start: a0\n" + "".join(f'a{i}: a{i + 1} "x"\n' for i in range(n)) + f'a{n}: "y"'


def definitions(n: int) -> dict:
    inner = {f"a{i}": {"type": "object", "properties": {"k": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(n)}
    return {"$defs": inner | {f"a{n}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


def test_grammars_that_would_crash_the_process_are_refused(grammars):
    cases: list[dict[str, Any]] = [{"grammar": chain(5000)}, {"json": definitions(1000)}]
    for given in cases:
        with pytest.raises(UserError, match="too deeply nested"):
            grammars.compile(StructuredOutputs(**given))
        # The trial process is there again.
        assert mask(grammars.compile(StructuredOutputs(regex="b" + next(iter(given)))).matcher()) == {1}


@pytest.mark.slow
def test_grammars_without_end_are_given_up(grammars):
    terms = " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(30))
    cases: list[dict[str, Any]] = [
        {"json": {"type": "integer", "multipleOf": 99_999_989}},
        {"grammar": f"start: A\nA: {terms}"},
    ]
    for given in cases:
        with pytest.raises(UserError, match="too complex"):
            grammars.compile(StructuredOutputs(**given))
