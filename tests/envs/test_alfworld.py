"""ALFWorld on games made on the spot: no data needed. tests/envs/test_alfworld_data.py plays the
real ones.
"""

from __future__ import annotations

import asyncio
import json
import lzma
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envs import EnvironmentPool, Task, environment_class, list_tasks

pytest.importorskip("alfworld", reason="pip install 'async-gigpo[alfworld]'")
from envs.alfworld import engine as engine_module
from envs.alfworld.games import TASK_MARK, TASK_TYPES, Game, list_games, read_game
from envs.alfworld.generated import OBJECTS, list_generated, pairs, read_generated
from tests.support.alfworld_stock import assert_equal_to_stock, load_stock, stock_engine
from tests.support.cached_play import play_and_compare

AlfWorld = environment_class("alfworld")
OPTIONS: dict[str, object] = {
    "data": "",
    "train": "train",
    "heldout": "valid_seen",
    "task_types": [],
    "train_games": 12,
    "heldout_games": 6,
    "seed": 0,
}


def heldout_tasks() -> list[Task]:
    return list(AlfWorld.tasks("heldout", OPTIONS))


def walkthrough(task: Task) -> tuple[str, ...]:
    return read_generated(task.data["game"]).walkthrough


def test_every_type_is_won_by_its_walkthrough_and_only_the_last_step_pays() -> None:
    arguments, state = list(sys.argv), random.getstate()
    env = AlfWorld(OPTIONS)
    tasks = [*AlfWorld.tasks("train", OPTIONS), *heldout_tasks()]
    assert {task.data["type"] for task in tasks} == set(TASK_TYPES)
    for task in tasks:
        first = env.reset(task)
        assert first.text.endswith(f"Your task is to: {first.objective}") and first.anchor is None
        seen = [env.step(command) for command in walkthrough(task)]
        assert [t.won for t in seen] == [False] * (len(seen) - 1) + [True], task.id
        assert [(t.reward, t.terminated) for t in seen] == [(float(t.won), t.won) for t in seen]
        assert all(t.observation.text != "Nothing happens." and not t.truncated for t in seen)
        with pytest.raises(ValueError, match="the episode is over"):
            env.step("look")
    env.close()
    # The planner's translator overwrites the command line; nothing of it may be left.
    assert sys.argv == arguments and random.getstate() == state


def test_what_leads_on_is_demonstrated_until_one_strays() -> None:
    env, task = AlfWorld(OPTIONS), heldout_tasks()[0]
    shown = [env.reset(task).demonstrated]
    for _ in range(len(walkthrough(task)) - 1):
        shown.append(env.step(shown[-1] or "").observation.demonstrated)
    assert tuple(shown) == walkthrough(task)
    assert env.step(shown[-1] or "").won
    env.reset(task)
    assert env.step("inventory").observation.demonstrated is None
    assert env.step(shown[0] or "").observation.demonstrated is None
    env.close()


def test_all_that_is_said_paid_and_listed_is_what_the_stock_engine_says_pays_and_lists() -> None:
    env, stock = AlfWorld(OPTIONS), stock_engine()
    for seed, task in enumerate(heldout_tasks()):
        assert_equal_to_stock(
            env, stock, task, read_generated(task.data["game"]), steps=12, seed=seed
        )
    env.close()


def test_an_unknown_command_changes_nothing_and_help_is_understood_though_not_listed() -> None:
    env = AlfWorld(OPTIONS)
    first = env.reset(heldout_tasks()[0])
    assert (
        first.actions
        and "help" not in first.actions
        and list(first.actions) == sorted(first.actions)
    )
    for nonsense in ("", "fly", "go to", first.actions[0].upper()):
        transition = env.step(nonsense)
        assert transition.observation.text == "Nothing happens." and not transition.terminated
        # to be punished or not by the config
        assert transition.observation.actions == first.actions and transition.valid
    helped = env.step("help")
    assert "Available commands" in helped.observation.text
    assert env.reset(heldout_tasks()[0]) == first
    env.close()


