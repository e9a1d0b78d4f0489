"""Advantages against worked examples: gamma 0.95, omega 1, penalty 0.1 unless said.

The numbers are what GiGPO's authors' code gives, except where its float32 is wrong (example 4).
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gigpo import (
    ANCHORS,
    ESTIMATORS,
    PUBLISHED_SETTINGS,
    AdvantageSettings,
    advantages_macro,
    compute_advantages,
)
from store import state_hash
from tests.support.gigpo_samples import column, episode, settings, table, uid

LONG_AND_SHORT = table({"A": episode("a b c d e", end=10), "B": episode("x", end=0)})
CASE_5 = {"A": episode("s0 s1 s2", end=10, invalid=(1,)), "B": episode("s0 s1", end=0)}
CASE_5_VALID = {"A": episode("s0 s1 s2", end=10), "B": episode("s0 s1", end=0)}
CASE_10 = table(
    {
        "a": episode("home shelf home desk", end=10, invalid=(1,)),
        "b": episode("home desk", end=10),
        "c": episode("home shelf shelf", end=0, invalid=(2,)),
    }
)
CASE_10 = CASE_10.append_column("won", pa.array([True] * 6 + [False] * 3))
CASE_10 = CASE_10.append_column(
    "final_state_hash", pa.array([None] * 8 + [CASE_10["state_hash"][0].as_py()], pa.binary(16))
)
CASE_10 = CASE_10.append_column("value", pa.array([0.5 * number for number in range(9)]))


@pytest.mark.parametrize(
    ("weighting", "normalise", "of_a", "of_b"),
    [
        ("steps", "mean", 5 / 3, -25 / 3),
        ("steps", "mean_std", 0.408248, -2.041241),
        ("trajectories", "mean", 5.0, -5.0),
        ("trajectories", "mean_std", 0.707107, -0.707107),
    ],
)
def test_example_1_long_episodes_weigh_more_unless_trajectories_are_counted(
    weighting, normalise, of_a, of_b
):
    got = column(LONG_AND_SHORT, "episode_advantage", weighting=weighting, normalise=normalise)
    assert got == pytest.approx([of_a] * 5 + [of_b], abs=1e-6)


def test_example_2_standard_deviation_has_ddof_1():
    steps = table({"A": episode("s", end=10), "B": episode("t", end=0)})
    got = column(steps, "episode_advantage", normalise="mean_std")
    assert got == pytest.approx([0.707107, -0.707107], abs=1e-6)


def test_example_3_singletons():
    one_row = table({"A": episode("s", end=10)})
    assert column(one_row, "episode_advantage") == [10.0]
    assert column(one_row, "episode_advantage", normalise="mean_std") == pytest.approx(
        [9.99999], abs=1e-9
    )
    one_trajectory = table({"A": episode("s t u", end=10)})
    assert column(one_trajectory, "episode_advantage") == [0.0, 0.0, 0.0]
    assert column(one_trajectory, "episode_advantage", weighting="trajectories") == [
        10.0,
        10.0,
        10.0,
    ]
    lone_step = table({"A": episode("s", end=7.7), "B": episode("t", end=1)})
    for normalise in ("mean", "mean_std"):
        assert column(lone_step, "step_advantage", normalise=normalise) == [0.0, 0.0]


@pytest.mark.parametrize("normalise", ["mean", "mean_std"])
@pytest.mark.parametrize("n", [2, 3, 7, 8, 78])
def test_example_4_equal_returns_give_exactly_zero(n, normalise):
    """In float32 seven times 9.9 gives -0.47 each."""
    rewards = [9.9, 11.6] + [10 * 0.95**k for k in range(20)]
    # Different lengths, so that episode scores are equal over different numbers of rows.
    steps = pa.concat_tables(
        table(
            {f"{reward} {i}": episode("s " * (1 + i % 3), end=reward) for i in range(n)},
            group=str(reward),
        )
        for reward in rewards
    )
    for weighting in ("steps", "trajectories"):
        got = compute_advantages(
            steps, settings(gamma=1.0, normalise=normalise, weighting=weighting)
        )
        assert set(got["advantage"].to_pylist()) == {0.0}


def test_example_5_penalty_stays_on_its_row():
    got = compute_advantages(table(CASE_5), settings()).to_pydict()
    assert got["step_return"] == pytest.approx([9.025, 9.4, 10, 0, 0])
    assert got["episode_advantage"] == pytest.approx([4.02, 3.92, 4.02, -5.98, -5.98])
    assert got["step_advantage"] == pytest.approx([4.5125, 4.70, 0, -4.5125, -4.70])
    assert got["advantage"] == pytest.approx([8.5325, 8.62, 4.02, -10.4925, -10.68])
    assert got["anchor_size"] == [2, 2, 1, 2, 2]
    assert column(table(CASE_5_VALID), "advantage") == pytest.approx(
        [8.5125, 8.75, 4, -10.5125, -10.75]
    )


def test_example_6_a_loop_meets_its_own_anchor():
    got = compute_advantages(
        table({"A": episode("s0 s1 s0 s2", end=10)}), settings(normalise="mean_std")
    )
    assert got["episode_advantage"].to_pylist() == [0.0] * 4
    assert got["step_advantage"].to_pylist() == pytest.approx([-0.707106, 0, 0.707106, 0], abs=2e-6)


def test_example_7_states_are_the_same_when_their_hashes_are():
    """Equal hashes share an anchor group, unequal ones do not, NULL joins none.

    The store decides which texts have equal hashes. Example 8 is in test_anchors.py.
    """
    steps = table(
        {f"t{i}": [(state, float(i), True)] for i, state in enumerate(["a", "b", "c", "a"])}
    )
    assert column(steps, "anchor_size") == [2, 1, 1, 2]
    unknown = table({"A": [(None, 1.0, True), (None, 0.0, True)], "B": [(None, 5.0, True)]})
    assert column(unknown, "anchor_size") == [1, 1, 1]
    assert column(unknown, "step_advantage") == [0.0, 0.0, 0.0]


def test_example_7_as_a_run_hashes_its_states():
    """Line ends, case and spaces count as they do for the authors, whose NFC and NFD of one text
    are two states; here one.
    """
    texts = {
        "Nothing happens.": 2,
        "Nothing happens.\n": 2,
        "Nothing happens.\r\n": 2,  # the same line end
        "nothing happens.": 1,
        " Nothing happens.": 1,
        "caf\u00e9": 2,
        "cafe\u0301": 2,
        "1": 1,  # a number or a dictionary is whatever text the environment makes of it
        "1.0": 1,
        "True": 1,
    }
    rows = [*texts, "Nothing happens."]
    hashes = pa.array([state_hash(text) for text in rows], pa.binary(16))
    steps = table({f"t{i}": [(text, float(i), True)] for i, text in enumerate(rows)})
    steps = steps.set_column(steps.column_names.index("state_hash"), "state_hash", hashes)
    assert column(steps, "anchor_size") == [*texts.values(), 2]


@pytest.mark.parametrize("state", [None, 1, 1.0, True, b"x", ["a"], {"a": 1}])
def test_example_7_what_is_no_text_is_no_state(state):
    """The authors' code takes numbers, lists and dictionaries, and refuses None and bytes; here all
    of it is refused.
    """
    with pytest.raises(
        TypeError, match=f"takes a text, not a value of type {type(state).__name__};"
    ):
        state_hash(state)


def test_example_7_the_same_state_in_two_groups_stays_apart():
    both = pa.concat_tables(
        [table({"A": episode("s", end=1)}, group="g"), table({"B": episode("s", end=5)}, group="h")]
    )
    assert column(both, "anchor_size") == [1, 1]
    assert column(both, "step_advantage") == [0.0, 0.0]


def test_example_9_a_copied_row_is_refused_not_averaged():
    """Upstream pads batches with copies of rows before the statistics, which shifts them (8.5125
    became 11.0167).
    """
    steps = table(CASE_5_VALID)
    with pytest.raises(ValueError, match="step_index twice"):
        compute_advantages(pa.concat_tables([steps, steps.slice(3, 1)]), settings())


def test_example_10_whole():
    mean = [
        5.035868,
        9.238888,
        5.962118,
        3.355556,
        5.962118,
        3.355556,
        -13.537882,
        -9.586111,
        -9.786111,
    ]
    mean_std = [
        1.033963,
        1.804650,
        1.234610,
        0.669969,
        1.234610,
        0.669969,
        -2.819903,
        -1.894302,
        -1.933566,
    ]
    no_step_term = [3.355556, 3.255556, *[3.355556] * 4, -6.644444, -6.644444, -6.744444]
    assert column(CASE_10, "advantage") == pytest.approx(mean, abs=2e-6)
    assert column(CASE_10, "advantage", normalise="mean_std") == pytest.approx(mean_std, abs=2e-6)
    assert column(CASE_10, "advantage", omega=0.0) == pytest.approx(no_step_term, abs=2e-6)
    assert column(CASE_10, "advantage", estimator="grpo") == column(CASE_10, "advantage", omega=0.0)
    assert set(column(CASE_10, "step_advantage", estimator="grpo")) == {0.0}


def test_example_11_step_index_is_time_whatever_the_order_of_rows():
    assert column(
        table({"A": [("s", 10, True), ("t", 0, True), ("u", 0, True)]}), "step_return"
    ) == [10, 0, 0]
    in_order = table({"a": episode("s t", end=10), "b": episode("s t", end=0)})
    assert column(in_order.take([0, 2, 1, 3]), "step_return") == [9.5, 0, 10, 0]
    assert column(in_order.take([3, 1, 2, 0]), "step_return") == [0, 10, 0, 9.5]


def test_example_12_dense_rewards():
    steps = table(
        {"A": [("s", -0.1, True), ("t", -0.1, True), ("u", 0.9, True), ("v", 10.9, True)]}
    )
    assert column(steps, "step_return") == pytest.approx(
        [9.9626375, 10.59225, 11.255, 10.9], rel=1e-12
    )
    # one trajectory: the score itself
    one_each = column(steps, "episode_advantage", weighting="trajectories")
    assert one_each == pytest.approx([11.6] * 4)


def test_a_penalty_under_trajectory_weighting_cannot_blow_up():
    """Two alike trajectories with one invalid step each: the trajectories' means are equal, their
    rows are not.
    """
    pair = {name: episode("s t", end=10, invalid=(0,)) for name in "AB"}
    got = column(table(pair), "episode_advantage", weighting="trajectories", normalise="mean_std")
    # scores 9.9, 10, 9.9, 10; weights 1/2; mean 9.95; var = 4 * 0.5 * 0.05^2 / (2 - 1) = 0.005
    assert got == pytest.approx(
        [-0.05 / (0.005**0.5 + 1e-6), 0.05 / (0.005**0.5 + 1e-6)] * 2, rel=1e-9
    )


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([0, 2], "0 to 2; it must count 0, 1, 2, ... without a gap"),
        ([1, 2], "without a gap"),
        ([-1, 0, 2], "without a gap"),
        ([0, 0], "step_index twice"),
        ([0, 1, 1], "step_index twice"),
        ([0, 1, 3, 3], "one step_index twice and lacks another"),
        ([0, 0, 2], "one step_index twice and lacks another"),
    ],
)
def test_gaps_and_duplicates_are_refused_by_name(bad, why):
    good = table(CASE_5_VALID)
    rows = table({"broken": [("s", 1.0, True)] * len(bad)})
    rows = rows.set_column(2, "step_index", pa.array(bad, pa.int32()))
    name = duckdb.execute("SELECT $1::BLOB::UUID::VARCHAR", [uid("broken")]).fetchall()[0][0]
    with pytest.raises(ValueError, match=f"trajectory {name} .*{why}"):
        compute_advantages(pa.concat_tables([good, rows]), settings())


def test_other_bad_rows_are_refused():
    with pytest.raises(ValueError, match="more than one group"):
        compute_advantages(
            table({"A": episode("s t", end=1)}).set_column(
                0, "group_uid", pa.array([uid("g"), uid("h")], pa.binary(16))
            ),
            settings(),
        )
    with pytest.raises(ValueError, match="not finite"):
        compute_advantages(table({"A": [("s", float("nan"), True)]}), settings())
    with pytest.raises(ValueError, match=r"lacks the columns \['reward'\]"):
        compute_advantages(table(CASE_5).drop_columns(["reward"]), settings())
    for name in ("group_uid", "traj_uid", "step_index", "is_action_valid", "reward"):
        steps = table(CASE_5)
        nulls = pa.array([None, *steps[name].to_pylist()[1:]], steps[name].type)
        with pytest.raises(ValueError, match="NULL|finite"):
            compute_advantages(
                steps.set_column(steps.column_names.index(name), name, nulls), settings()
            )


def test_no_steps_give_no_advantages():
    assert len(compute_advantages(table(CASE_5).slice(0, 0), settings())) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.01}, r"gamma=1.01 is outside \[0, 1\]"),
        ({"gamma": float("nan")}, "gamma=nan"),
        ({"omega": -1.0}, "omega=-1.0"),
        ({"invalid_penalty": -0.1}, "reward invalid actions"),
        ({"estimator": "gipgo"}, "did you mean 'gigpo'"),
        ({"normalise": "mean-std"}, "did you mean 'mean_std'"),
        ({"weighting": "rows"}, "one of steps, trajectories"),
        ({"normalise": "leave_one"}, "did you mean 'leave_one_out'"),
        ({"anchor": "states"}, "did you mean 'state'"),
        ({"anchor_versions": "windows"}, "did you mean 'window'"),
        ({"anchor_history": 0}, "anchor_history=0"),
        ({"version_window": -1}, "version_window=-1"),
        ({"similarity": 1.0}, r"similarity=1.0 is outside \(0, 1\)"),
        ({"estimator": "hgpo", "anchor": "suffix"}, "anchors of its own"),
        ({"gamma": None}, "gamma=None is of type NoneType; it must be a number"),
        ({"gamma": "0.5"}, "gamma='0.5' is of type str"),
        ({"omega": True}, "omega=True is of type bool"),
        ({"invalid_penalty": np.bool_(True)}, "invalid_penalty=.*bool"),
        ({"similarity": [0.9]}, "similarity=.* is of type list"),
        ({"anchor_history": 3.0}, "anchor_history=3.0 is of type float; it must be a whole number"),
        ({"version_window": True}, "version_window=True is of type bool"),
        ({"estimator": None}, "estimator=None is unknown"),
        ({"anchor": ["state"]}, "anchor=.* is unknown"),
    ],
)
def test_settings_are_refused_with_the_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.fixture
def shell(tmp_path: Path) -> duckdb.DuckDBPyConnection:
    """A bare connection over a Parquet file, uids cast as the run's views do."""
    pq.write_table(CASE_10, tmp_path / "steps.parquet")
    connection = duckdb.connect()
    connection.execute(
        "CREATE VIEW steps AS SELECT * REPLACE (group_uid::UUID AS group_uid, traj_uid::UUID AS "
        "traj_uid, "
        "final_state_hash::UUID AS final_state_hash, "
        f"state_hash::UUID AS state_hash) FROM read_parquet('{tmp_path / 'steps.parquet'}')"
    )
    connection.execute(advantages_macro(PUBLISHED_SETTINGS))
    return connection


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("normalise", "weighting"), [("mean", "steps"), ("leave_one_out", "trajectories")]
)
def test_the_macro_says_what_python_says(shell, estimator, normalise, weighting):
    sql = (
        "SELECT anchor_text, a.advantage, steps_differ FROM advantages(gamma := 0.9, omega := 0.5, "
        "invalid_penalty := 0.2, "
        f"estimator := '{estimator}', normalise := '{normalise}', weighting := '{weighting}') AS a "
        "JOIN steps USING (traj_uid, step_index) ORDER BY traj_uid, step_index"
    )
    changes = {"estimator": estimator, "normalise": normalise, "weighting": weighting}
    from_python = compute_advantages(
        CASE_10, settings(gamma=0.9, omega=0.5, invalid_penalty=0.2, **changes)
    )
    by_key = [("traj_uid", "ascending"), ("step_index", "ascending")]
    expected = (
        from_python.append_column("anchor_text", CASE_10["anchor_text"]).sort_by(by_key).to_pydict()
    )
    texts, got, differ = zip(*shell.execute(sql).fetchall(), strict=True)
    assert list(texts) == expected["anchor_text"]
    assert list(got) == pytest.approx(expected["advantage"], rel=1e-12)
    assert list(differ) == expected["steps_differ"]


