"""Each estimator against numbers worked out by hand, what a group without signal is, and what
unused branches cost.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pytest

from gigpo import (
    ESTIMATORS,
    PUBLISHED_SETTINGS,
    WITH_CRITIC,
    WITH_STEP_TERM,
    advantages_macro,
    anchor_size_histogram,
    compute_advantages,
    step_variance_share,
)
from tests.support.gigpo_samples import column, episode, settings, table, uid

EXAMPLE_10 = table(
    {
        "a": episode("home shelf home desk", end=10),
        "b": episode("home desk", end=10),
        "c": episode("home shelf shelf", end=0),
    }
).append_column("won", pa.array([True] * 6 + [False] * 3))


def scores(*values: float, group: str = "task") -> pa.Table:
    """Return a trajectory of one step per score, each in its own state."""
    return table(
        {f"{group}{i}": [(f"s{i}", value, True)] for i, value in enumerate(values)}, group=group
    )


def test_rloo_is_compared_with_the_others():
    steps = table({"A": episode("a b c", end=10, invalid=(2,)), "B": episode("d e f", end=0)})
    assert column(steps, "advantage", estimator="rloo") == pytest.approx(
        [6.02, 6.02, 5.9, -5.98, -5.98, -5.98]
    )
    # Over trajectories: the other one's mean, 0; and for B the mean of A's rows, 9.9666...
    others = [10, 10, 9.9, *[-(29.9 / 3)] * 3]
    assert column(steps, "advantage", estimator="rloo", weighting="trajectories") == pytest.approx(
        others
    )
    assert column(scores(10), "advantage", estimator="rloo") == [10.0]
    assert column(scores(6, 6, 6), "advantage", estimator="rloo") == [0.0, 0.0, 0.0]


def test_a_dropped_trajectory_is_left_out_of_everyones_baseline():
    """A published trap: a mask of who leaves out whom, made before a member was dropped, broke the
    rest of its group.
    """
    four = scores(8, 4, 0, 100)
    assert column(four.slice(0, 3), "advantage", estimator="rloo") == pytest.approx(
        [8 - 2, 4 - 4, 0 - 6]
    )


def test_leave_one_out_is_mean_scaled_up_and_free_of_its_own_score():
    steps = table(
        {"A": episode("s t", end=9), "B": episode("s u", end=0), "C": episode("s v", end=3)}
    )
    got = compute_advantages(
        steps, settings(normalise="leave_one_out", gamma=1.0, weighting="trajectories")
    )
    assert got["episode_advantage"].to_pylist() == pytest.approx([7.5, 7.5, -6, -6, -1.5, -1.5])
    assert got["step_advantage"].to_pylist() == pytest.approx([7.5, 0, -6, 0, -1.5, 0])
    mean = column(steps, "step_advantage", gamma=1.0)
    assert got["step_advantage"].to_pylist() == pytest.approx([x * 3 / 2 for x in mean])


def test_a_step_is_not_compared_with_its_own_trajectory_under_leave_one_out():
    """A comes to s twice, with returns 8 and 8, B once with 2, C once with 5. Leaving out one step,
    A's baseline would have contained its own reward."""
    steps = table({"A": episode("s s", end=8), "B": episode("s", end=2), "C": episode("s", end=5)})
    got = column(steps, "step_advantage", normalise="leave_one_out", gamma=1.0)
    assert got == pytest.approx([8 - 3.5, 8 - 3.5, 2 - 21 / 3, 5 - 18 / 3])
    weighted = steps.append_column("weight", pa.array([1.0, 2.0, 2.0, 0.5]))
    got = column(
        weighted, "step_advantage", normalise="leave_one_out", gamma=1.0, anchor_versions="weighted"
    )
    others = [(2 * 2 + 5 * 0.5) / 2.5] * 2 + [(8 * 3 + 5 * 0.5) / 3.5, (8 * 3 + 2 * 2) / 5]
    assert got == pytest.approx([8 - others[0], 8 - others[1], 2 - others[2], 5 - others[3]])
    alone = table({"A": episode("s s t", end=8), "B": episode("u", end=2)})
    assert column(alone, "step_advantage", normalise="leave_one_out") == [0.0] * 4, (
        "nobody else was there"
    )


