"""compute_advantages against the definitions in plain Python float64, on random tables: every
estimator, every setting.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigpo import (
    ESTIMATORS,
    PUBLISHED_SETTINGS,
    WHITENED,
    WITH_CRITIC,
    AdvantageSettings,
    compute_advantages,
)
from gigpo.advantages import _computed, _parts
from tests.support.gigpo_oracle import (
    Row,
    Value,
    differences,
    oracle,
    to_table,
    value_targets,
)
from tests.support.sizes import examples

# random groups per estimator; where the batch is whitened, which takes a call for each, random
# batches
CASES, BATCHES = 2_000, examples(320, full=2_000)
# newer estimators, held to a narrower bound
TO_1E_9 = ("graphgpo", "g2po", "gagpo", "turn_ppo", "ppo")
NAMES = ("episode_advantage", "step_advantage", "advantage")
DIFFERENCES = ("episodes_differ", "steps_differ", "has_penalties")


def random_group(rng: random.Random, *, group: int, first_trajectory: int) -> list[Row]:
    """1 to 5 trajectories of 1 to 7 steps, sparse or dense rewards, few states so that anchors
    meet. To win pays in all.
    """
    sparse = rng.random() < 0.5
    n_states = rng.choice([1, 2, 5])
    rows: list[Row] = []
    for member in range(rng.randint(1, 5)):
        length = rng.choice([1, 1, 2, 3, 7])
        won = rng.random() < 0.5
        version = rng.randint(3, 7)
        for step in range(length):
            is_last = step == length - 1
            end = 10.0 if won and is_last else 0.0
            rows.append(
                Row(
                    group=group,
                    trajectory=first_trajectory + member,
                    step=step,
                    reward=end if sparse else round(rng.uniform(-2, 2) + 2 * end, 1),
                    valid=rng.random() < 0.8,
                    state=random_state(rng, n_states),
                    version=version + rng.randint(0, 1),
                    weight=round(rng.uniform(0.1, 2.0), 3),
                    won=won,
                    actions=random_actions(rng),
                    key=random_key(rng),
                    final_state=random_state(rng, n_states) if is_last else None,
                    final_actions=random_actions(rng) if is_last and rng.random() < 0.8 else None,
                    final_key=random_key(rng) if is_last else None,
                    value=5 * math.sin(first_trajectory + 3 * member + 7 * step),
                )
            )
    return rows


def random_state(rng: random.Random, n_states: int) -> int | None:
    return None if rng.random() < 0.1 else rng.randrange(n_states)


def random_actions(rng: random.Random) -> tuple[str, ...]:
    return tuple(rng.choices(["go", "take", "2:go"], k=rng.randint(0, 3)))


def random_key(rng: random.Random) -> str | None:
    return None if rng.random() < 0.1 else rng.choice(["", "a", "b", "key a"])


def random_rows(rng: random.Random, *, groups: int, first: int = 1000) -> list[Row]:
    rows = [
        r
        for g in range(groups)
        for r in random_group(rng, group=first + g, first_trajectory=first + 10 * g)
    ]
    rng.shuffle(rows)
    return rows


def settings(**changes: object) -> AdvantageSettings:
    return replace(PUBLISHED_SETTINGS, **changes)  # type: ignore[arg-type]


def settings_of(estimator: str) -> Iterator[AdvantageSettings]:
    """Eight that cover what matters to this estimator."""
    varied = estimator in ("gigpo", "grpo", "hgpo", "graphgpo", "g2po", "gagpo")
    for number, (weighting, normalise) in enumerate(
        (w, n)
        for w in ("steps", "trajectories")
        for n in ("mean", "mean_std", "leave_one_out", "mean_std")
    ):
        yield settings(
            estimator=estimator,
            normalise=normalise if varied else "mean_std",
            weighting=weighting,
            gamma=(0.95, 1.0, 0.0, 0.1)[number % 4],
            gae_lambda=(0.95, 0.5, 1.0, 0.0)[number % 4],
            graph_gamma=(0.1, 0.2, 0.8, 0.0)[number % 4],
            omega=(1.0, 0.5)[number // 4],
            invalid_penalty=(0.1, 0.0)[number % 2],
            anchor_history=(3, 2)[number // 4],
        )


ANCHORS = [
    settings(anchor="state_and_actions"),
    settings(anchor="state_and_actions", normalise="leave_one_out"),
    settings(anchor="suffix", anchor_history=1),
    settings(anchor="suffix", anchor_history=2),
    settings(anchor="suffix", anchor_history=9, normalise="mean"),
    settings(anchor="anchor_key", normalise="mean"),
    settings(anchor="anchor_key", anchor_versions="weighted"),
    settings(anchor="suffix", anchor_versions="window", version_window=0),
    settings(anchor_versions="window", version_window=0),
    settings(anchor_versions="window", version_window=2, normalise="leave_one_out"),
    settings(anchor_versions="weighted"),
    settings(anchor_versions="weighted", normalise="mean"),
    settings(anchor_versions="weighted", normalise="leave_one_out"),
    settings(estimator="hgpo", anchor_versions="window", version_window=1),
    settings(estimator="hgpo", anchor_versions="weighted"),
    settings(estimator="graphgpo", anchor="suffix", anchor_history=2, anchor_versions="weighted"),
    settings(estimator="graphgpo", anchor="state_and_actions", graph_gamma=0.5),
    settings(estimator="graphgpo", anchor="anchor_key", anchor_versions="window"),
    settings(estimator="g2po", anchor="state_and_actions"),
    settings(estimator="g2po", anchor="suffix", anchor_history=2, anchor_versions="window"),
    settings(estimator="gagpo", anchor="anchor_key", gae_lambda=0.7),
    settings(estimator="gagpo", anchor="suffix", anchor_versions="window", version_window=0),
]
EVERY = [*(s for estimator in ESTIMATORS for s in settings_of(estimator)), *ANCHORS]


def computed(rows: list[Row], s: AdvantageSettings) -> list[tuple[float, float, float]]:
    table = compute_advantages(to_table(rows), s)
    return list(zip(*(table[name].to_pylist() for name in NAMES), strict=True))


def assert_close(
    got: list[tuple[float, ...]], expected: list[tuple[Value, ...]], *, relative: float = 1e-6
) -> None:
    for row, wanted in zip(got, expected, strict=True):
        for value, want in zip(row, wanted, strict=True):
            if want is None:
                assert value == 0.0
            else:
                # 1e-9: returns one ulp apart are divided by 1e-6 on both sides.
                assert abs(value - want) <= relative * abs(want) + 1e-9, (value, want)


@pytest.mark.shortened
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_equals_the_definitions(estimator):
    for number, s in enumerate(settings_of(estimator)):
        rng = random.Random(f"{estimator} {number}")
        # An estimator that whitens over a batch has one case per batch, so there are many small ones.
        batches, groups = (BATCHES // 8, 2) if estimator in WHITENED else (1, CASES // 8)
        for _ in range(batches):
            rows = random_rows(rng, groups=groups)
            relative = 1e-9 if estimator in TO_1E_9 else 1e-6
            assert_close(computed(rows, s), oracle(rows, s), relative=relative)


TIED = st.sampled_from([0.0, 0.1, 0.2, 0.3, 10.0])  # .1 + .2 and .3 differ in the last bit
STEPS = st.lists(
    st.tuples(TIED, st.booleans(), st.sampled_from([None, 0, 1, 2])), min_size=1, max_size=5
)
GROUPS = st.lists(
    st.lists(st.tuples(st.booleans(), STEPS), min_size=1, max_size=4), min_size=1, max_size=3
)


@pytest.mark.parametrize("estimator", [name for name in TO_1E_9 if name != "turn_ppo"])
@given(groups=GROUPS, number=st.sampled_from([0, 2, 5]))
@hypothesis.settings(max_examples=60, deadline=None)
def test_ties_and_states_met_once_equal_the_definitions_to_1e_9(
    estimator: str,
    groups: list[list[tuple[bool, list[tuple[float, bool, int | None]]]]],
    number: int,
) -> None:
    rows = [
        Row(
            group=group,
            trajectory=10 * group + member,
            step=step,
            reward=reward,
            valid=valid,
            state=state,
            won=won,
            final_state=states[step - 1] if step == len(steps) - 1 else None,
            value=reward + member / 2,
        )
        for group, episodes in enumerate(groups)
        for member, (won, steps) in enumerate(episodes)
        for states in [[state for *_, state in steps]]
        for step, (reward, valid, state) in enumerate(steps)
    ]
    s = list(settings_of(estimator))[number]
    assert_close(computed(rows, s), oracle(rows, s), relative=1e-9)


REWARDS = st.floats(-10, 10, allow_subnormal=False)
EPISODES = st.lists(
    st.lists(st.tuples(REWARDS, REWARDS, st.booleans()), min_size=1, max_size=6),
    min_size=1,
    max_size=6,
)


@given(episodes=EPISODES, gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
@hypothesis.settings(max_examples=100, deadline=None)
def test_turn_ppo_equals_its_definition_to_1e_9(
    episodes: list[list[tuple[float, float, bool]]], gamma: float, gae_lambda: float
) -> None:
    """For any rewards and values of a batch: advantages, and the targets as a mean of n-step
    returns.
    """
    rows = [
        Row(
            group=number // 2,
            trajectory=number,
            step=step,
            reward=reward,
            value=value,
            valid=valid,
            state=None,
        )
        for number, steps in enumerate(episodes)
        for step, (reward, value, valid) in enumerate(steps)
    ]
    s = settings(estimator="turn_ppo", gamma=gamma, gae_lambda=gae_lambda)
    got = compute_advantages(to_table(rows), s)
    expected = [advantage for *_, advantage in oracle(rows, s)]
    assert got["advantage"].to_pylist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert got["value_target"].to_pylist() == pytest.approx(
        value_targets(rows, s), rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize(
    "s",
    [
        settings(),
        settings(gamma=1.0, invalid_penalty=0.0),
        settings(gamma=0.5, anchor="suffix", anchor_history=2),
        settings(anchor_versions="window", version_window=0),
        settings(omega=0.0),
        settings(estimator="grpo"),
        settings(estimator="hgpo"),
    ],
    ids=lambda s: f"{s.estimator}-{s.anchor}-{s.anchor_versions}-{s.gamma}-{s.omega}",
)
def test_differences_are_those_of_exact_decimals(s):
    """No difference that rounding made, none that is there is lost. Half of the groups are the
    rewards of one trajectory in other orders, whose float sums differ in the last bits and whose
    exact ones do not."""
    rng = random.Random(8)
    rows = [row for row in random_rows(rng, groups=200) if row.group % 2]
    for group in range(100):
        rewards = [round(rng.uniform(-2, 2), 1) for _ in range(rng.randint(1, 7))]
        for member in range(rng.randint(1, 4)):
            rng.shuffle(rewards)
            rows += [
                Row(
                    group=group,
                    trajectory=10 * group + member,
                    step=step,
                    reward=reward,
                    valid=rng.random() < 0.9,
                    state=rng.randrange(3),
                )
                for step, reward in enumerate(rewards)
            ]
    table = compute_advantages(to_table(rows), s)
    expected = differences(rows, s)
    assert list(zip(*(table[name].to_pylist() for name in DIFFERENCES), strict=True)) == expected
    in_floats: dict[int, set[float]] = {}
    for row, (differs, *_), value in zip(
        rows, expected, table["episode_return"].to_pylist(), strict=True
    ):
        if not differs:
            in_floats.setdefault(row.group, set()).add(value)
    assert sum(len(values) > 1 for values in in_floats.values()) > 20, "the case tests something"


@pytest.mark.parametrize(
    "s", ANCHORS, ids=lambda s: f"{s.estimator}-{s.anchor}-{s.anchor_versions}-{s.normalise}"
)
def test_every_anchor_and_version_policy_equals_the_definitions(s):
    rows = random_rows(random.Random(7), groups=200)
    assert_close(computed(rows, s), oracle(rows, s))


@pytest.mark.parametrize(
    "s",
    EVERY[::5],
    ids=lambda s: f"{s.estimator}-{s.anchor}-{s.anchor_versions}-{s.normalise}-{s.weighting}",
)
def test_the_order_of_rows_and_other_tasks_change_nothing(s):
    """Whitening is over the batch: another task's rows do change it, as they should, by one factor
    and one shift for all.
    """
    rng = random.Random(11)
    rows = random_rows(rng, groups=30)
    before = computed(rows, s)
    order = rng.sample(range(len(rows)), len(rows))
    assert_close(computed([rows[i] for i in order], s), [before[i] for i in order])
    beside = computed(rows + random_rows(rng, groups=30, first=500_000), s)[: len(rows)]
    if s.estimator not in WHITENED:
        assert_close(beside, before)
    else:
        a, b = (before[i][2] for i in (0, 1))
        slope = (beside[0][2] - beside[1][2]) / (a - b)
        assert slope > 0
        assert_close(
            [(y[2],) for y in beside], [(slope * (x[2] - a) + beside[0][2],) for x in before]
        )


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e not in WITH_CRITIC])
def test_equal_episodes_give_exactly_zero(estimator):
    """Include dense rewards whose sum depends on the order of addition, and rows in any order."""
    rng = random.Random(5)
    for s in list(settings_of(estimator))[1::3]:
        for members in (2, 3, 7, 8, 9):
            rewards = [rng.uniform(-1, 1) for _ in range(rng.randint(1, 6))]
            rows = [
                Row(
                    group=1,
                    trajectory=10 + m,
                    step=t,
                    reward=reward,
                    valid=True,
                    state=t,
                    won=sum(rewards) > 0.1,
                )
                for m in range(members)
                for t, reward in enumerate(rewards)
            ]
            rng.shuffle(rows)
            if estimator == "g2po":  # it also compares the steps of an episode with one another
                table = compute_advantages(to_table(rows), s)
                assert not any(table["steps_differ"].to_pylist())
                assert not any(table["episodes_differ"].to_pylist())
                continue
            assert {a for row in computed(rows, s) for a in row} <= {0.0}


def test_the_same_rows_give_the_same_bits():
    rows = random_rows(random.Random(3), groups=40)
    for s in EVERY[::7]:
        assert computed(rows, s) == computed(rows, s)


def test_in_parts_and_at_once_are_the_same(monkeypatch):
    """Large tables are computed some groups at a time, but not what is whitened over all; here 50
    steps at a time.
    """
    rows = random_rows(random.Random(4), groups=60)
    by_group = sorted(range(len(rows)), key=lambda i: rows[i].group)
    every = [
        settings(),
        settings(estimator="hgpo"),
        *(settings(estimator=estimator) for estimator in WHITENED),
    ]
    at_once = [computed(rows, s) for s in every]
    monkeypatch.setattr("gigpo.advantages._PART_STEPS", 50)
    for s, expected in zip(every, at_once, strict=True):
        assert_close(computed(rows, s), expected)
        assert_close(computed([rows[i] for i in by_group], s), [expected[i] for i in by_group])
    by_key = settings(anchor="anchor_key")
    n_parts = len(list(_parts(to_table(rows), whole=False)))
    sizes: list[int] = []
    monkeypatch.setattr(
        "gigpo.advantages._computed", lambda part, s: sizes.append(len(part)) or _computed(part, s)
    )
    # Whole parts without a key, at the beginning and at the end: that is no reason to refuse, nor
    # to compute all at once.
    for has_key in (range(1030, 1060), range(1000, 1020), range(1059, 1060)):
        keyless = [row if row.group in has_key else replace(row, key=None) for row in rows]
        sizes.clear()
        assert_close(computed(keyless, by_key), oracle(keyless, by_key))
        assert len(sizes) == n_parts > 5 and max(sizes) < 150
    in_two_groups = [*rows, replace(rows[0], group=77)]
    with pytest.raises(ValueError, match="in more than one group|twice"):
        computed(in_two_groups, settings())
