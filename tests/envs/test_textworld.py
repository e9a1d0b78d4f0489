"""TextWorld on the real engine: three small games, compiled once for the module."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest

from envs import Task, environment_class
from envs.textworld.games import Treasure, ensure_compiled, goals, treasures
from envs.textworld.world import _shorten
from tests.support.cached_play import play_and_compare

ROOT = Path(__file__).resolve().parents[2]

TextWorld = environment_class("textworld")


def make_options(cache_dir: Path) -> dict[str, object]:
    return {
        "cache_dir": str(cache_dir),
        "seed": 0,
        "train_games": 2,
        "heldout_games": 1,
        "rooms": 2,
        "things": 2,
    }


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    return make_options(tmp_path_factory.mktemp("games"))


@pytest.fixture(scope="module")
def train(options: Mapping[str, object]) -> Sequence[Task]:
    argv, python_state, numpy_state = (
        list(sys.argv),
        random.getstate(),
        np.random.get_state()[1].copy(),
    )
    tasks = TextWorld.tasks("train", options)
    # A world must not touch what belongs to the whole process.
    assert sys.argv == argv and random.getstate() == python_state
    assert (np.random.get_state()[1] == numpy_state).all()
    return tasks


def drawn(split: str, count: int) -> list[Treasure]:
    return [game for _, game in islice(treasures(split=split, seed=0, rooms=3, things=3), count)]


def test_the_walkthrough_wins_on_the_engine_and_only_the_last_step_pays(
    options: Mapping[str, object], train: Sequence[Task]
) -> None:
    env = TextWorld(options)
    games = [game for _, game in islice(treasures(split="train", seed=0, rooms=2, things=2), 2)]
    for task, game in zip(train, games, strict=True):
        assert task.data["objective"] == game.objective
        first = env.reset(task)
        assert first.objective == game.objective and first.text.startswith(
            f"You are in the {game.rooms[game.start]}."
        )
        seen = [env.step(command) for command in game.walkthrough]
        assert [t.won for t in seen] == [False] * (len(seen) - 1) + [True]
        assert [t.reward for t in seen] == [float(t.won) for t in seen]
        assert seen[-1].terminated and not seen[-1].truncated and all(t.valid for t in seen)
        with pytest.raises(ValueError, match="the episode is over"):
            env.step("look")
    env.close()


def test_text_is_short_and_clean_and_a_wrong_command_changes_nothing(
    options: Mapping[str, object], train: Sequence[Task]
) -> None:
    env = TextWorld(options)
    first = env.reset(train[0])
    assert not {"-=", "=-", ">", "$", "\n"} & set(first.text) and len(first.text) < 200
    assert first.actions and not any(
        a.startswith(("examine", "look", "inventory")) for a in first.actions
    )
    for nonsense in ("", "fly", "go", "take everything", first.actions[0].upper()):
        transition = env.step(nonsense)
        assert not transition.valid and transition.observation.text == "Nothing happens."
        assert (transition.observation.anchor, transition.observation.actions) == (
            first.anchor,
            first.actions,
        )
    looked = env.step("look")  # not listed, yet understood
    assert (
        looked.valid
        and looked.observation.anchor == first.anchor
        and looked.observation.text == first.text
    )
    assert not looked.terminated and not looked.won
    env.close()


def test_coming_back_to_a_place_gives_the_same_anchor_and_taking_a_thing_another(
    options: Mapping[str, object], train: Sequence[Task]
) -> None:
    env = TextWorld(options)
    first = env.reset(train[0])
    assert first.actions
    out = next(a for a in first.actions if a.startswith("go "))
    there = env.step(out).observation
    assert there.actions
    back = env.step(next(a for a in there.actions if a.startswith("go "))).observation
    assert first.anchor == back.anchor != there.anchor
    assert env.reset(train[0]) == first
    env.close()


def test_a_cached_game_is_not_made_again_and_a_missing_half_is_mended(tmp_path: Path) -> None:
    options = make_options(tmp_path / "cache") | {"train_games": 1}
    tasks = TextWorld.tasks("train", options)
    path = Path(tasks[0].data["game_path"])
    made_at = path.stat().st_mtime_ns
    assert TextWorld.tasks("train", options) == tasks
    assert path.stat().st_mtime_ns == made_at
    assert sorted(p.name for p in path.parent.iterdir()) == [
        path.with_suffix(".json").name,
        path.name,
    ]
    # as after a kill between the two renames: without the .z8 the game does not count as made
    path.unlink()
    assert TextWorld.tasks("train", options) == tasks and path.is_file()


def test_all_compilers_work_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each compiler reads its games to the end and then waits for the other one to have done so.
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    waits = f"""
import json, os, pathlib, sys, time
json.load(sys.stdin)
pathlib.Path({str(meeting)!r}, str(os.getpid())).touch()
deadline_s = time.monotonic() + 60
while len(os.listdir({str(meeting)!r})) < 2:
    assert time.monotonic() < deadline_s, "the other compiler never began"
    time.sleep(0.05)
