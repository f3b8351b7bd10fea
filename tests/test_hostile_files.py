"""Damaged and hostile checkpoints by the hundred, opened in a process of their own that is watched."""

import json
import os
import selectors
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import fuzz_files
import numpy as np
import pytest
from safetensors.numpy import save

from jspark.checkpoint import open_drafter, open_target
from jspark.errors import UserError

#: Seconds without a new case after which the process hangs: far above the 5 of processor time that it allows
#: itself, on a machine that does other things too.
PATIENCE = 60


def faults(first: int, last: int, folder: Path, tell: Callable[[int], None] = lambda seed: None) -> list[str]:
    """What goes wrong with the seeds first..last − 1: faults that the process sees, crashes and hangs."""
    found: list[str] = []
    while first < last:
        with subprocess.Popen(
            [sys.executable, fuzz_files.__file__, str(first), str(last), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process:
            hung = False
            for line in lines(process):
                if line is None:
                    hung = True
                    process.kill()
                elif line.startswith("{"):
                    found.append(line)
                else:
                    first = int(line)
                    tell(first)
        if hung or process.returncode:
            found.append(f"seed {first} {'hung' if hung else f'ended the process: {process.returncode}'}")
        first += 1
    return found


def lines(process: subprocess.Popen):
    """Lines of its output; None after each time of silence that is too long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        os.set_blocking(process.stdout.fileno(), False)
        text = ""
        while True:
            if not selector.select(PATIENCE):
                yield None
                continue
            part = process.stdout.read()
            if part == "":
                return
            *whole, text = (text + (part or "")).split("\n")
            yield from whole


def test_some_hundred_cases(tmp_path):
    assert faults(0, 400, tmp_path / "case") == []


@pytest.mark.slow
def test_twenty_thousand_cases(tmp_path, capsys):
    def tell(seed: int) -> None:
        if seed % 1000 == 0:
            with capsys.disabled():
                print(f"\r{seed:,} of 20,000 ", end="", flush=True)

    assert faults(0, 20_000, tmp_path / "case", tell) == []


def test_the_watcher_sees_what_it_is_there_for(tmp_path, monkeypatch):
    """A crash, a hang, a wrong exception, a bad message and too much memory, each by a process that does it."""
    script = tmp_path / "bad.py"
    body = Path(fuzz_files.__file__).read_text()
    bad = """
def build(seed, folder):
    def use():
        if seed == 1: os.kill(os.getpid(), 11)
        if seed == 2: time.sleep(1000)
        if seed == 3: raise KeyError("x")
        if seed == 4: raise UserError("no")
        if seed == 5: np.ones(300 << 20, np.uint8)
    return use

if __name__"""
    script.write_text(body.replace("import json\n", "import json\nimport os\n", 1).replace("\nif __name__", bad))
    monkeypatch.setattr(fuzz_files, "__file__", str(script))
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE", 10)
    found = faults(0, 7, tmp_path / "case")
    words = [
        "seed 1 ended the process: -11",
        "seed 2 hung",
        "KeyError",
        "does not say what to do",
        "MiB for files of 0.0 MiB",
    ]
    assert len(found) == 5
    assert all(word in fault for word, fault in zip(words, found, strict=True)), found


# ── faults that were found, and hostile files by hand ─────────────────────────────────────────────────────────


@pytest.fixture
def model(tmp_path) -> Path:
    """A valid small target."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fuzz_files.config()))
    (folder / "model.safetensors").write_bytes(fuzz_files.target_tensors())
    (folder / "tokenizer.json").write_bytes(fuzz_files.tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(fuzz_files.TOKENIZER_CONFIG))
    return folder


def refused(path: Path, *words: str, use: Callable[[Path], None] = fuzz_files.use_target) -> None:
    with pytest.raises(UserError) as e:
        use(path)
    assert fuzz_files.complaint(str(e.value)) is None
    assert not [w for w in words if w not in str(e.value)], str(e.value)


def test_the_files_that_are_spoiled_are_good_ones(model, tmp_path):
    fuzz_files.use_target(model)
    (tmp_path / "m.gguf").write_bytes(b"".join(map(fuzz_files._packed, fuzz_files.gguf_atoms())))
    fuzz_files.use_target(tmp_path / "m.gguf")
    for dialect in ("deepspec", "specforge", "speculators", "dflash", "eagle3"):
        config, tensors = fuzz_files.drafter_files(dialect)
        folder = tmp_path / dialect
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(tensors)
        fuzz_files.use_drafter(folder)


def header(model: Path, change) -> None:
    """Rewrites the header of the model's tensors."""
    data = (model / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    document = json.loads(data[8 : 8 + size])
    text = json.dumps(change(document) or document).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h[NORM].update(shape=[2**60]),
        lambda h: h[NORM].update(shape=[2**32, 2**32]),
        lambda h: h[NORM].update(shape=[0, 2**60], data_offsets=[0, 0]),
        lambda h: h[NORM].update(data_offsets=[0, 64]),
        lambda h: h[NORM].update(data_offsets=[2**60, 2**60 + 64]),
        lambda h: h[NORM].update(data_offsets=[64, 0]),
        lambda h: h[NORM].update(dtype="F8_E4M3"),
        lambda h: h[NORM].update(dtype="QUATERNION"),
        lambda h: h[NORM].update(shape=[-16]),
        lambda h: {"a" * i: h[NORM] for i in range(2000)},
    ],
)
def test_hostile_safetensors_headers(model, change):
    header(model, change)
    refused(model, str(model))


def test_a_tensor_that_is_named_twice(model):
    data = (model / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    entry = json.dumps(json.loads(data[8 : 8 + size])[NORM])
    text = data[8 : 8 + size].rstrip()[:-1] + f', "{NORM}": {entry}}}'.encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    fuzz_files.use_target(model)  # the same twice says nothing new


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/passwd", "x" * 5000, "a\0b", "", ".", "..", "\ud800", "sub/a.safetensors"],
)
def test_hostile_shard_names(model, shard):
    """Found: a name too long for the system escaped as OSError."""
    (model / "model.safetensors").rename(model / "real.safetensors")
    index = {"weight_map": {NORM: shard}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(model, "index.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text", ['{"a": ' + "1" * 5000 + "}", '{"a": ' + "[" * 10**5, " " * (9 << 20), "\ufeff{}"]
)
def test_hostile_json(model, name, text):
    """Found: a number of thousands of digits escaped as ValueError, and files of any size were read."""
    (model / name).write_text(text)
    refused(model, name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_pipes_devices_and_folders_are_no_files(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    refused(model, name)
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")
    refused(model, name)
    (model / name).unlink()
    (model / name).mkdir()
    refused(model, name)


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
EMPTY = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 99}
TWICE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TWICE |= {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 60}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [EMPTY]}]}},
        {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 60}},
        {"post_processor": {"type": "Sequence", "processors": [TWICE] * 60}},
    ],
)
def test_tokenizers_that_blow_texts_up(model, change):
    """Found: replacements that double a text, sixty in a row, would end the process for want of memory."""
    document = json.loads(fuzz_files.tokenizer_json()) | change
    (model / "tokenizer.json").write_text(json.dumps(document))
    refused(model, "times longer")


