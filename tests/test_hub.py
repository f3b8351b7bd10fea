"""Models of the Hub, through huggingface_hub's own client and a server on a local socket."""

import json
import os
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, Repo
from huggingface_hub import constants
from safetensors.numpy import load_file, save

from jspark.checkpoint import describe, hub, open_drafter, open_target
from jspark.errors import UserError
from jspark.llm import LLM

TOKEN = "hf_secretsecret"
OTHER = "f" * 40


def files(folder: Path, **more: bytes) -> dict[str, bytes]:
    """A golden as a repository, with things beside it that no model needs."""
    names = ("config.json", "model.safetensors")
    rest = {"README.md": b"# A model", "pytorch_model.bin": b"\x80\x04.", "original/model.pth": b"\x80\x04."}
    return {n: (folder / n).read_bytes() for n in names} | rest | {"tokenizer_config.json": b"{}"} | more


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    """One server for all tests."""
    server = FakeHub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def fake(server, tmp_path, monkeypatch, goldens) -> FakeHub:
    """The server with one model, and an empty cache."""
    server.repos = {"some/model": Repo(files(goldens / "qwen3_tiny"))}
    server.log.clear()
    for name in ("HF_HUB_OFFLINE", "JSPARK_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    # huggingface_hub reads these two once, when it is imported.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return server


def refused(spec: str, *words: str, opening=open_target, **options) -> None:
    with pytest.raises(UserError) as e:
        opening(spec, **options)
    message = str(e.value)
    assert "\n" not in message
    assert TOKEN not in message
    assert not [word for word in words if word not in message], message


def test_a_model_is_fetched_once_and_only_what_it_needs(fake):
    target = open_target("some/model")
    assert (target.name, target.config.vocab_size) == ("some/model", 320)
    assert sorted(fake.fetched()) == ["config.json", "model.safetensors", "tokenizer_config.json"]
    fake.log.clear()
    assert open_target("some/model").path == target.path
    assert fake.fetched() == []
    fake.log.clear()
    assert open_target("some/model", offline=True).path == target.path
    assert fake.log == []


def test_shards_and_templates_and_nothing_else(fake, goldens):
    tensors = load_file(goldens / "qwen3_tiny" / "model.safetensors")
    repo = fake.repos["some/model"].files
    del repo["model.safetensors"]
    where = {}
    for i in range(2):
        part = {n: tensors[n] for n in sorted(tensors)[i::2]}
        repo[f"part-{i}.safetensors"] = save(part)
        where |= dict.fromkeys(part, f"part-{i}.safetensors")
    repo["model.safetensors.index.json"] = json.dumps({"weight_map": where}).encode()
    repo["other.safetensors"] = b"x" * 20_000
    repo["additional_chat_templates/tool_use.jinja"] = b"tools"
    repo["additional_chat_templates/deep/er.jinja"] = b"no"
    target = open_target("some/model")
    assert len(target.tensors.found) == len(tensors)
    got = set(fake.fetched())
    assert {"part-0.safetensors", "part-1.safetensors", "tool_use.jinja"} < got
    assert not got & {"other.safetensors", "pytorch_model.bin", "er.jinja", "README.md"}
    assert open_target("some/model", offline=True).path == target.path
    (target.path / "part-1.safetensors").unlink()
    refused("some/model", "the Hugging Face cache does not hold all", offline=True)
    repo["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../../config.json"}}).encode()
    fake.repos["some/model"].revisions["main"] = OTHER
    refused("some/model", "outside its folder")


def test_revisions(fake, goldens):
    repo = fake.repos["some/model"]
    first = open_target("some/model").path
    repo.files = files(goldens / "llama_tiny")
    repo.revisions = {"main": OTHER, "v1": OTHER}
    assert open_target("some/model@v1").config.model_type == "llama"
    assert open_target("some/model", revision="v1").path == open_target("some/model", revision=OTHER).path != first
    # Offline a branch is what it was when it was last seen, and a commit is always itself.
    assert open_target("some/model", offline=True).config.model_type == "qwen3"
    assert open_target(f"some/model@{COMMIT}", offline=True).path == first
    assert open_target("some/model").config.model_type == "llama"
    assert open_target("some/model", offline=True).config.model_type == "llama"
    refused("some/model@nine", "no revision 'nine'", "branches, tags or commits")
    refused("some/model@v1", "two revisions", revision="main")
    refused("some/model@v2", "at v2 the Hugging Face cache does not hold all", offline=True)
    refused(str(goldens / "qwen3_tiny"), "not on the Hub", revision="main")
    refused("smollm2-135m", "not on the Hub", revision="main")


