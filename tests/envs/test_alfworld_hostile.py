"""ALFWorld's files by a stranger: nothing in them is run, and no file outside of their folder is
read.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.alfworld.expressions import parse_expression
from envs.alfworld.games import list_games, read_game

MUG = SimpleNamespace(
    id="mug_1",
    type="object",
    name="mug 1",
    noun=None,
    adj=None,
    definite="the",
    indefinite="a",
    desc=None,
)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("o.name", "mug 1"),
        (" o.indefinite + ' ' + o.name ", "a mug 1"),
        ("o.noun or o.id", "mug_1"),
        ("o.name or o.id", "mug 1"),
        ("o.noun or o.adj", None),
        ("o", MUG),
        ("'a' + ('b' + \"c\")", "abc"),
    ],
)
def test_what_the_grammar_is_written_with_is_read_as_python_reads_it(
    expression: str, said: object
) -> None:
    assert parse_expression(expression)({"o": MUG}) == said == eval(expression.strip(), {"o": MUG})


HOSTILE = [
    "__import__('os').system('touch FILE')",
    "open('FILE', 'w')",
    "(lambda: open('FILE', 'w'))()",
    "o.__class__.__base__.__subclasses__()",
    "().__class__.__mro__[1].__subclasses__()",
    "o.__class__",
    "o.name.format(o)",
    "f'{o.__class__}'",
    "'%s' % o",
    "[open('FILE', 'w') for _ in 'a']",
    "(x := open('FILE', 'w'))",
    "'a' * 10**9",
    "9 ** 9 ** 9",
    "o.synonyms",
    "o.name if o else o",
    "await o",
    "o.name; o.name",
    "",
    "(" * 199,
    "o + " * 5000 + "o",
    "\x00",
]


@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_else_is_read_and_nothing_is_run(expression: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="alfworld: the grammar's expression"):
        parse_expression(expression.replace("FILE", str(tmp_path / "it-was-run")))({"o": MUG})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("expression", ["p.name", "o.name + o", "o.noun + o.name"])
def test_what_cannot_be_said_is_named(expression: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(expression))):
        parse_expression(expression)({"o": MUG})


GAME = {
    "solvable": True,
    "pddl_domain": "",
    "pddl_problem": "",
    "grammar": '"rhs": "Your task is to: rest."',
    "walkthrough": [],
}
NAME = "pick_and_place_simple-A/trial"


def write_game(folder: Path) -> Path:
    folder.mkdir(parents=True)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(GAME))
    return path


def test_a_game_is_read_beneath_the_folder_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_game(data / "train" / NAME)
    write_game(tmp_path / "secret" / "trial")
    assert list_games(data, "train") == [(NAME, "pick_and_place_simple")]
    assert read_game(data, "train", NAME).task == "Your task is to: rest."
    secret = tmp_path / "secret" / "trial"
    for name in (
        "../../secret/trial",
        f"{NAME}/../../../../secret/trial",
        str(secret),
        "../..",
        "a/..",
        "a/b/c",
        "",
        "a\x00/b",
    ):
        with pytest.raises(ValueError, match="is no game of .*; its games are named TASK/TRIAL"):
            read_game(data, "train", name)
    for split in ("../secret", str(tmp_path), "train/.."):
        with pytest.raises(ValueError, match="is none of the splits"):
            read_game(data, split, NAME)


@pytest.mark.parametrize("link", ["game.tw-pddl", "..", "../.."], ids=["file", "task", "split"])
def test_a_link_out_of_the_folder_is_not_followed(link: str, tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    write_game(elsewhere / "train" / NAME)
    path = Path(os.path.normpath(data / "train" / NAME / link))
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere / path.relative_to(data))
    for read in (lambda: read_game(data, "train", NAME), lambda: list_games(data, "train")):
        with pytest.raises(ValueError, match="leads out of .*; put the file itself there"):
            read()


def test_a_game_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    """Reading it waited for ever."""
    data = tmp_path / "data"
    write_game(data / "train" / NAME)
    (data / "train" / "pick_and_place_simple-B" / "trial").mkdir(parents=True)
    os.mkfifo(data / "train" / "pick_and_place_simple-B" / "trial" / "game.tw-pddl")
    assert list_games(data, "train") == [(NAME, "pick_and_place_simple")]


def test_rules_of_packed_games_are_no_links_out(tmp_path: Path) -> None:
    import lzma

    (tmp_path / "data").mkdir()
    row = {
        "id": NAME,
        "type": "pick_and_place_simple",
        "task": "",
        "walkthrough": [],
        "problem": "",
    }
    with lzma.open(tmp_path / "data" / "train.jsonl.xz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    (tmp_path / "secret").write_text("the password")
    for name in ("domain.pddl", "grammar.twl2"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="domain.pddl leads out of"):
        read_game(tmp_path / "data", "train", NAME)


def test_a_folder_that_is_itself_a_link_is_read(tmp_path: Path) -> None:
    write_game(tmp_path / "data" / "json_2.1.1" / "train" / NAME)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert list_games(tmp_path / "link", "train") == [(NAME, "pick_and_place_simple")]
    assert read_game(tmp_path / "link", "train", NAME).task == "Your task is to: rest."
