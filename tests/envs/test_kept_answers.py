"""Kept answers: equal to played ones, known to the next process, never half a file, never trusted."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import EnvironmentDied, EnvironmentPool, KeptAnswers, Observation, Task, Transition
from envs.hosting import kept_answers
from envs.hosting.answers import Understood
from envs.hosting.kept_answers import (
    AnswerFile,
    KeptAnswer,
    StateRecord,
    bound_folder,
    read_records,
    write_records,
)
from tests.support.cached_play import assert_equal

ROOT = Path(__file__).resolve().parents[2]
NAME = "tests.envs.test_kept_answers:Counter"
IDENTITY = bytes(range(16))
TASK = Task(id="one", env_name=NAME, split="train", seed=0)
Options = Mapping[str, Any]


class Counter:
    """Count up to three. Each request is a line of the file `asked`."""

    deterministic = True

    def __init__(self, options: Options) -> None:
        self._options = options

    @classmethod
    def tasks(cls, split: str, options: Options) -> list[Task]:
        return [replace(TASK, id=f"{split}-one", split=split)]

    @classmethod
    def kept_answers(cls, options: Options, task: Task) -> KeptAnswers:
        if options.get("broken"):
            raise RuntimeError("no such game")
        return KeptAnswers(
            folder=Path(options["folder"]), decided_by=(options.get("version", "1"),)
        )

    def reset(self, task: Task) -> Observation:
        self._note("reset")
        self.count = 0
        return Observation(text="0", objective=task.id)

    def step(self, action: str) -> Transition:
        self._note(action)
        self.count += action == "up"
        return Transition(
            observation=Observation(text=str(self.count), actions=("up", "down")),
            reward=self._options.get("reward", 0.1),
            terminated=self.count == 3,
            truncated=False,
            won=False,
        )

    def state_key(self) -> str:
        return str(self.count)

    def close(self) -> None: ...

    def _note(self, request: str) -> None:
        with open(self._options["asked"], "a") as asked:
            asked.write(f"{request}\n")


class Saving(Counter):
    deterministic = True

    def save_state(self) -> bytes:
        return pickle.dumps(self.count)

    def restore_state(self, task: Task, saved: bytes) -> None:
        self._note("restore")
        self.count = pickle.loads(saved)


def options_of(tmp_path: Path) -> dict[str, object]:
    return {"folder": str(tmp_path / "answers"), "asked": str(tmp_path / "asked")}


def play(
    options: Options, *episodes: str, name: str = NAME, log: Path | None = None
) -> tuple[list[str], list[str]]:
    """Play episodes in a new pool, one after the other. Return the last one's texts, and requests.

    An episode is its actions, such as "up down".
    """
    asked = Path(options["asked"])
    asked.unlink(missing_ok=True)

    async def run() -> list[str]:
        pool = EnvironmentPool(name, options, processes=1, answer_timeout_s=60.0, log=log)
        try:
            for actions in episodes:
                async with pool.environment() as environment:
                    texts = [(await environment.reset(TASK)).text]
                    for action in actions.split():
                        texts.append((await environment.step(action)).observation.text)
            return texts
        finally:
            pool.close()

    texts = asyncio.run(run())
    return texts, asked.read_text().split() if asked.exists() else []


def answer_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "answers").glob("*.answers"))


def test_the_next_process_knows_what_an_earlier_one_has_asked(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    expected = ["0", "1", "1", "2"]
    assert play(options, "up down up") == (expected, ["reset", "up", "down", "up"])
    assert play(options, "up down up") == (expected, [])
    # a question repeats the actions that lead to its state, and is known from then on
    assert play(options, "up up down") == (["0", "1", "2", "2"], ["reset", "up", "up", "down"])
    assert play(options, "up down up down") == (["0", "1", "1", "2", "2"], [])
    assert len(answer_files(tmp_path)) == 1


def test_saved_states_are_not_kept_but_made_again_on_the_way(tmp_path: Path) -> None:
    options, name = options_of(tmp_path), "tests.envs.test_kept_answers:Saving"
    play(options, "up up", name=name)
    assert pickle.dumps(2) not in zlib.decompress(answer_files(tmp_path)[0].read_bytes()[54:])
    _, asked = play(options, "up down", "up up left", "up right", name=name)
    # the third episode restores the state on whose way the second one came
    assert asked == ["reset", "up", "down", "restore", "up", "left", "restore", "right"]


@pytest.mark.parametrize("change", [{"version": "2"}, {"version": "1", "name": "Saving"}])
def test_what_has_changed_never_meets_old_answers(tmp_path: Path, change: dict[str, str]) -> None:
    options = options_of(tmp_path)
    play(options, "up")
    name = f"tests.envs.test_kept_answers:{change.pop('name', 'Counter')}"
    assert play({**options, **change}, "up", name=name)[1] == ["reset", "up"]
    assert len(answer_files(tmp_path)) == 2


@pytest.mark.parametrize("module", ["changing", "changing_base"])
def test_changed_code_never_meets_old_answers(tmp_path: Path, module: str) -> None:
    """The class's own, and that of the class that it inherits from."""
    base = "from tests.envs.test_kept_answers import Counter\nclass Base(Counter):\n    pass\n"
    (tmp_path / "changing_base.py").write_text(base)
    code = "from changing_base import Base\nclass World(Base):\n    deterministic = True\n"
    (tmp_path / "changing.py").write_text(code)
    whole = (tmp_path / f"{module}.py").read_text()
    options = options_of(tmp_path)
    program = (
        "import json, sys; from tests.envs.test_kept_answers import play; "
        "print(json.dumps(play(json.loads(sys.argv[1]), 'up', name='changing:World')))"
    )
    for version, asked in (("", ["reset", "up"]), ("", []), ("    reward = 2\n", ["reset", "up"])):
        (tmp_path / f"{module}.py").write_text(whole + version)
        done = subprocess.run(
            [sys.executable, "-B", "-c", program, json.dumps(options)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
            stdout=subprocess.PIPE,
            check=True,
        )
        assert json.loads(done.stdout)[1] == asked


def test_kept_answers_that_are_not_repeated_are_removed(tmp_path: Path) -> None:
    """Such as those of a library that changed without another version."""
    options = options_of(tmp_path)
    play(options, "up")
    changed = {**options, "reward": 0.2}
    with pytest.raises(
        EnvironmentDied, match=r"two answers .*; its kept answers in .* are removed"
    ):
        play(changed, "up down")
    assert play(changed, "up down")[1] == ["reset", "up", "down"]
    assert play(changed, "up down")[1] == []


def test_answers_are_written_when_the_last_episode_of_a_task_ends(tmp_path: Path) -> None:
    options = options_of(tmp_path)

    async def run() -> None:
        pool = EnvironmentPool(NAME, options, processes=1, answer_timeout_s=60.0)
        async with pool.environment() as one, pool.environment() as other:
            await one.reset(TASK)
            await other.reset(TASK)
            other.close()
            await asyncio.sleep(0.1)
            assert not answer_files(tmp_path)
        deadline_s = time.monotonic() + 60
        while not answer_files(tmp_path):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        async with pool.environment() as one:
            await one.reset(TASK)
            await one.step("up")
            pool.close()  # in the middle of an episode

    asyncio.run(run())
    assert play(options, "up") == (["0", "1"], [])


@pytest.mark.parametrize("fault", ["a file", "broken", "read-only"])
def test_answers_that_cannot_be_kept_are_one_line(tmp_path: Path, fault: str) -> None:
    options, log = options_of(tmp_path), tmp_path / "log"
    if fault == "a file":
        (tmp_path / "answers").write_text("not a folder")
    elif fault == "broken":
        options["broken"] = True
    else:
        options["folder"] = "/proc/answers"
    for _ in range(2):
        assert play(options, "up", "up", "up", log=log)[1] == ["reset", "up"]
    lines = log.read_text().splitlines()
    assert len([line for line in lines if "are not used: reading one failed" in line]) == 2


def spoiled(kind: str, whole: bytes) -> bytes:
    """Return a file in place of a whole one."""
    if kind == "empty":
        return b""
    if kind == "torn":
        return whole[: len(whole) // 2]
    if kind == "another format":
        return b"async-gigpo answers 0\n" + whole[22:]
    if kind == "of another task":
        return whole[:22] + bytes(16) + whole[38:]
    if kind == "pickle":
        return pickle.dumps(print)
    return random.Random(0).randbytes(200)


@pytest.mark.parametrize(
    "kind", ["empty", "torn", "another format", "of another task", "pickle", "random"]
)
def test_a_damaged_or_foreign_file_is_one_line_and_is_replaced(tmp_path: Path, kind: str) -> None:
    options, log = options_of(tmp_path), tmp_path / "log"
    play(options, "up down")
    (file,) = answer_files(tmp_path)
    file.write_bytes(spoiled(kind, file.read_bytes()))
    assert play(options, "up", "up", log=log) == (["0", "1"], ["reset", "up"])
    assert log.read_text().count("are ignored") == 1
    assert play(options, "up", log=log)[1] == []


def record_of(*answers: KeptAnswer, understood: Understood | None = None) -> bytes:
    return StateRecord(understood=understood, answers=answers).encode()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{}",
        b"[null]",
        b'[null,[[null,"zz",["0","",null,null,null,[]]]]]',
        b'[null,[[null,"00",[0,"",null,null,null,[]]]]]',
        b'[null,[[null,"00",["\\ud800","",null,null,null,[]]]]]',
        b'[null,[[null,"00",["0","",null,[1],null,[]]]]]',
        b'[null,[[null,"00",["0","",null,null,null,[[1e9,9,""]]]]]]',
        b"[[[1],null],[]]",
        b"[" * 100_000,
        b'[null,[[null,"00",[["0","",null,null,null,[]],NaN,false,false,false,true,null]]]]',
    ],
)
def test_a_record_of_another_form_is_one_line(tmp_path: Path, record: bytes) -> None:
    """A checksum can be made by anybody."""
    options, log = options_of(tmp_path), tmp_path / "log"
    play(options, "up")
    (file,) = answer_files(tmp_path)
    identity = bytes.fromhex(file.stem)
    records = read_records(file, identity)
    write_records(file, identity, {**records, b"": record})
    assert play(options, "up", log=log) == (["0", "1"], ["reset"])
    assert log.read_text().count("are ignored") == 1


