"""Sokoban as text or as images: push every box onto a target. Rooms are made from a seed.

A room is a grid of signs with spaces between them, and is its own anchor:

    #  wall      O  target      √  box on a target        P  player
    _  floor     X  box         S  player on a target

With observation=image, `Observation.images` has the same room in pixels for a vision model. Text
and anchor stay the grid.

Rules and rewards are gym-sokoban's. Each action costs 0.1. A box that comes onto a target earns 1,
one that leaves it loses 1, and the last one earns 10 more. Set `env.win_reward` to 1 for rewards of
this size.

An action is read as the paper's code reads it: the first of up, down, left, right and still that
occurs in its text. Without any, the player stays and the action is invalid. In the paper's code
such an action does not count towards the step limit; here every action does.

Options: `rows`, `columns` (with the outer walls), `boxes`, `least_moves` and `most_moves` of a
shortest solution, `train_rooms`, `heldout_rooms`, `seed` of the rooms. Optional: `observation`
(text or image; text), `cell_pixels` (side of a cell in an image; 28, so that a cell is one token of
Qwen2.5-VL).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from envs.base import Observation, Task, Transition
from envs.options import OptionsError, check_options, check_split, whole_numbers

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
WORDS = (*MOVES, "still")
TEXT, IMAGE = "text", "image"  # of the option `observation`
CELL_PIXELS = 28
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0  # as gym-sokoban
OBJECTIVE = "push every box onto a target."
HELDOUT_SHARE = 5  # one layout in five belongs to the held-out split
FLOOR_SHARE = 0.7  # of the cells inside the outer walls
MAX_STATES = 100_000  # positions of player and boxes searched for one room, in a second or two
MAX_DRAWS_PER_ROOM = 1000  # then no room has the wanted size and number of moves

MIN_CELL_PIXELS = 4  # a smaller box has no edge
WALL, FLOOR, TARGET = (60, 60, 70), (235, 225, 200), (200, 40, 40)
BOX, BOX_EDGE, PLAYER = (180, 120, 50), (110, 70, 25), (40, 140, 70)
BOX_SHARE, BOX_EDGE_SHARE, TARGET_SHARE, PLAYER_SHARE = 0.8, 0.6, 0.35, 0.7  # of a cell's side

Cell = tuple[int, int]  # row, column


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    floor: frozenset[Cell]  # targets included; everything else is wall
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell
    size: Cell  # rows, columns

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.targets

    def to_text(self) -> str:
        """Return the grid of signs. `parse_room` reads it."""
        rows, columns = self.size
        lines = []
        for row in range(rows):
            lines.append(" ".join(self._sign((row, column)) for column in range(columns)))
        return "\n".join(lines)

    def _sign(self, cell: Cell) -> str:
        on_target = cell in self.targets
        if cell == self.player:
            return "S" if on_target else "P"
        if cell in self.boxes:
            return "√" if on_target else "X"
        if cell not in self.floor:
            return "#"
        return "O" if on_target else "_"

    def moved(self, direction: str) -> Room:
        """Return the room after one move, which may push a box. It is unchanged if blocked."""
        there = _next(self.player, direction)
        if there not in self.floor:
            return self
        if there not in self.boxes:
            return replace(self, player=there)
        beyond = _next(there, direction)
        if beyond not in self.floor or beyond in self.boxes:
            return self
        return replace(self, player=there, boxes=self.boxes - {there} | {beyond})


class SokobanEnv:
    deterministic = True

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = _parse(options)
        self._is_over = True

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        """Make the rooms of a split. No room is made twice, or in both splits."""
        check_split(split)
        parsed = _parse(options)
        counts = {"train": parsed.train_rooms, "heldout": parsed.heldout_rooms}
        moves = f"m{parsed.least_moves}-{parsed.most_moves}"
        kind = f"{parsed.rows}x{parsed.columns}b{parsed.boxes}{moves}"
        return [
            Task(
                id=f"sokoban-{split}-{kind}-{seed}",
                env_name="sokoban",
                split=split,
                seed=seed,
                data={"room": room.to_text(), "type": f"{n_moves} moves"},
            )
            for seed, room, n_moves in islice(_rooms(split, parsed), counts[split])
        ]

    def reset(self, task: Task) -> Observation:
        self._room = parse_room(task.data["room"])
        self._is_over = False
        return self._observe()

    def step(self, action: str) -> Transition:
        if self._is_over:
            raise ValueError("the episode is over: call reset(task) before step")
        word = next((word for word in WORDS if word in action.lower()), None)
        before = len(self._room.boxes & self._room.targets)
        if word in MOVES:
            self._room = self._room.moved(word)
        won = self._is_over = self._room.is_solved
        reward = (
            STEP_REWARD
            + BOX_REWARD * (len(self._room.boxes & self._room.targets) - before)
            + SOLVED_REWARD * won
        )
        return Transition(
            observation=self._observe(),
            reward=reward,
            terminated=won,
            truncated=False,
            won=won,
            valid=word is not None,
        )

    def state_key(self) -> str:
        return self._room.to_text()  # with it the episode is over or not

    def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        text = self._room.to_text()
        images: tuple[NDArray[np.uint8], ...] = ()
        if self._options.observation == IMAGE:
            images = (draw_room(text, cell_pixels=self._options.cell_pixels),)
        return Observation(text=text, objective=OBJECTIVE, actions=tuple(MOVES), images=images)


def parse_room(text: str) -> Room:
    """Return the room of `Room.to_text`."""
    lines = [line.split(" ") for line in text.split("\n")]
    signs = {
        (row, column): sign for row, line in enumerate(lines) for column, sign in enumerate(line)
    }
    (player,) = (cell for cell, sign in signs.items() if sign in "PS")
    return Room(
        floor=frozenset(cell for cell, sign in signs.items() if sign != "#"),
        targets=frozenset(cell for cell, sign in signs.items() if sign in "O√S"),
        boxes=frozenset(cell for cell, sign in signs.items() if sign in "X√"),
        player=player,
        size=(len(lines), len(lines[0])),
    )


def draw_room(text: str, *, cell_pixels: int) -> NDArray[np.uint8]:
    """Return a room's image, [rows * cell_pixels, columns * cell_pixels, 3].

    Walls are dark, the floor is light, a target is a small red square, a box is a brown square with
    a darker edge, and the player is a green disc.
    """
    rows = []
    for line in text.split("\n"):
        cells = [_draw_cell(sign, cell_pixels) for sign in line.split(" ")]
        rows.append(np.concatenate(cells, axis=1))
    return np.concatenate(rows, axis=0)


@lru_cache(maxsize=64)
def _draw_cell(sign: str, cell_pixels: int) -> NDArray[np.uint8]:
    cell = np.empty((cell_pixels, cell_pixels, 3), np.uint8)
    cell[:] = WALL if sign == "#" else FLOOR
    # distance from the middle: 0 there, 1 at the cell's edge
    off_centre = np.abs(np.arange(cell_pixels) * 2 + 1 - cell_pixels) / cell_pixels
    down, right = off_centre[:, None], off_centre[None, :]
    square = np.maximum(down, right)
    if sign in "X√":
        cell[square <= BOX_SHARE] = BOX_EDGE
        cell[square <= BOX_EDGE_SHARE] = BOX
    if sign in "O√S":
        share = BOX_SHARE if sign == "S" else TARGET_SHARE  # visible around the player
        cell[square <= share] = TARGET
    if sign in "PS":
        cell[down**2 + right**2 <= PLAYER_SHARE**2] = PLAYER
    return cell


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    rows: int
    columns: int
    boxes: int
    least_moves: int
    most_moves: int
    train_rooms: int
    heldout_rooms: int
    seed: int
    cell_pixels: int
    observation: str


def _rooms(split: str, options: _Options) -> Iterator[tuple[int, Room, int]]:
    """Yield (seed, room, moves of a shortest solution), without end and reproducibly."""
    seen: set[Room] = set()
    seed = last = options.seed * 1_000_000_000
    while seed - last < MAX_DRAWS_PER_ROOM:
        seed += 1
        drawn = _draw(random.Random(f"{split} {seed}"), options)
        if drawn is not None and drawn[0] not in seen and _split_of(drawn[0]) == split:
            seen.add(drawn[0])
            yield seed, *drawn
            last = seed
    kind = f"{options.rows}x{options.columns} {split} room with boxes={options.boxes}"
    moves = f"least_moves={options.least_moves} and most_moves={options.most_moves}"
    raise ValueError(
        f"sokoban: after {len(seen)} there is no other {kind}, {moves} to be found; ask for fewer "
        "rooms, or other ones"
    )


def _split_of(room: Room) -> str:
    """Return the split of a room's walls and targets.

    So no held-out layout is ever trained on, whatever the seeds and the numbers of rooms.
    """
    layout = repr((room.size, sorted(room.floor), sorted(room.targets)))
    number = int.from_bytes(hashlib.blake2b(layout.encode(), digest_size=8).digest(), "little")
    return "train" if number % HELDOUT_SHARE else "heldout"


def _draw(rng: random.Random, options: _Options) -> tuple[Room, int] | None:
    """Return a room and the moves of its shortest solution; None if these walls allow no such."""
    floor = _draw_floor(rng, options)
    targets = frozenset(rng.sample(sorted(floor), options.boxes))
    size = (options.rows, options.columns)
    by_moves = _solvable(floor, targets, most_moves=options.most_moves)
    lengths = [n for n in range(options.least_moves, len(by_moves)) if by_moves[n]]
    if not lengths:
        return None
    moves = rng.choice(lengths)
    player, boxes = rng.choice(by_moves[moves])
    return Room(floor=floor, targets=targets, boxes=boxes, player=player, size=size), moves


def _draw_floor(rng: random.Random, options: _Options) -> frozenset[Cell]:
    """Return connected cells: each new one is beside an earlier one."""
    inside = [
        (row, column)
        for row in range(1, options.rows - 1)
        for column in range(1, options.columns - 1)
    ]
    wanted = max(options.boxes + 2, round(FLOOR_SHARE * len(inside)))
    floor = {rng.choice(inside)}
    while len(floor) < wanted:
        cell = rng.choice(inside)
        if cell not in floor and any(_next(cell, direction) in floor for direction in MOVES):
            floor.add(cell)
    return frozenset(floor)


def _solvable(
    floor: frozenset[Cell], targets: frozenset[Cell], *, most_moves: int
) -> list[list[tuple[Cell, frozenset[Cell]]]]:
    """Return the positions of player and boxes by the length of their shortest solution: 0, 1, ...

    The game is played backwards. A move takes the player one cell back, and may pull the box in
    front of it along. Raises ValueError beyond MAX_STATES.
    """
    latest = [(cell, targets) for cell in sorted(floor - targets)]
    # The player starts everywhere: a solution never ends with a move that pushes nothing.
    seen = set(latest)
    found = [latest]
    for _ in range(most_moves):
        earlier = []
        for player, boxes in latest:
            for direction in MOVES:
                back = _next(player, OPPOSITE[direction])
                if back not in floor or back in boxes:
                    continue
                ahead = _next(player, direction)
                states = [(back, boxes)]
                if ahead in boxes:
                    states.append((back, boxes - {ahead} | {player}))
                for state in states:
                    if state not in seen:
                        seen.add(state)
                        earlier.append(state)
        latest = earlier
        found.append(latest)
        if len(seen) > MAX_STATES:
            raise ValueError(
                f"sokoban: with boxes={len(targets)} and most_moves={most_moves} a room of "
                f"{len(floor)} cells has more than {MAX_STATES:,} positions to search, which takes "
                "too long; ask for fewer boxes, fewer moves or smaller rooms"
            )
    return found


def _next(cell: Cell, direction: str) -> Cell:
    down, right = MOVES[direction]
    return cell[0] + down, cell[1] + right


def _parse(options: Mapping[str, object]) -> _Options:
    least = {"rows": 3, "columns": 3, "seed": 0, "cell_pixels": MIN_CELL_PIXELS}
    counts = ("boxes", "least_moves", "most_moves", "train_rooms", "heldout_rooms")
    least |= dict.fromkeys(counts, 1)
    options = {"observation": TEXT, "cell_pixels": CELL_PIXELS, **options}
    check_options("sokoban", options, (*least, "observation"))
    observation = options["observation"]
    if observation not in (TEXT, IMAGE):
        raise OptionsError(
            f"sokoban option observation={observation!r} is not one of {TEXT!r}, {IMAGE!r}"
        )
    values = whole_numbers("sokoban", options, least)
    parsed = _Options(**values, observation=str(observation))
    most_boxes = (parsed.rows - 2) * (parsed.columns - 2) - 2  # one for the player, one to push to
    if parsed.boxes > most_boxes:
        raise OptionsError(
            f"sokoban option boxes={parsed.boxes} must be at most {most_boxes} in "
            f"{parsed.rows}x{parsed.columns}"
        )
    if parsed.least_moves > parsed.most_moves:
        raise OptionsError(
            f"sokoban option least_moves={parsed.least_moves} must be at most "
            f"most_moves={parsed.most_moves}"
        )
    return parsed
