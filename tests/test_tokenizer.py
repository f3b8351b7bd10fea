"""Text and ids: the real SmolLM2 vocabulary against its goldens, small vocabularies for the rest."""

import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jspark.checkpoint import open_target
from jspark.checkpoint.gguf_vocabulary import tokenizer as from_metadata
from jspark.errors import UserError
from jspark.tokenizer import Tokenizer, from_folder

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    """The built-in model's tokenizer, fetched as a user would."""
    tokenizer = open_target("smollm2-135m").tokenizer()
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def meta(goldens) -> dict:
    return json.loads((goldens / "smollm2_135m_q4_1" / "meta.json").read_text())


@pytest.fixture(scope="module")
def outputs(goldens):
    return np.load(goldens / "smollm2_135m_q4_1" / "outputs.npz")


def test_smollm_ids_are_the_golden_ids(smollm, meta, outputs):
    for j, text in enumerate(meta["strings"]):
        ids = smollm.encode(text)
        assert ids == outputs[f"tok_{j}"].tolist(), text
        assert smollm.decode(ids, skip_special_tokens=False) == text
    assert smollm.eos_token_ids == (meta["eos_token_id"],)
    assert smollm.vocab_size == 49152


def test_smollm_chats_render_as_golden(smollm, meta, outputs):
    for i, chat in enumerate(meta["chats"]):
        prompt = smollm.apply_chat_template(chat["chat"])
        assert prompt == chat["rendered"]
        assert smollm.encode(prompt, add_special_tokens=False) == outputs[f"prompt_{i}"].tolist()
    open_ended = smollm.apply_chat_template(meta["chats"][0]["chat"], add_generation_prompt=False)
    assert meta["chats"][0]["rendered"] == open_ended + "<|im_start|>assistant\n"


def test_special_tokens_are_skipped_on_demand(smollm):
    ids = smollm.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm.decode(ids) == "hello"
    assert smollm.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


def test_a_stream_never_splits_a_character(smollm):
    text = "naïve café – 東京 🙂👩‍👩‍👧 done"
    stream = smollm.stream()
    pieces = [stream.push(i) for i in smollm.encode(text)]
    assert "".join(pieces) == text
    assert "" in pieces  # some characters take several tokens
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""


def test_streams_equal_decoding_in_one_go_for_any_ids(smollm):
    draw = random.Random(0)
    partial = [i for i in range(smollm.vocab_size) if "\ufffd" in smollm.decode([i])]
    for _ in range(300):
        ids = [
            draw.choice(partial) if draw.random() < 0.6 else draw.randrange(smollm.vocab_size)
            for _ in range(draw.randrange(1, 30))
        ]
        for skip in (True, False):
            stream = smollm.stream(skip)
            assert "".join(map(stream.push, ids)) + stream.flush() == smollm.decode(ids, skip)


def test_flush_gives_unfinished_bytes_and_starts_afresh(smollm):
    first = smollm.encode("🙂")[0]
    stream = smollm.stream()
    assert stream.push(first) == ""
    assert stream.flush() == "\ufffd"
    assert "".join(map(stream.push, smollm.encode("ok"))) == "ok"


def test_ids_beyond_the_vocabulary_are_left_out(smollm):
    ids = [*smollm.encode("one"), 60_000, *smollm.encode(" two")]
    stream = smollm.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == smollm.decode(ids) == "one two"


