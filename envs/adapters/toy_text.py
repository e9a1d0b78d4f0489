"""Describe Gymnasium's FrozenLake and Taxi in words: functions for `render` and `task_kwargs`."""

from __future__ import annotations

from typing import Any

STOPS = ("red", "green", "yellow", "blue")  # Taxi's stops, in the order of its states
IN_TAXI = len(STOPS)
LAKE_SIZE = 4  # rows and columns, as of Gymnasium's default map
FROZEN_SHARE = 0.8  # of the cells, as in Gymnasium's own random maps


def lake_of_seed(seed: int) -> dict[str, Any]:
    """Return the arguments of another FrozenLake for each seed. Its goal can be reached."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return {"desc": generate_random_map(size=LAKE_SIZE, p=FROZEN_SHARE, seed=seed)}


def lake(env: Any, state: int) -> str:
    """Return the lake as a grid: P player, S start, F ice, H hole, G goal."""
    rows = env.desc.astype(str).tolist()
    rows[state // env.ncol][state % env.ncol] = "P"
    return "\n".join(" ".join(row) for row in rows)


def taxi(env: Any, state: int) -> str:
    """Say where taxi, passenger and destination are.

    Walls show in the admissible actions, by `info["action_mask"]`.
    """
    row, column, passenger, destination = env.decode(state)
    if passenger == IN_TAXI:
        waits = "in the taxi"
    else:
        waits = f"at the {STOPS[passenger]} stop, {_cell(*env.locs[passenger])}"
    stop = f"the {STOPS[destination]} stop, {_cell(*env.locs[destination])}"
    return (
        f"The taxi is in {_cell(row, column)}. The passenger is {waits}. The destination is {stop}."
    )


def _cell(row: int, column: int) -> str:
    return f"row {row} column {column}"
