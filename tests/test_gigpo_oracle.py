"""compute_advantages against the equations in plain Python float64, on random tables."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gigpo import AdvantageSettings, compute_advantages

# (group, trajectory, step_index, reward, valid, state)
Row = tuple[int, int, int, float, bool, int | None]
EPSILON = 1e-6


def to_table(rows: list[Row]) -> pa.Table:
    key = lambda n: None if n is None else int(n).to_bytes(16, "big")  # noqa: E731
    group, trajectory, step, reward, valid, state = zip(*rows, strict=True)
    return pa.table(
        {
            "group_uid": pa.array(map(key, group), pa.binary(16)),
            "traj_uid": pa.array(map(key, trajectory), pa.binary(16)),
            "step_index": pa.array(step, pa.int32()),
            "reward": pa.array(reward, pa.float64()),
            "is_action_valid": pa.array(valid, pa.bool_()),
            "state_hash": pa.array(map(key, state), pa.binary(16)),
        }
    )


def oracle(rows: list[Row], s: AdvantageSettings) -> list[tuple[float | None, ...]]:
    """(A_E, A_S, A) of every row, equation by equation; None for a term that must be 0 exactly."""
    trajectories: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row[2]):
        trajectories[row[1]].append(row)
    step_return: dict[tuple[int, int], float] = {}
    score: dict[tuple[int, int], float] = {}
    for name, steps in trajectories.items():
        running = total = 0.0
        for _, _, index, reward, _, _ in reversed(steps):  # eq. 5
            running = reward + s.gamma * running
            total = reward + total
            step_return[name, index] = running
        for _, _, index, _, valid, _ in steps:
            penalty = 0.0 if valid else s.invalid_penalty
            step_return[name, index] -= penalty
            score[name, index] = total - penalty

    episode_rows: dict[int, list[Row]] = defaultdict(list)
    anchor_rows: dict[tuple[int, int], list[Row]] = defaultdict(list)  # eq. 6
    for row in rows:
        episode_rows[row[0]].append(row)
        if row[5] is not None:
            anchor_rows[row[0], row[5]].append(row)

    def divide(value: float, deviation: float) -> float:
        return value if s.normalise == "mean" else value / (deviation + EPSILON)

    def episode_advantage(row: Row) -> float | None:  # eq. 3
        members = episode_rows[row[0]]
        values = [score[r[1], r[2]] for r in members]
        value = score[row[1], row[2]]
        weights = [1.0 if s.weighting == "steps" else 1 / len(trajectories[r[1]]) for r in members]
        n = len(members) if s.weighting == "steps" else len({r[1] for r in members})
        if n == 1:
            return divide(value, 1.0)
        if max(values) == min(values):
            return None
        mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / n
        variance = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / (n - 1)
        return divide(value - mean, math.sqrt(variance))

    def step_advantage(row: Row) -> float | None:  # eq. 7
        if s.estimator == "grpo" or row[5] is None:
            return None
        values = [step_return[r[1], r[2]] for r in anchor_rows[row[0], row[5]]]
        if max(values) == min(values):
            return None
        return divide(step_return[row[1], row[2]] - statistics.fmean(values), statistics.stdev(values))

    terms = [(episode_advantage(row), step_advantage(row)) for row in rows]
    return [(e, a, (e or 0.0) + s.omega * (a or 0.0)) for e, a in terms]  # eq. 8


def random_rows(rng: random.Random, *, groups: int, first_uid: int) -> list[Row]:
    rows: list[Row] = []
    sparse = rng.random() < 0.5
    for group in range(groups):
        for member in range(rng.randint(1, 5)):
            trajectory = first_uid + 100 * group + member
            length = rng.choice([1, 1, 2, 3, 7])
            for index in range(length):
                won = rng.choice([0.0, 10.0]) if index == length - 1 else 0.0
                reward = won if sparse else round(rng.uniform(-2, 2), 1)
                state = None if rng.random() < 0.1 else rng.randint(0, 4)
                rows.append((first_uid + group, trajectory, index, reward, rng.random() < 0.8, state))
    rng.shuffle(rows)
    return rows


SETTINGS = st.builds(
    AdvantageSettings,
    estimator=st.sampled_from(["gigpo", "gigpo", "grpo"]),
    gamma=st.sampled_from([0.0, 0.1, 0.95, 1.0]),
    omega=st.sampled_from([0.0, 0.5, 1.0]),
    normalise=st.sampled_from(["mean", "mean_std"]),
    weighting=st.sampled_from(["steps", "trajectories"]),
    invalid_penalty=st.sampled_from([0.0, 0.1]),
)
SEEDS = st.integers(0, 2**32 - 1)


def advantages(rows: list[Row], s: AdvantageSettings) -> list[tuple[float, float, float]]:
    got = compute_advantages(to_table(rows), s)
    names = ("episode_advantage", "step_advantage", "advantage")
    return list(zip(*(got[name].to_pylist() for name in names), strict=True))


def assert_close(got: list[tuple[float, ...]], expected: list[tuple[float | None, ...]]) -> None:
    for row, wanted in zip(got, expected, strict=True):
        for value, want in zip(row, wanted, strict=True):
            # 1e-9: returns one ulp apart are divided by 1e-6 on both sides.
            assert value == (0.0 if want is None else pytest.approx(want, rel=1e-6, abs=1e-9))


@hypothesis_settings(max_examples=100, deadline=None)
@given(seed=SEEDS, s=SETTINGS)
def test_equals_the_oracle(seed, s):
    rows = random_rows(random.Random(seed), groups=6, first_uid=1000)
    assert_close(advantages(rows, s), oracle(rows, s))


@hypothesis_settings(max_examples=20, deadline=None)
@given(seed=SEEDS, s=SETTINGS)
def test_the_order_of_rows_changes_nothing(seed, s):
    rng = random.Random(seed)
    rows = random_rows(rng, groups=4, first_uid=1000)
    order = rng.sample(range(len(rows)), len(rows))
    before = advantages(rows, s)
    after = advantages([rows[i] for i in order], s)
    assert_close(after, [before[i] for i in order])


@hypothesis_settings(max_examples=20, deadline=None)
@given(seed=SEEDS, s=SETTINGS)
def test_other_groups_change_nothing(seed, s):
    rng = random.Random(seed)
    rows = random_rows(rng, groups=2, first_uid=1000)
    others = random_rows(rng, groups=3, first_uid=50_000)
    assert_close(advantages(rows + others, s)[: len(rows)], advantages(rows, s))


@hypothesis_settings(max_examples=20, deadline=None)
@given(seed=SEEDS, s=SETTINGS, length=st.integers(1, 6), members=st.integers(2, 9))
def test_equal_episodes_give_exactly_zero(seed, s, length, members):
    """Also for dense rewards whose sum depends on the order of addition, and rows in any order."""
    rng = random.Random(seed)
    rewards = [rng.uniform(-1, 1) for _ in range(length)]
    rows = [(1, 10 + m, t, rewards[t], True, t) for m in range(members) for t in range(length)]
    rng.shuffle(rows)
    assert {a for row in advantages(rows, s) for a in row} == {0.0}


def test_the_same_rows_give_the_same_bits():
    rows = random_rows(random.Random(3), groups=40, first_uid=1000)
    s = AdvantageSettings(
        estimator="gigpo", gamma=0.95, omega=1.0, normalise="mean_std", weighting="steps", invalid_penalty=0.1
    )
    assert advantages(rows, s) == advantages(rows, s)
