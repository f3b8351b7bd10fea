"""Cost tables and budget policies: what they choose where a hand or brute force can check it."""

import numpy as np
import pytest

from jspark.budget import (
    BatchState,
    Fixed,
    Full,
    GlobalArgmax,
    Plan,
    Threshold,
    parse_policy,
)
from jspark.cost import Correction, CostTable, additive
from jspark.errors import UserError

TABLE = CostTable(draft={1: 1.0, 4: 2.0}, verify={4: 10.0, 8: 12.0, 16: 30.0}, context=0.001)


def state(survival, tiers=(4, 8, 16), cost=None, context_tokens=0) -> BatchState:
    survival = np.asarray(survival, np.float32)
    return BatchState(
        rows=survival.shape[0],
        block_size=survival.shape[1],
        tiers=tiers,
        survival=survival,
        conditional=survival,
        cost=cost,
        context_tokens=context_tokens,
    )


def test_a_size_costs_what_the_next_measured_one_does():
    assert TABLE.seconds(1, 4) == 11
    assert TABLE.seconds(2, 5) == 14
    assert TABLE.seconds(4, 8) == 14
    assert TABLE.seconds(1, 1, context_tokens=500) == pytest.approx(11.5)


def test_beyond_the_table_cost_grows_in_proportion():
    assert TABLE.seconds(8, 32) == 64


def test_flat_tables_say_so():
    assert not TABLE.is_flat
    assert CostTable({1: 1.0}, {8: 1.0, 64: 1.01}).is_flat
    assert CostTable({1: 1.0}, {8: 1.0}).is_flat


def test_json_round_trip_sorts_sizes():
    table = CostTable.from_json(CostTable({4: 2.0, 1: 1.0}, {8: 3.0, 4: 2.5}, 1e-9).to_json())
    assert table == CostTable({1: 1.0, 4: 2.0}, {4: 2.5, 8: 3.0}, 1e-9)
    assert list(table.verify) == [4, 8]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"draft": {"1": 1}}',
        '{"draft": {"1": 1}, "verify": {}}',
        '{"draft": {"1": 0}, "verify": {"4": 0}}',
        '{"sample_batch_tokens": [8, 4], "sample_steps_per_sec": [10, 9]}',
        '{"sample_batch_tokens": [4, 8], "sample_steps_per_sec": [10]}',
        '{"sample_batch_tokens": [4], "sample_steps_per_sec": [0]}',
        '{"bias_seconds": 1, "bs_probes": [1], "alpha_seconds": [0]}',
        '{"draft": {"1": 1}, "verify": {"4": NaN}}',
        '{"draft": {"one": 1}, "verify": {"4": 1}}',
        '{"draft": {"1": 1}, "verify": {"4": 1}, "context": -1}',
    ],
)
def test_bad_tables_are_refused(text):
    with pytest.raises(UserError):
        CostTable.from_json(text)


def test_sglangs_tables():
    diagonal = CostTable.from_json(
        '{"sample_batch_tokens": [8, 16, 32], "sample_steps_per_sec": [1000, 500, 250], "max_batch_tokens": 64}'
    )
    # The largest probe that is not larger, level at both ends.
    assert [diagonal.seconds(4, t) for t in (1, 8, 15, 16, 99)] == [0.001, 0.001, 0.001, 0.002, 0.004]
    both = CostTable.from_json(
        '{"bias_seconds": 1, "bs_probes": [1, 3], "alpha_seconds": [0, 2], "m_probes": [4, 8], '
        '"theta_seconds": [0, 4]}'
    )
    assert both.seconds(2, 6) == pytest.approx(1 + 1 + 2)
    assert both.seconds(9, 99) == pytest.approx(1 + 2 + 4)
    for table in (diagonal, both):
        assert CostTable.from_json(table.to_json()) == table


