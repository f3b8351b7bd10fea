"""`jspark eval` and `jspark calibrate` end to end on tiny trained drafters, against the reference's own counts."""

import json
from pathlib import Path

import numpy as np
import pytest
from support import GOLDENS, arrays, prompts
from text_model import text_model

from jspark.calibration import read_temperatures
from jspark.cli import main
from jspark.evaluate import run as run_module
from jspark.llm import LLM
from jspark.loading import load_target
from jspark.request import SamplingParams

DSPARK, DFLASH = "dspark_qwen3_tiny_vanilla_trained", "dflash_qwen3_tiny_trained"
SIZES = ["--concurrency", "2", "--chunked-prefill-size", "32", "--context-length", "192"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A target with a tokenizer whose chat template has something before the user's words."""
    folder = text_model(GOLDENS / "qwen3_tiny", tmp_path_factory.mktemp("evaluate") / "model", {})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "u" + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def jsonl(path: Path, *objects) -> str:
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return str(path)


def refusal(capsys, command: list[str]) -> str:
    assert main(command) == 2
    message = capsys.readouterr().err
    assert message.startswith("jspark: error: ")
    assert message.count("\n") == 1
    return message


def picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_eval_counts_as_the_reference_does_and_goes_on_after_an_interruption(model, tmp_path, monkeypatch, capsys):
    golden = jsonl(tmp_path / "golden.jsonl", *({"prompt": list(p)} for p in prompts(DSPARK)))
    flash = jsonl(tmp_path / "f.jsonl", *({"prompt": list(p)} for p in prompts(DFLASH)))
    talk = jsonl(tmp_path / "t.jsonl", {"turns": ["hello", "again"]}, {"turns": ["why"]})
    out = tmp_path / "out"
    data = ["--data", golden, "--data", f"talk={talk}", "--data", f"flash={flash}"]
    drafts = ["--speculative-draft-model-path", f"a={GOLDENS / DSPARK}"]
    drafts += ["--speculative-draft-model-path", str(GOLDENS / DFLASH)]
    command = ["eval", "--model-path", model, *data, *drafts, "--temperature", "0", "--output", str(out), *SIZES]
    command += ["--max-new-tokens", "48", "--ignore-eos"]

    answer = run_module.answer

    def interrupted(llm, recorder, data, *rest):
        if data.name == "talk":
            raise KeyboardInterrupt
        return answer(llm, recorder, data, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "answer", interrupted)
        assert main(command) == 130
    first = out / "parts" / "golden@0.npz"
    assert [p.name for p in (out / "parts").iterdir()] == [first.name]
    written = first.stat().st_mtime_ns
    assert main(command) == 0
    assert first.stat().st_mtime_ns == written
    assert "loop-free τ, temperature 0" in capsys.readouterr().out

    record = json.loads((out / "results.json").read_text())
    [result] = record["results"]
    arms = result["arms"]
    assert list(arms) == ["plain", "a", DFLASH, "prompt-lookup", "oracle"]
    for arm, name, data_set in (("a", DSPARK, "golden"), (DFLASH, DFLASH, "flash")):
        lengths = [arrays(name)[1][f"p{i}_acceptance_lengths"] for i in range(4)]
        lengths = [n[np.cumsum(n) - n < 47] for n in lengths]
        own = arms[arm]["data_sets"][data_set]
        assert own["steps"] == sum(map(len, lengths))
        assert own["tau"]["value"] == pytest.approx(4 * 47 / own["steps"])
        assert own["tau"]["low"] <= own["tau"]["value"] <= own["tau"]["high"]
        accepted = np.concatenate(lengths) - 1
        assert own["conditional_acceptance"][0] == pytest.approx(np.mean(accepted >= 1))
        # Greedy decoding in float32: no drafter changes an answer, in any turn.
        assert [arms[arm]["data_sets"][d]["answers_equal_to_plain"] for d in ("golden", "talk", "flash")] == [
            4,
            3,
            4,
        ]
    assert arms["plain"]["data_sets"]["golden"]["tau"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert arms["plain"]["data_sets"]["golden"]["steps"] == 4 * 47
    assert arms["plain"]["data_sets"]["talk"]["answers"] == 3
    assert arms["oracle"]["data_sets"]["golden"]["tau"]["value"] == pytest.approx(47 / 6)
    assert 1 <= arms["prompt-lookup"]["macro"]["tau"]["value"] < arms["a"]["macro"]["tau"]["value"]
    values = [arms["a"]["data_sets"][d]["tau"]["value"] for d in ("golden", "talk", "flash")]
    assert arms["a"]["macro"]["tau"]["value"] == pytest.approx(np.mean(values))
    assert arms["a"]["speed_up"] > 0
    ratio = next(r for r in result["ratios"] if (r["of"], r["over"]) == ("a", DFLASH))
    want = arms["a"]["macro"]["tau"]["value"] / arms[DFLASH]["macro"]["tau"]["value"] - 1
    assert ratio["tau"]["macro"]["value"] == pytest.approx(want)
    assert "threshold_sweep" not in arms[DFLASH]
    sweep = arms["a"]["threshold_sweep"]["golden"]
    assert sweep[0]["window"] == 7
    assert sweep[0]["tokens_per_step"] == pytest.approx(np.mean(accepted_of(DSPARK)) + 1)
    assert all(picture(out / name) for name in ("tau.png", "acceptance.png", "thresholds.png"))
    report = (out / "report.md").read_text()
    assert "| a |" in report
    assert "macro gain" in report

    assert main(command) == 0  # nothing is left to run
    assert json.loads((out / "results.json").read_text())["results"] == record["results"]
    capsys.readouterr()
    message = refusal(capsys, [*command, "--seed", "3"])
    assert "is part of another evaluation (seed was 0 and is 3); choose another --output" in message


def accepted_of(name: str) -> np.ndarray:
    lengths = [arrays(name)[1][f"p{i}_acceptance_lengths"] for i in range(4)]
    return np.concatenate([n[np.cumsum(n) - n < 47] for n in lengths]) - 1


@pytest.mark.slow
def test_a_calibration_is_fitted_checked_and_used(model, tmp_path, capsys):
    draft, file = str(GOLDENS / DSPARK), tmp_path / "sts.json"
    words = ["--model-path", model, "--speculative-draft-model-path", draft]
    sizes = ["--max-new-tokens", "40", "--chunked-prefill-size", "32", "--concurrency", "1"]
    assert main(["calibrate", *words, "--num-prompts", "4", "--output", str(file), *sizes]) == 0
    assert "figures are of prompts that the fit has not seen" in " ".join(capsys.readouterr().out.split())
    record = json.loads(file.read_text())
    assert picture(file.with_suffix(".png"))
    assert (record["block_size"], record["dataset"], record["prompts"]) == (7, "self-written", {"self-written": 4})
    assert [len(record[k]) for k in ("temperatures", "ece_before", "ece_after")] == [7, 7, 7]
    classes = record["classes"]
    assert record["num_samples"] == sum(classes[c]["fit_blocks"] for c in ("greedy", "sampled"))
    for own in classes.values():
        assert min(own["fit_blocks"], own["check_blocks"]) > 10
        assert [len(own[w]["by_position"]) for w in ("before", "after")] == [7, 7]
        assert own["after"]["pooled"]["observed"] == own["before"]["pooled"]["observed"] > 0
        # The confidence of this drafter was trained: it ranks.
        assert own["before"]["pooled"]["auc"] > 0.7
    both = read_temperatures(file)
    assert both.greedy == tuple(classes["greedy"]["temperatures"]) != both.sampled

    prompt = ",".join(map(str, prompts(DSPARK)[1]))
    use = ["--speculative-dspark-confidence-sts-path", str(file)]
    more = [
        "--token-ids",
        prompt,
        "--max-new-tokens",
        "24",
        "--ignore-eos",
        "--json",
        "--max-running-requests",
        "1",
    ]
    more += ["--verify-policy", "threshold:0.4", "--context-length", "192", "--chunked-prefill-size", "32"]
    assert main(["generate", *words, *use, *more]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["output_ids"] == arrays(DSPARK)[1]["p1_target_greedy"][:24].tolist()
    assert answer["window_histogram"][7] < answer["steps"]
    assert "the calibration has 7 temperatures and the block has 5 tokens" in refusal(
        capsys, ["generate", *words, *use, *more, "--speculative-dspark-block-size", "5"]
    )

    data = jsonl(tmp_path / "d.jsonl", {"prompt": list(prompts(DSPARK)[0])}, {"turns": ["hello"]})
    command = ["eval", *words, *use, "--data", data, "--output", str(tmp_path / "out"), *sizes]
    assert main([*command, "--speculative-sampling", "coupled"]) == 0
    arm = json.loads((tmp_path / "out" / "results.json").read_text())["results"][0]["arms"][DSPARK]
    # Coupled sampling keeps plain decoding's tokens.
    assert arm["data_sets"]["d"]["answers_equal_to_plain"] == arm["data_sets"]["d"]["answers"] == 2
    assert arm["confidence"]["temperatures"] == list(both.sampled)
    capsys.readouterr()
    short = ["--speculative-dspark-block-size", "5", "--output", str(tmp_path / "five")]
    assert "the calibration has 7 temperatures and the block has 5 tokens" in refusal(capsys, [*command, *short])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"turns": ["a"]}\n\n{"turns": ["b"]', "line 3 of "),
        ('{"turns": ["a"]}\n[1]', 'has no prompt; write {"turns": ["…"]}'),
        ('{"turns": []}', "line 1 of "),
        ('{"turns": ["a", 3]}', "has no prompt"),
        ('{"prompt": ""}', "has no prompt"),
        ('{"prompt": [1, 2.5]}', "has no prompt"),
        ("\n \n", "is empty; write one JSON object a line"),
    ],
)
def test_bad_data_is_one_sentence(model, tmp_path, capsys, lines, message):
    (tmp_path / "bad.jsonl").write_text(lines)
    command = ["eval", "--model-path", model, "--data", str(tmp_path / "bad.jsonl")]
    assert message in refusal(capsys, [*command, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_bad_flags_are_one_sentence(model, tmp_path, capsys):
    good = jsonl(tmp_path / "good.jsonl", {"turns": ["hello"]}, {"prompt": list(range(30))})
    out = ["--output", str(tmp_path / "out")]
    evaluate = ["eval", "--model-path", model, "--data", good, *out]
    draft = ["--speculative-draft-model-path", str(GOLDENS / DSPARK)]
    cases = [
        ([*evaluate, "--data", good], "two data sets are called 'good'"),
        ([*evaluate, "--temperature", "1", "--temperature", "1.0"], "two temperatures are called '1'"),
        ([*evaluate, *draft, *draft], "two drafters are called"),
        ([*evaluate, "--speculative-draft-model-path", f"plain={GOLDENS / DSPARK}"], "cannot be called 'plain'"),
        ([*evaluate, "--data", f"a b={good}"], "is no name for a data set"),
        ([*evaluate, "--data", f"{tmp_path}/no.jsonl"], "cannot be read (No such file or directory)"),
        ([*evaluate, "--limit", "-1"], "--limit is -1"),
        ([*evaluate, "--speculative-dspark-confidence-sts-path", f"x={good}"], "names none of the drafters"),
        ([*evaluate, "--max-new-tokens", "500"], "the context holds 512; lower --max-new-tokens"),
        ([*evaluate, "--context-length", "60", "--max-new-tokens", "40"], "line 2 of"),
        ([*evaluate, "--speculative-draft-model-path", f"{tmp_path}/no"], "there is no file or folder"),
    ]
    calibrate = ["calibrate", "--model-path", model, "--data", good]
    json_file = ["--output", str(tmp_path / "sts.json")]
    cases += [
        ([*calibrate, *draft, *json_file, "--temperature", "0"], "sampled requests have one above 0"),
        ([*calibrate, *draft, "--output", str(tmp_path / "sts.txt")], "choose a name that ends in .json"),
        ([*calibrate, "--speculative-draft-model-path", str(GOLDENS / DFLASH), *json_file], "no confidence head"),
        (
            ["calibrate", "--model-path", str(GOLDENS / "qwen3_tiny"), *draft, *json_file],
            "has no chat template, so it cannot ask itself questions; pass --data FILE",
        ),
    ]
    for command, message in cases:
        assert message in refusal(capsys, command)
    assert not (tmp_path / "sts.json").exists()


@pytest.mark.parametrize("draft", [None, str(GOLDENS / DSPARK)])
def test_where_programs_are_made_ready_no_step_compiles_one(model, tmp_path, draft):
    """As on a GPU, where every missing program would hold up the run for seconds."""
    params = [SamplingParams(temperature=t, max_tokens=12) for t in (0.0, 1.0)]
    target = load_target(model, "float32")
    llm = LLM(
        target,
        draft,
        max_running_requests=2,
        context_length=192,
        chunked_prefill_size=32,
        single_shapes=True,
        verify_mode="static" if draft else "compact",
    )
    run_module.make_ready([llm], params)
    compiled = llm.engine.programs.report.programs
    assert compiled >= 4
    for own in params:
        llm.generate([list(p) for p in prompts(DSPARK)] + [[1] * 70], own)
    assert llm.engine.programs.report.programs == compiled
