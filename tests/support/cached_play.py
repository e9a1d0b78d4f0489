"""Play random episodes through a pool that remembers answers, and again on a bare environment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envs import EnvironmentPool, Observation, Task, Transition, environment_class
from tests.support.sizes import examples

GROUP = 8  # episodes of one task at once, which ask the same questions at the same time
EPISODES = examples(16, full=1000)
NONSENSE = ("", "xyzzy", "take the moon", "click[moon]", "<answer>moon</answer>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    task: Task
    actions: Sequence[str]
    answers: Sequence[Observation | Transition]  # of `reset`, then of each action


def play_and_compare(
    name: str,
    options: Mapping[str, object],
    tasks: Sequence[Task],
    *,
    max_steps: int,
    also: Sequence[str] = (),
    episodes: int = EPISODES,
) -> float:
    """Assert that remembered episodes equal bare ones in every field. Return the share remembered.

    Actions are drawn from the listed ones, `also` and nonsense. Few tasks are played often. An
    environment that keeps its answers is played by two more pools: by one the same episodes, none
    of which may ask a question, and by one others.
    """
    make = environment_class(name)
    bare = make(options)
    shares = []
    for seed in (0, 0, 1) if hasattr(make, "kept_answers") else (0,):
        played, remembered = asyncio.run(
            _play(
                name, options, tasks, max_steps=max_steps, also=also, episodes=episodes, seed=seed
            )
        )
        assert len(played) >= episodes
        shares.append(remembered)
        for each in played:
            assert_equal(each.answers[0], bare.reset(each.task))
            for action, answer in zip(each.actions, each.answers[1:], strict=True):
                assert_equal(answer, bare.step(action))
    bare.close()
    assert shares[1:2] in ([], [1.0])
    return shares[0]


def assert_equal(one: Observation | Transition, other: Observation | Transition) -> None:
    assert one == other  # all fields but the images
    images, others = _observation(one).images, _observation(other).images
    assert all(np.array_equal(a, b) for a, b in zip(images, others, strict=True))


def _observation(answer: Observation | Transition) -> Observation:
    return answer.observation if isinstance(answer, Transition) else answer


async def _play(
    name: str,
    options: Mapping[str, object],
    tasks: Sequence[Task],
    *,
    max_steps: int,
    also: Sequence[str],
    episodes: int,
    seed: int,
) -> tuple[list[Played], float]:
    pool = EnvironmentPool(name, options, processes=2, answer_timeout_s=60.0)
    draw = random.Random(f"{episodes} {seed}")

    async def episode(task: Task, seed: int) -> Played:
        rng = random.Random(seed)
        actions: list[str] = []
        async with pool.environment() as environment:
            answers: list[Observation | Transition] = [await environment.reset(task)]
            while len(actions) < max_steps:
                listed = _observation(answers[-1]).actions or ()
                usual = rng.random() < 0.9 and (*listed, *also)
                actions.append(rng.choice(usual or NONSENSE))
                transition = await environment.step(actions[-1])
                answers.append(transition)
                if transition.terminated or transition.truncated:
                    break
        return Played(task=task, actions=actions, answers=answers)

    try:
        played: list[Played] = []
        while len(played) < episodes:
            task = draw.choice(tasks)
            group = (episode(task, draw.getrandbits(32)) for _ in range(GROUP))
            played += await asyncio.gather(*group)
        n_answers, n_remembered = pool.answers()
        return played, n_remembered / n_answers
    finally:
        pool.close()