def test_a_table_from_measured_programs():
    # Tiers cost 10, 12, 20; rows 1 and 4 add 0 and 1 to them, and a draft of 2 and 3.
    measured = {(1, 4): 10.0, (1, 8): 12.0, (4, 4): 10.0, (4, 8): 13.0, (4, 16): 21.0}
    table = additive({1: 2.0, 4: 3.0}, measured)
    assert table.verify == {4: 10.0, 8: 12.5, 16: 21.0}
    assert table.seconds(1, 4) == pytest.approx(11.75)
    noisy = additive({1: 2.0, 2: 1.9}, {(1, 4): 10.0, (1, 8): 9.0})
    assert list(noisy.verify.values()) == [10.0, 10.0]
    assert list(noisy.draft.values()) == sorted(noisy.draft.values())


def test_correction_follows_slowly_and_stays_near():
    table, correction = CostTable({1: 1e-9}, {8: 1.0, 16: 2.0}), Correction()

    def step(tier, measured):
        correction.observe(tier, correction.apply(table).seconds(1, tier), measured)

    step(8, 1000.0)
    assert correction.apply(table).seconds(1, 8) < 1.02, "one pause of the machine moved the table"
    for _ in range(1000):
        step(8, 1.5)
    fixed = correction.apply(table)
    assert fixed.seconds(1, 8) == pytest.approx(1.5, rel=1e-3)
    assert fixed.seconds(1, 16) == pytest.approx(3.0, rel=1e-3), "an unseen tier follows the nearest"
    for _ in range(3000):
        step(8, 1e6)
    assert correction.factors[8] == pytest.approx(4.0)
    correction.frozen = True
    step(8, 1.0)
    assert correction.factors[8] == pytest.approx(4.0)
    for _ in range(3000):
        correction.frozen = False
        step(16, 1e-6)
    assert correction.apply(table).verify[16] >= correction.apply(table).verify[8], (
        "never cheaper than a smaller tier"
    )


def test_simple_policies():
    s = state(np.full((3, 5), 0.5))
    assert Full().plan(s) == Plan(15)
    assert Fixed(2).plan(s) == Plan(6, max_window=2)
    with pytest.raises(UserError, match="fixed:5 or less"):
        Fixed(9).plan(s)
    assert Fixed(0).plan(s) == Plan(0, max_window=0, drafts=False)
    assert Threshold(0.4).plan(s) == Plan(15, threshold=0.4)


def test_argmax_by_hand():
    # Two rows: tier 4 holds K = 2, tier 8 holds K = 6, all 8 drafted tokens need tier 16.
    sure = [[0.9, 0.9, 0.9, 0.9]] * 2
    # 3.8 / 12, 7.4 / 14, 9.2 / 32: tier 8, filled.
    assert GlobalArgmax(TABLE).plan(state(sure)) == Plan(6)
    # 2.6 / 12, 2.6 / 14, 2.6 / 32.
    assert GlobalArgmax(TABLE).plan(state([[0.3, 0, 0, 0]] * 2)) == Plan(2)


def test_argmax_fills_a_tier_even_with_hopeless_tokens():
    free = CostTable({1: 1e-9}, {4: 10.0, 8: 12.0, 16: 30.0})
    assert GlobalArgmax(free).plan(state(np.zeros((3, 4)))) == Plan(1)


def test_argmax_drafts_nothing_when_drafting_cannot_pay():
    # 3 / 10 tokens a second without a draft; with one 3 / 12.
    assert GlobalArgmax(TABLE).plan(state(np.zeros((3, 4)))) == Plan(0, drafts=False)
    # A gain below the minimum is no reason to stop: 3 / 10 against 3 / 10.1.
    cheap = CostTable({4: 0.1}, {4: 10.0, 8: 12.0, 16: 30.0})
    assert GlobalArgmax(cheap).plan(state(np.zeros((3, 4)))).drafts


def test_argmax_does_not_trim_for_noise():
    # Tier 4 promises 3.4 / 11 against 3.4 / 11.1 for all of it.
    table = CostTable({1: 1.0}, {4: 10.0, 8: 10.1})
    s = state([[0.7, 0.0]] * 2, tiers=(4, 6))
    assert GlobalArgmax(table).plan(s) == Plan(4)
    assert GlobalArgmax(table, min_gain=0).plan(s) == Plan(2)


