"""Answers of environment processes that the process which asked cannot read: the error names the
cause, nothing hangs.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path

import pytest

from envs import EnvironmentDied, EnvironmentFailed, EnvironmentPool, Task, list_tasks_in_child

TASK = Task(id="one", env_name="strange", split="train", seed=0)

# `only_there` is a module of the environment's process alone, as one that it made or has on another
# path.
STRANGE = """
import os, socket, sys, types
from envs import Observation, Task, Transition

only_there = sys.modules["only_there"] = types.ModuleType("only_there")
exec("class Word(str): pass", vars(only_there))
Word = only_there.Word
Word.__module__ = "only_there"

def send(garbage):
    descriptor = next(int(word) for word in sys.argv[1:] if word.isdigit())
    with socket.socket(fileno=os.dup(descriptor)) as channel:
        channel.sendall(garbage)

class Strange:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options):
        if options.get("garbage"): send(len(b"not json").to_bytes(4, "big") + b"not json")
        word = Word if options.get("words") else str
        name, data = word(f"strange-{split}"), {word("a"): word("b")}
        return [Task(id=name, env_name=word("s"), split=split, seed=0, data=data)]
    def reset(self, task): return Observation(text="start")
    def step(self, action):
        if action == "garbage":
            send(len(b"no pickle").to_bytes(4, "big") + b"no pickle")
        if action == "unknown":
            import pickle
            answer = pickle.dumps((77, b"", None))
            send(len(answer).to_bytes(4, "big") + answer)
        if action == "foreign":
            import pickle
            dumps = pickle.dumps
            def once(answer):
                pickle.dumps = dumps
                return dumps(Word("a word"))
            pickle.dumps = once
        text = Word("a word") if action == "word" else "a text"
        return Transition(
            observation=Observation(text=text),
            reward=0.0, terminated=False, truncated=False, won=False)
    def close(self): pass
"""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_strange_one.py").write_text(STRANGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_strange_one:Strange"


NO_ANSWER = r"sent something else than an answer \({}.*\) and was killed, in step"


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (
            "foreign",
            "in step 'foreign' of task train/one: its answer cannot be read here: "
            "ModuleNotFoundError: .*'only_there'",
        ),
        ("garbage", NO_ANSWER.format("UnpicklingError: ")),
        ("unknown", NO_ANSWER.format("KeyError: 77")),
    ],
)
def test_an_answer_that_cannot_be_read_is_the_error_of_its_request(
    action: str, why: str, strange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> str:
        pool = EnvironmentPool(
            strange, {}, processes=1, answer_timeout_s=60.0, log=tmp_path / "log"
        )
        try:
            async with pool.environment() as environment:
                await environment.reset(TASK)
                monkeypatch.delitem(sys.modules, "only_there", raising=False)
                with pytest.raises(EnvironmentDied, match=why) as failed:
                    await environment.step(action)
                assert failed.value.at_fault
            # and the next episode is none the worse for it
            async with pool.environment() as environment:
                await environment.reset(TASK)
                return (await environment.step("go")).observation.text
        finally:
            pool.close()

    assert asyncio.run(play()) == "a text"
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_text_that_only_the_author_can_unpickle_arrives_as_a_plain_one(strange: str) -> None:
    async def play() -> str:
        pool = EnvironmentPool(strange, {}, processes=1, answer_timeout_s=60.0)
        try:
            async with pool.environment() as environment:
                await environment.reset(TASK)
                return (await environment.step("word")).observation.text
        finally:
            pool.close()

    text = asyncio.run(play())
    assert (text, type(text)) == ("a word", str)


def test_tasks_that_only_the_author_can_unpickle_are_listed(strange: str, tmp_path: Path) -> None:
    splits = list_tasks_in_child(strange, {"words": True}, creating=True, log=tmp_path / "log")
    assert splits is not None
    (task,) = splits["train"]
    assert (task.id, task.data) == ("strange-train", {"a": "b"})
    assert {type(text) for text in (task.id, task.env_name, *task.data, *task.data.values())} == {
        str
    }


def test_a_list_of_tasks_that_cannot_be_read_is_named(strange: str, tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentFailed,
        match=f"env.name={strange}: listing its tasks ended with an answer that cannot be read",
    ):
        list_tasks_in_child(strange, {"garbage": True}, creating=True, log=tmp_path / "log")


def test_an_error_keeps_whose_fault_it_was_in_another_process() -> None:
    for at_fault, ended_process in ((True, False), (False, True)):
        died = EnvironmentDied("it broke", at_fault=at_fault, ended_process=ended_process)
        error = pickle.loads(pickle.dumps(died))
        found = (str(error), error.at_fault, error.ended_process)
        assert found == ("it broke", at_fault, ended_process)