def test_gguf_repositories(fake):
    repo = Repo({"config.json": b"{}", "m.Q4_0.gguf": b"GGUF4", "m.Q8_0.gguf": b"GGUF8", "b/m.gguf": b"GGUFb"})
    fake.repos["some/quants"] = repo
    refused("some/quants", "holds 3 GGUF files", "some/quants:FILE", "m.Q4_0.gguf")
    refused("some/quants:Q9", "no file for Q9", "m.Q8_0.gguf")
    refused("some/quants:Q", "2 files for Q")
    for name, data in (("q8_0", b"GGUF8"), ("b/m.gguf", b"GGUFb"), ("m.Q4_0.gguf@main", b"GGUF4")):
        hub_id = hub.parse(f"some/quants:{name}")
        assert hub_id is not None
        path = hub.fetch(hub_id)
        assert path.read_bytes() == data
        assert hub.fetch(hub_id, offline=True) == path
    assert fake.fetched() == ["m.Q8_0.gguf", "m.gguf", "m.Q4_0.gguf"]
    del repo.files["m.Q4_0.gguf"], repo.files["b/m.gguf"]
    repo.revisions["main"] = OTHER
    refused("some/quants", "is not a complete GGUF file")


def test_a_broken_connection_is_resumed(fake, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    repo = fake.repos["some/model"]
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    repo.cut = 300_000
    target = open_target("some/model")
    assert (target.path / "model.safetensors").read_bytes() == repo.files["model.safetensors"]
    ranges = [r for method, path, r, _ in fake.log if method == "GET" and path.endswith("model.safetensors")]
    assert ranges == [None, "bytes=300000-"]


def test_what_arrives_damaged_is_dropped(fake, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    repo = fake.repos["some/model"]
    repo.spoil = True
    refused("some/model", "model.safetensors of some/model did not arrive as it was published", "try again")
    refused("some/model", "does not hold all", offline=True)
    repo.spoil, repo.short = False, 1
    refused("some/model", "model.safetensors of some/model could not be fetched", "try again")
    repo.short = 0
    assert open_target("some/model").config.vocab_size == 320


def test_what_is_not_there_or_not_allowed(fake, monkeypatch, goldens):
    refused("some/nothing", "no file or folder 'some/nothing'", "HF_TOKEN")
    refused("some/nothing", "no file or folder 'some/nothing'", opening=open_drafter)
    fake.repos["some/gated"] = Repo({}, gated=True)
    refused("some/gated", "some/gated is gated", "ask for access", "HF_TOKEN")
    fake.repos["some/private"] = Repo(files(goldens / "qwen3_tiny"), token=TOKEN)
    refused("some/private", "no such model for you", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert open_target("some/private").name == "some/private"
    assert {token for _, _, _, token in fake.log[-3:]} == {TOKEN}
    refused("some/nothing", "no such model")
    fake.repos["some/pickles"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"\x80\x04."})
    refused("some/pickles", "only pickles (pytorch_model.bin)", "model.safetensors")
    fake.repos["some/empty"] = Repo({"README.md": b""})
    refused("some/empty", "neither model.safetensors")
    assert "pytorch_model.bin" not in fake.fetched()


def test_without_a_network_the_cache_serves(fake, monkeypatch):
    fake.repos["some/model"].status = 503
    refused("some/model", "could not serve some/model", "try again later")
    fake.repos["some/model"].status = 0
    path = open_target("some/model").path
    fake.repos["some/model"].status = 503
    assert open_target("some/model").path == path
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        assert open_target("some/model").path == path
        refused("some/other", "could not be fetched from the Hub", "check the network")


def test_a_local_folder_of_that_name_wins(fake, goldens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model").symlink_to(goldens / "llama_tiny")
    assert open_target("some/model").config.model_type == "llama"
    assert fake.log == []


def test_target_and_drafter_answer_under_the_name_that_was_chosen(fake, goldens):
    name = "dspark_qwen3_tiny_vanilla_trained"
    fake.repos["some/drafter"] = Repo(files(goldens / name), {"main": OTHER, "v2": COMMIT})
    assert describe("some/drafter", revision="v2")["name"] == "some/drafter"
    with pytest.raises(UserError, match="without a drafter of the Hub"):
        LLM("some/model", draft_revision="v2")
    llm = LLM(
        "some/model",
        "some/drafter",
        draft_revision="v2",
        draft_probe=False,
        served_model_name="mine",
        context_length=64,
    )
    assert (llm.algorithm, llm.served_model_name) == ("DSPARK", "mine")
    with pytest.raises(UserError, match="loaded already"):
        LLM(llm.target, revision="v2")
    assert LLM(llm.target, context_length=64).served_model_name == "some/model"


def test_the_command_line(fake, tmp_path):
    """A process of its own: HF_HOME and HF_HUB_OFFLINE are read by the real thing, terminals see progress."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment = clean | {"HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}

    def info(*flags: str, **more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "jspark", "info", "some/model", "--json", *flags]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True)

    command = [sys.executable, "-m", "jspark", "info", "some/model", "--json", "--revision", "main"]
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    first = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    assert b"model.safetensors" in os.read(ours, 1 << 16)
    os.close(ours)
    assert json.loads(first.stdout)["name"] == "some/model"
    fake.log.clear()
    for again in (info("--offline"), info(HF_HUB_OFFLINE="1")):
        assert (again.stdout, again.stderr) == (first.stdout, "")
    assert fake.log == []
    lost = info("--offline", HF_HOME=str(tmp_path / "other"))
    assert (lost.returncode, lost.stdout, lost.stderr.count("\n")) == (2, "", 1)
    assert "go online once" in lost.stderr
