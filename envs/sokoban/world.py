"""Sokoban as text or as images: push every box onto a target. Rooms are made here, from a seed;
rules and rewards are gym-sokoban's.

The room is a grid of signs with a space between them: # wall, _ floor, O target, X box, √ box on a
target, P the player, S the player on a target. It is also the anchor. With observation=image the
same room is drawn in pixels too, in `Observation.images`, as vision models see it
(`sokoban_pixels.py`); text and anchor stay the grid.

An action is read as the paper's code reads it: the first of up, down, left, right, still that
occurs in its text. Every one costs 0.1; a box that comes onto a target earns 1, one that leaves it
loses 1, and the last one earns 10 more. Without any of those words the player stays, which costs
0.1 too, and the action is invalid. (There such an action does not count towards the step limit.
Here every action does: the limit is the runner's, `env.max_steps`.) With rewards of this size
`env.win_reward` is 1.

Options: `rows`, `columns` (outer walls included), `boxes`, `least_moves` and `most_moves` of a
shortest solution, `train_rooms`, `heldout_rooms`, `seed` (of the rooms). May be left out:
`observation`, text (unless it is given) or image; `cell_pixels`, the side of a cell in an image, 28
unless it is given, which is 2 x 2 patches of Qwen2.5-VL: a cell is one token.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from envs.base import Observation, Task, Transition
from envs.options import OptionsError, check_options, check_split, whole_number
from envs.sokoban.rendering import LEAST_CELL_PIXELS, drawn_room

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
WORDS = (*MOVES, "still")
TEXT, IMAGE = "text", "image"  # of the option `observation`
CELL_PIXELS = 28
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0  # as gym-sokoban
OBJECTIVE = "push every box onto a target."
HELDOUT_SHARE = 5  # one layout in five belongs to the held-out split
FLOOR_SHARE = 0.7  # of the cells inside the outer walls
MAX_STATES = 100_000  # of player and boxes, searched for each room that is drawn: a second or two
MAX_DRAWS_PER_ROOM = 1000  # for a size and a number of moves that no room can have

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

    def drawn(self) -> str:
        rows, columns = self.size
        return "\n".join(
            " ".join(self._sign((row, column)) for column in range(columns)) for row in range(rows)
        )

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
        """The room after one move, which pushes a box that is in the way; the same room if a wall
        or another box is.
        """
        there, beyond = (
            _next(self.player, direction),
            _next(_next(self.player, direction), direction),
        )
        if there not in self.floor or (
            there in self.boxes and (beyond not in self.floor or beyond in self.boxes)
        ):
            return self
        boxes = self.boxes - {there} | {beyond} if there in self.boxes else self.boxes
        return replace(self, player=there, boxes=boxes)


class SokobanEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = _parse(options)
        self._is_over = True

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        """Rooms of a split: a solution takes `least_moves` to `most_moves`, no room is there twice
        or in both splits.
        """
        check_split(split)
        parsed = _parse(options)
        counts = {"train": parsed.train_rooms, "heldout": parsed.heldout_rooms}
        kind = f"{parsed.rows}x{parsed.columns}b{parsed.boxes}m{parsed.least_moves}-{parsed.most_moves}"
        return [
            Task(
                id=f"sokoban-{split}-{kind}-{seed}",
                env_name="sokoban",
                split=split,
                seed=seed,
                data={"room": room.drawn(), "type": f"{moves} moves"},
            )
            for seed, room, moves in islice(_rooms(split, parsed), counts[split])
        ]

    def reset(self, task: Task) -> Observation:
        self._room = read_room(task.data["room"])
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

    def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        text = self._room.drawn()
        images = (
            (drawn_room(text, cell_pixels=self._options.cell_pixels),)
            if self._options.observation == IMAGE
            else ()
        )
        return Observation(text=text, objective=OBJECTIVE, actions=tuple(MOVES), images=images)


def read_room(text: str) -> Room:
    """The room of `Room.drawn`."""
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
    """Endless (seed, room, moves of a shortest solution); the same arguments always give the same
    sequence.
    """
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
    """By its walls and targets, so that no held-out layout is ever trained on, whatever the seeds
    and the numbers of rooms.
    """
    layout = repr((room.size, sorted(room.floor), sorted(room.targets)))
    number = int.from_bytes(hashlib.blake2b(layout.encode(), digest_size=8).digest(), "little")
    return "train" if number % HELDOUT_SHARE else "heldout"


def _draw(rng: random.Random, options: _Options) -> tuple[Room, int] | None:
    """A room and the moves of its shortest solution; None where the walls drawn allow none of the
    length asked for.
    """
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
    """Connected cells: each new one is beside one that is there."""
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
    """Where player and boxes may be so that the shortest solution takes 0, 1, 2 ... moves: the game
    played backwards.

    A move backwards takes the player one cell back and, if a box is on the other side of it, may
    pull that along. ValueError beyond MAX_STATES.
    """
    latest = [(cell, targets) for cell in sorted(floor - targets)]
    # A solution never ends with a move that pushes nothing; elsewhere the player may have walked.
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
                f"{len(floor)} cells has more than "
                f"{MAX_STATES:,} positions to search, which takes too long; ask for fewer boxes, "
                "fewer moves or smaller rooms"
            )
    return found


def _next(cell: Cell, direction: str) -> Cell:
    down, right = MOVES[direction]
    return cell[0] + down, cell[1] + right


def _parse(options: Mapping[str, object]) -> _Options:
    least = {
        "rows": 3,
        "columns": 3,
        "boxes": 1,
        "least_moves": 1,
        "most_moves": 1,
        "train_rooms": 1,
        "heldout_rooms": 1,
        "seed": 0,
        "cell_pixels": LEAST_CELL_PIXELS,
    }
    options = {"observation": TEXT, "cell_pixels": CELL_PIXELS, **options}
    check_options("sokoban", options, (*least, "observation"))
    observation = options["observation"]
    if observation not in (TEXT, IMAGE):
        raise OptionsError(
            f"sokoban option observation={observation!r} is not one of {TEXT!r}, {IMAGE!r}"
        )
    values = {
        name: whole_number("sokoban", name, options[name], least=lowest)
        for name, lowest in least.items()
    }
    parsed = _Options(**values, observation=str(observation))
    room_for = (parsed.rows - 2) * (parsed.columns - 2) - 2  # the player, and somewhere to push to
    if parsed.boxes > room_for:
        raise OptionsError(
            f"sokoban option boxes={parsed.boxes} must be at most {room_for} in "
            f"{parsed.rows}x{parsed.columns}"
        )
    if parsed.least_moves > parsed.most_moves:
        raise OptionsError(
            f"sokoban option least_moves={parsed.least_moves} must be at most "
            f"most_moves={parsed.most_moves}"
        )
    return parsed