@pytest.mark.parametrize("estimator", ["gigpo", "hgpo"])
def test_a_leave_one_out_baseline_does_not_know_its_own_trajectory(estimator):
    """R - A_S of a trajectory's steps stays what it is, whatever that trajectory earned."""
    rng = random.Random(0)

    def baselines(end_of_a: float) -> list[float]:
        episodes = {
            name: episode(" ".join(rng.choices("st", k=4)), end=rng.choice([0, 3, 7]))
            for name in "BCDE"
        }
        steps = table({"A": episode("s t s t", end=end_of_a)} | episodes)
        got = compute_advantages(
            steps, settings(estimator=estimator, normalise="leave_one_out", anchor_history=1)
        )
        return [
            r - a
            for r, a in zip(
                got["step_return"].to_pylist()[:4],
                got["step_advantage"].to_pylist()[:4],
                strict=True,
            )
        ]

    first = baselines(10.0)
    rng.seed(0)
    assert baselines(-6.0) == pytest.approx(first)


def test_dr_grpo_divides_by_no_deviation_whatever_normalise_says():
    for normalise in ("mean", "mean_std", "leave_one_out"):
        assert column(
            scores(10, 0, 2), "advantage", estimator="dr_grpo", normalise=normalise
        ) == pytest.approx([6, -4, -2])
    assert column(
        scores(10, 0), "advantage", estimator="grpo", normalise="mean_std"
    ) == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-6)


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
    """In t the returns are 0.2, 0.3 and 0.1, and A's 0.2 is their mean, or an ulp beside it, as
    (0.1 + 0.2 + 0.3) / 3 is. After x, t it is 0.05 below the mean of A and B, and that alone is
    what its history says."""
    steps = table(
        {"A": [("x", 0, True), ("t", 0.2, True)], "B": [("x", 0, True), ("t", 0.3, True)]}
    )
    steps = pa.concat_tables([steps, table({"C": [("y", 0, True), ("t", 0.1, True)]})])
    of_states = compute_advantages(steps, settings())["step_advantage"].to_pylist()
    assert 0.0 < abs(of_states[1]) < 1e-15, "the case tests something"
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 5, 1, 0, 2, 4]):
        got = column(steps.take(order), "advantage", estimator="hgpo")
        assert got[order.index(1)] == pytest.approx(-0.05)


def with_ends(steps: pa.Table, won: list[bool], final: list[str | None]) -> pa.Table:
    """Add who won, and the state in which each trajectory ended, in the row of its last step."""
    states = pa.array([None if state is None else uid(state) for state in final], pa.binary(16))
    return steps.append_column("won", pa.array(won)).append_column("final_state_hash", states)


# The lost episode C of example 10 ends on the shelf that it was at, or at a place of its own.
ON_THE_SHELF = EXAMPLE_10.append_column(
    "final_state_hash", pa.array([None] * 8 + [uid("shelf")], pa.binary(16))
)
ELSEWHERE = EXAMPLE_10.append_column(
    "final_state_hash", pa.array([None] * 8 + [uid("cellar")], pa.binary(16))
)


def test_graphgpo_counts_steps_to_success():
    got = compute_advantages(ON_THE_SHELF, settings(estimator="graphgpo"))
    # From desk 1 step, from home 2, from shelf 3; each step has the distance of the state it leads
    # to.
    expected = [0.01, 0.1, 1, 10, 1, 10, 0.01, 0.01, 0.01]
    assert got["step_return"].to_pylist() == pytest.approx(expected)
    home, shelf = (0.01 + 1 + 1 + 0.01) / 4, (0.1 + 0.01 + 0.01) / 3
    assert got["step_advantage"].to_pylist() == pytest.approx(
        [0.01 - home, 0.1 - shelf, 1 - home, 0, 1 - home, 0, 0.01 - home, *[0.01 - shelf] * 2]
    )
    assert got["episode_advantage"].to_pylist() == column(EXAMPLE_10, "episode_advantage")
    doubled = column(ON_THE_SHELF, "step_return", estimator="graphgpo", graph_gamma=0.2)
    assert doubled[:4] == pytest.approx([0.08, 0.4, 2, 10])


def test_graphgpo_takes_a_dead_end_as_one_step_further_than_the_farthest_state():
    """The shelf is the farthest, with 3 steps."""
    unknown = ELSEWHERE.set_column(8, "final_state_hash", pa.nulls(9, pa.binary(16)))
    for steps in (ELSEWHERE, unknown):
        returns = column(steps, "step_return", estimator="graphgpo")
        assert returns[8] == pytest.approx(0.001)
        assert returns[7] == pytest.approx(0.01), "the shelf again"


