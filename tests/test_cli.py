"""The command line: what comes out where, exit codes, bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console
from text_model import text_model

import jspark
from jspark.checkpoint import describe
from jspark.cli import main
from jspark.cli_generate import read_prompts
from jspark.demo import WrappedPrinter
from jspark.errors import UserError

KEYS = ["model", "index", "text", "output_ids", "finish_reason", "prompt_tokens", "completion_tokens"]
KEYS += ["steps"]
KEYS += ["accept_length", "window_histogram", "accepted_histogram", "prefill_seconds", "decode_seconds"]
KEYS += ["cached_tokens", "utilisation"]
SIZES = ["--max-running-requests", "1", "--context-length", "128", "--chunked-prefill-size", "32"]
SIZES += ["--skip-draft-probe"]


@pytest.fixture(scope="module")
def text(goldens, tmp_path_factory) -> str:
    """A target with a tokenizer."""
    return str(text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("cli") / "model", {}))


@pytest.fixture
def target(goldens) -> str:
    return str(goldens / "qwen3_tiny")


@pytest.fixture
def draft(goldens) -> str:
    return str(goldens / "dspark_qwen3_tiny_vanilla_trained")


@pytest.fixture
def answer(goldens) -> tuple[str, list[int]]:
    """A prompt as a flag's value and its greedy answer."""
    name = goldens / "dspark_qwen3_tiny_vanilla_trained"
    with np.load(name / "inputs.npz") as inputs, np.load(name / "outputs.npz") as outputs:
        return ",".join(map(str, inputs["prompt_1"])), outputs["p1_target_greedy"].tolist()


def command(*args, **options) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "jspark", *args], stdout=pipe, stderr=pipe, text=True, bufsize=1, **options
    )


def test_json_is_all_there_is_on_stdout(target, draft, answer):
    prompt, tokens = answer
    flags = ["--token-ids", prompt, "--token-ids", "57", "--max-new-tokens", "24", "--ignore-eos", "--json"]
    flags += ["--served-model-name", "small"]
    process = command("generate", "--model-path", target, "--speculative-draft-model-path", draft, *flags, *SIZES)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    first, second = map(json.loads, out.splitlines())
    assert list(first) == list(second) == KEYS
    assert first["text"] is None
    assert first["model"] == "small"
    assert first["output_ids"] == tokens[:24]
    assert (first["prompt_tokens"], first["completion_tokens"], first["finish_reason"]) == (6, 24, "length")
    assert first["accept_length"] == 23 / first["steps"] > 1.5
    assert sum(first["window_histogram"]) == sum(first["accepted_histogram"]) == first["steps"]
    assert len(first["accepted_histogram"]) == 8
    assert second["prompt_tokens"] == 1


