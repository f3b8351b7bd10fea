"""The measured cost table: what is timed, where it is kept and when it is void; its use and correction."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from support import check_equals_plain, drafter, mesh, plain, prompts, run, target

from jspark import profile
from jspark.budget import Auto, GlobalArgmax
from jspark.cli import main
from jspark.config import EngineConfig
from jspark.cost import CostTable, LiveCost
from jspark.engine import Engine
from jspark.errors import JsparkWarning, UserError
from jspark.profile import Launches, Profile, Profiler
from jspark.request import Request, SamplingParams

NAME = "dspark_qwen3_tiny_vanilla_trained"
CONFIG = EngineConfig(
    max_running_requests=2, page_size=16, context_length=96, chunked_prefill_size=32, row_buckets=(1, 2)
)
STEEP = CostTable({1: 0.01, 2: 0.02}, {1: 1.0, 2: 1.1, 4: 2.0, 16: 4.0})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("JSPARK_CACHE", str(tmp_path))
    return tmp_path / "cost"


def engine(**more) -> Engine:
    settings = {name: more.pop(name) for name in list(more) if hasattr(CONFIG, name)}
    return Engine(replace(CONFIG, **settings), target("qwen3_tiny"), drafter(NAME), mesh=mesh(), **more)


@pytest.fixture(scope="module")
def measured() -> tuple[Engine, Profile]:
    """One engine whose table was really measured, within a limit that allows the ends of the ladders only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Profiler, "keep", lambda self, profile: None)
        patch.setattr(Profiler, "kept", lambda self: None)
        with warnings.catch_warnings():
            # A model as small as this one may well be flat.
            warnings.simplefilter("ignore", JsparkWarning)
            own = engine(policy=GlobalArgmax(), profile_seconds=1)
            assert own.cost is not None, "the policy needs a table, so there is one"
            return own, own.profile(limit=0)


def test_every_size_of_the_ladders_has_a_cost(measured):
    own, profile = measured
    table, width = profile.table, own.block_size + 1
    assert set(table.draft) == {1, 2}
    assert set(table.verify) == set(own.config.token_tiers) | {2 * width}
    for steps in (table.draft, table.verify):
        assert all(cost > 0 for cost in steps.values())
        assert list(steps.values()) == sorted(steps.values()), "a larger step is never cheaper"
    assert set(profile.verify) == {(2, 2 * width), (1, 1), (1, width)}, "the ends were timed"
    assert profile.interpolated == len(table.verify) - 3


@pytest.mark.filterwarnings("ignore::jspark.errors.JsparkWarning")
def test_some_programs_are_compiled_and_then_timed_until_the_limit(cache, monkeypatch):
    """As on a GPU, where timing a program takes no time beside compiling it."""
    own = engine(cost=STEEP)
    compiled, timed, order = own.programs.compile, Launches.verify_seconds, []
    monkeypatch.setattr(profile, "_at_a_time", lambda mesh: 2)
    monkeypatch.setattr(own.programs, "compile", lambda shape: (order.append("c"), compiled(shape)))
    monkeypatch.setattr(Launches, "verify_seconds", lambda *args: (order.append("t"), timed(*args))[1])
    monkeypatch.setattr(Profiler, "contexts", (64, 64))
    assert own.profile(fresh=True, limit=0).interpolated
    assert "".join(order) == "ccc" + "ttt"
    order.clear()
    assert own.profile(fresh=True).interpolated == 0
    assert "".join(order).startswith("ccc" + "ttt" + "cc" + "tt")
    assert order.count("c") == order.count("t")


def test_measuring_leaves_the_engine_as_it_was(measured):
    own, _ = measured
    assert own.scheduler.allocator.in_use == 0
    params = SamplingParams(temperature=0.0, max_tokens=8)
    request = Request(0, prompts(NAME)[0], params)
    check_equals_plain(request, run(own, [request])[0].tokens, plain(request), [])


def test_a_profile_is_a_cost_tables_file(measured):
    _, profile = measured
    text = json.dumps(profile.to_dict())
    assert CostTable.from_json(text) == profile.table
    assert Profile.from_json(text) == profile


def kept(profile: Profile, own: Engine) -> Profile:
    """`profile` as if it had been measured on `own`, kept for it."""
    profiler = own._cost._profiler
    mine = replace(profile, key=profiler.key())
    profiler.keep(mine)
    return mine


@pytest.fixture
def never(monkeypatch):
    """Measuring fails the test."""
    monkeypatch.setattr(Profiler, "measure", lambda *args: pytest.fail("measured again"))