def test_a_game_is_translated_once_and_not_for_ever_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Game] = []
    translate = engine_module.translate
    monkeypatch.setattr(
        engine_module, "translate", lambda game: made.append(game) or translate(game)
    )
    engine_module.translated.cache_clear()
    env, other = AlfWorld(OPTIONS), AlfWorld(OPTIONS)
    for task in [*heldout_tasks(), *heldout_tasks()]:
        assert env.reset(task) == other.reset(task)
    assert len(made) == len(heldout_tasks())
    assert engine_module.translated.cache_info().maxsize == engine_module.KEPT_GAMES
    env.close()
    other.close()


def test_objects_made_anew_play_on_the_copies_of_the_planner_that_are_free() -> None:
    first = AlfWorld(OPTIONS)
    first.reset(heldout_tasks()[0])
    first.close()
    before = planners()
    for task in heldout_tasks():
        env = AlfWorld(OPTIONS)
        env.reset(task)
        env.close()
        env.close()  # the second time it does no more
    assert planners() == before and len(engine_module._free_libraries) == len(
        set(map(id, engine_module._free_libraries))
    )


def planners() -> int:
    """Copies of the planner in this process: each is an own file, removed as soon as it was
    loaded.
    """
    return len(set(re.findall(r"(\S+libdownward\.so)", Path("/proc/self/maps").read_text())))


def test_two_games_at_once_do_not_touch_each_other() -> None:
    one, two = AlfWorld(OPTIONS), AlfWorld(OPTIONS)
    task, other = heldout_tasks()[:2]
    one.reset(task)
    two.reset(other)
    for mine, theirs in zip(walkthrough(task)[:-1], walkthrough(other)[:-1], strict=False):
        assert "Nothing happens." not in (
            one.step(mine).observation.text,
            two.step(theirs).observation.text,
        )
    one.close()
    two.close()


def test_it_plays_in_an_environment_process() -> None:
    async def play() -> bool:
        pool = EnvironmentPool("alfworld", OPTIONS, processes=1, answer_timeout_s=60.0)
        try:
            async with pool.environment() as environment:
                task = heldout_tasks()[0]
                await environment.reset(task)
                return [(await environment.step(command)).won for command in walkthrough(task)][-1]
        finally:
            pool.close()

    assert asyncio.run(play())


def test_listing_tasks_loads_no_engine() -> None:
    listing = f"import sys, envs; envs.list_tasks('alfworld', {OPTIONS!r})"
    script = f"{listing}; sys.exit(bool({{'textworld', 'alfworld'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_larger_split_begins_with_the_smaller_one_and_the_splits_share_no_goal() -> None:
    tasks = list_tasks("alfworld", OPTIONS)
    assert [task.id for task in AlfWorld.tasks("train", OPTIONS | {"train_games": 4})] == [
        t.id for t in tasks["train"][:4]
    ]
    assert tasks["train"][0].id.startswith("generated_train/pick_and_place_simple-")
    assert {task.id for task in tasks["train"]} != {
        t.id for t in AlfWorld.tasks("train", OPTIONS | {"seed": 1})
    }
    for kind in TASK_TYPES:
        train, heldout = set(pairs("train", kind)), set(pairs("heldout", kind))
        assert train and heldout and not train & heldout
    wanted = [
        name.split("-")[1]
        for name, _ in list_generated("train", 60, seed=0, task_types=[TASK_TYPES[3]])
    ]
    assert all("heat" in OBJECTS[object_] for object_ in wanted)


def write_official(folder: Path, split: str, name: str, game: Game, **changes: object) -> None:
    path = folder / "json_2.1.1" / split / name / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    content = {
        "pddl_domain": game.domain,
        "grammar": game.grammar.replace(TASK_MARK, game.task),
        "pddl_problem": game.problem,
        "solvable": True,
        "walkthrough": list(game.walkthrough),
    }
    path.write_text(json.dumps({**content, **changes}))