def metadata(**changes) -> dict:
    """A byte-level vocabulary: the 256 bytes, a few merges, an end token and a user-defined one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he", "ll", "hell", "Ġa", "<s>", "</s>", "<tool call>", "12", "123"]
    types = [1] * 260 + [3, 3, 4, 1, 1]
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["h e", "l l", "he ll", "Ġ a", "1 2", "12 3"],
        "bos_token_id": 260,
        "eos_token_id": 261,
    }
    merged = {k: v for k, v in (base | changes).items() if v is not None}
    return {f"tokenizer.ggml.{k}": v for k, v in merged.items()}


def pieces(pre: str, text: str) -> list[str]:
    """How a pre-tokeniser cuts `text`, seen through a vocabulary without merges."""
    made = from_metadata(metadata(pre=pre), "x.gguf")
    assert isinstance(made, Tokenizer)
    normalised = made.backend.normalizer.normalize_str(text) if made.backend.normalizer else text
    cut = made.backend.pre_tokenizer.pre_tokenize_str(normalised)
    return [decoders.ByteLevel().decode([piece]) for piece, _ in cut]


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        (
            "smollm",
            [
                "I",
                "'ll",
                " pay",
                " ",
                "1",
                "2",
                "3",
                "4",
                " €",
                "  ",
                " now",
                "!!",
                "\n",
                "\n",
                "DON",
                "'",
                "T",
            ],
        ),
        ("gpt-2", ["I", "'ll", " pay", " 1234", " €", "  ", " now", "!!", "\n", "\n", "DON", "'", "T"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "4", " €", "  ", " now", "!!\n\n", "DON", "'T"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", " €", "  ", " now", "!!\n\n", "DON", "'T"]),
        (
            "default",
            ["I", "'", "ll", " pay", " ", "123", "4", " €", "  ", " now", "!!", "\n", "\n", "DON", "'", "T"],
        ),
    ],
)
def test_pre_tokenisers(pre, want):
    text = "I'll pay 1234 €   now!!\n\nDON'T"
    assert pieces(pre, text) == want
    assert "".join(want) == text


def test_qwen_text_is_composed_first():
    assert pieces("qwen2", "cafe\u0301") == ["caf\u00e9"]
    assert pieces("gpt-2", "cafe\u0301") == ["cafe", "\u0301"]


def test_gguf_added_tokens_and_bos():
    plain = from_metadata(metadata(), "x.gguf")
    assert isinstance(plain, Tokenizer)
    assert plain.encode("hell a<tool call></s>") == [258, 259, 262, 261]
    assert plain.decode([258, 262, 261]) == "hell<tool call>"
    for changes, want in (
        ({"add_bos_token": True}, [260, 258]),
        ({"add_bos_token": True, "add_eos_token": True}, [260, 258, 261]),
        ({"pre": "llama-bpe"}, [260, 258]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [258]),
    ):
        made = from_metadata(metadata(**changes), "x.gguf")
        assert isinstance(made, Tokenizer)
        assert made.encode("hell") == want
        assert made.encode("hell", add_special_tokens=False) == [258]


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"model": "llama"}, "'llama'"), ({"pre": "tekken"}, "tekken"), ({"model": None}, "no vocabulary")],
)
def test_vocabularies_that_cannot_be_used_say_why(changes, word):
    reason = from_metadata(metadata(**changes), "x.gguf")
    assert isinstance(reason, str)
    assert word in reason
    assert "x.gguf" in reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"merges": ["h e", "nothing"]}, "nothing"),
        ({"merges": ["h zz"]}, "zz"),
        ({"merges": None}, "merges"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"token_type": [1]}, "types"),
        ({"eos_token_id": 400}, "eos_token_id"),
    ],
)
def test_contradictory_vocabularies(changes, word):
    with pytest.raises(UserError, match=word):
        from_metadata(metadata(**changes), "x.gguf")


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder's tokenizer files, with a BOS in the post-processor."""
    backend = tokenizers.Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<bos>", "lstrip": False}, "eos_token": "<eos>", "pad_token": None}
    settings["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_folder_with_its_companions(folder):
    made = from_folder(folder)
    assert isinstance(made, Tokenizer)
    ids = made.encode("long text")
    assert ids[0] == 256
    assert len(ids) == 10  # the file's own truncation does not apply
    assert made.encode("<eos>", add_special_tokens=False) == [257]
    assert made.eos_token_ids == (257,)
    assert made.apply_chat_template(CHAT) == "<bos>hi<eos>"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert with_folder(folder).apply_chat_template(CHAT) == "hi!"


def with_folder(folder) -> Tokenizer:
    made = from_folder(folder)
    assert isinstance(made, Tokenizer)
    return made


def test_named_templates_and_none(folder):
    path = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert with_folder(folder).apply_chat_template(CHAT) == "d"
    path.unlink()
    made = with_folder(folder)
    assert not made.has_chat_template
    assert made.eos_token_ids == ()
    with pytest.raises(UserError, match="no chat template; send a plain prompt"):
        made.apply_chat_template(CHAT)


def test_missing_and_broken_files(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        from_folder(folder)
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in str(from_folder(folder))
