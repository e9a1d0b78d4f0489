"""Check which groups are filtered, the meaning of a difference, and that the reason is true."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from gigpo import GROUP_FILTERS, advantages_macro, compute_advantages, filtered_groups
from tests.support.gigpo_samples import episode, settings, table, uid

DOCS = Path(__file__).resolve().parents[2] / "docs/algorithms.md"
GROUPS = {
    "alike": {"A": episode("s t", end=10), "B": episode("s t", end=10)},
    "sooner": {"C": episode("s t", end=10), "D": episode("s", end=10)},
    "penalised": {"E": episode("s", end=0, invalid=(0,)), "F": episode("s", end=0)},
    "all penalised": {
        "G": episode("s", end=0, invalid=(0,)),
        "H": episode("s", end=0, invalid=(0,)),
    },
    "other": {"I": episode("s", end=10), "J": episode("s", end=0)},
    "alone": {"K": episode("s t s", end=10)},  # its step terms differ
}
ZERO = "no advantage differs from 0"
PENALTIES = "2 trajectories, all returned 0, they differ in penalties only"


@pytest.mark.parametrize(
    ("group_filter", "changes", "filtered"),
    [
        (
            "advantages",
            {},
            {"alike": f"2 trajectories, {ZERO}", "all penalised": f"2 trajectories, {ZERO}"},
        ),
        ("none", {}, {}),
        (
            "rewards",
            {},
            {
                "alike": "2 trajectories, all returned 10",
                "penalised": PENALTIES,
                "all penalised": "2 trajectories, all returned 0",
                "alone": "1 trajectory, nothing to compare it with",
            },
        ),
        (
            "rewards",  # no step term, so sooner or later is all one
            {"estimator": "rloo"},
            {
                "alike": "2 trajectories, all returned 10",
                "sooner": "2 trajectories, all returned 10",
                "penalised": PENALTIES,
                "all penalised": "2 trajectories, all returned 0",
                "alone": "1 trajectory, nothing to compare it with",
            },
        ),
        (
            "returns",
            {},
            {
                "alike": "2 trajectories, all returned 10",
                "sooner": "2 trajectories, all returned 10",
                "penalised": "2 trajectories, all returned 0",
                "all penalised": "2 trajectories, all returned 0",
                "alone": "1 trajectory, nothing to compare it with",
            },
        ),
    ],
)
def test_a_filtered_group_has_the_true_reason(group_filter, changes, filtered):
    steps = pa.concat_tables(table(episodes, group=name) for name, episodes in GROUPS.items())
    got = filtered_groups(compute_advantages(steps, settings(**changes)), group_filter=group_filter)
    assert got == {uid(name): reason for name, reason in filtered.items()}


def test_a_step_term_without_weight_keeps_no_group():
    sooner = table(GROUPS["sooner"])
    for group_filter in GROUP_FILTERS:
        found = filtered_groups(
            compute_advantages(sooner, settings(omega=0.0)), group_filter=group_filter
        )
        assert list(found) == [uid("task")] * (group_filter != "none"), group_filter
    assert not filtered_groups(
        compute_advantages(sooner, settings(omega=0.5)), group_filter="rewards"
    )
    # One trajectory's two steps in s differ, and leave_one_out compares them with nobody.
    loop = table({"A": episode("s s", end=10), "B": episode("t u", end=10)})
    found = compute_advantages(loop, settings(normalise="leave_one_out", weighting="trajectories"))
    assert filtered_groups(found, group_filter="rewards") == {
        uid("task"): f"2 trajectories, {ZERO}"
    }


def test_the_order_in_which_rewards_come_keeps_no_group():
    """.1 + .2 + .3 and .3 + .2 + .1 are an ulp apart: all that a policy could learn there is
    rounding.
    """
    orders = {"A": (0.1, 0.2, 0.3), "B": (0.3, 0.2, 0.1)}  # both begin in s, then go their own ways
    steps = table(
        {
            name: [(f"{name}{i}" if i else "s", r, True) for i, r in enumerate(of)]
            for name, of in orders.items()
        }
    )
    undiscounted = compute_advantages(steps, settings(gamma=1.0))
    assert len(set(undiscounted["episode_return"].to_pylist())) == 2, "the case tests something"
    for group_filter in ("rewards", "returns"):
        assert filtered_groups(undiscounted, group_filter=group_filter) == {
            uid("task"): "2 trajectories, all returned 0.6"
        }
    # Discounted they do differ: B has the larger reward first.
    discounted = compute_advantages(steps, settings(gamma=0.9))
    assert discounted["steps_differ"].to_pylist() == [True, False, False] * 2
    assert not filtered_groups(discounted, group_filter="rewards")
    assert filtered_groups(discounted, group_filter="returns")


def test_a_real_difference_is_a_signal_however_small_beside_the_rewards():
    steps = table({"A": episode("s t", end=1e6), "B": episode("s t", end=1e6 + 1e-6)})
    assert not filtered_groups(compute_advantages(steps, settings()), group_filter="returns")
    cancelling = table(
        {
            "A": [("s", 1e6, True), ("t", -1e6, True)],
            "B": [("s", 1e6, True), ("t", -999999.9, True)],
        }
    )
    assert not filtered_groups(compute_advantages(cancelling, settings()), group_filter="returns")


def test_signals_are_known_by_name_and_no_group_is_no_trouble():
    none = compute_advantages(table(GROUPS["alike"]).slice(0, 0), settings())
    assert all(
        filtered_groups(none, group_filter=group_filter) == {} for group_filter in GROUP_FILTERS
    )
    with pytest.raises(
        ValueError,
        match="group_filter='return' is unknown; it is one of advantages, rewards, returns, none",
    ):
        filtered_groups(none, group_filter="return")


@pytest.mark.parametrize("estimator", ["gigpo", "grpo", "hgpo"])
def test_a_shell_can_ask_for_filtered_groups_as_the_docs_say(estimator):
    """Include a group that won and lost in states that never recur: hgpo has no advantage there."""
    unlike = {"L": episode("u", end=10), "M": episode("v", end=0)}
    steps = pa.concat_tables(
        table(episodes, group=name) for name, episodes in {**GROUPS, "unlike": unlike}.items()
    )
    (asked,) = re.findall(r"```sql\n([^`]*-- left out by rewards[^`]*)```", DOCS.read_text())
    with duckdb.connect() as shell:
        shell.register("steps", steps)
        shell.execute(advantages_macro(settings(estimator=estimator)))
        filtered = {row[0] for row in shell.execute(asked).fetchall()}
    expected = filtered_groups(
        compute_advantages(steps, settings(estimator=estimator)), group_filter="rewards"
    )
    assert filtered == expected.keys()
    assert (uid("unlike") in filtered) is (estimator == "hgpo")
