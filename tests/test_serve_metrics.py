"""What a scraper of /metrics and a reader of /server_info see of the engine's own figures."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import running
from test_llm import EOS, PIECES, SIZES, golden
from test_serve_faults import LONG, SHORT, raw, slow
from text_model import text_model

from jspark import LLM
from jspark.cost import CostTable

NAME = "dspark_qwen3_tiny_vanilla_trained"
#: Far from what steps of the tiny model take, so that they correct it.
TABLE = CostTable({1: 2.0, 2: 2.0}, {2: 1.0, 16: 3.0})


@pytest.fixture(scope="module")
def model(goldens, tmp_path_factory) -> str:
    return str(text_model(goldens / "qwen3_tiny", tmp_path_factory.mktemp("metrics") / "model", PIECES, EOS))


@pytest.fixture(scope="module")
def watched(model, goldens) -> Iterator:
    """A server that verifies whole blocks and watches calibration and cost; it compiles nothing beside steps."""
    options = {"verify_mode": "cap-accept", "policy": "fixed:3", "online_calibration": "frozen"}
    with running(LLM(model, str(goldens / NAME), cost=TABLE, **options, **SIZES)) as run:
        yield run


@pytest.fixture(scope="module")
def blind(model, goldens) -> Iterator:
    """A server with nothing to know: no row is a probe, there is no cost table."""
    options = {"online_calibration": "on", "probe_share": 0.0}
    with running(LLM(model, str(goldens / NAME), **options, **SIZES), max_queued_requests=1) as run:
        yield run


Page = dict[tuple[str, ...], float]


def scrape(run) -> Page:
    """Samples by name without prefix and by the values of their labels, the model's aside."""
    page: Page = {}
    for family in text_string_to_metric_families(httpx.get(f"{run.address}/metrics").text):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            page[sample.name.removeprefix("jspark:"), *labels] = sample.value
    return page


def state(run) -> dict:
    return httpx.get(f"{run.address}/server_info").json()["internal_states"][0]


def ask(run, prompt, **more) -> dict:
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0} | more
    done = httpx.post(f"{run.address}/v1/completions", json=body, timeout=120)
    assert done.status_code == 200, done.text
    return done.json()["metrics"]["speculative_decoding"]


def grown(before: Page, after: Page, *names: str) -> float:
    """How much a counter has grown, all samples whose labels begin like `names`."""
    return sum(v - before.get(k, 0) for k, v in after.items() if k[: len(names)] == names)


def test_steps_have_kinds_tiers_and_times(watched, goldens):
    [prompt, *_], *_ = golden(goldens, NAME)
    before, earlier = scrape(watched), state(watched)["steps"]
    drafted = ask(watched, prompt)["num_spec_steps"]
    plain = ask(watched, prompt, disable_speculative_decoding=True)
    assert plain["num_spec_steps"] == 0
    after = scrape(watched)
    # Whole blocks of two rows, at γ 7, or no drafts at all.
    assert grown(before, after, "engine_steps_total", "drafted") == drafted > 0
    assert grown(before, after, "engine_steps_total", "drafted", "16") == drafted
    assert grown(before, after, "engine_steps_total", "plain", "2") == 23
    steps = state(watched)["steps"] - earlier
    assert grown(before, after, "engine_steps_total") == steps == drafted + 23 + 2
    assert grown(before, after, "engine_step_seconds_count") == steps
    assert grown(before, after, "engine_step_seconds_bucket", "+Inf") == steps
    assert 0 < grown(before, after, "engine_step_seconds_sum") < 60
    bounds = [float(key[1]) for key in after if key[0] == "engine_step_seconds_bucket"]
    assert bounds == sorted(bounds)
    counts = [v for key, v in after.items() if key[0] == "engine_step_seconds_bucket"]
    assert counts == sorted(counts)


def test_utilisation_is_what_windows_left_of_whole_blocks(watched, goldens):
    prompts, *_ = golden(goldens, NAME)
    totals = watched.server.engine.loaded.engine.totals
    was = totals.block_accepted
    before = scrape(watched)
    figures = [ask(watched, prompt) for prompt in prompts]
    after = scrape(watched)
    whole = sum(accepted * n for accepted, n in (totals.block_accepted - was).items())
    assert grown(before, after, "spec_decode_num_block_accepted_tokens_total") == whole
    accepted = sum(f["num_accepted_draft_tokens"] for f in figures)
    assert grown(before, after, "spec_decode_num_accepted_tokens_total") == accepted
    assert 0 < accepted < whole
    assert 0 < state(watched)["spec_utilisation"] < 1