def test_graphgpo_passes_through_a_state_that_only_ended_a_lost_episode():
    """B was cut off where A went on to win, so it was as near as A."""
    steps = table({"A": episode("a b c", end=10), "B": episode("x y", end=0)})
    steps = with_ends(steps, [True] * 3 + [False] * 2, [None] * 4 + ["b"])
    returns = column(steps, "step_return", estimator="graphgpo")
    assert returns == pytest.approx([0.1, 1, 10, 0.01, 0.1])


def test_graphgpo_without_a_win_has_no_way_and_without_a_column_refuses():
    lost = ON_THE_SHELF.set_column(7, "won", pa.array([False] * 9))
    assert column(lost, "step_return", estimator="graphgpo") == [1.0] * 9
    assert column(lost, "step_advantage", estimator="graphgpo") == [0.0] * 9
    unknown = table({"A": [("s", 0, True), (None, 0, True), ("t", 4, True)]})
    unknown = with_ends(unknown, [True] * 3, [None] * 3)
    assert column(unknown, "step_return", estimator="graphgpo") == pytest.approx([0.1, 1, 10])
    for name in ("won", "final_state_hash"):
        with pytest.raises(ValueError, match=rf"lacks the columns \['{name}'\]"):
            compute_advantages(ON_THE_SHELF.drop_columns([name]), settings(estimator="graphgpo"))
    nothing = ON_THE_SHELF.set_column(7, "won", pa.nulls(9, pa.bool_()))
    with pytest.raises(ValueError, match="whether trajectory .* was won"):
        compute_advantages(nothing, settings(estimator="graphgpo"))


def test_the_nodes_of_graphgpo_follow_the_anchor():
    """Shelf and desk are one place for this anchor, whatever the hashes say."""
    steps = ON_THE_SHELF.append_column(
        "anchor_key", pa.array(["h", "f", "h", "f", "h", "f", "h", "f", "f"])
    ).append_column("final_anchor_key", pa.array([None] * 8 + ["f"]))
    got = compute_advantages(steps, settings(estimator="graphgpo", anchor="anchor_key"))
    assert got["step_return"].to_pylist() == pytest.approx([1, 0.1, 1, 10, 1, 10, 1, 1, 1])
    assert got["anchor_size"].to_pylist() == [4, 5, 4, 5, 4, 5, 4, 5, 5]


def test_graphgpo_compares_final_texts_as_it_compares_texts():
    """B ended at a text like A's desk, 0.9 of it the same, so success was near. A text that is 0.8
    the same is another state, and the end of a won episode, which is no state, links nothing to it.
    """
    desk, like_desk, unlike = (f"{start}efghijklmnopqrst" for start in ("abcd", "XYcd", "XYZW"))
    steps = table(
        {
            "A": [("start", 0, True), (desk, 10, True)],
            "B": [("street", 0, True)],
            "C": [("garden", 10, True)],
        }
    )
    steps = with_ends(steps, [True, True, False, True], [None] * 4)
    for end, won_end, expected in ((like_desk, unlike, 1), (unlike, like_desk, 0.01)):
        texts = steps.append_column("final_anchor_text", pa.array([None, None, end, won_end]))
        for anchor in ("similar", "similar_greedy"):
            got = column(texts, "step_return", estimator="graphgpo", anchor=anchor)
            assert got == pytest.approx([1, 10, expected, 10])


def test_g2po_compares_the_states_that_actions_lead_to():
    # V(home) = 10 (1/16 + 1/4 + 1/4 + 0) / 4 = 1.40625, V(shelf) = 1.25 / 3, V(desk) = 5, and 10
    # after a win. Next values at home: shelf, desk, desk, shelf, with mean 2.708333; at shelf: home,
    # shelf, nothing, with mean 0.607639; at desk all 10. The mean temporal difference is 1.753472.
    steps = column(EXAMPLE_10, "step_advantage", estimator="g2po", gamma=0.5, normalise="mean")
    expected = [-5.034722, 0.034722, 4.131944, 3.246528, 4.131944, 3.246528]
    assert steps == pytest.approx([*expected, -5.034722, -1.944444, -2.777778], abs=1e-6)
    episodes = column(EXAMPLE_10, "episode_advantage", normalise="mean")
    advantages = column(EXAMPLE_10, "advantage", estimator="g2po", gamma=0.5, normalise="mean")
    assert advantages == pytest.approx([e + s for e, s in zip(episodes, steps, strict=True)])
    assert column(EXAMPLE_10, "anchor_size", estimator="g2po") == [4, 3, 4, 2, 4, 2, 4, 3, 3]


