"""ALFWorld on its real games. Fast: a few of them. `make test-slow`: all of both evaluation splits
and 400 of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from envs import Task, environment_class

pytest.importorskip("alfworld", reason="pip install 'async-gigpo[alfworld]'")
from envs.alfworld.games import TASK_TYPES, read_game
from tests.support.alfworld_stock import assert_equal_to_stock, stock_engine
from tests.support.cached_play import play_and_compare

AlfWorld = environment_class("alfworld")


@pytest.fixture(scope="session")
def options(shared_data: Path) -> dict[str, object]:
    if not (shared_data / "alfworld").is_dir():
        pytest.skip(f"no alfworld folder in {shared_data}")
    return {
        "data": str(shared_data / "alfworld"),
        "train": "train",
        "heldout": "valid_seen",
        "task_types": [],
        "train_games": 0,
        "heldout_games": 0,
        "seed": 0,
    }


def one_of_each_type(tasks: Sequence[Task]) -> list[Task]:
    first: dict[str, Task] = {}
    for task in tasks:
        first.setdefault(task.data["type"], task)
    return [first[kind] for kind in TASK_TYPES]


def assert_what_is_demonstrated_wins(tasks: Sequence[Task], options: dict[str, object]) -> None:
    env = AlfWorld(options)
    for task in tasks:
        seen = env.reset(task)
        while seen.demonstrated is not None:
            assert seen.demonstrated in (seen.actions or ()), (task.id, seen.demonstrated)
            transition = env.step(seen.demonstrated)
            seen = transition.observation
        assert (transition.won, transition.reward) == (True, 1.0), task.id
    env.close()


def test_the_evaluation_splits_are_whole_and_a_game_of_each_type_is_won_by_its_walkthrough(
    options: dict[str, object],
) -> None:
    seen = AlfWorld.tasks("heldout", options)
    unseen = AlfWorld.tasks("heldout", options | {"heldout": "valid_unseen"})
    assert (len(seen), len(unseen)) == (140, 134)
    assert len({task.id for task in (*seen, *unseen)}) == 274
    assert Counter(task.data["type"] for task in unseen) == dict(
        zip(TASK_TYPES, (24, 18, 31, 23, 21, 17), strict=True)
    )
    assert_what_is_demonstrated_wins(
        one_of_each_type(unseen), options | {"heldout": "valid_unseen"}
    )


def test_a_real_game_is_said_paid_and_listed_as_by_the_stock_engine(
    options: dict[str, object],
) -> None:
    # of the type with the smallest rooms
    task = one_of_each_type(AlfWorld.tasks("heldout", options))[1]
    game = read_game(Path(str(options["data"])), "valid_seen", task.data["game"])
    assert_equal_to_stock(AlfWorld(options), stock_engine(), task, game, steps=15, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "games"),
    [("valid_seen", 140), ("valid_unseen", 134), ("valid_train", 200), ("train", 400)],
)
def test_walkthroughs_win(options: dict[str, object], split: str, games: int) -> None:
    tasks = AlfWorld.tasks("heldout", options | {"heldout": split})
    assert len(tasks) == {"train": 3553}.get(split, games)
    assert_what_is_demonstrated_wins(tasks[:games], options)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen", "train"])
def test_random_walks_are_equal_to_the_stock_engine(options: dict[str, object], split: str) -> None:
    tasks = AlfWorld.tasks("heldout", options | {"heldout": split})
    env, stock = AlfWorld(options), stock_engine()
    for seed, task in enumerate([*one_of_each_type(tasks), *tasks[:6]]):
        game = read_game(Path(str(options["data"])), split, task.data["game"])
        assert_equal_to_stock(env, stock, task, game, steps=40, seed=seed)


@pytest.mark.shortened
def test_remembered_episodes_equal_played_ones(options: dict[str, object]) -> None:
    tasks = AlfWorld.tasks("heldout", options)[:2]
    assert play_and_compare("alfworld", options, tasks, max_steps=20, also=["help"]) > 0.05
