"""A corridor of any length: the key lies at its west end, the door is at its east end.

The rules and texts are those of `envs/key_room.py`. Only the number of rooms between key and door
differs, so a study can change how far away success is and leave everything else as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from envs import Observation, Task
from envs.key_room import KeyRoomEnv

HOUSES = ("Red", "Green", "Blue", "White")  # with two numbers a small model confuses the rooms


class Corridor(KeyRoomEnv):
    """Play one corridor. The option `distance` is the number of moves from the key to the door."""

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__({})
        self._rooms = tuple(f"Room {number}." for number in range(_distance(options) + 1))

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        """Return the tasks: one for each of four places to start from, spread between the ends."""
        door = _distance(options)
        starts = sorted({round(1 + number * (door - 2) / 3) for number in range(4)})
        return [
            Task(
                id=f"corridor-{door}-from-{start}",
                env_name="corridor",
                split=split,
                seed=start,
                data={"start": str(start), "key": "0", "door": str(door)},
            )
            for start in starts
        ]


class Corridors(KeyRoomEnv):
    """Play one of four corridors, which share no room: one task each, by where it starts."""

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__({})
        self._door = _distance(options)

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        """Return the tasks, the longest way last."""
        same_rooms = Corridor.tasks(split, options)
        return [
            replace(task, id=f"house-{number}-{task.id}", env_name="corridors", seed=number)
            for number, task in enumerate(same_rooms)
        ]

    def reset(self, task: Task) -> Observation:
        self._rooms = tuple(
            f"{HOUSES[task.seed]} house, room {at}." for at in range(self._door + 1)
        )
        return super().reset(task)


def _distance(options: Mapping[str, object]) -> int:
    return int(str(options["distance"]))
