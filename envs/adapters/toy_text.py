"""Gymnasium's FrozenLake and Taxi in words, for the options `render` and `task_kwargs` of
`from_gymnasium.py`.
"""

from __future__ import annotations

from typing import Any

PLACES = ("red", "green", "yellow", "blue")  # Taxi's, in the order of its states
IN_TAXI = len(PLACES)
LAKE_SIZE = 4
FROZEN = 0.8  # of the cells, as Gymnasium's own random maps


def lake_of_seed(seed: int) -> dict[str, Any]:
    """A FrozenLake of its own for every seed; there is always a way to the goal."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return {"desc": generate_random_map(size=LAKE_SIZE, p=FROZEN, seed=seed)}


def lake(env: Any, state: int) -> str:
    """The lake as a grid: P is where the player is, S the start, F ice, H a hole, G the goal."""
    rows = [[cell.decode() for cell in row] for row in env.desc]
    rows[state // env.ncol][state % env.ncol] = "P"
    return "\n".join(" ".join(row) for row in rows)


def taxi(env: Any, state: int) -> str:
    """Where the taxi, the passenger and the destination are. Walls are in the list of actions:
    `info["action_mask"]`.
    """
    row, column, passenger, destination = env.decode(state)
    waits = (
        "in the taxi"
        if passenger == IN_TAXI
        else f"at the {PLACES[passenger]} stop, {_cell(*env.locs[passenger])}"
    )
    stop = f"the {PLACES[destination]} stop, {_cell(*env.locs[destination])}"
    return (
        f"The taxi is in {_cell(row, column)}. The passenger is {waits}. The destination is {stop}."
    )


def _cell(row: int, column: int) -> str:
    return f"row {row} column {column}"
