"""Stop strings and held-back text, on a real byte-level tokenizer."""

import pytest
from text_model import text_model

from jspark.text import TextStream
from jspark.tokenizer import from_folder

EURO = "€".encode()
PIECES = {100: EURO[:1], 101: EURO[1:], 102: b"!\xe2", 103: b"\x82\xac?"}


@pytest.fixture(scope="module")
def tokenizer(goldens, tmp_path_factory):
    return from_folder(text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("text") / "model", PIECES))


def pushed(tokenizer, ids, stop=()):
    """(pieces by token, then the rest; the stop string), ending where the stop string does."""
    stream, pieces = TextStream(tokenizer.stream(), stop), []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stop_string is not None:
            return pieces, stream.stop_string
    return [*pieces, stream.finish()], stream.stop_string


def test_characters_split_over_tokens_come_out_whole(tokenizer):
    assert pushed(tokenizer, [0, 100, 101, 1]) == (["a", "", "€", "b", ""], None)
    assert pushed(tokenizer, [102, 103]) == (["", "!€?", ""], None)


def test_an_unfinished_character_ends_as_a_replacement(tokenizer):
    assert pushed(tokenizer, [0, 100]) == (["a", "", "\ufffd"], None)


def test_text_is_held_back_only_while_it_may_begin_a_stop_string(tokenizer):
    ids = tokenizer.encode("abxabc")
    assert pushed(tokenizer, ids, ["abc"]) == (["", "", "abx", "", "", ""], "abc")
    assert pushed(tokenizer, ids[:5], ["abc"]) == (["", "", "abx", "", "", "ab"], None)


def test_a_stop_string_that_overlaps_itself_is_found(tokenizer):
    pieces, stop = pushed(tokenizer, tokenizer.encode("aabaaab"), ["aaab"])
    assert ("".join(pieces), stop) == ("aab", "aaab")


def test_a_stop_string_inside_one_token_cuts_within_it(tokenizer):
    assert pushed(tokenizer, [0, 130, 1], ["13"]) == (["a", "A"], "13")


def test_of_two_stop_strings_the_earlier_in_the_text_wins(tokenizer):
    assert pushed(tokenizer, [0, 130], ["30", "A1"]) == (["a", ""], "A1")


def test_a_stop_string_of_a_split_character(tokenizer):
    pieces, stop = pushed(tokenizer, [0, 102, 103, 1], ["€"])
    assert ("".join(pieces), stop) == ("a!", "€")


@pytest.mark.parametrize("stop", [["zz"], ["ca", "bcd"], ["a b", "b c a"], ["cc", "c c b", "abca"]])
def test_every_stream_shows_the_text_before_the_first_complete_stop_string(tokenizer, rng, stop):
    for _ in range(300):
        text = "".join(rng.choice(list("abc "), size=12))
        ends = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
        pieces, _ = pushed(tokenizer, tokenizer.encode(text), stop)
        # The first to be complete wins; of those complete at the same letter, the one that began first.
        assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)