def test_a_kept_table_is_used_again(cache, never):
    table = Profile(STEEP, {1: 0.01}, {(1, 1): 1.0}, {}, 0, 1.0, {})
    kept(table, engine())
    assert engine(policy=GlobalArgmax()).cost == STEEP
    assert engine(policy=Auto()).cost == STEEP
    assert engine().cost is None, "full does not ask for one"
    assert [path.suffix for path in cache.iterdir()] == [".json"], "nothing unfinished is left behind"


@pytest.mark.parametrize(
    "change", [{"block_size": 2}, {"page_size": 8}, {"row_buckets": (2,)}, {"verify_mode": "static"}]
)
def test_a_table_of_other_settings_is_not_used(cache, change):
    kept(Profile(STEEP, {1: 0.01}, {(1, 1): 1.0}, {}, 0, 1.0, {}), engine())
    assert engine(policy=Auto()).cost == STEEP
    assert engine(policy=Auto(), **change).cost is None


def test_a_table_of_another_number_format_or_version_is_not_used(cache, monkeypatch):
    own = engine()
    kept(Profile(STEEP, {1: 0.01}, {(1, 1): 1.0}, {}, 0, 1.0, {}), own)
    profiler = own._cost._profiler
    assert profiler.kept() is not None
    assert replace(profiler, config=replace(profiler.config, dtype="bfloat16")).kept() is None
    monkeypatch.setattr("jspark.profile.version", lambda package: "99")
    assert profiler.kept() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"draft": {"1": 1}}', "half of a fi"])
def test_a_broken_file_counts_as_none(cache, text):
    own = engine()
    kept(Profile(STEEP, {1: 0.01}, {(1, 1): 1.0}, {}, 0, 1.0, {}), own)
    profiler = own._cost._profiler
    profiler.file().write_text(text)
    assert profiler.kept() is None
    profiler.keep(Profile(STEEP, {1: 0.01}, {(1, 1): 1.0}, {}, 0, 1.0, profiler.key()))
    assert profiler.kept() is not None


def test_a_flat_table_is_said_with_its_numbers(cache):
    flat = CostTable({1: 0.001}, {1: 0.1, 8: 0.101})
    with pytest.warns(JsparkWarning, match=r"flat: verifying 1 tokens takes 100 ms and 8 tokens 101 ms"):
        engine(cost=flat)


def test_a_table_without_a_drafter_is_refused(cache):
    alone = Engine(CONFIG, target("qwen3_tiny"), mesh=mesh())
    with pytest.raises(UserError, match="no drafter"):
        alone.profile()


# ── correction ────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_correct_the_table_unless_it_is_frozen(measured):
    own, profile = measured
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    request = Request(1, prompts(NAME)[0][:8], params)
    run(own, [request])  # whatever it lacks is compiled
    wrong = replace(profile.table, verify={t: 10 * (s + t) for t, s in profile.table.verify.items()})
    for frozen in (False, True):
        own._cost._config = replace(own.config, freeze_cost_table=frozen)
        own._cost.install(wrong)
        run(own, [request])
        figures = own.cost_figures
        assert figures is not None
        assert figures.steps > 16
        assert figures.measured < figures.predicted
        assert figures.frozen == frozen
        assert (own.cost == wrong) == frozen


def test_correction_follows_a_slower_machine_and_stays_bounded(rng):
    live = LiveCost(STEEP)
    for _ in range(2000):
        predicted = live.table.seconds(1, 4, drafts=True)
        noise = float(np.exp(rng.normal(0, 0.3)))
        live.observe(4, predicted, 1.5 * STEEP.seconds(1, 4) * noise)
    assert live.figures.factors[4] == pytest.approx(1.5, rel=0.15)
    assert live.table.seconds(1, 4) == pytest.approx(1.5 * STEEP.seconds(1, 4), rel=0.15)
    for _ in range(5000):
        live.observe(16, live.table.seconds(2, 16), 1e6)
    assert live.figures.factors[16] <= 4.0 * 1.001
    assert list(live.table.verify.values()) == sorted(live.table.verify.values())


@pytest.mark.slow
def test_the_command_writes_a_table_that_engines_read(cache, goldens, tmp_path, capsys):
    output = tmp_path / "table.json"
    models = ["--model-path", str(goldens / "qwen3_tiny"), "--speculative-draft-model-path", str(goldens / NAME)]
    sizes = ["--max-running-requests", "2", "--context-length", "96", "--profile-seconds", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JsparkWarning)
        assert main(["profile", *models, *sizes, "--skip-draft-probe", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert CostTable.from_file(str(output)).verify == {int(t): s for t, s in record["verify"].items()}
    assert {"versions", "device", "command", "key"} <= record.keys()
    assert output.with_suffix(".png").stat().st_size > 1000
    assert len(list(cache.glob("*.json"))) == 1, "kept for later engines"
    assert "floor ms" in capsys.readouterr().out
