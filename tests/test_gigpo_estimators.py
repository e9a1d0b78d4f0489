"""Each estimator against numbers worked out by hand, what a group without signal is, and what unused branches cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import duckdb
import pyarrow as pa
import pytest

from configs import AlgorithmConfig, Config, check
from gigpo import (
    ESTIMATORS,
    NORMALISATIONS,
    PUBLISHED_SETTINGS,
    SIGNALS,
    advantages_macro,
    anchor_size_histogram,
    compute_advantages,
    groups_without_signal,
    signal_settings,
    singleton_fraction,
    step_variance_share,
    zero_variance_fraction,
)
from tests.gigpo_samples import column, episode, settings, table, uid

EXAMPLE_10 = table(
    {
        "a": episode("home shelf home desk", end=10),
        "b": episode("home desk", end=10),
        "c": episode("home shelf shelf", end=0),
    }
).append_column("won", pa.array([True] * 6 + [False] * 3))


def scores(*values: float, group: str = "task") -> pa.Table:
    """One trajectory of one step per score, each in a state of its own."""
    return table({f"{group}{i}": [(f"s{i}", value, True)] for i, value in enumerate(values)}, group=group)


def test_rloo_is_compared_with_the_others():
    steps = table({"A": episode("a b c", end=10, invalid=(2,)), "B": episode("d e f", end=0)})
    assert column(steps, "advantage", estimator="rloo") == pytest.approx([6.02, 6.02, 5.9, -5.98, -5.98, -5.98])
    # Of trajectories: the other one's mean, 0; and for B the mean of A's rows, 9.9666...
    others = [10, 10, 9.9, *[-(29.9 / 3)] * 3]
    assert column(steps, "advantage", estimator="rloo", weighting="trajectories") == pytest.approx(others)
    assert column(scores(10), "advantage", estimator="rloo") == [10.0]
    assert column(scores(6, 6, 6), "advantage", estimator="rloo") == [0.0, 0.0, 0.0]


def test_a_dropped_trajectory_is_left_out_of_everyones_baseline():
    """A published trap: a mask of who leaves out whom, made before a member was dropped, broke the rest of its group."""
    four = scores(8, 4, 0, 100)
    assert column(four.slice(0, 3), "advantage", estimator="rloo") == pytest.approx([8 - 2, 4 - 4, 0 - 6])


def test_leave_one_out_is_mean_scaled_up_and_free_of_its_own_score():
    steps = table({"A": episode("s t", end=9), "B": episode("s u", end=0), "C": episode("s v", end=3)})
    got = compute_advantages(steps, settings(normalise="leave_one_out", gamma=1.0, weighting="trajectories"))
    assert got["episode_advantage"].to_pylist() == pytest.approx([7.5, 7.5, -6, -6, -1.5, -1.5])
    assert got["step_advantage"].to_pylist() == pytest.approx([7.5, 0, -6, 0, -1.5, 0])
    mean = column(steps, "step_advantage", gamma=1.0)
    assert got["step_advantage"].to_pylist() == pytest.approx([x * 3 / 2 for x in mean])


def test_dr_grpo_divides_by_no_deviation_whatever_normalise_says():
    for normalise in ("mean", "mean_std", "leave_one_out"):
        assert column(scores(10, 0, 2), "advantage", estimator="dr_grpo", normalise=normalise) == pytest.approx([6, -4, -2])
    assert column(scores(10, 0), "advantage", estimator="grpo", normalise="mean_std") == pytest.approx(
        [0.5**0.5, -(0.5**0.5)], rel=1e-6
    )


def test_reinforce_pp_whitens_over_the_batch():
    batch = pa.concat_tables([scores(10, 0, group="g"), scores(4, group="h")])
    deviation = ((16**2 + 14**2 + 2**2) / 9 / 2 + 1e-8) ** 0.5  # about the mean 14 / 3
    assert column(batch, "advantage", estimator="reinforce_pp") == pytest.approx(
        [16 / 3 / deviation, -14 / 3 / deviation, -2 / 3 / deviation]
    )
    # With the group's mean off first: 5, -5 and, alone, 4; their mean is 4 / 3.
    deviation = ((11**2 + 19**2 + 8**2) / 9 / 2 + 1e-8) ** 0.5
    assert column(batch, "advantage", estimator="reinforce_pp_baseline") == pytest.approx(
        [11 / 3 / deviation, -19 / 3 / deviation, 8 / 3 / deviation]
    )
    for estimator in ("reinforce_pp", "reinforce_pp_baseline"):
        assert column(scores(3, 3, 3), "advantage", estimator=estimator) == [0.0] * 3
        assert column(scores(3), "advantage", estimator=estimator) == [0.0]


def test_hgpo_is_what_its_authors_compute():
    expected = [0.420303, 1.165685, 0.65199, 0, 0.65199, 0, -1.724284, -0.882842, -0.707106]
    got = compute_advantages(EXAMPLE_10, settings(estimator="hgpo", normalise="mean_std"))
    assert got["advantage"].to_pylist() == pytest.approx(expected, abs=2e-6)
    assert got["episode_advantage"].to_pylist() == [0.0] * 9
    assert got["anchor_size"].to_pylist() == [4, 3, 4, 2, 4, 2, 4, 3, 3]


def test_hgpo_does_not_care_on_which_side_of_the_mean_rounding_falls():
    """0.2 is the mean of 0.1, 0.2, 0.3, or an ulp beside it; its pair's difference of 0.2 must keep its weight."""
    episodes = {"A": [0.3, 0.0], "B": [0.1, 0.1], "C": [0.1, 0.0], "D": [0.0, 0.0]}
    steps = table({name: [("s", r, True), (name[0], 0.0, True)] for name, (r, _) in episodes.items()})
    orders = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [2, 3, 6, 7, 0, 1, 4, 5]]
    results = []
    for order in orders:
        got = column(steps.take(order), "advantage", estimator="hgpo")
        results.append([got[order.index(i)] for i in range(8)])
    assert results[1] == pytest.approx(results[0]) and results[2] == pytest.approx(results[0])