"""
    monkeypatch.setattr("envs.textworld.games.COMPILER_CODE", waits)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    games = [game for _, game in islice(treasures(split="train", seed=0, rooms=3, things=1), 4)]
    ensure_compiled(games, cache_dir=tmp_path / "games")
    assert len(list(meeting.iterdir())) == 2


def test_how_many_games_are_made_is_said_while_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, said = tmp_path / "go on", []
    makes = f"""
import json, pathlib, sys, time
(first, _), *others = json.load(sys.stdin)
pathlib.Path(first).touch()
deadline_s = time.monotonic() + 60
while not pathlib.Path({str(go_on)!r}).exists():
    assert time.monotonic() < deadline_s, "nothing was said"
    time.sleep(0.05)
for path, _ in others: pathlib.Path(path).touch()
"""

    def say(line: str, *, flush: bool) -> None:
        said.append(line)
        if line == "made 1 of 3 games":
            go_on.touch()

    monkeypatch.setattr("envs.textworld.games.COMPILER_CODE", makes)
    monkeypatch.setattr("envs.textworld.games.SAID_EVERY_S", 0.05)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr("builtins.print", say)
    games = [game for _, game in islice(treasures(split="train", seed=0, rooms=3, things=1), 3)]
    ensure_compiled(games, cache_dir=tmp_path / "games")
    assert "made 1 of 3 games" in said


def test_a_compiler_that_is_killed_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr("envs.textworld.games.COMPILER_CODE", killed)
    (_, game), *_ = islice(treasures(split="train", seed=0, rooms=3, things=1), 1)
    with pytest.raises(RuntimeError, match="compiling a game failed: its process was killed"):
        ensure_compiled([game], cache_dir=tmp_path / "games")


def test_compilers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    # so many games take minutes
    makes = f"""
