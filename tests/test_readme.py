"""The README's commands and figures are real."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jspark.bench.server_process import started

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Lines of the shell blocks that call jspark and end; `make` is what CI runs, serving has its own test."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("jspark ") and not line.startswith("jspark serve ")]


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow if "--speculative" in c else ()) for c in commands()]
)
def test_command(command, tmp_path):
    words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"))
def test_python(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_serving():
    """The server as the README starts it answers the README's curl."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    [serve] = [line.removeprefix("jspark serve ") for line in lines if line.startswith("jspark serve ")]
    [curl] = [line for line in lines if line.startswith("curl ")]
    with started(serve) as server:
        asked = curl.replace("http://127.0.0.1:30000", server.address)
        done = subprocess.run(shlex.split(asked), capture_output=True, text=True, timeout=300, check=True)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len("".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)) > 20


def test_figures_are_the_committed_ones():
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec
    assert spec.loader
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    for table in (render.cpu(), render.demo(), render.engine(), render.kernels(), render.steps()):
        assert table in README, f"the README should say:\n{table}"


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    assert set(re.findall(r"^make (\w[\w-]*)", "\n".join(blocks("sh")), flags=re.MULTILINE)) == {"demo", "test"}
