"""TextWorld as an environment: Inform 7 games, made on the first call, on TextWorld's own engine.

The agent reads the game's text without banner and status line, and chooses among the commands that
TextWorld lists. Any other command is not sent to the game: it is invalid and changes nothing.

Options: `cache_dir` (folder of games), `seed` (of the games), `train_games`, `heldout_games`,
`rooms` (at most so many per game), `things` (useless things lying about).
"""

from __future__ import annotations

import logging
import pickle
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import islice, starmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from envs.base import KeptAnswers, Observation, Task, Transition
from envs.current_directory import current_directory
from envs.options import OptionsError, check_options, check_split, whole_numbers
from envs.textworld.games import ROOMS, ensure_compiled, treasures

# No game needs these commands, and they would double the length of each prompt. They still work.
UNLISTED_VERBS = ("close", "drop", "examine", "inventory", "look")
NOTHING_HAPPENS = "Nothing happens."
# TextWorld ends each reply with a prompt and a status line, `>     -= Attic =-0/3`.
STATUS_LINE = re.compile(r"^>\s*-=\s*(?P<room>.+?)\s*=-[-\d/]*\s*\Z", re.MULTILINE)
ROOM_TITLE = re.compile(r"-=\s*.+?\s*=-")
GAME_NAME = re.compile(r"[0-9a-f]{32}\.z8")
WIN_NOTICE = "*** The End ***"
# The Z-machine's table of objects: where its address stands, and what precedes its first object.
OBJECTS_ADDRESS, DEFAULTS_BYTES = 10, 126
OBJECT_BYTES = 14
TREE = slice(6, 12)  # of an object: parent, sibling and child
PROPERTIES = slice(12, 14)  # of an object: the address of its properties, which follow the table


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    cache_dir: Path
    seed: int
    train_games: int
    heldout_games: int
    rooms: int
    things: int