def test_argmax_on_a_jagged_curve_looks_past_the_first_drop():
    jagged = CostTable({1: 1e-9}, {4: 1.0, 8: 10.0, 16: 2.0})
    assert GlobalArgmax(jagged).plan(state(np.full((4, 3), 0.9))) == Plan(12)


def test_argmax_prefers_the_smallest_of_equal_budgets():
    even = CostTable({4: 1.0}, {4: 1.0, 8: 3.0})
    # 4 / 2 and 8 / 4.
    assert GlobalArgmax(even, min_gain=0).plan(state(np.ones((4, 1)), tiers=(4, 8))).budget == 0


def test_context_makes_more_tokens_worth_while():
    s = [[0.6, 0.5, 0.4, 0.4]] * 2
    costs = CostTable({2: 1.0}, {4: 10.0, 8: 18.0, 16: 100.0}, context=0.01)
    assert GlobalArgmax(costs).plan(state(s)).budget == 2
    assert GlobalArgmax(costs).plan(state(s, context_tokens=10_000)).budget == 6


def test_rows_without_history_count_as_sure():
    unknown = np.array([[0.0, 0.0, 0.0, 0.0], [np.nan] * 4])
    known = np.array([[0.0, 0.0, 0.0, 0.0], [1.0] * 4])
    plans = [GlobalArgmax(TABLE).plan(state(s)) for s in (unknown, known)]
    assert plans[0] == plans[1] == Plan(6)


def test_argmax_equals_brute_force_over_all_budgets(rng):
    for _ in range(200):
        rows, gamma = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        tiers = tuple(sorted({*rng.integers(1, 60, 5).tolist(), rows * (gamma + 1)}))
        cost = CostTable(
            {1: 0.5, 8: 1.0}, {t: float(c) for t, c in zip(tiers, rng.uniform(1, 5, 9), strict=False)}
        )
        alive = np.cumprod(rng.uniform(size=(rows, gamma)), axis=1)
        ranked = np.sort(alive.astype(np.float32), axis=None)[::-1].astype(np.float64)

        def speed(k, ranked=ranked, rows=rows, cost=cost):
            return (rows + ranked[:k].sum()) / cost.seconds(rows, rows + k)

        best = max(speed(k) for k in range(rows * gamma + 1))
        plain = rows / cost.seconds(rows, rows, drafts=False)
        got = GlobalArgmax(cost, min_gain=0).plan(state(alive, tiers=tiers))
        assert 0 <= got.budget <= rows * gamma
        assert got.drafts == (plain <= best)
        if got.drafts:
            assert speed(got.budget) == pytest.approx(best, rel=1e-9)


def test_argmax_takes_the_engines_table_unless_given_one():
    sure = [[0.9, 0.9, 0.9, 0.9]] * 2
    steep = CostTable({1: 0.1}, {4: 1.0, 8: 100.0})
    assert GlobalArgmax().plan(state(sure, cost=steep)).budget == 2
    assert GlobalArgmax(TABLE).plan(state(sure, cost=steep)).budget == 6
    with pytest.raises(UserError, match="cost table"):
        GlobalArgmax().plan(state(sure))


def test_parse_policy(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(TABLE.to_json())
    assert parse_policy("full") == Full()
    assert parse_policy("fixed:3") == Fixed(3)
    assert parse_policy("threshold:0.5") == Threshold(0.5)
    assert parse_policy("argmax") == GlobalArgmax()
    assert parse_policy(f"argmax:{path}") == GlobalArgmax(TABLE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "best",
        "full:1",
        "fixed",
        "fixed:-1",
        "fixed:x",
        "threshold:2",
        "threshold:nan",
        "threshold",
        "argmax:",
    ],
)
def test_parse_policy_refuses(text):
    with pytest.raises(UserError):
        parse_policy(text)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json"):
        parse_policy(f"argmax:{tmp_path / 'nowhere.json'}")


@pytest.mark.parametrize("context", ["1" + "0" * 400, "[1]", "null", "-1", "NaN", "[" * 100_000])
def test_a_table_with_nonsense_is_refused(context):
    with pytest.raises(UserError, match="cost table"):
        CostTable.from_json(f'{{"draft": {{"1": 1}}, "verify": {{"1": 1}}, "context": {context}}}')