from envs.textworld.world import TextWorldEnv
numbers = {{"seed": 0, "train_games": 500, "heldout_games": 1, "rooms": 3, "things": 1}}
TextWorldEnv.tasks("train", {{"cache_dir": {str(tmp_path)!r}, **numbers}})
"""
    maker = subprocess.Popen([sys.executable, "-c", makes], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not list(tmp_path.glob("tmp-*")):  # a compiler has read its games and begun
            assert maker.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        compilers = psutil.Process(maker.pid).children()
        assert compilers
    finally:
        maker.kill()
        maker.wait()
    ended, left = psutil.wait_procs(compilers, timeout=30)
    for compiler in left:
        compiler.kill()
    assert not left and len(ended) == len(compilers)


def test_a_larger_split_begins_with_the_smaller_one_and_the_splits_share_no_goal() -> None:
    assert drawn("train", 60)[:20] == drawn("train", 20)
    train, heldout = drawn("train", 100), drawn("heldout", 40)
    assert len(set(train)) == 100 and len({game.fingerprint for game in (*train, *heldout)}) == 140
    # recomputed from the games, not read from the partition that made them
    goals_of = [{game.goal for game in games} for games in (train, heldout)]
    assert not goals_of[0] & goals_of[1]
    assert not goals("train") & goals("heldout")


def test_every_drawn_game_has_the_work_to_do_before_it() -> None:
    for game in drawn("train", 200):
        assert game.source != game.target and game.target not in game.places
        chest, place = game.goal
        assert len(game.walkthrough) >= 4 and game.walkthrough[-2:] == (
            f"unlock {chest} with key",
            f"open {chest}",
        )
        assert f"take key from {place}" in game.walkthrough


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"max_steps": 3}, "unknown: max_steps"),
        ({"rooms": 1}, "rooms=1 must be a whole number, at least 2"),
        ({"rooms": 99}, "rooms=99 must be at most 10"),
        ({"train_games": "ten"}, "train_games='ten' must be a whole number"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TextWorld.tasks("train", make_options(tmp_path) | change)


def test_an_unknown_split_and_a_lost_game_file_are_named(options: Mapping[str, object]) -> None:
    with pytest.raises(ValueError, match="split 'test' is not one of"):
        TextWorld.tasks("test", options)
    with pytest.raises(ValueError, match=r"0\.z8' is not there"):
        TextWorld(options).reset(task_of(f"/no/{'0' * 32}.z8"))


def task_of(game_path: str) -> Task:
    return Task(
        id="x",
        env_name="textworld",
        split="train",
        seed=1,
        data={"game_path": game_path, "objective": ""},
    )


def test_a_task_names_no_game_elsewhere(tmp_path: Path) -> None:
    """A game is code for its interpreter. The attack: a task of a stranger names a file of another
    folder.
    """
    env = TextWorld(make_options(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    elsewhere = tmp_path / f"{'0' * 32}.z8"
    elsewhere.write_bytes(b"")
    with pytest.raises(ValueError, match="is not there"):
        env.reset(task_of(str(elsewhere)))
    for path in ("/etc/passwd", str(tmp_path / "x.z8"), "..", "", f"{'0' * 32}.json"):
        with pytest.raises(ValueError, match="is no game of .*; ask for the tasks again"):
            env.reset(task_of(path))
    for suffix in (".z8", ".json"):
        link = (tmp_path / "cache" / elsewhere.name).with_suffix(suffix)
        link.symlink_to(elsewhere)
        with pytest.raises(ValueError, match="is no game of .*; ask for the tasks again"):
            env.reset(task_of(str(elsewhere)))
        link.unlink()


def test_a_folder_of_games_that_was_moved_or_is_a_link_is_played(tmp_path: Path) -> None:
    options = make_options(tmp_path / "cache") | {"train_games": 1}
    (task,) = TextWorld.tasks("train", options)
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    for folder in ("moved", "link"):
        env = TextWorld(options | {"cache_dir": str(tmp_path / folder)})
        assert env.reset(task).actions
        env.close()


def test_shorten_keeps_the_story_and_drops_the_frame() -> None:
    raw = (
        "\n\n  $$ banner\n\nput cup on desk.\n\n-= Attic =-\nYou are in\nthe attic.\n\n"
        ">        -= Attic =-0/1"
    )
    assert _shorten(raw) == "You are in the attic."
    assert _shorten("You take the cup.\n\n\n>      -= Hall =-0/12") == "You take the cup."


@pytest.mark.shortened
def test_remembered_episodes_equal_played_ones(
    options: Mapping[str, object], train: Sequence[Task]
) -> None:
    games = [game for _, game in islice(treasures(split="train", seed=0, rooms=2, things=2), 2)]
    carried = {"key", *(thing for game in games for thing in game.things)}
    also = ["look", "inventory", *(f"drop {thing}" for thing in sorted(carried))]
    assert play_and_compare("textworld", options, train, max_steps=25, also=also) > 0.05


def test_things_in_another_order_are_another_state(
    options: Mapping[str, object], train: Sequence[Task]
) -> None:
    """A game lists first what was put down last, so its facts alone do not tell its next text."""
    env = TextWorld(options)
    ends = []
    for things in ("key", "book"), ("book", "key"):
        env.reset(train[0])
        takes = [f"take {thing} from desk" for thing in things]
        for action in ("go south", *takes, *(f"put {thing} on desk" for thing in things)):
            assert env.step(action).valid
        key, look = env.state_key(), env.step("look").observation  # type: ignore[attr-defined]
        ends.append((key, look))
    (one_key, one), (other_key, other) = ends
    assert one.anchor == other.anchor and one.text != other.text
    assert one_key != other_key


def test_a_restored_state_goes_on_as_the_saved_one_in_another_process(
    options: Mapping[str, object], train: Sequence[Task]
) -> None:
    """Another object stands for another process here: it has opened the other game."""
    one, other = TextWorld(options), TextWorld(options)
    other.reset(train[1])
    rng = random.Random(0)
    seen = one.reset(train[0])
    for _ in range(20):
        saved, key = one.save_state(), one.state_key()  # type: ignore[attr-defined]
        action = rng.choice(seen.actions or ())
        other.restore_state(train[0], saved)  # type: ignore[attr-defined]
        assert other.state_key() == key  # type: ignore[attr-defined]
        transition = one.step(action)
        assert other.step(action) == transition
        assert other.state_key() == one.state_key()  # type: ignore[attr-defined]
        if transition.terminated:
            break
        seen = transition.observation


def test_data_of_the_current_directory_is_not_read(tmp_path: Path) -> None:
    """The attack: in /tmp it was anybody's, and each reset failed."""
    logic = tmp_path / "textworld_data" / "logic"
    logic.mkdir(parents=True)
    (logic / "a.twl").write_text("theirs")
    program = """
from pathlib import Path
from envs.textworld.world import _open_game

try:
    _open_game("none.z8")
except ValueError as error:
    print(error, Path.cwd())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith("game file 'none.z8' is not there")
    assert ran.stdout.endswith(f"{tmp_path}\n")


def test_a_game_is_opened_where_the_current_directory_is_gone(tmp_path: Path) -> None:
    """Go on in another one. The same holds for one that its user cannot enter, as after `su`."""
    program = """
import os
from envs.textworld.world import _open_game

os.rmdir(os.getcwd())
try:
    _open_game("none.z8")
except ValueError as error:
    print(error)
"""
    (tmp_path / "gone").mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "gone",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith("game file 'none.z8' is not there")
