"""Making TextWorld games on the spot: a seeded world, compiled to a `.z8` file, checked by playing
it, and cached.

One family, "treasure": two or more rooms in a row, one piece of furniture in each, small things
lying about. A key lies on or in one piece; another room holds a locked chest, and the game is won
when the chest is open. What a game is (`Treasure`) is drawn by us, in microseconds; TextWorld turns
it into a real Inform 7 game. The splits are disjoint by construction: every (chest, hiding place of
the key) pair belongs to one split alone, so no held-out game has the content of a training game.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from printable import printable

ROOMS = (
    "attic",
    "bedroom",
    "cellar",
    "garage",
    "garden",
    "hall",
    "kitchen",
    "library",
    "office",
    "porch",
)
SUPPORTERS = ("bench", "counter", "desk", "shelf", "stool", "table")
CONTAINERS = ("basket", "box", "crate", "drawer", "trunk")
CHESTS = ("cabinet", "chest", "locker", "safe", "strongbox", "wardrobe")
THINGS = (
    "apple",
    "ball",
    "book",
    "candle",
    "cup",
    "hat",
    "jar",
    "map",
    "pen",
    "ring",
    "rope",
    "spoon",
)
KEY = "key"
# direction out of a room and direction back, as Inform names them
WAYS = (("north", "south"), ("south", "north"), ("east", "west"), ("west", "east"))
HELDOUT_SHARE = 3  # one goal in three is kept for the held-out split
# Part of every cached file's name: raise it when the same `Treasure` would no longer give the same
# game.
GENERATOR_VERSION = 2
COMPILER_CODE = "from envs.textworld.games import main; main()"


@dataclass(frozen=True, kw_only=True, slots=True)
class Treasure:
    """Everything that distinguishes one game from another; two equal treasures are the same
    game.
    """

    rooms: tuple[str, ...]  # in a row: rooms[i] leads to rooms[i + 1]
    ways: tuple[int, ...]  # index into WAYS for each of those steps
    # one piece in each room; that of the target room is the locked chest
    furniture: tuple[str, ...]
    closed: tuple[bool, ...]  # whether that piece, if a container, starts closed
    things: tuple[str, ...]  # of no use
    places: tuple[int, ...]  # the room whose furniture holds each thing
    start: int  # the room the player wakes up in
    source: int  # the room whose furniture holds the key
    target: int  # the room with the chest

    @property
    def goal(self) -> tuple[str, str]:
        return self.furniture[self.target], self.furniture[self.source]

    @property
    def objective(self) -> str:
        return f"Find the {KEY} and open the {self.furniture[self.target]}."

    @property
    def walkthrough(self) -> tuple[str, ...]:
        """A shortest winning line, used to prove that the compiled game can be won."""
        place, chest = self.furniture[self.source], self.furniture[self.target]
        commands = self._walk(self.start, self.source)
        if place in CONTAINERS and self.closed[self.source]:
            commands.append(f"open {place}")
        commands.append(f"take {KEY} from {place}")
        commands += self._walk(self.source, self.target)
        return (*commands, f"unlock {chest} with {KEY}", f"open {chest}")

    @property
    def fingerprint(self) -> str:
        """128 bits of hex over the content and the generator's version; the name of the cached
        file.
        """
        content = json.dumps([GENERATOR_VERSION, asdict(self)], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def _walk(self, here: int, there: int) -> list[str]:
        if here <= there:
            return [f"go {WAYS[way][0]}" for way in self.ways[here:there]]
        return [f"go {WAYS[way][1]}" for way in reversed(self.ways[there:here])]


def goals(split: str) -> frozenset[tuple[str, str]]:
    """The (chest, hiding place) pairs that belong to a split, whatever the number of games and
    their seed.
    """
    pairs = [(chest, place) for chest in CHESTS for place in (*SUPPORTERS, *CONTAINERS)]
    random.Random("treasure goals").shuffle(pairs)
    border = len(pairs) // HELDOUT_SHARE
    return frozenset(pairs[:border] if split == "heldout" else pairs[border:])


def treasures(*, split: str, seed: int, rooms: int, things: int) -> Iterator[tuple[int, Treasure]]:
    """Endless (seed of the game, game) of a split, no game twice; the same arguments always give
    the same sequence.

    Each game has 2 to `rooms` rooms: the small ones are won by chance now and then, and what is
    learned there carries over.
    """
    allowed = goals(split)
    seen: set[Treasure] = set()
    game_seed = seed * 1_000_000  # room for a million games before two base seeds could meet
    while True:
        game_seed += 1
        treasure = _draw(random.Random(f"{split} {game_seed}"), rooms=rooms, things=things)
        if treasure.goal in allowed and treasure not in seen:
            seen.add(treasure)
            yield game_seed, treasure


def _draw(rng: random.Random, *, rooms: int, things: int) -> Treasure:
    rooms = rng.randint(2, rooms)
    # Never straight back: the row of rooms would fold onto itself.
    ways = [rng.randrange(len(WAYS))]
    while len(ways) < rooms - 1:
        step = rng.randrange(len(WAYS))
        if WAYS[step][0] != WAYS[ways[-1]][1]:
            ways.append(step)
    source, target = rng.sample(range(rooms), 2)
    furniture = rng.sample((*SUPPORTERS, *CONTAINERS), rooms)
    furniture[target] = rng.choice(CHESTS)
    # nothing lies in the locked chest
    open_rooms = [room for room in range(rooms) if room != target]
    return Treasure(
        rooms=tuple(rng.sample(ROOMS, rooms)),
        ways=tuple(ways[: rooms - 1]),
        furniture=tuple(furniture),
        closed=tuple(rng.random() < 0.5 for _ in range(rooms)),
        things=tuple(rng.sample(THINGS, things)),
        places=tuple(rng.choice(open_rooms) for _ in range(things)),
        start=rng.randrange(rooms),
        source=source,
        target=target,
    )


def ensure_compiled(games: Sequence[Treasure], *, cache_dir: Path) -> list[Path]:
    """Compile what the cache lacks, one game per process at a time; returns the `.z8` of each game,
    in order.

    Interrupted at any moment it leaves whole games or none, and the next call goes on from there.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    paths = [cache_dir / f"{game.fingerprint}.z8" for game in games]
    missing = {path: game for path, game in zip(paths, games, strict=True) if not path.is_file()}
    if missing:
        print(
            printable(f"making {len(missing)} TextWorld games of {len(paths)}, in {cache_dir}"),
            flush=True,
        )
    compilers = [
        _start_compiler(list(missing.items())[n :: _cores()])
        for n in range(min(len(missing), _cores()))
    ]
    errors = [compiler.communicate()[1] for compiler in compilers]
    failed = [
        error for compiler, error in zip(compilers, errors, strict=True) if compiler.returncode
    ]
    if failed:
        raise RuntimeError(f"compiling a game failed: {failed[0].strip().splitlines()[-1]}")
    return paths


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _start_compiler(games: Sequence[tuple[Path, Treasure]]) -> subprocess.Popen[str]:
    """A process of its own that imports nothing but this file: a fork would carry the caller's
    threads and locks.
    """
    compiler = subprocess.Popen(
        [sys.executable, "-c", COMPILER_CODE],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert compiler.stdin is not None
    compiler.stdin.write(json.dumps([[str(path.resolve()), asdict(game)] for path, game in games]))
    return compiler


def _compile(game: Treasure, path: Path) -> None:
    """Build, compile, win once, then rename into place; the `.z8` goes last because it is what
    marks a whole game.
    """
    from textworld.generator import GameOptions, compile_game

    scratch = path.parent / f"tmp-{path.stem}-{os.getpid()}"
    scratch.mkdir(exist_ok=True)
    try:
        options = GameOptions()
        options.path = str(scratch / "game.z8")
        compile_game(_build(game), options)
        _check_winnable(game, options.path)
        os.replace(scratch / "game.json", path.with_suffix(".json"))
        os.replace(scratch / "game.z8", path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _build(treasure: Treasure):  # type: ignore[no-untyped-def]  # textworld.Game; textworld ships no types
    from textworld import GameMaker
    from textworld.generator import GameOptions
    from textworld.generator.game import Event, Quest

    options = GameOptions()
    # set, or TextWorld draws from its global generator; the texts have no other randomness
    options.seeds = 0
    options.grammar.theme = "basic"  # the shortest sentences TextWorld has
    maker = GameMaker(options)
    rooms = [maker.new_room(name) for name in treasure.rooms]
    for here, there, way in zip(rooms, rooms[1:], treasure.ways, strict=False):
        maker.connect(here.exits[WAYS[way][0]], there.exits[WAYS[way][1]])
    furniture = []
    for room, name, is_closed in zip(rooms, treasure.furniture, treasure.closed, strict=True):
        piece = maker.new(type="s" if name in SUPPORTERS else "c", name=name)
        if name in CONTAINERS:
            piece.add_property("closed" if is_closed else "open")
        room.add(piece)
        furniture.append(piece)
    chest, key = furniture[treasure.target], maker.new(type="k", name=KEY)
    chest.add_property("locked")
    maker.add_fact("match", key, chest)
    furniture[treasure.source].add(key)
    for name, place in zip(treasure.things, treasure.places, strict=True):
        furniture[place].add(maker.new(type="o", name=name))
    maker.set_player(rooms[treasure.start])
    maker.quests = [Quest(win_events=[Event(conditions={maker.new_fact("open", chest)})])]
    game = maker.build()
    game.objective = treasure.objective
    return game


def _check_winnable(treasure: Treasure, z8_path: str) -> None:
    import textworld

    env = textworld.start(z8_path, textworld.EnvInfos(won=True, admissible_commands=True))
    try:
        state = env.reset()
        for command in treasure.walkthrough:
            assert not state.won and command in state.admissible_commands, (treasure, command)
            state, _, _ = env.step(command)
        assert state.won, treasure
    finally:
        env.close()


def main() -> None:
    """Compile the games on standard input: JSON pairs of a file to write and a Treasure's fields."""
    for target, content in json.load(sys.stdin):
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.items()
        }
        _compile(Treasure(**fields), Path(target))
