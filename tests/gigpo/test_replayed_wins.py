"""Advantages of replayed wins, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pyarrow as pa
import pytest

from gigpo import PUBLISHED_SETTINGS, replay_weight, replayed_wins

Episode = tuple[float, bool]  # return, and whether the one step of it was valid


def table(groups: dict[str, list[Episode]]) -> pa.Table:
    """Return episodes of one step each. Those with a return above 0 won."""
    rows = [
        {
            "group_uid": name,
            "traj_uid": f"{name}{member}",
            "step_index": 0,
            "reward": episode_return,
            "is_action_valid": is_valid,
            "won": episode_return > 0,
        }
        for name, episodes in groups.items()
        for member, (episode_return, is_valid) in enumerate(episodes)
    ]
    return pa.Table.from_pylist(rows)


# Means 0, 4 and 10, so the median is 4. Only b's returns differ: their deviation is sqrt(32).
BATCH = table(
    {
        "a": [(0.0, True), (0.0, True)],
        "b": [(8.0, True), (0.0, True)],
        "c": [(10.0, True), (10.0, True)],
    }
)
# The deviation of its returns is sqrt(50); it has a win that was invalid, and one of little worth.
OLD = table({"x": [(10.0, True), (0.0, True)], "y": [(10.0, False), (3.0, True), (0.0, True)]})
MEAN = replace(PUBLISHED_SETTINGS, normalise="mean", invalid_penalty=0.5)


def advantages(wins: pa.Table) -> dict[str, float]:
    return dict(zip(wins["traj_uid"].to_pylist(), wins["advantage"].to_pylist(), strict=True))


def test_a_win_is_compared_with_what_the_policy_gets_now() -> None:
    found = advantages(replayed_wins(OLD, BATCH, MEAN, weight=0.5))
    assert found == {"x0": 0.5 * (10 - 4), "y0": 0.5 * (10 - 0.5 - 4)}, "3 is below the median"


def test_the_scale_is_the_median_deviation_of_groups_that_differ() -> None:
    settings = replace(MEAN, normalise="mean_std")
    deviation_of_y = math.sqrt(((10 - 13 / 3) ** 2 + (3 - 13 / 3) ** 2 + (13 / 3) ** 2) / 2)
    assert math.sqrt(50) > math.sqrt(32) > deviation_of_y, "so b's is the median"
    found = advantages(replayed_wins(OLD, BATCH, settings, weight=1.0))
    assert found == pytest.approx({"x0": 6 / math.sqrt(32), "y0": 5.5 / math.sqrt(32)}, rel=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo"])
def test_estimators_without_a_deviation_get_none(estimator: str) -> None:
    settings = replace(MEAN, normalise="mean_std", estimator=estimator)
    assert advantages(replayed_wins(OLD, BATCH, settings, weight=1.0))["x0"] == 6.0


def test_a_policy_that_wins_most_of_the_time_learns_nothing_from_wins() -> None:
    solved = table({"a": [(10.0, True)] * 2, "b": [(10.0, True)] * 2, "c": [(0.0, True)] * 2})
    wins = replayed_wins(OLD, solved, PUBLISHED_SETTINGS, weight=1.0)
    assert wins.num_rows == 0
    assert wins.column_names == [*OLD.column_names, "advantage"]


def test_a_policy_that_wins_nothing_has_a_scale_too() -> None:
    """It is the replayed groups'."""
    lost = table({"a": [(0.0, True)] * 2})
    wins = replayed_wins(OLD.slice(0, 2), lost, PUBLISHED_SETTINGS, weight=1.0)
    assert advantages(wins) == pytest.approx({"x0": math.sqrt(2)}, rel=1e-6)


def test_rows_keep_their_order_and_their_other_columns() -> None:
    mixed = OLD.append_column("number", pa.array(range(5))).take(pa.array([2, 4, 0, 1, 3]))
    wins = replayed_wins(mixed, BATCH, MEAN, weight=1.0)
    assert wins["traj_uid"].to_pylist() == ["y0", "x0"]
    assert wins["number"].to_pylist() == [2, 0]


def test_the_weight_rises_by_half_a_cosine() -> None:
    weights = [replay_weight(step, warmup_steps=4) for step in range(1, 7)]
    half = math.sqrt(0.5) / 2
    assert weights == pytest.approx([0.5 - half, 0.5, 0.5 + half, 1.0, 1.0, 1.0])
    assert replay_weight(1, warmup_steps=0) == 1.0
