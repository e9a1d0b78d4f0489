"""Remembered answers: equal to the environment's own, asked for once, bounded, never wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import configs
from envs import EnvironmentDied, KeptAnswers, Observation, Task, Transition, environment_class
from envs.hosting.answers import Answer, answer_of, prepared
from envs.hosting.transition_cache import (
    MAX_BYTES,
    RESET,
    CachedEpisode,
    EnvironmentObject,
    TransitionCache,
)
from tests.support.cached_play import play_and_compare
from tests.support.search_samples import LOCAL

ROOMS: dict[str, object] = {
    "rows": 6,
    "columns": 6,
    "boxes": 1,
    "least_moves": 3,
    "most_moves": 8,
    "train_rooms": 2,
    "heldout_rooms": 1,
    "seed": 0,
}
ROOT = Path(__file__).resolve().parents[2]
LAKE = configs.load(ROOT / "configs/frozenlake.yaml").env.options
WORLDS: dict[str, tuple[str, Mapping[str, object]]] = {
    "key_room": ("key_room", {}),
    "sokoban": ("sokoban", ROOMS),
    "sokoban, drawn": ("sokoban", ROOMS | {"observation": "image", "cell_pixels": 4}),
    "search_local": ("search_local", {**LOCAL, "list_actions": True}),
    "frozenlake": ("gymnasium", {**LAKE, "train_seeds": [0, 3]}),
    "frozenlake, slippery": (
        "gymnasium",
        {**LAKE, "train_seeds": [0, 3], "kwargs": {"is_slippery": True}},
    ),
}


@pytest.mark.shortened
@pytest.mark.parametrize("world", WORLDS)
def test_remembered_episodes_equal_played_ones(world: str) -> None:
    name, options = WORLDS[world]
    tasks = environment_class(name).tasks("train", options)[:3]
    assert play_and_compare(name, options, tasks, max_steps=12) > 0.05


@pytest.mark.shortened
@pytest.mark.parametrize("world", WORLDS)
def test_kept_episodes_equal_played_ones(
    world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options = WORLDS[world]
    make = environment_class(name)
    kept = KeptAnswers(folder=tmp_path, decided_by=())
    monkeypatch.setattr(make, "kept_answers", lambda options, task: kept, raising=False)
    tasks = make.tasks("train", options)[:3]
    assert play_and_compare(name, options, tasks, max_steps=12) > 0.05
    assert len(list(tmp_path.iterdir())) == len(tasks)


class Counter:
    """Count up to three. Each object keeps the requests that it got."""

    deterministic = True

    def __init__(self, options: Mapping[str, object]) -> None:
        self.asked: list[str] = []

    def reset(self, task: Task) -> Observation:
        self.asked.append("reset")
        self.count = 0
        return Observation(text="0", objective=task.id)

    def step(self, action: str) -> Transition:
        self.asked.append(action)
        if self.count == 3:
            raise ValueError("the episode is over: call reset(task) before step")
        if action == "fail":
            raise RuntimeError("broken")
        self.count += action == "up"
        return Transition(
            observation=Observation(text=str(self.count)),
            reward=0.0,
            terminated=self.count == 3,
            truncated=False,
            won=False,
        )


class Keyed(Counter):
    deterministic = True

    def state_key(self) -> str:
        return str(self.count)


class Saved(Keyed):
    deterministic = True

    def save_state(self) -> bytes:
        return str(self.count).encode()

    def restore_state(self, task: Task, saved: bytes) -> None:
        self.asked.append("restore")
        self.count = int(saved)


class Understanding(Saved):
    deterministic = True

    def understood(self) -> tuple[tuple[str, ...], Transition]:
        observation = Observation(text=f"{self.count}, as before")
        ignored = Transition(
            observation=observation, reward=0.0, terminated=False, truncated=False, won=False
        )
        return ("up", "down"), ignored


class Forgetful(Counter):
    """Claim to be deterministic without being so: each object gives another reward."""

    deterministic = True
    made = 0

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__(options)
        Forgetful.made += 1
        self.offset = Forgetful.made

    def step(self, action: str) -> Transition:
        return replace(super().step(action), reward=float(self.offset))


class Silent(Forgetful):
    """Leave the claim to its class: the object says nothing of its own."""


class Honest(Forgetful):
    """Claim it for the class, and deny it for the object."""

    deterministic = True

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__(options)
        self.deterministic = False


TASK = Task(id="one", env_name="counter", split="train", seed=0)


class Here:
    """Environment objects in this process, one for each episode, in place of a pool's."""

    def __init__(self, make: Any) -> None:
        self.environments: list[Any] = []
        self._make = make
        self._idle: list[EnvironmentObject] = []
        self.cache = TransitionCache(
            "counter", deterministic=True, max_bytes=MAX_BYTES, keeper=None
        )

    def take(self, task: Task, node: object) -> EnvironmentObject:
        for each in self._idle:
            if each.stands_at(node):
                self._idle.remove(each)
                return each
        environment = self._make({})
        self.environments.append(environment)

        async def call(method: str, argument: object) -> Answer:
            await asyncio.sleep(0)
            result = getattr(environment, method)(prepared(environment, argument))
            return answer_of(environment, method, result)

        return EnvironmentObject(call, task)

    def give_back(self, returned: EnvironmentObject) -> None:
        self._idle.append(returned)

    def begin(self, task: Task = TASK) -> CachedEpisode:
        return self.cache.episode(task, self)

    async def play(self, *actions: str, task: Task = TASK) -> list[str]:
        """Return the texts of an episode."""
        episode = self.begin(task)
        try:
            answers = [await episode.answer(action) for action in (RESET, *actions)]
        finally:
            episode.close()
        seen = [a.observation if isinstance(a, Transition) else a for a in answers]
        return [each.text for each in seen]

    def asked(self) -> list[list[str]]:
        return [environment.asked for environment in self.environments]


