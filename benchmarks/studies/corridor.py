"""A corridor of any length: the key lies at its west end, the door is at its east end.

The rules and texts are those of `envs/key_room.py`. Only the number of rooms between key and door
differs, so a study can change how far away success is and leave everything else as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs import Observation, Task
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


class Corridors(KeyRoomEnv):
    """Play one of several corridors, which share no room. The option `n` is their number.

    In every second one the door is in the west and the key in the east, so an action that is right
    in one corridor is wrong in the next. Each is one task.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__({})
        self._last = _distance(options)

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        last = _distance(options)
        tasks = []
        for number in range(int(str(options["n"]))):
            ends = (0, last) if number % 2 == 0 else (last, 0)
            start = last // 2
            tasks.append(
                Task(
                    id=f"corridors-{last}-{number}",
                    env_name="corridors",
                    split=split,
                    seed=number,
                    data={"start": str(start), "key": str(ends[0]), "door": str(ends[1])},
                )
            )
        return tasks

    def reset(self, task: Task) -> Observation:
        self._rooms = tuple(f"House {task.seed}, room {at}." for at in range(self._last + 1))
        return super().reset(task)


def _distance(options: Mapping[str, object]) -> int:
    return int(str(options["distance"]))