def test_graphgpo_counts_steps_to_success():
    got = compute_advantages(EXAMPLE_10, settings(estimator="graphgpo"))
    # From desk 1 step, from home 2, from shelf 3; each step has the distance of the state it leads to.
    assert got["step_return"].to_pylist() == pytest.approx([0.01, 0.1, 1, 10, 1, 10, 0.01, 0.01, 0])
    home, shelf = (0.01 + 1 + 1 + 0.01) / 4, (0.1 + 0.01 + 0) / 3
    assert got["step_advantage"].to_pylist() == pytest.approx(
        [0.01 - home, 0.1 - shelf, 1 - home, 0, 1 - home, 0, 0.01 - home, 0.01 - shelf, -shelf]
    )
    assert got["episode_advantage"].to_pylist() == column(EXAMPLE_10, "episode_advantage")


def test_graphgpo_without_a_win_or_a_state_has_no_way_and_without_won_refuses():
    lost = EXAMPLE_10.set_column(7, "won", pa.array([False] * 9))
    assert column(lost, "step_return", estimator="graphgpo") == [0.0] * 9
    unknown = table({"A": [("s", 0, True), (None, 0, True), ("t", 4, True)]}).append_column("won", pa.array([True] * 3))
    assert column(unknown, "step_return", estimator="graphgpo") == pytest.approx([0.04, 0.4, 4])
    with pytest.raises(ValueError, match=r"lacks the columns \['won'\]"):
        compute_advantages(EXAMPLE_10.drop_columns(["won"]), settings(estimator="graphgpo"))
    nothing = EXAMPLE_10.set_column(7, "won", pa.nulls(9, pa.bool_()))
    with pytest.raises(ValueError, match="whether trajectory .* was won"):
        compute_advantages(nothing, settings(estimator="graphgpo"))


def test_truncation_is_the_end_and_an_overlong_answer_is_an_invalid_action():
    """No bootstrap at the step limit; what the actors recorded beside the reward changes nothing here."""
    steps = table({"A": episode("s t", end=0, invalid=(1,)), "B": episode("s t", end=10)})
    more = steps.append_column("truncated", pa.array([False, True, False, False]))
    more = more.append_column("finish_reason", pa.array(["stop", "length", "stop", "stop"]))
    got = compute_advantages(more, settings())
    assert got["step_return"].to_pylist() == pytest.approx([0, -0.1, 9.5, 10])
    assert got.equals(compute_advantages(steps, settings()))