def test_a_known_episode_asks_nobody() -> None:
    here = Here(Counter)

    async def twice() -> None:
        assert await here.play("up", "down", "up") == ["0", "1", "1", "2"]
        assert await here.play("up", "down", "up") == ["0", "1", "1", "2"]

    asyncio.run(twice())
    assert here.asked() == [["reset", "up", "down", "up"]]
    assert (here.cache.n_answers, here.cache.n_remembered) == (8, 4)


def test_without_a_state_key_an_object_repeats_the_actions_that_it_has_missed() -> None:
    here = Here(Counter)

    async def both() -> None:
        await here.play("up", "down")
        assert await here.play("up", "up", "up") == ["0", "1", "2", "3"]

    asyncio.run(both())
    assert here.asked() == [["reset", "up", "down"], ["reset", "up", "up", "up"]]


def test_states_with_one_key_share_their_answers() -> None:
    here = Here(Keyed)

    async def both() -> None:
        await here.play("up", "up")
        assert await here.play("up", "down", "down", "up") == ["0", "1", "1", "1", "2"]

    asyncio.run(both())
    # "down" leads from 1 to 1, where "up" and "down" are known
    assert here.asked() == [["reset", "up", "up"], ["reset", "up", "down"]]


def test_a_saved_state_is_restored_and_the_object_serves_the_other_episodes() -> None:
    here = Here(Saved)

    async def interleaved() -> None:
        first, second = here.begin(), here.begin()
        for action in (RESET, "up", "up"):
            await first.answer(action)
        for action in (RESET, "up", "down"):
            await second.answer(action)
        await first.answer("left")  # the object that stood at 2 stands there no more, or still does

    asyncio.run(interleaved())
    assert here.asked()[0] == ["reset", "up", "up", "left"]
    assert here.asked()[1] == ["restore", "down"]


def test_an_action_that_is_not_understood_asks_nobody() -> None:
    here = Here(Understanding)
    played = asyncio.run(here.play("up", "fail", "fly", "up", "fly", "up"))
    assert played == ["0", "1", "1, as before", "1, as before", "2", "2, as before", "3"]
    assert here.asked() == [["reset", "up", "up", "up"]]
    assert (here.cache.n_answers, here.cache.n_remembered) == (7, 3)


def test_the_last_state_understands_nothing() -> None:
    environment = Understanding({})
    environment.reset(TASK)
    for _ in range(3):
        answer = answer_of(environment, "step", environment.step("up"))
    assert answer.state is not None and answer.state.understood is None