def test_tokenizers_that_fail_on_a_text(model):
    """Found: faults inside the package of tokenizers are no Exception and went through everything."""
    document = json.loads(fuzz_files.tokenizer_json())
    (model / "tokenizer.json").write_text(json.dumps(document | {"pre_tokenizer": SPLIT}))
    tokenizer = open_target(str(model)).tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    with pytest.raises(UserError, match="fails on this text"):
        tokenizer.encode("a" * 5000 + "!")
    document["model"]["continuing_subword_prefix"] = "x" * 99
    (model / "tokenizer.json").write_text(json.dumps(document))
    refused(model, "cannot be read as a tokenizer")


def test_names_in_messages_are_harmless(model):
    header(model, lambda h: h.update({"evil\n\x1b[2J\u202e" + "x" * 10**5: h.pop(NORM)}))
    refused(model, "missing norm.scale", "evil \\u001b[2J\\u202e")


def gguf(tmp_path: Path, *atoms) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"".join(map(fuzz_files._packed, atoms)))
    return path


def test_hostile_gguf_headers(tmp_path):
    head = [("b", b"GGUF"), ("<I", 3), ("<Q", 0), ("<Q", 1), ("<Q", 1), ("b", b"k"), ("<I", 9)]
    refused(gguf(tmp_path, *head[:2], ("<Q", 2**60), ("<Q", 0)), "claims to hold")
    refused(gguf(tmp_path, *head[:3], ("<Q", 2**60)), "ends within its header")
    refused(gguf(tmp_path, *head, ("<I", 0), ("<Q", 2**60)), "more entries than any model's")
    refused(gguf(tmp_path, *head, ("<I", 9), ("<Q", 1)), "array of arrays")
    refused(gguf(tmp_path, *head[:4], ("<Q", 2**63), ("b", b"k")), "ends within its header")
    atoms = list(fuzz_files.gguf_atoms())
    at = max(i for i, a in enumerate(atoms[:-2]) if a[0] == "<Q")  # the last tensor's offset
    for offset, word in ((0, "overlap"), (2**60, "beyond the end"), (2**64 - 1, "beyond the end"), (1, "overlap")):
        refused(gguf(tmp_path, *atoms[:at], ("<Q", offset), *atoms[at + 1 :]), word)


def test_a_large_array_of_small_numbers_is_not_blown_up(tmp_path):
    """Found: a list of Python numbers takes eight times the room of bytes in the file."""
    head = [("b", b"GGUF"), ("<I", 3), ("<Q", 0), ("<Q", 1), ("<Q", 1), ("b", b"k"), ("<I", 9), ("<I", 0)]
    size = 64 << 20
    path = gguf(tmp_path, *head, ("<Q", size), ("b", b"\1" * size))
    tracemalloc.start()
    try:
        refused(path, "more entries")
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def test_a_drafter_with_a_hostile_map(tmp_path):
    config, _ = fuzz_files.drafter_files("speculators")
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, shapes = fuzz_files.drafter("speculators")
    arrays = fuzz_files._arrays(shapes)
    for offsets in (2**62, -(2**62), 2**63 - 1):
        arrays["d2t"] = np.full(shapes["d2t"], offsets, np.int64)
        (tmp_path / "model.safetensors").write_bytes(save(arrays))
        refused(tmp_path, "d2t does not map", use=fuzz_files.use_drafter)
    with pytest.raises(UserError, match="is a drafter"):
        open_target(str(tmp_path))
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match="no file or folder"):
        open_drafter(str(tmp_path))
