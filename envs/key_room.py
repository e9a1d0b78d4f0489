"""A corridor of rooms, a key in one, a locked door in another: the smallest world with repeated
anchor states.

The worked example of an environment of your own: `tasks`, `reset`, `step`, `close`, and no more.
It has no options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.base import Observation, Task, Transition
from envs.options import check_options, check_split

ROOMS = ("red", "blue", "green", "white", "black")
WAYS = {"go west": -1, "go east": 1}
# of the 5 x 4 x 3 layouts one of each three doors is held out: 40 to train on, 20 to test on
HELDOUT_EVERY = 3


class KeyRoomEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        check_options("key_room", options, ())
        self._is_over = True

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        check_options("key_room", options, ())
        check_split(split)
        n = range(len(ROOMS))
        layouts = [
            (start, key, door)
            for start in n
            for key in n
            for door in n
            if len({start, key, door}) == 3
        ]
        return [
            Task(
                id=f"key_room-{split}-{seed}",
                env_name="key_room",
                split=split,
                seed=seed,
                data={"start": str(start), "key": str(key), "door": str(door)},
            )
            for seed, (start, key, door) in enumerate(layouts)
            # another of the three for each start and key, or no training layout had its door in the
            # first room
            if ((seed + seed // HELDOUT_EVERY) % HELDOUT_EVERY == 0) == (split == "heldout")
        ]

    def reset(self, task: Task) -> Observation:
        self._room, self._key, self._door = (
            int(task.data[name]) for name in ("start", "key", "door")
        )
        self._has_key = self._is_over = False
        return self._observe()

    def step(self, action: str) -> Transition:
        if self._is_over:
            raise ValueError("the episode is over: call reset(task) before step")
        is_valid = action in self._commands()
        self._room += WAYS.get(action, 0) if is_valid else 0
        self._has_key = self._has_key or (is_valid and action == "take key")
        won = self._is_over = is_valid and action == "unlock door"
        observation = self._observe()
        return Transition(
            observation=observation,
            reward=float(won),
            terminated=won,
            truncated=False,
            won=won,
            valid=is_valid,
        )

    def close(self) -> None:
        pass

    def _commands(self) -> tuple[str, ...]:
        commands = [way for way, change in WAYS.items() if 0 <= self._room + change < len(ROOMS)]
        if self._room == self._key and not self._has_key:
            commands.append("take key")
        if self._room == self._door and self._has_key:
            commands.append("unlock door")
        return tuple(commands)

    def _observe(self) -> Observation:
        lies_here = " A key lies here." if self._room == self._key and not self._has_key else ""
        door_here = " A locked door." if self._room == self._door else ""
        held = " You hold the key." if self._has_key else ""
        text = f"The {ROOMS[self._room]} room.{lies_here}{door_here}{held}"
        return Observation(text=text, objective="unlock the door.", actions=self._commands())