@pytest.mark.parametrize("make", [Counter, Keyed, Saved])
def test_a_group_that_asks_the_same_at_once_asks_once(make: type) -> None:
    here = Here(make)

    async def group() -> list[list[str]]:
        return await asyncio.gather(*(here.play("up", "up") for _ in range(8)))

    assert asyncio.run(group()) == [["0", "1", "2"]] * 8
    assert sorted(action for asked in here.asked() for action in asked) == ["reset", "up", "up"]


def test_a_cancelled_question_is_asked_by_the_next_episode() -> None:
    here = Here(Counter)

    async def play() -> list[str]:
        cancelled = asyncio.create_task(here.play("up"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(here.play("up"))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await waiting

    assert asyncio.run(play()) == ["0", "1"]


def test_an_error_is_the_own_one_of_each_episode() -> None:
    here = Here(Counter)

    async def play(*actions: str) -> None:
        await here.play(*actions)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            asyncio.run(play("up", "fail"))
        with pytest.raises(ValueError, match="the episode is over"):
            asyncio.run(play("up", "up", "up", "up"))


def test_an_environment_that_does_not_keep_its_promise_is_named() -> None:
    Forgetful.made = 0
    here = Here(Forgetful)

    async def play() -> None:
        await here.play("up", "down")
        await here.play("up", "up")  # a second object repeats the first "up"

    with pytest.raises(
        EnvironmentDied, match=r"'counter' says deterministic.*step 'up'.*train/one"
    ):
        asyncio.run(play())


@pytest.mark.parametrize("make", [Silent, Honest])
def test_an_environment_that_promises_nothing_is_always_asked(make: type) -> None:
    here = Here(make)

    async def play() -> None:
        await asyncio.gather(*(here.play("up", "up") for _ in range(3)))

    asyncio.run(play())
    assert here.asked() == [["reset", "up", "up"]] * 3
    assert here.cache.n_remembered == 0


def test_the_task_played_longest_ago_is_forgotten_as_a_whole() -> None:
    tasks = [replace(TASK, id=str(number)) for number in range(3)]
    here = Here(Counter)

    async def play(*numbers: int) -> None:
        for number in numbers:
            await here.play("up", task=tasks[number])

    asyncio.run(play(0))
    # room for two of these tasks
    here.cache = TransitionCache(
        "counter", deterministic=True, max_bytes=2 * here.cache.n_bytes + 100, keeper=None
    )
    here.environments.clear()
    asyncio.run(play(0, 1, 0, 2, 0))  # task 1 goes
    assert len(here.environments) == 3
    asyncio.run(play(1))
    assert len(here.environments) == 4
    asyncio.run(play(1))
    assert len(here.environments) == 4


def test_what_running_episodes_keep_of_a_forgotten_task_counts_until_they_end() -> None:
    """The attack: 88 KB a step, of which nobody knew."""
    cache = TransitionCache("counter", deterministic=True, max_bytes=1, keeper=None)
    here = Here(Counter)
    here.cache = cache

    async def play() -> None:
        episodes = [cache.episode(TASK, here) for _ in range(2)]
        for episode in episodes:
            await episode.answer(RESET)
            await episode.answer("up")
            assert cache.n_held_bytes > 1000 and cache.n_bytes == 0
        first, second = episodes
        first.close()
        assert cache.n_held_bytes > 0
        second.close()
        second.close()
        assert cache.n_held_bytes == 0

    asyncio.run(play())
    asyncio.run(here.play("up"))
    assert cache.n_held_bytes == cache.n_bytes == 0


def test_another_task_under_a_known_id_is_another_task() -> None:
    here = Here(Counter)
    changed = replace(TASK, seed=1)

    async def play() -> None:
        await here.play("up")
        await here.play("up", task=changed)

    asyncio.run(play())
    assert here.asked() == [["reset", "up"]] * 2


class Odd(Counter):
    deterministic = True

    def state_key(self) -> object:
        return 5


def test_a_state_key_of_another_type_is_refused() -> None:
    environment = Odd({})
    with pytest.raises(TypeError, match="state_key returned int; it must return str or bytes"):
        answer_of(environment, "reset", environment.reset(TASK))