def test_a_file_that_grows_without_end_when_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.answers"
    write_records(path, IDENTITY, {b"": b"[]"})
    bomb = zlib.compress(bytes(kept_answers.MAX_TEXT_BYTES + 1), level=9)
    head = kept_answers.FORMAT + IDENTITY
    path.write_bytes(head + kept_answers._digest((bomb,)) + bomb)
    with pytest.raises(ValueError, match="more than .* bytes of text"):
        read_records(path, IDENTITY)


def test_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    whole, link, pipe = (tmp_path / name for name in ("whole", "link", "pipe"))
    write_records(whole, IDENTITY, {b"": b"[]"})
    link.symlink_to(whole)
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="symbolic link"):
        read_records(link, IDENTITY)
    with pytest.raises(ValueError, match="no file of such answers"):
        read_records(pipe, IDENTITY)


UNREAD = "no file of such answers|checksum is wrong"


def test_no_changed_byte_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one.answers"
    write_records(path, IDENTITY, {b"": b"[null,[]]", b"1": b"[null,[]]"})
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=UNREAD):
            read_records(path, IDENTITY)
        path.write_bytes(whole[:at])
        with pytest.raises(ValueError, match=UNREAD):
            read_records(path, IDENTITY)


WRITER = """
import sys
from pathlib import Path
from tests.envs.test_kept_answers import IDENTITY, reset_record
from envs.hosting.kept_answers import AnswerFile
file = AnswerFile(path=Path(sys.argv[1]), identity=IDENTITY, states={})
for number in range(10**9):
    file.add({b"%s %d" % (sys.argv[2].encode(), number % 300): reset_record(number)})
"""