def test_calibration_is_told_by_class(watched, goldens):
    [prompt, *_], *_ = golden(goldens, NAME)
    before = scrape(watched)
    greedy = ask(watched, prompt)["num_spec_steps"]
    sampled = ask(watched, prompt, temperature=1, seed=1)["num_spec_steps"]
    after, told = scrape(watched), state(watched)["calibration"]
    assert grown(before, after, "calibration_blocks_total", "greedy") == greedy > 0
    assert grown(before, after, "calibration_blocks_total", "sampled") == sampled > 0
    assert after["calibration_refits_total",] == told["refits"] == 0
    assert told["mode"] == "frozen"
    figures = watched.server.engine.loaded.engine.calibration
    for i, kind in enumerate(("greedy", "sampled")):
        own = told["classes"][kind]
        assert own["blocks"] == after["calibration_blocks_total", kind] == figures.blocks[i]
        assert own["calibration_error"] == pytest.approx(figures.ece[i])
        assert after["calibration_error_ratio", kind] == pytest.approx(figures.ece[i].mean())
        assert own["mean_calibration_error"] == after["calibration_error_ratio", kind]
        assert len(own["temperatures"]) == len(own["predicted"]) == len(own["observed"]) == 7


def test_cost_is_told_with_its_correction(watched, goldens):
    [prompt, *_], *_ = golden(goldens, NAME)
    before = scrape(watched)
    ask(watched, prompt, max_tokens=60)
    after, told = scrape(watched), state(watched)["cost_table"]
    assert grown(before, after, "cost_compared_steps_total") > 0
    # Steps of milliseconds against a table of seconds.
    assert 0 < after["cost_measured_step_seconds",] < after["cost_predicted_step_seconds",] < 5.0
    assert told["measured_step_seconds"] == after["cost_measured_step_seconds",]
    assert told["predicted_step_seconds"] == after["cost_predicted_step_seconds",]
    assert told["compared_steps"] == after["cost_compared_steps_total",]
    assert after["cost_correction_ratio", "16"] == told["corrections"]["16"] < 1
    assert ("cost_correction_ratio", "2") in after
    assert told["frozen"] is False


def test_what_is_not_known_is_left_out(blind):
    ask(blind, "abc")
    page, told = scrape(blind), state(blind)
    assert not any(math.isnan(v) for v in page.values())
    names = {key[0] for key in page}
    assert page["calibration_blocks_total", "greedy"] == page["calibration_blocks_total", "sampled"] == 0
    assert "calibration_error_ratio" not in names
    assert "spec_decode_num_block_accepted_tokens_total" not in names, "windows hide what whole blocks would have"
    assert not any(name.startswith("cost_") for name in names)
    assert told["calibration"]["classes"]["greedy"]["calibration_error"] == [None] * 7
    assert told["calibration"]["classes"]["greedy"]["mean_calibration_error"] is None
    assert told["cost_table"] is told["spec_utilisation"] is None


def test_the_list_of_metrics_is_whole(watched):
    ask(watched, "abc")
    named = (Path(__file__).parent.parent / "docs" / "clients.md").read_text().split("## Prometheus")[1]
    cells = re.findall(r"^\| (.+?) \|", named, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    found = text_string_to_metric_families(httpx.get(f"{watched.address}/metrics").text)
    names = {f.name + "_total" * (f.type == "counter") for f in found if not f.name.endswith("_created")}
    assert {f"jspark:{name}" for name in listed} == {n for n in names if not n.startswith("process_")}


def test_figures_do_not_stay_when_everybody_leaves_at_once(blind):
    """No step follows that would tell, and what waited must not keep others out."""
    with slow(blind.server.engine.loaded, 0.5):
        gone = [raw(blind, LONG | {"prompt": "ab"}) for _ in range(2)]
        blind.wait(lambda: state(blind)["num_running_reqs"] == 2)
        gone.append(raw(blind, LONG))
        blind.wait(lambda: state(blind)["num_queue_reqs"] == 1)
        for connection in gone:
            connection.close()
        blind.assert_free()
    blind.wait(lambda: scrape(blind)["num_requests_running",] == 0, seconds=10)
    assert scrape(blind)["num_requests_waiting",] == scrape(blind)["kv_cache_usage_perc",] == 0
    assert httpx.post(f"{blind.address}/v1/completions", json=SHORT, timeout=60).status_code == 200
