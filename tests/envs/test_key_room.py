"""The key room, played by hand and at random."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import Task, environment_class

OPTIONS: dict[str, object] = {}
KeyRoom = environment_class("key_room")
# start in red (0), key in blue (1), door in green (2)
TASK = Task(
    id="t", env_name="key_room", split="train", seed=0, data={"start": "0", "key": "1", "door": "2"}
)


def test_forty_train_and_twenty_heldout_layouts_that_never_meet() -> None:
    train, heldout = KeyRoom.tasks("train", OPTIONS), KeyRoom.tasks("heldout", OPTIONS)
    assert (len(train), len(heldout)) == (40, 20)
    layouts = {tuple(sorted(task.data.items())) for task in (*train, *heldout)}
    assert len(layouts) == 60
    assert len({task.id for task in (*train, *heldout)}) == 60
    assert train == KeyRoom.tasks("train", OPTIONS)
    with pytest.raises(ValueError, match="split 'test' is not one of"):
        KeyRoom.tasks("test", OPTIONS)


def test_every_room_has_its_share_of_starts_keys_and_doors_in_both_splits() -> None:
    for what in ("start", "key", "door"):
        train, heldout = (
            Counter(task.data[what] for task in environment_class("key_room").tasks(split, {}))
            for split in ("train", "heldout")
        )
        assert set(train) == set(heldout) == set("01234")
        assert all(6 <= n <= 10 for n in train.values()), (what, train)
        assert all(2 <= n <= 6 for n in heldout.values()), (what, heldout)


def test_the_shortest_way_wins_and_only_the_last_step_pays() -> None:
    env = KeyRoom(OPTIONS)
    assert env.reset(TASK).text == "The red room."
    seen = [env.step(action) for action in ("go east", "take key", "go east", "unlock door")]
    assert [t.reward for t in seen] == [0.0, 0.0, 0.0, 1.0]
    assert [t.terminated for t in seen] == [False, False, False, True]
    assert all(t.valid for t in seen) and seen[-1].won
    assert seen[0].observation.text == "The blue room. A key lies here."
    assert seen[2].observation.text == "The green room. A locked door. You hold the key."


def test_an_action_that_is_not_offered_changes_nothing() -> None:
    env = KeyRoom(OPTIONS)
    before = env.reset(TASK)
    for action in ("unlock door", "take key", "go west", "fly", ""):
        transition = env.step(action)
        assert (
            not transition.valid and transition.observation == before and not transition.terminated
        )
    assert env.step("go east").valid


def test_options_it_does_not_have_are_named() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        KeyRoom({"max_steps": 3})


@given(choices=st.lists(st.integers(0, 3), min_size=1, max_size=6), index=st.integers(0, 39))
def test_the_same_actions_give_the_same_episode(choices: list[int], index: int) -> None:
    task = KeyRoom.tasks("train", OPTIONS)[index]
    played = []
    for _ in range(2):
        env = KeyRoom(OPTIONS)
        observation, record = env.reset(task), []
        for choice in choices:
            assert observation.actions
            transition = env.step(observation.actions[choice % len(observation.actions)])
            record.append(transition)
            observation = transition.observation
            if transition.terminated:
                break
        assert all(t.valid for t in record)
        assert record[-1].terminated == record[-1].won
        played.append(record)
    assert played[0] == played[1]