def reset_record(number: int) -> bytes:
    result = Observation(text=f"{number} " * 50)
    return record_of(KeptAnswer(action=None, result=result, state=b"\1"))


def test_a_killed_writer_leaves_a_whole_file_and_writers_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    path = tmp_path / "one.answers"
    draw = random.Random(0)
    for _ in range(4):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], cwd=ROOT)
            for name in ("one", "other")
        ]
        deadline_s = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        for writer in writers:
            end_s = time.monotonic() + draw.random()
            while time.monotonic() < end_s:
                assert all(map(StateRecord.decode, read_records(path, IDENTITY).values()))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        assert read_records(path, IDENTITY)
        path.unlink()


def test_two_writers_add_to_what_the_other_has_written(tmp_path: Path) -> None:
    def moved(action: str) -> KeptAnswer:
        transition = Transition(
            observation=Observation(text=action),
            reward=0.0,
            terminated=False,
            truncated=False,
            won=False,
        )
        return KeptAnswer(action=action, result=transition, state=b"\2")

    path = tmp_path / "one.answers"
    one, other = (AnswerFile(path=path, identity=IDENTITY, states={}) for _ in range(2))
    one.add({b"\1": record_of(moved("a")), b"\3": record_of(moved("x"))})
    other.add({b"\1": record_of(moved("b"), moved("a"))})
    one.add({b"\1": record_of(moved("c"))})
    records = read_records(path, IDENTITY)
    answers = StateRecord.decode(records[b"\1"]).answers
    assert sorted(answer.action or "" for answer in answers) == ["a", "b", "c"]
    assert StateRecord.decode(records[b"\3"]).answers == (moved("x"),)