def test_official_files_and_packed_ones_hold_the_same_games_in_the_same_order(
    tmp_path: Path,
) -> None:
    official, packed = tmp_path / "official", tmp_path / "packed"
    packed.mkdir()
    rows = []
    for number, (made, kind) in enumerate(
        list_generated("train", 12, seed=0, task_types=TASK_TYPES)
    ):
        name, game = f"{kind}-Mug-None-Desk-{number}/trial_T{number}", read_generated(made)
        write_official(official, "valid_seen", name, game)
        row = {
            "id": name,
            "type": kind,
            "task": game.task,
            "walkthrough": game.walkthrough,
            "problem": game.problem,
        }
        rows.append(json.dumps(row))
    with lzma.open(packed / "valid_seen.jsonl.xz", "wt") as file:
        file.write("\n".join(rows) + "\n")
    (packed / "domain.pddl").write_text(game.domain)
    (packed / "grammar.twl2").write_text(game.grammar)
    write_official(
        official, "valid_seen", "look_at_obj_in_light-A-None-B-1/trial_T1", game, solvable=False
    )
    write_official(
        official, "valid_seen", "look_at_obj_in_light-AppleSliced-None-B-1/trial_T1", game
    )
    listed = list_games(official, "valid_seen")
    assert len(listed) == 12 and listed == list_games(packed, "valid_seen") == list_games(
        official / "json_2.1.1", "valid_seen"
    )
    assert listed != sorted(listed)  # the first ones are of several types
    for name, _ in listed:
        assert read_game(official, "valid_seen", name) == read_game(packed, "valid_seen", name)
    options = OPTIONS | {"data": str(official), "heldout_games": 0}
    task = AlfWorld.tasks("heldout", options)[0]
    assert task.id == f"valid_seen/{listed[0][0]}" and task.data["type"] == listed[0][1]
    env = AlfWorld(options)
    content = (official / "json_2.1.1" / task.id / "game.tw-pddl").read_text()
    stock = stock_engine()
    assert (
        env.reset(task).text
        == load_stock(stock, read_game(official, "valid_seen", listed[0][0])).feedback
    )
    # and the file itself has its sentence, not the mark
    assert json.loads(content)["grammar"].count("Your task is to") == 1
    env.close()
    two = AlfWorld.tasks("heldout", options | {"task_types": [TASK_TYPES[5]]})
    assert [t.data["type"] for t in two] == [TASK_TYPES[5]] * 2
    for folder in (official, packed):
        with pytest.raises(ValueError, match="that the tasks were listed from"):
            read_game(folder, "valid_seen", "no/game")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"max_steps": 3}, "missing or unknown: max_steps"),
        ({"train": "test"}, r"train='test' is not one of \['train'"),
        ({"heldout": "heldout"}, "heldout='heldout' is not one of"),
        ({"task_types": ["cook"]}, r"task_types=\['cook'\] must be a list of some of"),
        ({"train_games": -1}, "train_games=-1 must be a whole number"),
        ({"train_games": 0}, "set train_games to a number, or data to a folder"),
        ({"data": None}, "data=None must be a folder"),
        (
            {"data": "/no/such"},
            "neither /no/such/json_2.1.1/train nor /no/such/train.jsonl.xz is there",
        ),
    ],
)
def test_wrong_options_are_named(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        AlfWorld.tasks("train", OPTIONS | change)
    assert "\n" not in str(caught.value)


def test_an_unknown_split_and_an_unknown_game_are_named() -> None:
    with pytest.raises(ValueError, match="split 'test' is not one of"):
        AlfWorld.tasks("test", OPTIONS)
    data = {"split": "generated_train", "game": "nothing", "type": ""}
    lost = Task(id="x", env_name="alfworld", split="train", seed=1, data=data)
    with pytest.raises(ValueError, match="'nothing' is no generated game"):
        AlfWorld(OPTIONS).reset(lost)


@pytest.mark.shortened
def test_remembered_episodes_equal_played_ones() -> None:
    tasks = heldout_tasks()[:2]
    assert play_and_compare("alfworld", OPTIONS, tasks, max_steps=15, also=["help"]) > 0.05
