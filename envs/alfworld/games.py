"""Read games from the official data directory or from packed files, without an engine.

    official  json_2.1.1/SPLIT/TASK/TRIAL/game.tw-pddl, as `alfworld-download` writes it
    packed    SPLIT.jsonl.xz with a game a line, beside one domain.pddl and one grammar.twl2

An official file has its own copy of domain and grammar. A game is named `TASK/TRIAL` in both forms,
and both list the same games in the same order.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
OFFICIAL_SPLITS = ("train", "valid_seen", "valid_unseen", "valid_train")
TASK_MARK = "@TASK@"  # replaces the task's sentence in a grammar, so that games share grammars
OFFICIAL_NAME = re.compile(r"(?!\.)[^/\x00]+/(?!\.)[^/\x00]+")  # no absolute path, and no `..`
TASK_SENTENCE = re.compile(r'(?<="rhs": ")Your task is to: [^"]*(?=")')


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """The parts of a game that the engine needs."""

    domain: str  # PDDL
    grammar: str  # TextWorld's twl2, with TASK_MARK where the task's sentence goes
    problem: str  # PDDL
    task: str  # "Your task is to: ..."
    walkthrough: tuple[str, ...]  # commands that win it


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedGame:
    type: str
    task: str
    walkthrough: tuple[str, ...]
    problem: bytes  # deflated: the training split has 25 MB instead of 200 MB


def list_games(data: Path, split: str) -> list[tuple[str, str]]:
    """Return (name, task type) of a split's solvable games, in a fixed order that mixes the types.

    Raises ValueError if the split is not there.
    """
    packed, folder = _locate(data, split)
    if packed.is_file():
        found = [(name, row.type) for name, row in _read_packed(packed).items()]
    else:
        found = []
        for path in folder.glob("*/*/game.tw-pddl"):
            if _is_playable(_inside(data, path)):
                name = path.parent.relative_to(folder).as_posix()
                found.append((name, name.partition("-")[0]))
    if not found:
        raise ValueError(f"alfworld: no solvable game in {folder}; unpack the data again")
    return sorted(found, key=_digest_of_name)


def _digest_of_name(game: tuple[str, str]) -> bytes:
    """Return a sort key that mixes the types and does not depend on how games are stored."""
    return hashlib.blake2b(game[0].encode(), digest_size=16).digest()


def read_game(data: Path, split: str, name: str) -> Game:
    """Read one game. Raises ValueError if there is no such game."""
    packed, folder = _locate(data, split)
    if packed.is_file():
        row = _read_packed(packed).get(name)
        if row is None:
            raise ValueError(
                f"alfworld: {packed} has no game {name!r}; it is not the file that the tasks were "
                "listed from"
            )
        return Game(
            domain=_read_text(_inside(data, data / "domain.pddl")),
            grammar=_read_text(_inside(data, data / "grammar.twl2")),
            problem=zlib.decompress(row.problem).decode(),
            task=row.task,
            walkthrough=row.walkthrough,
        )
    if not OFFICIAL_NAME.fullmatch(name):
        raise ValueError(
            f"alfworld: {name!r} is no game of {folder}; its games are named TASK/TRIAL"
        )
    path = _inside(data, folder / name / "game.tw-pddl")
    if not path.is_file():
        raise ValueError(
            f"alfworld: {path} is not there; env.options.data is not the folder that the tasks "
            "were listed from"
        )
    content = json.loads(path.read_text())
    sentence = TASK_SENTENCE.search(content["grammar"])
    if sentence is None:
        raise ValueError(
            f"alfworld: the grammar of {path} has no 'Your task is to: ...'; unpack the data again"
        )
    return Game(
        domain=content["pddl_domain"],
        grammar=content["grammar"].replace(sentence[0], TASK_MARK),
        problem=content["pddl_problem"],
        task=sentence[0],
        walkthrough=tuple(content["walkthrough"]),
    )


def _locate(data: Path, split: str) -> tuple[Path, Path]:
    """Return the split's packed file and its folder. Raises ValueError if neither is there."""
    if split not in OFFICIAL_SPLITS:
        raise ValueError(f"alfworld: {split!r} is none of the splits {', '.join(OFFICIAL_SPLITS)}")
    packed = _inside(data, data / f"{split}.jsonl.xz")
    folder = data / "json_2.1.1" / split
    if not folder.is_dir() and (data / split).is_dir():
        folder = data / split
    if not packed.is_file() and not folder.is_dir():
        raise ValueError(
            f"alfworld option data={str(data)!r}: neither {folder} nor {packed} is there; fetch "
            f"the games with `alfworld-download --data-dir {data}`, or leave data empty to play "
            "small games made on the spot"
        )
    return packed, folder


def _inside(data: Path, path: Path) -> Path:
    """Return the path. Raises ValueError if it leads out of the folder, for example by a link."""
    if not path.resolve().is_relative_to(data.resolve()):
        raise ValueError(
            f"alfworld: {path} leads out of {data}; put the file itself there, or name the other "
            "folder as data"
        )
    return path


def _is_playable(path: Path) -> bool:
    """Return whether a game is marked as solvable and has no sliced or movable things."""
    if "movable" in str(path) or "Sliced" in str(path) or not path.is_file():  # a FIFO would block
        return False
    return bool(json.loads(path.read_text()).get("solvable"))


@lru_cache(maxsize=len(OFFICIAL_SPLITS))
def _read_packed(path: Path) -> dict[str, _PackedGame]:
    rows: dict[str, _PackedGame] = {}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            rows[row["id"]] = _PackedGame(
                type=row["type"],
                task=row["task"],
                walkthrough=tuple(row["walkthrough"]),
                problem=zlib.compress(row["problem"].encode(), level=1),
            )
    return rows


@lru_cache(maxsize=8)
def _read_text(path: Path) -> str:
    return path.read_text()