def test_a_group_without_signal_has_a_reason():
    alike = table({"A": episode("s t", end=10), "B": episode("s t", end=10)}, group="alike")
    sooner = table({"C": episode("s t", end=10), "D": episode("s", end=10)}, group="sooner")
    penalised = table({"E": episode("s", end=0, invalid=(0,)), "F": episode("s", end=0)}, group="penalised")
    alone = table({"G": episode("s t", end=10)}, group="alone")
    steps = pa.concat_tables([alike, sooner, penalised, alone])

    def silent(**how: str) -> dict[bytes, str]:
        return groups_without_signal(compute_advantages(steps, signal_settings(settings(), **how)))

    reason = "no advantage differs from 0"
    assert silent(signal="advantages") == {
        uid("alike"): f"2 trajectories, {reason}",
        uid("alone"): f"1 trajectory, {reason}",
    }
    assert silent(signal="returns") == {
        **{uid(name): f"2 trajectories, {reason}" for name in ("alike", "sooner", "penalised")},
        uid("alone"): f"1 trajectory, {reason}",
    }
    with pytest.raises(ValueError, match="one of advantages, returns"):
        silent(signal="rewards")


def test_table_diagnostics():
    steps = pa.concat_tables(
        [table({"A": episode("s t s", end=10), "B": episode("s u", end=0)}, group="g"), scores(1, 1, group="h")]
    )
    got = compute_advantages(steps, settings())
    assert anchor_size_histogram(got) == {1: 4, 3: 1}
    assert singleton_fraction(got) == pytest.approx(4 / 7)
    assert zero_variance_fraction(got) == 0.5
    episode_only = compute_advantages(steps, settings(estimator="grpo"))
    assert step_variance_share(episode_only, 1.0) == 0.0
    assert 0.0 < step_variance_share(got, 1.0) < 1.0


def operators(plan: dict) -> Iterator[dict]:
    yield plan
    for child in plan.get("children", []):
        yield from operators(child)


@pytest.mark.parametrize(
    ("call", "costly"),
    [
        ("", set()),
        ("estimator := 'grpo'", set()),
        ("estimator := 'hgpo'", {"WINDOW", "INOUT_FUNCTION"}),
        ("estimator := 'reinforce_pp'", {"CROSS_PRODUCT"}),
        ("estimator := 'graphgpo'", {"RECURSIVE_CTE distances"}),
        ("versions := 'window'", {"WINDOW"}),
        ("anchor := 'suffix'", {"WINDOW", "INOUT_FUNCTION"}),
    ],
)
def test_a_call_computes_nothing_that_it_does_not_use(call, costly):
    """Branches that a call's constants rule out have gone from the plan, or run over no rows at all."""
    connection = duckdb.connect()
    connection.register("steps", EXAMPLE_10.append_column("version_min", pa.array([1] * 9)))
    connection.execute(advantages_macro(PUBLISHED_SETTINGS))
    text = connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) FROM advantages({call})").fetchall()[0][1]
    busy = {
        f"{node['type']} {node['extra_info']['CTE Name']}" if node["type"] == "RECURSIVE_CTE" else node["type"]
        for node in operators(json.loads(text)["operator"][0])
        if node["intermediate_rows"]
    }
    assert "HASH_JOIN" in busy and "RECURSIVE_CTE returns" in busy
    assert busy & {"WINDOW", "INOUT_FUNCTION", "CROSS_PRODUCT", "RECURSIVE_CTE distances"} == costly


def test_a_run_without_settings_has_the_published_ones():
    """And every name that gigpo knows can be written in a config, unless a run has not recorded what it needs."""
    algorithm = asdict(AlgorithmConfig())
    assert {name: algorithm[{"versions": "anchor_versions"}.get(name, name)] for name in asdict(PUBLISHED_SETTINGS)} == asdict(
        PUBLISHED_SETTINGS
    )
    for key, names in (("estimator", ESTIMATORS), ("normalise", NORMALISATIONS), ("signal", SIGNALS)):
        for name in names:
            check(Config(algorithm=AlgorithmConfig(**{key: name})))