def test_bad_input_is_one_line_and_exit_2(tmp_path):
    process = command("generate", "--model-path", str(tmp_path / "nowhere"), "--prompt", "hello")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err.startswith("jspark: error: there is no file or folder")
    assert err.count("\n") == 1


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full", "--json >/dev/full"])
def test_output_that_cannot_be_written_is_one_line_and_exit_2(target, redirection):
    run = f"exec {sys.executable} -m jspark generate --model-path {target} --token-ids 57 --max-new-tokens 1 "
    done = subprocess.run(["sh", "-c", run + redirection], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("jspark: error: ")
    assert done.stderr.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_refused_before_any_work(target, tmp_path):
    (tmp_path / "file").touch()
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    flags = ["generate", "--model-path", target, "--token-ids", "57"]
    process = command(*flags, env=env | {"JSPARK_CACHE": str(tmp_path / "file")})
    out, err = process.communicate()
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "set JSPARK_CACHE to a writable folder" in err


def test_a_terminal_without_the_character_ends_no_answer(goldens, tmp_path):
    model = text_model(goldens / "qwen3_tiny", tmp_path / "model", {71: "€".encode()})
    flags = ["--token-ids", "57", "--max-new-tokens", "1", *SIZES]
    process = command(
        "generate", "--model-path", str(model), *flags, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert process.communicate()[0] == "\\u20ac\n"
    assert process.returncode == 0


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_an_interrupt_while_starting_is_quiet(target, seconds):
    process = command("generate", "--model-path", target, "--token-ids", "57", "--max-new-tokens", "500")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize("end", ["interrupt", "broken pipe"])
def test_an_interrupted_answer_ends_quietly(target, end):
    flags = ["--token-ids", "57", "--max-new-tokens", "500", "--ignore-eos", "--max-running-requests", "1"]
    with command("generate", "--model-path", target, *flags) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(3)[:2].isdigit()
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
        code = process.wait(timeout=60)
        assert (code, process.stderr.read()) == (130 if end == "interrupt" else 141, "")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jspark {jspark.__version__}\n"


def test_help_needs_no_jax():
    code = "import sys\nfrom jspark.cli import main\n"
    code += "try: main(['generate', '--help'])\nfinally: print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("False")
    for flag in ("--model-path", "--verify-mode", "--speculative-dspark-block-size", "--ignore-eos", "--json"):
        assert flag in done.stdout


def test_one_prompt_streams_its_text(text, capsys):
    args = ["generate", "--model-path", text, "--prompt", "bca", "--max-new-tokens", "5", *SIZES]
    assert main(args) == 0
    out, err = capsys.readouterr()
    llm = jspark.LLM(text, max_running_requests=1, context_length=128, chunked_prefill_size=32)
    [output] = llm.generate("bca", jspark.SamplingParams(temperature=0, max_tokens=5))
    assert out == f"{output.text}\n"
    assert err.startswith("5 tokens · ")
    assert "τ" not in err


def test_several_prompts_are_a_block_each_in_order(text, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("c\n\nd\n")
    args = ["generate", "--model-path", text, "--prompt", "b", "--token-ids", "0,25", "--prompt-file", str(file)]
    args += ["--max-new-tokens", "3", *SIZES]
    assert main(args) == 0
    out, err = capsys.readouterr()
    blocks = out.rstrip("\n").split("\n\n")
    assert [b.splitlines()[0] for b in blocks] == ["── 1: b", "── 2: 0,25", "── 3: c", "── 4: d"]
    assert all(len(b.splitlines()) == 2 for b in blocks)
    assert err.startswith("12 tokens · ")


def test_chat_and_stop_flags_reach_the_engine(text, capsys):
    args = ["generate", "--model-path", text, "--chat", "--prompt", "ab", "--json", *SIZES]
    assert main([*args, "--max-new-tokens", "4"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["prompt_tokens"] == len("ab z")
    third = whole["output_ids"][2]
    assert third not in whole["output_ids"][:2]
    assert main([*args, "--max-new-tokens", "4", "--stop-token-ids", f"318,{third}"]) == 0
    stopped = json.loads(capsys.readouterr().out)
    assert (stopped["output_ids"], stopped["finish_reason"]) == (whole["output_ids"][:3], "stop")
    assert whole["text"].startswith(stopped["text"])
    assert main([*args, "--max-new-tokens", "4", "--stop", "never", "--stop", whole["text"][1:3]]) == 0
    cut = json.loads(capsys.readouterr().out)
    assert (cut["text"], cut["finish_reason"]) == (whole["text"][:1], "stop")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "there is no prompt; pass --prompt, --token-ids or --prompt-file"),
        (["--token-ids", "1,two"], "--token-ids '1,two' is no list of token ids"),
        (["--token-ids", ""], "--token-ids '' is no list of token ids"),
        (["--token-ids", "1,320"], "token id 320 is outside the vocabulary of 320"),
        (["--token-ids=-1"], "token id -1 is outside the vocabulary"),
        (["--prompt", ""], "a text prompt needs a tokenizer"),
        (["--token-ids", "1", "--chat"], "--chat puts texts into the chat template"),
        (["--token-ids", "1", "--prompt-file", "/nowhere"], "cannot be read (No such file or directory)"),
        (["--token-ids", "1", "--max-new-tokens", "0"], "--max-new-tokens is 0; it must be"),
        (
            ["--token-ids", "1", "--max-new-tokens", "512"],
            "leaves room for 511 more in a context of 512, and --max-new-tokens is 512",
        ),
        (["--token-ids", "1", "--temperature", "nan"], "--temperature is nan"),
        (["--token-ids", "1", "--top-p", "0"], "--top-p is 0.0"),
        (["--token-ids", "1", "--seed", "7"], "--seed does nothing at temperature 0"),
        (["--token-ids", "1", "--stop", ""], "--stop is ('',)"),
        (["--token-ids", "1", "--n", "2"], "--n is 2; it must be 1 at temperature 0"),
        (
            ["--token-ids", "1", "--min-new-tokens", "9", "--max-new-tokens", "3"],
            "--min-new-tokens is 9; it must be at most --max-new-tokens, which is 3",
        ),
        (["--token-ids", "1", "--logit-bias", "3"], "--logit-bias '3' is no list of ids and numbers"),
        (["--token-ids", "1", "--logit-bias", "320:1"], "--logit-bias: token id 320 is outside the vocabulary"),
        (["--token-ids", "1", "--logprobs", "2"], "--logprobs shows in JSON only"),
        (["--token-ids", "1", "--bad-words", "x"], "a text among --bad-words needs a tokenizer"),
        (["--token-ids", "1", "--verify-mode", "static"], "a verify mode was given without a drafter"),
        (["--token-ids", "1", "--stop-token-ids", "x"], "--stop-token-ids 'x' is no list"),
        (["--token-ids", "1", "--page-size", "0"], "--page-size is 0"),
        (["--token-ids", "1", "--max-total-tokens", "-5"], "--max-total-tokens is -5"),
        (
            ["--token-ids", "1", "--max-total-tokens", "9999999999999"],
            "there is not enough memory for a KV pool of this size; lower --max-total-tokens",
        ),
        (["--token-ids", "1", "--speculative-algorithm", "DSPARK"], "DSPARK needs a drafter"),
        (["--token-ids", "1", "--speculative-dspark-block-size", "3"], "a block size was given without a drafter"),
        (["--token-ids", "1", "--verify-policy", "half"], "unknown verify policy 'half'"),
    ],
)
def test_bad_flags_are_one_sentence(target, flags, message, capsys):
    assert main(["generate", "--model-path", target, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jspark: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperatures": [1, 1.5, 2]}', "the calibration has 3 temperatures and the block has 7 tokens"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1, -1]}', "is no calibration"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1, NaN]}', "is no calibration"),
        ('{"temperatures": [1, 1, 1, 1, 1, 1, true]}', "is no calibration"),
        ('{"temperatures": "1234567"}', "is no calibration"),
        ('{"temperatures": []}', "is no calibration"),
        ("[1]", "is no calibration"),
        ("[" * 100_000, "is no calibration"),
        ("\xff", "cannot be read (it is no text in UTF-8)"),
        (None, "cannot be read (it does not exist)"),
    ],
)
def test_bad_calibrations_are_one_sentence(target, draft, tmp_path, content, message, capsys):
    file = tmp_path / "sts.json"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    flags = ["--token-ids", "1", "--speculative-draft-model-path", draft]
    flags += ["--speculative-dspark-confidence-sts-path", str(file), *SIZES]
    assert main(["generate", "--model-path", target, *flags]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--seed", "x"], ["--verify-mode", "most"], ["--unknown"], ["--dtype", "int8"]])
def test_unknown_flags_and_values_exit_2(target, flags, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--model-path", target, "--token-ids", "1", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_argument_of_broken_bytes(text, capsys):
    assert main(["generate", "--model-path", text, "--prompt", os.fsdecode(b"a\xff")]) == 2
    assert "not valid Unicode" in capsys.readouterr().err


def test_prompt_files(tmp_path):
    lines = ['{"prompt": "one\\u2028line"}', "", '{"prompt": [1, 2]}', '{"turns": ["first", "second"]}']
    file = tmp_path / "prompts.jsonl"
    file.write_text("\r\n".join(lines), encoding="utf-8-sig")
    assert read_prompts(file) == ["one\u2028line", [1, 2], "first"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"\n \n", "holds no prompt"),
        ("p.txt", b"\xff", "cannot be read .*UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2 of .* is not JSON"),
        ("p.jsonl", b'{"text": "a"}', "line 1 of .* has no prompt"),
        ("p.jsonl", b'{"turns": []}', "has no prompt"),
        ("p.jsonl", b'{"prompt": [1.5]}', "has no prompt"),
        ("p.jsonl", b'["a"]', "has no prompt"),
    ],
)
def test_bad_prompt_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_info_as_table_and_as_json(draft, capsys):
    assert main(["info", draft, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe(draft)
    assert main(["info", draft]) == 0
    out = capsys.readouterr().out
    assert "algorithm" in out
    assert "DSPARK" in out
    assert main(["info", draft + "/config.json"]) == 2
    assert capsys.readouterr().err.startswith("jspark: error: ")


def test_demo_compares_the_arms(text, tmp_path, capsys):
    picture = tmp_path / "demo.svg"
    assert main(["demo", "--max-new-tokens", "4", "--model-path", text, "--svg", str(picture)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("✓ the same 4 tokens") == 3
    assert "Same tokens in every answer" in out
    assert "This drafter is untrained" in out
    assert "<svg" in picture.read_text()


def test_demo_refuses_what_it_cannot_do(text, target, tmp_path, capsys):
    assert main(["demo", "--model-path", target]) == 2
    assert main(["demo", "--model-path", text, "--max-new-tokens", "600"]) == 2
    assert main(["demo", "--model-path", text, "--max-new-tokens", "0"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [e.split(";")[0] for e in errors if e.startswith("jspark")] == [
        f"jspark: error: a chat needs a tokenizer: {target} has no tokenizer.json, so text cannot be used",
        "jspark: error: 600 new tokens do not fit in a context of 512",
        "jspark: error: --max-new-tokens is 0",
    ]


def test_streamed_words_are_wrapped_and_nothing_is_lost(capsys):
    console = Console(width=20)
    printer = WrappedPrinter(console, indent=4, style="")
    for piece in ["some", "thing", " that is", " too long", " for one", " line\nand", " another"]:
        printer.write(piece)
    printer.close()
    assert capsys.readouterr().out == "something that\n    is too long for\n    one line\n    and another\n"
