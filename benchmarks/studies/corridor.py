"""A corridor of any length: the key lies at its west end, the door is at its east end.

The rules and texts are those of `envs/key_room.py`. Only the number of rooms between key and door
differs, so a study can change how far away success is and leave everything else as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs import Observation, Task, Transition

DIRECTIONS = {"go west": -1, "go east": 1}


class Corridor:
    """Play one corridor. The option `distance` is the number of moves from the key to the door."""

    deterministic = True

    def __init__(self, options: Mapping[str, object]) -> None:
        self._door = int(str(options["distance"]))
        self._is_over = True

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        """Return the tasks: one for each of four places to start from, spread between the ends."""
        door = int(str(options["distance"]))
        starts = sorted({round(1 + place * (door - 2) / 3) for place in range(4)})
        return [
            Task(
                id=f"corridor-{door}-from-{start}",
                env_name="corridor",
                split=split,
                seed=start,
                data={"start": str(start)},
            )
            for start in starts
        ]

    def reset(self, task: Task) -> Observation:
        self._room = int(task.data["start"])
        self._has_key = self._is_over = False
        return self._observe()

    def step(self, action: str) -> Transition:
        """Carry out an action. One that is not admissible changes nothing."""
        if self._is_over:
            raise ValueError("the episode is over: call reset(task) before step")
        is_valid = action in self._admissible_actions()
        won = is_valid and action == "unlock door"
        if is_valid and action == "take key":
            self._has_key = True
        if is_valid and action in DIRECTIONS:
            self._room += DIRECTIONS[action]
        self._is_over = won
        return Transition(
            observation=self._observe(),
            reward=float(won),
            terminated=won,
            truncated=False,
            won=won,
            valid=is_valid,
        )

    def close(self) -> None:
        pass

    def _admissible_actions(self) -> tuple[str, ...]:
        moves = DIRECTIONS.items()
        actions = [name for name, change in moves if 0 <= self._room + change <= self._door]
        if self._room == 0 and not self._has_key:
            actions.append("take key")
        if self._room == self._door and self._has_key:
            actions.append("unlock door")
        return tuple(actions)

    def _observe(self) -> Observation:
        sentences = [f"Room {self._room}."]
        if self._room == 0 and not self._has_key:
            sentences.append("A key lies here.")
        if self._room == self._door:
            sentences.append("A locked door.")
        if self._has_key:
            sentences.append("You hold the key.")
        return Observation(
            text=" ".join(sentences),
            objective="unlock the door.",
            actions=self._admissible_actions(),
        )