def test_a_task_with_too_many_answers_keeps_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.answers"
    file = AnswerFile(path=path, identity=IDENTITY, states={})
    file.add({b"\1": b"[null,[]]"})
    monkeypatch.setattr(kept_answers, "MAX_TEXT_BYTES", 100)
    file.add({b"\2": reset_record(0)})
    assert read_records(path, IDENTITY) == {b"\1": b"[null,[]]"}
    assert list(tmp_path.iterdir()) == [path]


def test_the_files_written_longest_ago_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        path = tmp_path / f"{number}.answers"
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    (tmp_path / "game.z8").write_bytes(bytes(1000))  # not ours to remove
    monkeypatch.setattr(kept_answers, "MAX_FOLDER_BYTES", 250)
    bound_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2.answers",
        "3.answers",
        "game.z8",
    ]


texts = st.text(st.characters(codec="utf-8"), max_size=20)
images = st.integers(0, 2**32).map(
    lambda seed: np.random.default_rng(seed).integers(0, 256, (2, 3, 3), dtype=np.uint8)
)
numbers = st.floats(-1e6, 1e6)
observations = st.builds(
    Observation,
    text=texts,
    objective=texts,
    anchor=st.none() | texts,
    actions=st.none() | st.lists(texts, max_size=4).map(tuple),
    demonstrated=st.none() | texts,
    images=st.lists(images, max_size=2).map(tuple),
)
transitions = st.builds(
    Transition,
    observation=observations,
    reward=numbers,
    terminated=st.booleans(),
    truncated=st.booleans(),
    won=st.booleans(),
    valid=st.booleans(),
    task_score=st.none() | numbers,
)
any_text = st.text(max_size=20)  # also half of a surrogate pair, which an agent may write
answers = st.builds(KeptAnswer, action=any_text, result=transitions, state=st.binary(max_size=16))
first_answers = st.builds(
    KeptAnswer, action=st.none(), result=observations, state=st.binary(max_size=16)
)
understood_ones = st.builds(
    Understood, actions=st.lists(any_text, max_size=3).map(tuple), otherwise=transitions
)
records = st.builds(
    StateRecord,
    understood=st.none() | understood_ones,
    answers=st.lists(answers | first_answers, max_size=4).map(tuple),
)


@given(records)
@settings(max_examples=200, deadline=None)
def test_a_record_that_is_read_equals_the_written_one(record: StateRecord) -> None:
    encoded = record.encode()
    assert b"\n" not in encoded
    decoded = StateRecord.decode(encoded)
    assert decoded == record
    for read, written in zip(decoded.answers, record.answers, strict=True):
        assert_equal(read.result, written.result)
        if isinstance(read.result, Transition):
            assert isinstance(read.result.reward, float) and repr(read.result) == repr(
                replace(written.result, observation=read.result.observation)  # type: ignore[type-var]
            )
