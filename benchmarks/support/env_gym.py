"""Measure steps per second of Sokoban, and of Gymnasium's FrozenLake and Taxi with our adapter.

A random agent in one process plays episodes of at most 20 steps. Resets count. Adapter and bare
environment alternate, and their ratio is the median over the rounds. Times are of the processor.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium

import configs
from envs import environment_class

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20_000
QUICK_STEPS = 2_000
ROUNDS = 5
EPISODE_STEPS = 20
LAKE = configs.load(ROOT / "configs/frozenlake.yaml").env.options
TAXI = LAKE | {
    "id": "Taxi-v4",
    "kwargs": {},
    "task_kwargs": "",
    "render": "envs.adapters.toy_text:taxi",
    "actions": ["south", "north", "east", "west", "pick up", "drop off"],
    "win_at": 20.0,
}
ROOMS = {
    "rows": 6,
    "columns": 6,
    "boxes": 2,
    "least_moves": 3,
    "most_moves": 15,
    "heldout_rooms": 1,
    "seed": 0,
}


def measure(*, quick: bool, data: Path) -> dict[str, float]:
    """Return steps/s and ratios. `data` is not needed."""
    n_steps = QUICK_STEPS if quick else STEPS
    worlds: dict[str, tuple[str, Mapping[str, object]]] = {
        "sokoban": ("sokoban", ROOMS | {"train_rooms": 50}),
        "frozenlake": (
            "gymnasium",
            LAKE | {"kwargs": {"is_slippery": False, "map_name": "4x4"}, "task_kwargs": ""},
        ),
        "frozenlake_of_seed": ("gymnasium", LAKE),
        "taxi": ("gymnasium", TAXI),
    }
    bare = {
        "frozenlake": ("FrozenLake-v1", {"map_name": "4x4", "is_slippery": False}),
        "taxi": ("Taxi-v4", {}),
    }
    figures: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for world, (name, options) in worlds.items():
            rate = per_second(player(name, options), n_steps)
            figures.setdefault(f"{world}_steps_s", []).append(rate)
            if world in bare:
                bare_rate = per_second(bare_player(*bare[world]), n_steps)
                figures.setdefault(f"{world}_over_bare", []).append(rate / bare_rate)
    n_rooms = 100 if quick else 1000
    sokoban = environment_class("sokoban")
    made = per_second(lambda n: sokoban.tasks("train", ROOMS | {"train_rooms": n}), n_rooms)
    figures["sokoban_rooms_made_s"] = [made]
    return {name: statistics.median(values) for name, values in figures.items()}


def per_second(work: Callable[[int], Any], count: int) -> float:
    began = time.process_time()
    work(count)
    return count / (time.process_time() - began)


def player(name: str, options: Mapping[str, object]) -> Callable[[int], None]:
    """Return a function that plays so many steps. Tasks and environment are made before."""
    rng = random.Random(0)
    tasks = environment_class(name).tasks("train", options)
    env = environment_class(name)(options)
    env.reset(tasks[0])  # makes the wrapped environment

    def play(n_steps: int) -> None:
        is_over = True
        for step in range(n_steps):
            if step % EPISODE_STEPS == 0 or is_over:
                observation = env.reset(tasks[rng.randrange(len(tasks))])
            assert observation.actions
            transition = env.step(rng.choice(observation.actions))
            observation = transition.observation
            is_over = transition.terminated or transition.truncated
        env.close()

    return play


def bare_player(id_: str, kwargs: Mapping[str, Any]) -> Callable[[int], None]:
    rng = random.Random(0)
    env = gymnasium.make(id_, **kwargs)

    def play(n_steps: int) -> None:
        is_over = True
        for step in range(n_steps):
            if step % EPISODE_STEPS == 0 or is_over:
                env.reset(seed=rng.randrange(200))
            action = rng.randrange(env.action_space.n)  # type: ignore[attr-defined]
            _, _, terminated, truncated, _ = env.step(action)
            is_over = terminated or truncated
        env.close()

    return play