def test_g2po_shows_the_next_states_value_for_every_anchor():
    for anchor in ("state", "suffix"):
        got = column(EXAMPLE_10, "step_return", estimator="g2po", gamma=0.5, anchor=anchor)
        assert [got[3], got[5], got[8]] == [10.0, 10.0, 0.0]  # after a win, a win, a loss
        assert got[2] == 5.0, "of the desk, whatever came before it"


def test_g2po_has_a_signal_in_states_met_once():
    steps = table({"A": episode("a b", end=10), "B": episode("c d", end=0)})
    won = steps.append_column("won", pa.array([True, True, False, False]))
    # V is 2.5, 5 and 0, 0; the differences 2.5, 5, 0, 0 have the mean 1.875.
    got = column(won, "step_advantage", estimator="g2po", gamma=0.5, normalise="mean")
    assert got == pytest.approx([0.625, 3.125, -1.875, -1.875])
    with pytest.raises(ValueError, match=r"lacks the columns \['won'\]"):
        compute_advantages(steps, settings(estimator="g2po"))


def test_gagpo_is_generalised_advantage_estimation_over_mean_returns():
    # V(home) = 2.8125, V(shelf) = 2.5 / 3, V(desk) = 10; gamma lambda = 0.25.
    got = column(
        EXAMPLE_10, "advantage", estimator="gagpo", gamma=0.5, gae_lambda=0.5, normalise="mean"
    )
    expected = [-2.045718, 1.189959, 2.257668, 0.070168, 2.257668, 0.070168]
    assert got == pytest.approx([*expected, -2.481916, -0.554832, -0.763166], abs=1e-6)
    assert set(column(EXAMPLE_10, "episode_advantage", estimator="gagpo")) == {0.0}


def test_turn_ppo_is_generalised_advantage_estimation_over_a_critics_values():
    """With gamma 0.5 and lambda 0.5 a later difference counts a quarter."""
    steps = table({"A": [("s", 0, True), ("t", 1, False), ("u", 10, True)], "B": [("s", 2, True)]})
    steps = steps.append_column("value", pa.array([4.0, 2.0, 6.0, 1.0]))
    # A: 10 + 0 - 6 = 4;  1 + 6 / 2 - 2 = 2, and 2 + 4 / 4 = 3;  0 + 2 / 2 - 4 = -3, and
    # -3 + 3 / 4 = -2.25. B: 2 + 0 - 1 = 1.
    estimates = [-2.25, 3.0, 4.0, 1.0]
    got = compute_advantages(steps, settings(estimator="turn_ppo", gamma=0.5, gae_lambda=0.5))
    assert got["value_target"].to_pylist() == pytest.approx([4 - 2.25, 2 + 3, 6 + 4, 1 + 1])
    estimates[1] -= 0.1  # the action was invalid
    mean = sum(estimates) / 4
    deviation = (sum((x - mean) ** 2 for x in estimates) / 3 + 1e-8) ** 0.5
    whitened = [(x - mean) / deviation for x in estimates]
    assert got["advantage"].to_pylist() == pytest.approx(whitened, abs=1e-12)
    assert set(got["episode_advantage"].to_pylist()) == {0.0}


def test_a_critic_that_knows_every_return_leaves_no_advantage():
    """And of one that knows nothing, with lambda 1, the targets are the returns."""
    steps = table({"A": episode("s t u", end=10), "B": episode("s v", end=0)})
    exact = steps.append_column("value", pa.array([2.5, 5.0, 10.0, 0.0, 0.0]))
    assert column(exact, "advantage", estimator="turn_ppo", gamma=0.5) == [0.0] * 5
    nothing = steps.append_column("value", pa.array([0.0] * 5))
    targets = column(nothing, "value_target", estimator="turn_ppo", gamma=0.5, gae_lambda=1.0)
    assert targets == column(steps, "step_return", gamma=0.5) == [2.5, 5.0, 10.0, 0.0, 0.0]


def test_ppo_gives_each_response_the_score_of_its_episode():
    """Whatever the discount: 11 to all steps of A, 0.1 less where the action was invalid."""
    steps = table({"A": [("s", 0, True), ("t", 1, False), ("u", 10, True)], "B": [("s", 2, True)]})
    steps = steps.append_column("value", pa.array([4.0, 2.0, 6.0, 1.0]))
    got = compute_advantages(steps, settings(estimator="ppo", gamma=0.5, gae_lambda=0.5))
    assert got["value_target"].to_pylist() == [11.0, 10.9, 11.0, 2.0]
    estimates = [11 - 4, 10.9 - 2, 11 - 6, 2 - 1]  # of the first tokens, with lambda 1
    mean = sum(estimates) / 4
    deviation = (sum((x - mean) ** 2 for x in estimates) / 3 + 1e-8) ** 0.5
    whitened = [(x - mean) / deviation for x in estimates]
    assert got["advantage"].to_pylist() == pytest.approx(whitened, abs=1e-12)


