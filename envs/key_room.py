"""The smallest environment: find the key in a corridor of five rooms, and unlock the door.

Copy this file for an environment of your own. It needs one class with four methods: `tasks`,
`reset`, `step` and `close`. Name your class `module:Class` in `env.name`.

    env = KeyRoomEnv({})
    observation = env.reset(KeyRoomEnv.tasks("train", {})[0])
    transition = env.step("go east")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from envs.base import Observation, Task, Transition
from envs.options import check_options, check_split

ROOMS = ("red", "blue", "green", "white", "black")  # from west to east
DIRECTIONS = {"go west": -1, "go east": 1}
HELDOUT_EVERY = 3  # one layout in three is held out: 40 to train on, 20 to test on


class KeyRoomEnv:
    deterministic = True  # so its answers are remembered, see docs/your_environment.md

    def __init__(self, options: Mapping[str, object]) -> None:
        check_options("key_room", options, ())  # it has no options
        self._rooms = tuple(f"The {colour} room." for colour in ROOMS)
        self._is_over = True

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        """Return a task for each layout of the split: three different rooms of the five."""
        check_options("key_room", options, ())
        check_split(split)
        tasks = []
        for seed, (start, key, door) in enumerate(permutations(range(len(ROOMS)), 3)):
            # The held-out one moves on from triple to triple. Otherwise it would always be the
            # layout with the westernmost door, and no training layout would have that.
            is_heldout = (seed + seed // HELDOUT_EVERY) % HELDOUT_EVERY == 0
            if is_heldout == (split == "heldout"):
                task = Task(
                    id=f"key_room-{split}-{seed}",
                    env_name="key_room",
                    split=split,
                    seed=seed,
                    data={"start": str(start), "key": str(key), "door": str(door)},
                )
                tasks.append(task)
        return tasks

    def reset(self, task: Task) -> Observation:
        """Begin an episode. All that differs between tasks comes from the task."""
        self._room = int(task.data["start"])
        self._key_room = int(task.data["key"])
        self._door_room = int(task.data["door"])
        self._has_key = False
        self._is_over = False
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
            truncated=False,  # the runner has the limit of steps
            won=won,
            valid=is_valid,
        )

    def state_key(self) -> str:
        return f"{self._room} {self._has_key} {self._is_over}"

    def close(self) -> None:
        pass

    def _admissible_actions(self) -> tuple[str, ...]:
        last = len(self._rooms) - 1
        actions = [
            action for action, change in DIRECTIONS.items() if 0 <= self._room + change <= last
        ]
        if self._room == self._key_room and not self._has_key:
            actions.append("take key")
        if self._room == self._door_room and self._has_key:
            actions.append("unlock door")
        return tuple(actions)

    def _observe(self) -> Observation:
        sentences = [self._rooms[self._room]]
        if self._room == self._key_room and not self._has_key:
            sentences.append("A key lies here.")
        if self._room == self._door_room:
            sentences.append("A locked door.")
        if self._has_key:
            sentences.append("You hold the key.")
        # Equal texts are equal states here, so the text is the anchor and none is given.
        return Observation(
            text=" ".join(sentences),
            objective="unlock the door.",
            actions=self._admissible_actions(),
        )
