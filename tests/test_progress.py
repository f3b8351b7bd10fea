"""What long work shows on stderr: a bar on a terminal, one line elsewhere."""

import io
import os
import pty
import shlex
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from test_llm import EOS, PIECES
from text_model import text_model

from jspark.bench.server_process import started
from jspark.progress import told

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def work(console: Console, programs: int) -> None:
    with told("measuring the cost table", console) as tell:
        for i in range(programs):
            tell(i, programs, f"R {i + 1}, T 8")
        tell(programs, programs, "done")


def test_a_pipe_gets_one_line():
    out = io.StringIO()
    work(Console(file=out), 12)
    assert out.getvalue() == "measuring the cost table: up to 12 programs\n"
    with told("measuring the cost table", Console(file=out)):
        pass
    assert out.getvalue().count("\n") == 1, "nothing is said where nothing is measured"


def test_a_terminal_gets_a_bar_that_goes_again(capsys):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, legacy_windows=False, _environ={"TERM": "xterm"})
    with told("measuring the cost table", console) as tell:
        assert out.getvalue() == "", "nothing before the first news"
        tell(0, 3, "R 2, T 16")
        print("an access log")
        console.print("a start-up line")
    text = out.getvalue()
    assert "measuring the cost table: R 2, T 16" in text
    assert "0/3" in text
    assert "a start-up line" in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert capsys.readouterr().out == "an access log\n", "stdout is left alone"
    tell(1, 3, "R 1, T 8")
    assert out.getvalue() == text, "nothing after the end"


@pytest.mark.slow
def test_the_server_shows_that_it_measures(goldens, tmp_path):
    """On a pipe and on a terminal; and not where a table was kept."""
    model = text_model(goldens / "qwen3_tiny", tmp_path / "model", PIECES, EOS)
    drafter = goldens / "dspark_qwen3_tiny_vanilla_trained"
    flags = f"--model-path {model} --speculative-draft-model-path {drafter} --max-running-requests 2"
    flags += " --context-length 64 --profile-seconds 1"

    def lines() -> list[str]:
        with started(flags, tmp_path / "cache") as server:
            return [line for line in server.said if "measuring the cost table" in line]

    [line] = lines()
    assert line.startswith("measuring the cost table: up to ")
    assert lines() == []

    reader, terminal = pty.openpty()
    words = ["serve", *shlex.split(flags), "--port", "0", "--access-log", "none"]
    env = os.environ | {"JSPARK_CACHE": str(tmp_path / "other"), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-m", "jspark", *words], stderr=terminal, env=env)
    try:
        os.close(terminal)
        text = b""
        while b"ready after" not in text:
            text += os.read(reader, 4096)
    finally:
        process.terminate()
        process.wait(60)
        os.close(reader)
    seen = text.decode()
    assert "measuring the cost table: R 2, T 16" in seen
    assert "up to" not in seen
    assert seen.rindex(SHOW_CURSOR) > seen.rindex(HIDE_CURSOR)
    assert seen.index("measuring the cost table") < seen.index("cost table in ms")


def test_measuring_is_given_up_with_the_server(goldens, tmp_path):
    flags = [
        "--model-path",
        goldens / "qwen3_tiny",
        "--profile-seconds",
        "600",
        "--port",
        "0",
        "--skip-draft-probe",
    ]
    flags += [
        "--speculative-draft-model-path",
        goldens / "dspark_qwen3_tiny_vanilla_trained",
        "--skip-draft-probe",
    ]
    env = os.environ | {"JSPARK_CACHE": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "jspark", "serve", *map(str, flags)], stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith("measuring the cost table"):
                break
        process.send_signal(signal.SIGINT)
        # A program may have to be compiled to its end; measuring them all takes minutes.
        said, code = process.stderr.read(), process.wait(60)
    assert code == 0
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("*.json")), "no table was kept"
