"""Where games come from: the official data directory, the packed form of it, or `generated.py`. All
read without an engine.

Official: `json_2.1.1/SPLIT/TASK/TRIAL/game.tw-pddl`, as `alfworld-download` makes it, each file
with its own copy of the domain and of the grammar. Packed: `SPLIT.jsonl.xz`, a game a line, beside
one `domain.pddl` and one `grammar.twl2`. A game's name is `TASK/TRIAL` in both, and both list the
same games in the same order.
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
TASK_MARK = "@TASK@"  # stands for the task's sentence in a grammar, so that all games have one
OFFICIAL_NAME = re.compile(r"(?!\.)[^/\x00]+/(?!\.)[^/\x00]+")  # no absolute path, and no `..`
TASK_SENTENCE = re.compile(r'(?<="rhs": ")Your task is to: [^"]*(?=")')


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """All that the engine needs to play it."""

    domain: str  # PDDL
    grammar: str  # TextWorld's twl2, with TASK_MARK where the task's sentence goes
    problem: str  # PDDL
    task: str  # "Your task is to: ..."
    walkthrough: tuple[str, ...]  # commands that win it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    type: str
    task: str
    walkthrough: tuple[str, ...]
    problem: bytes  # deflated: 200 MB as text for the whole training split, 25 MB so


def list_games(data: Path, split: str) -> list[tuple[str, str]]:
    """(name, task type) of all solvable games of a split, in an order that is fixed and mixes the
    types.

    Raises ValueError if the split is not there.
    """
    packed, folder = _places(data, split)
    if packed.is_file():
        found = [(name, row.type) for name, row in _read_packed(packed).items()]
    else:
        paths = [
            path for path in folder.glob("*/*/game.tw-pddl") if _is_playable(_inside(data, path))
        ]
        found = [
            (path.parent.relative_to(folder).as_posix(), path.parts[-3].partition("-")[0])
            for path in paths
        ]
    if not found:
        raise ValueError(f"alfworld: no solvable game in {folder}; unpack the data again")
    # By digest of the name: the first games of a split are then of all types, whichever way the
    # files are kept.
    return sorted(
        found, key=lambda game: hashlib.blake2b(game[0].encode(), digest_size=16).digest()
    )


def read_game(data: Path, split: str, name: str) -> Game:
    """Raises ValueError if there is no such game."""
    packed, folder = _places(data, split)
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


def _places(data: Path, split: str) -> tuple[Path, Path]:
    """The split's packed file and its folder, one of which is there; ValueError if neither is."""
    if split not in OFFICIAL_SPLITS:
        raise ValueError(f"alfworld: {split!r} is none of the splits {', '.join(OFFICIAL_SPLITS)}")
    packed, folders = (
        _inside(data, data / f"{split}.jsonl.xz"),
        [data / "json_2.1.1" / split, data / split],
    )
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    if not packed.is_file() and not folder.is_dir():
        raise ValueError(
            f"alfworld option data={str(data)!r}: neither {folder} nor {packed} is there; fetch "
            "the games with "
            f"`alfworld-download --data-dir {data}`, or leave data empty to play small games made "
            "on the spot"
        )
    return packed, folder


def _inside(data: Path, path: Path) -> Path:
    """Return the path of a game file. Raises ValueError if it leads out of the folder of games, by
    a link for example.
    """
    if not path.resolve().is_relative_to(data.resolve()):
        raise ValueError(
            f"alfworld: {path} leads out of {data}; put the file itself there, or name the other "
            "folder as data"
        )
    return path


def _is_playable(path: Path) -> bool:
    """Upstream's rule: marked as solvable, and nothing sliced or movable in it."""
    if "movable" in str(path) or "Sliced" in str(path):
        return False
    return bool(json.loads(path.read_text()).get("solvable"))


@lru_cache(maxsize=len(OFFICIAL_SPLITS))
def _read_packed(path: Path) -> dict[str, _Packed]:
    rows: dict[str, _Packed] = {}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            rows[row["id"]] = _Packed(
                type=row["type"],
                task=row["task"],
                walkthrough=tuple(row["walkthrough"]),
                problem=zlib.compress(row["problem"].encode(), level=1),
            )
    return rows


@lru_cache(maxsize=8)
def _read_text(path: Path) -> str:
    return path.read_text()
