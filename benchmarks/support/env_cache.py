"""Measure the cost of a step without remembered answers, with them, and with kept ones.

A worker pays for it. Kept answers are those of the same episodes in an earlier process.

Groups of 8 play the first games of the quick start at once, each game 6 times, as in a run of it. A
policy that improves is imitated: it takes the shortest way to a win that is known from this anchor,
with a probability that rises from 0.2 to 0.9, else it draws a listed action. One reply in 50 is
nonsense. Times are of the processor, of the environment process and of the worker's side of the
transport, and begin when the engine is loaded.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

import configs
from envs import EnvironmentPool, KeptAnswers, Task
from envs.textworld import TextWorldEnv

ROOT = Path(__file__).resolve().parents[2]
GROUP = 8  # episodes of a task
ROUNDS = 6  # times that the policy has improved
P_FIRST, P_LAST = 0.2, 0.9  # chance of the best action in the first and in the last round
NONSENSE = 0.02  # chance of an action that the game does not know
MS = 1000.0


class PlainTextWorld(TextWorldEnv):
    deterministic = False


class ForgetfulTextWorld(TextWorldEnv):
    """Keep no answers beyond the process."""

    deterministic = True
    kept_answers = None  # type: ignore[assignment]


class KeepingTextWorld(TextWorldEnv):
    """Keep answers in a folder of this benchmark, which begins empty."""

    deterministic = True
    folder: Path

    @classmethod
    def kept_answers(cls, options: Mapping[str, object], task: Task) -> KeptAnswers:
        return replace(super().kept_answers(options, task), folder=cls.folder)


def measure(*, quick: bool, data: Path) -> dict[str, float]:
    """Return milliseconds a step and the share remembered. `data` is not needed."""
    env = configs.load(ROOT / "configs/quickstart.yaml").env
    n_games = 6 if quick else 40
    options = {**env.options, "cache_dir": str(ROOT / "runs/games"), "train_games": n_games}
    tasks = TextWorldEnv.tasks("train", options)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        KeepingTextWorld.folder = Path(folder)
        for kind, name in (
            ("uncached", "PlainTextWorld"),
            ("cached", "ForgetfulTextWorld"),
            ("first", "KeepingTextWorld"),
            ("kept", "KeepingTextWorld"),
        ):
            name = f"support.env_cache:{name}"
            played = asyncio.run(_play(name, options, tasks, max_steps=env.max_steps))
            figures |= {f"textworld_{kind}_{figure}": value for figure, value in played.items()}
    ratio = figures["textworld_uncached_ms_a_step"] / figures["textworld_cached_ms_a_step"]
    return figures | {"textworld_uncached_over_cached": ratio}


async def _play(
    name: str, options: Mapping[str, object], tasks: Sequence[Task], *, max_steps: int
) -> dict[str, float]:
    pool = EnvironmentPool(name, options, processes=1, answer_timeout_s=600.0)
    rng = random.Random(0)
    # by task and anchor: the steps that were left to a win, and the first of them
    winning: dict[tuple[str, str], tuple[int, str]] = {}
    n_steps = n_won = 0

    async def episode(task: Task, p: float) -> None:
        nonlocal n_steps, n_won
        taken = []
        async with pool.environment() as environment:
            seen = await environment.reset(task)
            for _ in range(max_steps):
                await asyncio.sleep(0.001)  # as the model answers, all members of a group go on
                assert seen.actions and seen.anchor
                action = rng.choice(seen.actions)
                if rng.random() < p:
                    action = winning.get((task.id, seen.anchor), (0, action))[1]
                if rng.random() < NONSENSE:
                    action = f"take moon {rng.randrange(10)}"
                taken.append((seen.anchor, action))
                transition = await environment.step(action)
                seen = transition.observation
                n_steps += 1
                if transition.won:
                    n_won += 1
                    for n_left, (anchor, chosen) in enumerate(reversed(taken), start=1):
                        key, way = (task.id, anchor), (n_left, chosen)
                        winning[key] = min(winning.get(key, way), way)
                    break

    try:
        async with pool.environment() as environment:
            await environment.reset(tasks[0])  # loads the engine, unless the answer is kept
        processes = [psutil.Process(), *psutil.Process().children()]
        begun_s = sum(_cpu_s(process) for process in processes)
        for number in range(ROUNDS):
            p = P_FIRST + (P_LAST - P_FIRST) * number / (ROUNDS - 1)
            order = rng.sample(tasks, len(tasks))
            for first in range(0, len(order), GROUP):  # as many groups in flight as members
                flight = order[first : first + GROUP]
                await asyncio.gather(*(episode(task, p) for task in flight for _ in range(GROUP)))
        spent_s = sum(_cpu_s(process) for process in processes) - begun_s
        n_episodes = ROUNDS * len(tasks) * GROUP
        n_answers, n_remembered = pool.answers()
        return {
            "ms_a_step": spent_s / n_steps * MS,
            "steps_an_episode": n_steps / n_episodes,
            "success": n_won / n_episodes,
            "remembered": n_remembered / n_answers,
        }
    finally:
        pool.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
