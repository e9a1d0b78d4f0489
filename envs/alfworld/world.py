"""ALFWorld as an environment.

Options:
    data           folder of games, official or packed; "" generates small ones
    train, heldout official splits to train on and to hold out
    task_types     list of some of the six types; [] for all
    train_games, heldout_games
                   use at most so many; 0 for all
    seed           of generated games
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envs.alfworld.games import OFFICIAL_SPLITS, TASK_TYPES, list_games
from envs.alfworld.generated import list_generated
from envs.base import Observation, Task, Transition
from envs.current_directory import current_directory
from envs.options import OptionsError, check_options, check_split, whole_numbers

if TYPE_CHECKING:
    from envs.alfworld.engine import Engine

UNLISTED = "help"  # not listed to the agent, as upstream; the game still answers it
OBJECTIVE = "Your task is to: "


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    data: str
    train: str
    heldout: str
    task_types: tuple[str, ...]
    train_games: int
    heldout_games: int
    seed: int


class AlfWorldEnv:
    """An observation is the game's text, and is its own anchor.

    Every action is valid, as in the paper. The game answers an unlisted one with "Nothing happens."
    The next command of the game's walkthrough is demonstrated as long as the agent follows it.
    """

    deterministic = True

    def __init__(self, options: Mapping[str, object]) -> None:
        self._data = _parse(options).data
        self._engine: Engine | None = None
        self._objective = ""
        self._walkthrough: tuple[str, ...] = ()  # commands that are left
        self._is_over = True

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        check_split(split)
        parsed = _parse(options)
        official, count = parsed.train, parsed.train_games
        if split == "heldout":
            official, count = parsed.heldout, parsed.heldout_games
        if parsed.data:
            listed = list_games(Path(parsed.data).expanduser(), official)
            games = [(name, kind) for name, kind in listed if kind in parsed.task_types]
            games = games[: count or None]
        else:
            official = f"generated_{split}"
            games = list_generated(split, count, seed=parsed.seed, task_types=parsed.task_types)
        return [
            Task(
                id=f"{official}/{name}",
                env_name="alfworld",
                split=split,
                seed=index,
                data={"split": official, "game": name, "type": kind},
            )
            for index, (name, kind) in enumerate(games)
        ]

    def reset(self, task: Task) -> Observation:
        try:
            # imported here, because the coordinator only lists tasks
            # TextWorld's import reads ./textworld_data, which would be anybody's in /tmp.
            with current_directory(Path(__file__).parent):
                from envs.alfworld.engine import Engine, translated
        except ModuleNotFoundError as error:
            raise ValueError(
                f"environment 'alfworld' needs its planner ({error}): pip install -e '.[alfworld]'"
            ) from error

        game = translated(self._data, task.data["split"], task.data["game"])
        if self._engine is None:
            self._engine = Engine()
        text = self._engine.reset(game)
        self._walkthrough = game.walkthrough
        self._objective = text.partition(OBJECTIVE)[2].strip()
        self._is_over = False
        return self._observation(text)

    def step(self, action: str) -> Transition:
        if self._is_over or self._engine is None:
            raise ValueError("the episode is over: call reset(task) before step")
        action = action.strip()
        text, won = self._engine.step(action)
        self._walkthrough = self._walkthrough[1:] if self._walkthrough[:1] == (action,) else ()
        self._is_over = won
        return Transition(
            observation=self._observation(text),
            reward=float(won),
            terminated=won,
            truncated=False,
            won=won,
        )

    def state_key(self) -> str:
        assert self._engine is not None
        return f"{self._engine.state_key()} {len(self._walkthrough)} {self._is_over}"

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._is_over = True

    def _observation(self, text: str) -> Observation:
        assert self._engine is not None
        listed = tuple(command for command in self._engine.commands if command != UNLISTED)
        demonstrated = self._walkthrough[0] if self._walkthrough else None
        return Observation(
            text=text, objective=self._objective, actions=listed, demonstrated=demonstrated
        )


def _parse(options: Mapping[str, object]) -> _Options:
    check_options("alfworld", options, tuple(_Options.__dataclass_fields__))
    for name in ("train", "heldout"):
        if options[name] not in OFFICIAL_SPLITS:
            raise OptionsError(
                f"alfworld option {name}={options[name]!r} is not one of {list(OFFICIAL_SPLITS)}"
            )
    whole_numbers("alfworld", options, dict.fromkeys(("train_games", "heldout_games", "seed"), 0))
    kinds = options["task_types"]
    if not isinstance(kinds, Sequence) or not set(kinds) <= set(TASK_TYPES):
        raise OptionsError(
            f"alfworld option task_types={kinds!r} must be a list of some of {list(TASK_TYPES)}, "
            "or [] for all"
        )
    if not isinstance(options["data"], str):
        raise OptionsError(
            f"alfworld option data={options['data']!r} must be a folder, or '' for generated games"
        )
    task_types = tuple(kind for kind in TASK_TYPES if not kinds or kind in kinds)
    return _Options(**{**options, "task_types": task_types})  # type: ignore[arg-type]  # checked
