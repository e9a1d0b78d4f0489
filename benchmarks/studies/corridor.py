"""A corridor of any length: the key lies at its west end, the door is at its east end.

The rules and texts are those of `envs/key_room.py`. Only the number of rooms between key and door
differs, so a study can change how far away success is and leave everything else as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs import Task
from envs.key_room import KeyRoomEnv


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


def _distance(options: Mapping[str, object]) -> int:
    return int(str(options["distance"]))