@pytest.mark.parametrize("estimator", WITH_CRITIC)
@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_an_estimator_with_a_critic_refuses_steps_without_a_value(estimator, value):
    steps = table({"A": episode("s t", end=10)})
    with pytest.raises(ValueError, match=r"lacks the columns \['value'\]"):
        compute_advantages(steps, settings(estimator=estimator))
    refused = f"{estimator} needs .* trajectory .* step 1 has .*; give `steps` a column"
    with pytest.raises(ValueError, match=refused):
        column(
            steps.append_column("value", pa.array([1.0, value], pa.float64())),
            "advantage",
            estimator=estimator,
        )


def test_values_of_nodes_have_no_weights():
    for estimator in ("g2po", "gagpo"):
        with pytest.raises(ValueError, match="anchor_versions='mixed' or 'window'"):
            settings(estimator=estimator, anchor_versions="weighted")
    with pytest.raises(ValueError, match=r"gae_lambda=1.5 is outside \[0, 1\]"):
        settings(gae_lambda=1.5)


def test_truncation_is_the_end_and_an_overlong_answer_is_an_invalid_action():
    """No bootstrap at the step limit; what the actors recorded beside the reward changes nothing
    here.
    """
    steps = table({"A": episode("s t", end=0, invalid=(1,)), "B": episode("s t", end=10)})
    more = steps.append_column("truncated", pa.array([False, True, False, False]))
    more = more.append_column("finish_reason", pa.array(["stop", "length", "stop", "stop"]))
    got = compute_advantages(more, settings())
    assert got["step_return"].to_pylist() == pytest.approx([0, -0.1, 9.5, 10])
    assert got.equals(compute_advantages(steps, settings()))


def test_table_diagnostics():
    steps = pa.concat_tables(
        [
            table({"A": episode("s t s", end=10), "B": episode("s u", end=0)}, group="g"),
            scores(1, 1, group="h"),
        ]
    )
    got = compute_advantages(steps, settings())
    assert anchor_size_histogram(got) == {1: 4, 3: 3}
    for estimator in [e for e in ESTIMATORS if e not in (*WITH_STEP_TERM, *WITH_CRITIC)]:
        assert step_variance_share(compute_advantages(steps, settings(estimator=estimator))) == 0.0
    assert 0.0 < step_variance_share(got) < 1.0
    # hgpo has no use for omega: its step term is all there is, at any.
    hierarchical = compute_advantages(steps, settings(estimator="hgpo", omega=0.0))
    assert step_variance_share(hierarchical) == 1.0


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
        ("estimator := 'graphgpo'", {"WINDOW", "RECURSIVE_CTE distances"}),
        ("estimator := 'g2po'", {"WINDOW"}),
        ("estimator := 'gagpo'", {"WINDOW", "RECURSIVE_CTE backwards"}),
        ("estimator := 'turn_ppo'", {"CROSS_PRODUCT", "RECURSIVE_CTE backwards"}),
        ("estimator := 'ppo'", {"CROSS_PRODUCT"}),
        ("anchor_versions := 'window'", {"WINDOW"}),
        ("anchor := 'suffix'", {"WINDOW", "INOUT_FUNCTION"}),
    ],
)
def test_a_call_computes_nothing_that_it_does_not_use(call, costly):
    """Branches that a call's constants rule out have gone from the plan, or run over no rows at
    all.
    """
    connection = duckdb.connect()
    steps = EXAMPLE_10.append_column("version_min", pa.array([1] * 9))
    connection.register("steps", steps.append_column("value", pa.array([1.0] * 9)))
    connection.execute(advantages_macro(PUBLISHED_SETTINGS))
    text = connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) FROM advantages({call})").fetchall()[
        0
    ][1]
    busy = {
        f"{node['type']} {node['extra_info']['CTE Name']}"
        if node["type"] == "RECURSIVE_CTE"
        else node["type"]
        for node in operators(json.loads(text)["operator"][0])
        if node["intermediate_rows"]
    }
    assert "HASH_JOIN" in busy and "RECURSIVE_CTE returns" in busy
    watched = {"WINDOW", "INOUT_FUNCTION", "CROSS_PRODUCT"}
    watched |= {"RECURSIVE_CTE distances", "RECURSIVE_CTE backwards"}
    assert busy & watched == costly