def test_every_call_of_the_macro_in_the_docs_runs(shell):
    text = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    queries = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    calls = [query for query in queries if "advantages(" in query]
    assert {
        estimator for call in calls for estimator in re.findall(r"estimator := '(\w+)'", call)
    } == set(ESTIMATORS)
    for call in calls:
        shell.execute(call).fetchall()


def test_the_macro_has_the_published_defaults(shell):
    total = shell.execute("SELECT sum(abs(advantage)) FROM advantages()").fetchall()[0][0]
    assert total == pytest.approx(
        sum(abs(a) for a in column(CASE_10, "advantage", normalise="mean_std"))
    )
    shell.execute(
        "CREATE OR REPLACE VIEW steps AS SELECT uuid() AS group_uid, uuid() AS traj_uid, "
        "3 AS step_index, 1.0 AS reward, true AS is_action_valid, uuid() AS state_hash"
    )
    with pytest.raises(duckdb.InvalidInputException, match="without a gap"):
        shell.execute("FROM advantages()").fetchall()


BAD = {  # every parameter of the macro
    "estimator": ["gpro", ""],
    "gamma": [1.5, -0.1, float("nan"), float("inf")],
    "gae_lambda": [1.5, -0.1, float("nan"), float("inf")],
    "graph_gamma": [1.5, -0.1, float("nan"), float("inf")],
    "omega": [-1.0, float("nan"), float("inf")],
    "normalise": ["std"],
    "weighting": ["rows"],
    "invalid_penalty": [-5.0, float("nan"), float("inf")],
    "anchor": ["states"],
    "anchor_history": [0, -3, 2.5],
    "anchor_versions": ["all"],
    "version_window": [-1, 0.5],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_the_macro_refuses_what_python_refuses(shell, name, value):
    """Refuse each with other settings too, and beside columns that the call does not need."""
    with pytest.raises(ValueError, match=name):
        settings(**{name: value})
    literal = (
        f"'{value}'"
        if isinstance(value, str)
        else f"'{value}'::DOUBLE"
        if isinstance(value, float)
        else value
    )
    for columns in ("*", "anchor_size", "count(*)"):
        with pytest.raises(duckdb.InvalidInputException, match=f"{name} must be .*, not"):
            shell.execute(f"SELECT {columns} FROM advantages({name} := {literal})").fetchall()


@pytest.mark.parametrize(
    "name", [name for name in AdvantageSettings.__dataclass_fields__ if name != "similarity"]
)
def test_null_is_no_parameter(shell, name):
    assert name in BAD, "every parameter has values that are refused"
    with pytest.raises(duckdb.InvalidInputException, match=f"{name} must be .*, not NULL"):
        shell.execute(f"FROM advantages({name} := NULL)").fetchall()


def test_the_macro_refuses_hgpo_with_other_anchors(shell):
    for anchor in set(ANCHORS) - {"state"}:
        with pytest.raises(ValueError, match="anchors of its own"):
            settings(estimator="hgpo", anchor=anchor)
        with pytest.raises(
            duckdb.InvalidInputException,
            match=f"anchor must be state with estimator hgpo.*not {anchor}",
        ):
            shell.execute(f"FROM advantages(estimator := 'hgpo', anchor := '{anchor}')").fetchall()


def test_calls_from_several_threads_do_not_mix():
    tables = [
        table({"A": episode("s", end=float(k)), "B": episode("t", end=0.0)}) for k in range(20)
    ]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda steps: column(steps, "episode_advantage"), tables))
    assert got == [[k / 2, -k / 2] for k in range(20)]
