"""Draw TextWorld games from a seed, compile them to `.z8` files, prove them winnable, cache them.

Every game is a "treasure": two or more rooms in a row, one piece of furniture in each, and small
things lying about. One piece hides a key. Another room holds a locked chest, and opening it wins.
A game's content (`Treasure`) is drawn here in microseconds; TextWorld makes a real Inform 7 game of
it. Each pair of chest and hiding place belongs to one split alone, so no held-out game repeats the
content of a training game.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from envs.hosting.child_process import end_with_parent
from printable import printable

ROOMS = (
    "attic", "bedroom", "cellar", "garage", "garden", "hall", "kitchen", "library", "office",
    "porch",
)  # fmt: skip
SUPPORTERS = ("bench", "counter", "desk", "shelf", "stool", "table")
CONTAINERS = ("basket", "box", "crate", "drawer", "trunk")
CHESTS = ("cabinet", "chest", "locker", "safe", "strongbox", "wardrobe")
THINGS = (
    "apple", "ball", "book", "candle", "cup", "hat", "jar", "map", "pen", "ring", "rope",
    "spoon",
)  # fmt: skip
KEY = "key"
# Inform's names of the direction to the next room and of the direction back
WAYS = (("north", "south"), ("south", "north"), ("east", "west"), ("west", "east"))
HELDOUT_SHARE = 3  # one goal in three is kept for the held-out split
# Part of each cached file's name. Raise it when equal treasures would give another game.
GENERATOR_VERSION = 2
SAID_EVERY_S = 30.0  # how many games are made: a game takes about a second
COMPILER_CODE = "from envs.textworld.games import main; main()"


@dataclass(frozen=True, kw_only=True, slots=True)
class Treasure:
    """The content of one game. Equal treasures are the same game."""

    rooms: tuple[str, ...]  # in a row: rooms[i] leads to rooms[i + 1]
    ways: tuple[int, ...]  # index into WAYS for each step along the row
    # one piece in each room; the target room's is the locked chest
    furniture: tuple[str, ...]
    closed: tuple[bool, ...]  # whether each piece, if a container, starts closed
    things: tuple[str, ...]  # useless
    places: tuple[int, ...]  # the room whose furniture holds each thing
    start: int  # the room in which the game begins
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
        """Return a shortest solution, which proves that the compiled game can be won."""
        place, chest = self.furniture[self.source], self.furniture[self.target]
        commands = self._walk(self.start, self.source)
        if place in CONTAINERS and self.closed[self.source]:
            commands.append(f"open {place}")
        commands.append(f"take {KEY} from {place}")
        commands += self._walk(self.source, self.target)
        return (*commands, f"unlock {chest} with {KEY}", f"open {chest}")

    @property
    def fingerprint(self) -> str:
        """Return 128 bits in hex of content and generator version: the cached file's name."""
        content = json.dumps([GENERATOR_VERSION, asdict(self)], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def _walk(self, here: int, there: int) -> list[str]:
        if here <= there:
            return [f"go {WAYS[way][0]}" for way in self.ways[here:there]]
        return [f"go {WAYS[way][1]}" for way in reversed(self.ways[there:here])]


def goals(split: str) -> frozenset[tuple[str, str]]:
    """Return the (chest, hiding place) pairs of a split. They depend on nothing else."""
    pairs = [(chest, place) for chest in CHESTS for place in (*SUPPORTERS, *CONTAINERS)]
    random.Random("treasure goals").shuffle(pairs)
    border = len(pairs) // HELDOUT_SHARE
    return frozenset(pairs[:border] if split == "heldout" else pairs[border:])


def treasures(*, split: str, seed: int, rooms: int, things: int) -> Iterator[tuple[int, Treasure]]:
    """Yield (seed of the game, game) of a split, without end or repetition, reproducibly.

    Each game has 2 to `rooms` rooms. Small games are sometimes won by chance, and the skill carries
    over to large ones.
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
    # never straight back: two rooms would be in the same place
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
    """Compile the games that the cache lacks. Return the `.z8` file of each game, in order.

    If it is interrupted, the cache has complete games only, and the next call continues.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    paths = [cache_dir / f"{game.fingerprint}.z8" for game in games]
    missing = {path: game for path, game in zip(paths, games, strict=True) if not path.is_file()}
    if missing:
        print(
            printable(f"making {len(missing)} TextWorld games of {len(paths)}, in {cache_dir}"),
            flush=True,
        )
    n_cores = len(os.sched_getaffinity(0))
    games_to_compile = list(missing.items())
    compilers = [
        _start_compiler(games_to_compile[n::n_cores]) for n in range(min(len(missing), n_cores))
    ]
    errors = [_ended(compiler, missing) for compiler in compilers]
    failed = [
        error for compiler, error in zip(compilers, errors, strict=True) if compiler.returncode
    ]
    if failed:
        # A killed compiler, for example without memory, has written nothing.
        last_line = (failed[0].strip() or "its process was killed").splitlines()[-1]
        raise RuntimeError(f"compiling a game failed: {last_line}")
    return paths


def _ended(compiler: subprocess.Popen[str], missing: Collection[Path]) -> str:
    """Return the errors of a compiler when it has ended. Say meanwhile how many games are made."""
    while True:
        try:
            return compiler.communicate(timeout=SAID_EVERY_S)[1]
        except subprocess.TimeoutExpired:
            n_made = sum(path.is_file() for path in missing)
            print(printable(f"made {n_made} of {len(missing)} games"), flush=True)


def _start_compiler(games: Sequence[tuple[Path, Treasure]]) -> subprocess.Popen[str]:
    """Start a new process. A fork would copy the caller's threads and locks.

    It reads its games from a file: from a pipe it would begin only when the caller waits for it.
    """
    with tempfile.TemporaryFile("w+") as listed:
        json.dump([[str(path.resolve()), asdict(game)] for path, game in games], listed)
        listed.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", COMPILER_CODE],
            cwd=Path(__file__).resolve().parents[2],
            stdin=listed,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


def _compile(game: Treasure, path: Path) -> None:
    """Build, compile and win a game, then rename its files. The `.z8` marks it as complete."""
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


# Returns a textworld.Game; textworld ships no types.
def _build(treasure: Treasure):  # type: ignore[no-untyped-def]
    from textworld import GameMaker
    from textworld.generator import GameOptions
    from textworld.generator.game import Event, Quest

    options = GameOptions()
    options.kb = _knowledge()
    # fixed, because the texts are TextWorld's only other randomness
    options.seeds = 0
    options.grammar.theme = "basic"  # the shortest sentences TextWorld has
    maker = GameMaker(options)
    rooms = [maker.new_room(name) for name in treasure.rooms]
    for here, there, way in zip(rooms[:-1], rooms[1:], treasure.ways, strict=True):
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


@cache
def _knowledge():  # type: ignore[no-untyped-def]  # a textworld.KnowledgeBase
    """Read TextWorld's rules and grammar once per process: half of the time that a game takes."""
    from textworld.generator import KnowledgeBase

    return KnowledgeBase.load()


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
    """Compile the games on standard input: JSON pairs of a path and a Treasure's fields.

    Without its parent it would go on for minutes, beside the compilers of the next start.
    """
    end_with_parent()
    for target, content in json.load(sys.stdin):
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.items()
        }
        _compile(Treasure(**fields), Path(target))