class TextWorldEnv:
    """Play one game at a time. An open game is kept, so a group loads it once per process."""

    makes_tasks = True
    deterministic = True

    def __init__(self, options: Mapping[str, object]) -> None:
        self._cache_dir = _parse(options).cache_dir
        self._game = None
        self._game_path = ""
        self._story: NDArray[np.uint8]  # of the game's file, with which the memory begins
        self._is_over = True
        self._objective = ""
        self._room = ""
        self._commands: tuple[str, ...] = ()
        # valid actions of the open game, by its facts; both are TextWorld's objects
        self._valid_actions: dict[frozenset[object], list[object]] = {}

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        check_split(split)
        parsed = _parse(options)
        counts = {"train": parsed.train_games, "heldout": parsed.heldout_games}
        drawn = treasures(split=split, seed=parsed.seed, rooms=parsed.rooms, things=parsed.things)
        games = list(islice(drawn, counts[split]))
        paths = ensure_compiled([game for _, game in games], cache_dir=parsed.cache_dir)
        return [
            Task(
                id=f"treasure-{split}-{seed}-r{parsed.rooms}t{parsed.things}",
                env_name="textworld",
                split=split,
                seed=seed,
                data={"game_path": str(path.resolve()), "objective": game.objective},
            )
            for (seed, game), path in zip(games, paths, strict=True)
        ]

    def reset(self, task: Task) -> Observation:
        self._open(task)
        assert self._game is not None
        state = self._game.reset()
        self._remember_actions()
        self._is_over = False
        return self._observe(state)

    def step(self, action: str) -> Transition:
        if self._is_over or self._game is None:
            raise ValueError("the episode is over: call reset(task) before step")
        if action not in self._commands:
            return _transition(self._observation(NOTHING_HAPPENS), valid=False)
        state, _, _ = self._game.step(action)
        self._is_over = bool(state.won)
        return _transition(self._observe(state), won=self._is_over)

    def understood(self) -> tuple[Sequence[str], Transition]:
        """Return the actions that are sent to the game, and the answer to all others."""
        return self._commands, _transition(self._observation(NOTHING_HAPPENS), valid=False)

    def state_key(self) -> bytes:
        """Return the room, the facts, and the order in which things lie about.

        Facts alone are too little: a game lists first what was put down last.
        """
        assert self._game is not None
        facts = sorted(map(str, _progression(self._game).state.facts))
        told = f"{self._room} {self._is_over} {facts}".encode()
        return told + _object_tree(_interpreter(self._game).get_state()[0])

    def save_state(self) -> bytes:
        """Return all that `restore_state` needs: some 2 KB, as most memory is as in the file."""
        assert self._game is not None
        ram, *registers = _interpreter(self._game).get_state()
        places = np.flatnonzero(ram != self._story[: ram.size])
        changed = (places.astype(np.uint32).tobytes(), ram[places].tobytes())
        own = (self._room, self._commands, self._is_over)
        saved = (changed, registers, _named_facts(_progression(self._game)), own)
        return zlib.compress(pickle.dumps(saved), level=1)

    def restore_state(self, task: Task, saved: bytes) -> None:
        """Go on where `save_state` was called, in this process or in another one."""
        is_new = self._open(task)
        assert self._game is not None
        if is_new:
            self._game.reset()  # makes the objects that are changed below
        (places, values), registers, facts, own = pickle.loads(zlib.decompress(saved))
        ram = self._story[: _interpreter(self._game).frotz_lib.getRAMSize()].copy()
        ram[np.frombuffer(places, np.uint32)] = np.frombuffer(values, np.uint8)
        _interpreter(self._game).set_state((ram, *registers))
        self._set_facts(facts)
        self._room, self._commands, self._is_over = own

    @classmethod
    def kept_answers(cls, options: Mapping[str, object], task: Task) -> KeptAnswers:
        """Keep the answers beside the games. The game's files and its engine decide them."""
        path = Path(_game_file(_parse(options).cache_dir, task))
        story, facts = path.read_bytes(), path.with_suffix(".json").read_bytes()
        decided_by: tuple[str | bytes, ...] = (task.data["objective"], story, facts)
        return KeptAnswers(
            folder=path.parent / "answers", decided_by=(*_engine_versions(), *decided_by)
        )

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
        self._game = None
        self._game_path = ""
        self._is_over = True

    def _open(self, task: Task) -> bool:
        """Open the task's game unless it is open. Return whether it had to be opened."""
        self._objective = task.data["objective"]
        path = _game_file(self._cache_dir, task)
        if path == self._game_path:
            return False
        self.close()
        self._game = _open_game(path)
        self._game_path = path
        self._story = np.fromfile(path, np.uint8)
        self._valid_actions = {}
        return True

    def _remember_actions(self) -> None:
        """Have the game find the valid actions of equal facts once, which is a third of a step."""
        assert self._game is not None
        state, known = _progression(self._game).state, self._valid_actions
        find = state.all_applicable_actions

        def remembered(*given: object) -> list[object]:
            facts = frozenset(state.facts)
            if facts not in known:
                known[facts] = list(find(*given))
            return known[facts]

        state.all_applicable_actions = remembered

    def _set_facts(self, named: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> None:
        """Set the facts from the names in them, and the actions that are valid then."""
        from textworld.logic import Proposition, State, Variable

        progression = _progression(self._game)
        kb = progression.game.kb
        facts = [Proposition(name, list(starmap(Variable, variables))) for name, variables in named]
        progression.state = State(kb.logic, facts)
        self._remember_actions()
        progression._valid_actions = list(
            progression.state.all_applicable_actions(kb.rules.values(), kb.types.constants_mapping)
        )

    # `state` is a textworld.GameState; textworld ships no types.
    def _observe(self, state) -> Observation:  # type: ignore[no-untyped-def]
        status = STATUS_LINE.search(state.feedback)
        if status is not None:
            self._room = status["room"]
        self._commands = tuple(state.admissible_commands)
        return self._observation(_shorten(state.feedback))

    def _observation(self, text: str) -> Observation:
        listed = tuple(
            command for command in self._commands if command.split()[0] not in UNLISTED_VERBS
        )
        # Room and commands identify the state. The last reply does not: it depends on the way in.
        anchor = f"{self._room}: {', '.join(listed)}"
        return Observation(text=text, objective=self._objective, anchor=anchor, actions=listed)


@cache
def _engine_versions() -> tuple[str, ...]:
    return version("textworld"), version("jericho")


def _transition(observation: Observation, *, won: bool = False, valid: bool = True) -> Transition:
    return Transition(
        observation=observation,
        reward=1.0 if won else 0.0,
        terminated=won,
        truncated=False,  # the step limit is the runner's
        won=won,
        valid=valid,
    )


def _interpreter(game):  # type: ignore[no-untyped-def]  # jericho.FrotzEnv; no types there
    return game.unwrapped._jericho


def _progression(game):  # type: ignore[no-untyped-def]  # TextWorld's GameProgression
    return game._wrapped_env._game_progression


# TextWorld's own records hold hashes that differ from process to process.
def _named_facts(progression):  # type: ignore[no-untyped-def]
    """Return name and variables (name, type) of each fact."""

    def variables_of(fact):  # type: ignore[no-untyped-def]
        return [(variable.name, variable.type) for variable in fact.arguments]

    return [(fact.name, variables_of(fact)) for fact in progression.state.facts]


def _object_tree(ram: NDArray[np.uint8]) -> bytes:
    """Return parent, sibling and child of every object in the Z-machine's memory."""
    begin = int.from_bytes(ram[OBJECTS_ADDRESS : OBJECTS_ADDRESS + 2].tobytes()) + DEFAULTS_BYTES
    first = ram[begin : begin + OBJECT_BYTES]
    end = int.from_bytes(first[PROPERTIES].tobytes())
    return ram[begin:end].reshape(-1, OBJECT_BYTES)[:, TREE].tobytes()


def _game_file(cache_dir: Path, task: Task) -> str:
    """Return the path of the task's game in the folder of games. Raises ValueError for any other.

    Only the file's name is taken from the task: a game is code for TextWorld's interpreter. The
    folder may have been moved.
    """
    path = cache_dir.resolve() / Path(task.data["game_path"]).name
    # TextWorld reads the .json file beside the game, too.
    is_link = any(file.is_symlink() for file in (path, path.with_suffix(".json")))
    if not GAME_NAME.fullmatch(path.name) or is_link:
        raise ValueError(
            f"{path} is no game of {cache_dir}; ask for the tasks again, which makes it anew"
        )
    return str(path)


def _shorten(feedback: str) -> str:
    """Return the game's text on one line, without banner, title, status line and end notice."""
    text = STATUS_LINE.sub("", feedback).split(WIN_NOTICE)[0]
    # Banner and objective of the first reply stand before the room's title.
    title = ROOM_TITLE.search(text)
    if title is not None:
        text = text[title.end() :]
    return " ".join(text.split())


def _open_game(path: str):  # type: ignore[no-untyped-def]  # textworld.Environment; no types there
    # Imported here: it takes 0.7 s, and the coordinator only lists tasks. Its import reads
    # ./textworld_data, which would be anybody's in /tmp.
    with current_directory(Path(__file__).parent):
        import textworld

    logging.getLogger("textworld").setLevel(logging.WARNING)
    if not Path(path).is_file():
        raise ValueError(
            f"game file {path!r} is not there; ask for the tasks again, which makes it anew"
        )
    with warnings.catch_warnings():
        # the interpreter warns that it does not know this new game
        warnings.simplefilter("ignore")
        return textworld.start(path, textworld.EnvInfos(won=True, admissible_commands=True))


def _parse(options: Mapping[str, object]) -> _Options:
    # least values
    numbers = {"seed": 0, "train_games": 1, "heldout_games": 1, "rooms": 2, "things": 1}
    check_options("textworld", options, ("cache_dir", *numbers))
    values = whole_numbers("textworld", options, numbers)
    if values["rooms"] > len(ROOMS):
        raise OptionsError(f"textworld option rooms={values['rooms']} must be at most {len(ROOMS)}")
    return _Options(cache_dir=Path(str(options["cache_dir"])), **values)
