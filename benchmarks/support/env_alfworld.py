"""Measure ALFWorld: steps beside the stock engine on the same games and commands, and memory.

Steps: both engines walk through the same random commands of each game, one after the other, in one
process. A step includes observation, reward and all admissible commands. Resets are timed
separately: the first of a game translates it, later ones do not; the stock engine always does.
Memory: growth of the resident set over random episodes of 50 steps on one environment object, after
the first tenth of them, in which each game is played once. Without data, generated games are used.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from envs import Task
from envs.alfworld import AlfWorldEnv
from envs.alfworld.engine import translated
from envs.alfworld.games import read_game
from envs.alfworld.generated import read_generated
from tests.support.alfworld_stock import load_stock, stock_engine

MAX_STEPS = 50
MIB = 2**20


def measure(*, quick: bool, data: Path) -> dict[str, float]:
    """Return steps in 1/s, resets in ms and growth in MiB. `data` may have `alfworld/`."""
    data = data / "alfworld"
    options = {
        "data": str(data) if data.is_dir() else "",
        "train": "train",
        "heldout": "valid_seen",
        "task_types": [],
        "train_games": 8,
        "heldout_games": 0 if data.is_dir() else 140,
        "seed": 0,
    }
    tasks = AlfWorldEnv.tasks("heldout", options)
    return {
        # memory first: the stock engine does not free all of its own
        **_memory(tasks, options, episodes=60 if quick else 1000),
        **_beside_stock(tasks[: 3 if quick else 8], options, steps=15 if quick else 30),
    }


def _beside_stock(
    tasks: Sequence[Task], options: Mapping[str, object], *, steps: int
) -> dict[str, float]:
    translated.cache_clear()  # the memory measurement has played these games
    env, stock = AlfWorldEnv(options), stock_engine()
    ours_s = []
    stock_s = []
    first_ms = []
    again_ms = []
    stock_load_ms = []
    for seed, task in enumerate(tasks):
        name = task.data["game"]
        if options["data"]:
            game = read_game(Path(str(options["data"])), task.data["split"], name)
        else:
            game = read_generated(name)
        first_ms.append(_elapsed_s(env.reset, task) * 1000)
        again_ms.append(_elapsed_s(env.reset, task) * 1000)
        commands, elapsed_s = _walk(env, task, steps=steps, seed=seed)
        ours_s.append(elapsed_s / len(commands))
        stock_load_ms.append(_elapsed_s(load_stock, stock, game) * 1000)
        start = time.perf_counter()
        for command in commands:
            stock.step(command)
        stock_s.append((time.perf_counter() - start) / len(commands))
    env.close()
    return {
        "alfworld_steps_s": 1 / statistics.mean(ours_s),
        "alfworld_stock_steps_s": 1 / statistics.mean(stock_s),
        "alfworld_over_stock": statistics.median(
            theirs / ours for ours, theirs in zip(ours_s, stock_s, strict=True)
        ),
        "alfworld_first_reset_ms": statistics.mean(first_ms),
        "alfworld_reset_again_ms": statistics.mean(again_ms),
        "alfworld_stock_load_and_reset_ms": statistics.mean(stock_load_ms),
    }


def _walk(env: AlfWorldEnv, task: Task, *, steps: int, seed: int) -> tuple[list[str], float]:
    """Play random commands until `steps` or a win. Return them, and the seconds they took."""
    draw = random.Random(seed)
    seen = env.reset(task)
    commands: list[str] = []
    start = time.perf_counter()
    while len(commands) < steps:
        commands.append(draw.choice(seen.actions or ("look",)))
        transition = env.step(commands[-1])
        seen = transition.observation
        if transition.terminated:
            break
    return commands, time.perf_counter() - start


def _memory(
    tasks: Sequence[Task], options: Mapping[str, object], *, episodes: int
) -> dict[str, float]:
    env, process = AlfWorldEnv(options), psutil.Process()
    resident: list[float] = []
    won = 0
    start = time.perf_counter()
    for episode in range(episodes):
        task = tasks[episode % min(len(tasks), episodes // 10)]  # each once within the first tenth
        won += len(_walk(env, task, steps=MAX_STEPS, seed=episode)[0]) < MAX_STEPS
        resident.append(process.memory_info().rss / MIB)
    env.close()
    settled = episodes // 10
    return {
        "alfworld_episodes": float(episodes),
        "alfworld_episodes_s": episodes / (time.perf_counter() - start),
        "alfworld_random_wins": float(won),
        "alfworld_mib_after_a_tenth": resident[settled],
        "alfworld_mib_at_the_end": resident[-1],
        "alfworld_mib_growth": resident[-1] - resident[settled],
    }


def _elapsed_s(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start
