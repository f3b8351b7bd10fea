"""A tokenizer for the tiny target, whose own folder has none: letters, words and split characters."""

import json
import shutil
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}z{% endif %}"


def text_model(source: Path, folder: Path, pieces: dict[int, bytes], eos: int = 318) -> Path:
    """A copy of the target in `folder` with a tokenizer.

    Ids 0 to 26 are a to z and space, so that such texts can be prompts; every other id is a word of its own
    (A27, A28, …), except those that `pieces` gives bytes, and `eos`, the end of text.
    """
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder)
    alphabet = _byte_alphabet()
    words = dict(enumerate([*string.ascii_lowercase, " "]))
    words |= {i: f"A{i}" for i in range(27, 320)}
    vocabulary = {"".join(alphabet[b] for b in pieces.get(i, w.encode())): i for i, w in words.items() if i != eos}
    vocabulary["<eos>"] = eos
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _byte_alphabet() -> dict[int, str]:
    """Byte → the printable character that byte-level tokenizers write for it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    assert set(table.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return table
