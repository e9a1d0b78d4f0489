"""An environment that lies in what it returns, or whose errors cannot be told, costs its episode.

Neither a full disk of logs nor its `close` costs more. A driver is led nowhere by one.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import (
    ClientSettings,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentPool,
    Observation,
    Outcome,
    ProgramPool,
    Task,
    Transition,
    list_tasks_in_child,
    try_environment,
    write_log,
)
from envs.error_texts import MAX_TRACEBACK_CHARACTERS, describe_error, full_traceback
from envs.hosting.answers import KEY_BYTES, answer_of
from envs.validation import checked_answer, checked_outcome

FULL = Path("/dev/full")  # every write of it finds no space left on the device
TASK = Task(id="t", env_name="hostile", split="train", seed=0)
NOBODY = ClientSettings(base_url="", api_key="")
SOON_S = 30.0  # for an answer that would never come

# `step` does what the action says, and `close` what `env.options.close` says.
HOSTILE = """
import asyncio, json, os, socket, sys, time, traceback
from envs import Observation, Outcome, Task, Transition

class Exits(Exception):
    def __str__(self): raise SystemExit(3)
class Interrupts(Exception):
    def __str__(self): raise KeyboardInterrupt
class Nameless(type):
    @property
    def __name__(cls): raise RuntimeError("no name")
class NoName(Exception, metaclass=Nameless): pass
class NoClass(Exception):
    @property
    def __class__(self): raise RuntimeError("no class")
class HalfId(str):
    def __len__(self): return 1
    def encode(self, *arguments): return b""

def broken(*arguments, **settings): raise ZeroDivisionError

class Hostile:
    def __init__(self, options): self.options = options
    @classmethod
    def tasks(cls, split, options):
        name = HalfId(chr(0xD800)) if options.get("tasks") == "half" else split
        return [Task(id=name, env_name="hostile", split=split, seed=0)]
    def reset(self, task): return Observation(text="here")
    def step(self, action):
        if action == "die": time.sleep(0.3); os._exit(7)
        if action == "raise": raise RuntimeError("it broke")
        if action == "an offset that is text": raise SyntaxError("bad", ("f.py", 1, "five", "foo"))
        if action == "a line that is bytes": raise SyntaxError("bad", ("f.py", 1, 5, b"foo"))
        if action == "a message that exits": raise Exits
        if action == "a message that interrupts": raise Interrupts
        if action == "a type without a name": raise NoName("x")
        if action == "an error without a class": raise NoClass("x")
        if action == "a broken clock": time.strftime = broken; raise RuntimeError("x")
        if action == "a broken traceback":
            traceback.format_exception = traceback.format_tb = traceback.extract_tb = broken
            raise RuntimeError("x")
        return Transition(
            observation=Observation(text=action),
            reward=1.0, terminated=False, truncated=False, won=False)
    def close(self):
        kinds = {kind.__name__: kind for kind in (
            SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)}
        if self.options.get("close"): raise kinds[self.options["close"]]

class Awaited(Hostile):
    async def reset(self, task): return Hostile.reset(self, task)
    async def step(self, action): return Hostile.step(self, action)

class Driven(Awaited):
    "Needs an event loop from the first to the last, and does to its process what the task says."
    def __init__(self, options): asyncio.get_running_loop(); self.task_id = ""
    async def reset(self, task):
        await asyncio.sleep(0)
        self.task_id = task.id
        if task.id == "chdir": os.chdir("/")
        if task.id == "umask": os.umask(0o777)
        if task.id == "close": os.closerange(0, 3)
        if task.id == "hang": await asyncio.sleep(3600)
        if task.id == "exit in a task":
            async def leave(): sys.exit(5)
            await asyncio.ensure_future(leave())
        return Observation(text=task.id)
    def close(self):
        asyncio.get_running_loop()
        if self.task_id == "an exit in close": sys.exit(0)

class Keeps(Hostile):
    deterministic = True
    @staticmethod
    def kept_answers(options, task): os.chdir("/")

class Forger:
    "Sends the outcome of a task by itself."
    def __init__(self, options): self.outcome = options["outcome"]
    tasks = Hostile.tasks
    def run(self, task, client):
        with socket.socket(fileno=os.dup(int(sys.argv[1]))) as channel:
            forged = {"outcome": json.loads(self.outcome), "number": 1}
            channel.sendall(json.dumps(forged).encode() + b"\\n")
        time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_world.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile_world", raising=False)  # of another test's folder


def a_pool(kind: str, *, log: Path | None, **options: object) -> EnvironmentPool:
    return EnvironmentPool(
        f"hostile_world:{kind}", options, processes=1, answer_timeout_s=SOON_S, log=log
    )


async def ending(pool: EnvironmentPool, action: str) -> object:
    """Play one episode of one step. Return its answer or its error."""
    async with pool.environment() as environment:
        await environment.reset(TASK)
        try:
            async with asyncio.timeout(SOON_S):
                return await environment.step(action)
        except EnvironmentDied as error:
            return error


def check_died(error: object, words: str, *, at_fault: bool = True) -> None:
    assert isinstance(error, EnvironmentDied), repr(error)
    assert words in str(error) and error.at_fault is at_fault


# logs


def test_a_process_that_dies_while_its_log_is_full_fails_its_episodes_at_once() -> None:
    async def play() -> list[object]:
        pool = a_pool("Hostile", log=FULL)
        try:
            async with pool.environment() as one, pool.environment() as another:
                await asyncio.gather(one.reset(TASK), another.reset(TASK))
                steps = asyncio.gather(one.step("die"), another.step("go"), return_exceptions=True)
                async with asyncio.timeout(SOON_S):
                    return await steps
        finally:
            pool.close()

    dying, other = asyncio.run(play())
    check_died(dying, "ended with exit code 7, in step 'die' of task train/t")
    check_died(other, "ended with exit code 7", at_fault=False)


@pytest.mark.parametrize("kind", ["Hostile", "Awaited"])
@pytest.mark.parametrize("log", ["full", "no folder"])
def test_an_environment_that_raises_has_its_own_error_though_its_log_cannot_be_written(
    kind: str, log: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    async def play() -> tuple[object, object]:
        pool = a_pool(kind, log=FULL if log == "full" else tmp_path / "file" / "w.log")
        try:
            return await ending(pool, "raise"), await ending(pool, "go")
        finally:
            pool.close()

    failed, answer = asyncio.run(play())
    check_died(failed, "in step 'raise' of task train/t: RuntimeError: it broke")
    assert isinstance(answer, Transition) and answer.observation.text == "go"


def test_standard_error_is_told_once_of_a_log_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for log in (tmp_path / "a", tmp_path / "b"):
        log.mkdir()
    for _ in range(2):
        write_log(tmp_path / "a", "a text")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/a cannot be written: IsADirectoryError")
    closed = io.StringIO()
    closed.close()
    for output in (closed, None):
        monkeypatch.setattr(sys, "stderr", output)
        monkeypatch.setattr(sys, "stdout", output)
        write_log(tmp_path / "b", "a text")
        write_log(None, "a text")


# errors that cannot be told

UNTOLD = {
    "an offset that is text": "SyntaxError: bad",
    "a line that is bytes": "SyntaxError: bad",
    "a message that exits": "Exits: it has no message, for its __str__ raises SystemExit",
    "a message that interrupts": "Interrupts: it has no message, for its __str__ raises Keyboard",
    "a type without a name": "NoName: x",
    "an error without a class": "NoClass: x",
    "a broken clock": "RuntimeError: x",
    "a broken traceback": "RuntimeError: x",
}


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what an environment on the event loop does to modules of this process."""
    monkeypatch.setattr(time, "strftime", time.strftime)
    for name in ("format_exception", "format_tb", "extract_tb"):
        monkeypatch.setattr(traceback, name, getattr(traceback, name))
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("kind", ["Hostile", "Awaited"])
def test_an_error_that_cannot_be_told_costs_its_episode(kind: str, tmp_path: Path) -> None:
    async def play() -> dict[str, object]:
        pool = a_pool(kind, log=tmp_path / "w.log")
        try:
            endings = {action: await ending(pool, action) for action in UNTOLD}
            return endings | {"go": await ending(pool, "go")}
        finally:
            pool.close()

    endings = asyncio.run(play())
    assert isinstance(endings.pop("go"), Transition)
    for action, error in endings.items():
        check_died(error, f"in step {action!r} of task train/t: {UNTOLD[action]}")
    assert "bad" in (tmp_path / "w.log").read_text()


def test_a_cause_or_a_note_beyond_measure_is_left_out_of_the_traceback() -> None:
    huge = "x" * (3 * MAX_TRACEBACK_CHARACTERS)
    noted, grouped = RuntimeError("short"), ExceptionGroup("short", [ValueError(huge)])
    noted.add_note(huge)
    caused = RuntimeError("short")
    caused.__cause__ = ValueError(huge)
    for error in (noted, caused, grouped, SyntaxError("short", ("f.py", 1, 1, huge))):
        text = full_traceback(error)
        assert "short" in text and len(text) < 1000
    for many in range(100_000):  # their traceback would be millions of lines
        caused, caused.__cause__ = RuntimeError(f"error {many}"), caused
    assert "error 99999" in full_traceback(caused) and len(full_traceback(caused)) < 1000
    small = RuntimeError("short")
    small.__cause__ = ValueError("its cause")
    assert "ValueError: its cause" in full_traceback(small)
    assert len(describe_error(caused, called=None)) < 1000


# close


@pytest.mark.parametrize("kind", ["Hostile", "Awaited"])
@pytest.mark.parametrize(
    "error", ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError"]
)
def test_whatever_close_raises_is_logged_and_costs_nothing(
    kind: str, error: str, tmp_path: Path
) -> None:
    async def play() -> tuple[object, object]:
        pool = a_pool(kind, log=tmp_path / "w.log", close=error)
        try:
            return await ending(pool, "raise"), await ending(pool, "go")
        finally:
            pool.close()

    failed, answer = asyncio.run(play())
    check_died(failed, "RuntimeError: it broke")
    assert isinstance(answer, Transition)
    assert (tmp_path / "w.log").read_text().count(error) >= 2  # of the failed object, of the other


# a driver


@pytest.mark.parametrize("what", ["chdir", "umask", "close", "an exit in close"])
def test_what_an_environment_does_to_its_process_it_does_not_to_a_driver(
    what: str, tmp_path: Path
) -> None:
    directory, umask = os.getcwd(), os.umask(0o022)
    os.umask(umask)
    try:
        seen = try_environment(
            "hostile_world:Driven",
            {},
            replace(TASK, id=what),
            answer_timeout_s=SOON_S,
            log=tmp_path / "w.log",
        )
        assert seen is not None and seen.text == what
        assert os.getcwd() == directory and os.umask(umask) == umask
        for descriptor in range(3):
            os.fstat(descriptor)
    finally:
        os.chdir(directory)
        os.umask(umask)


def test_a_driver_does_not_ask_an_environment_which_answers_it_keeps(tmp_path: Path) -> None:
    directory = os.getcwd()
    try:
        try_environment(
            "hostile_world:Keeps", {}, TASK, answer_timeout_s=SOON_S, log=tmp_path / "w.log"
        )
        assert os.getcwd() == directory
    finally:
        os.chdir(directory)


def test_an_environment_that_exits_or_hangs_in_a_driver_is_one_line(tmp_path: Path) -> None:
    for what, words, limit_s in (
        ("exit in a task", "exit code 5, in reset of task train/exit in a task;", SOON_S),
        ("hang", r"did not answer within 1 s and was killed, in reset of task train/hang;", 1.0),
    ):
        with pytest.raises(EnvironmentFailed, match=words):
            try_environment(
                "hostile_world:Driven",
                {},
                replace(TASK, id=what),
                answer_timeout_s=limit_s,
                log=tmp_path / "w.log",
            )


# answers that lie


class LyingFloat(float):
    def __float__(self) -> float:
        return float("nan")


class LyingText(str):
    __slots__ = ()

    def __len__(self) -> int:
        return 1

    def encode(self, *_: Any) -> bytes:
        return b"x"

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __reduce__(self) -> Any:
        return os.getcwd, ()


class LyingTuple(tuple[Any, ...]):
    def __iter__(self) -> Iterator[Any]:
        return iter([3])

    def __len__(self) -> int:
        return 0


class LyingBytes(bytes):
    def __bytes__(self) -> bytes:
        return b"other"

    def __getitem__(self, _: Any) -> Any:
        return b"other"


class LyingImage(np.ndarray):
    def copy(self, *_: Any) -> Any:
        return None


class LyingObservation(Observation):
    pass


class LyingTransition(Transition):
    pass


def a_transition(kind: type[Transition] = Transition, **fields: Any) -> Transition:
    plain: dict[str, Any] = {
        "observation": Observation(text="x"),
        "reward": 1.0,
        "terminated": False,
        "truncated": False,
        "won": False,
    }
    return kind(**plain | fields)


def test_a_number_is_checked_as_it_is_stored() -> None:
    for fields in ({"reward": LyingFloat(1.0)}, {"task_score": LyingFloat(1.0)}):
        (name,) = fields
        with pytest.raises(ValueError, match=f"step returned {name}=1.0; it must be a finite"):
            checked_answer("step", a_transition(**fields))
        with pytest.raises(ValueError, match=f"run returned {name}=1.0; it must be a finite"):
            checked_outcome(Outcome(**{"reward": 1.0, "won": True} | fields))
    for huge in (10**400, float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="step returned reward="):
            checked_answer("step", a_transition(reward=huge))


def test_what_goes_on_from_the_border_is_pythons_own() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    lying = LyingObservation(
        text=LyingText("a text"),
        objective=LyingText("an objective"),
        anchor=LyingText("an anchor"),
        actions=[LyingText("go"), LyingText("stay")],  # type: ignore[arg-type]
        demonstrated=LyingText("go"),
        images=LyingTuple((image.view(LyingImage),)),
    )
    plain = checked_answer(
        "step", a_transition(LyingTransition, observation=lying, won=np.True_, reward=np.int64(2))
    )
    assert type(plain) is Transition and type(plain.observation) is Observation
    seen = plain.observation
    assert (plain.reward, plain.won) == (2.0, True)
    assert (type(plain.reward), type(plain.won)) == (float, bool)
    texts = [seen.text, seen.objective, seen.anchor, *(seen.actions or ()), seen.demonstrated]
    assert texts == ["a text", "an objective", "an anchor", "go", "stay", "go"]
    assert {type(text) for text in texts} == {str} and type(seen.actions) is tuple
    (copied,) = seen.images
    assert type(copied) is np.ndarray and (copied.copy() == image).all()
    with pytest.raises(ValueError, match="half of a character"):
        checked_answer("reset", Observation(text=LyingText(chr(0xD800))))


class LyingState:
    """A deterministic environment that lies in what it says of its state."""

    deterministic = True

    def state_key(self) -> object:
        return LyingText("a key")

    def save_state(self) -> object:
        return LyingBytes(b"saved")

    def understood(self) -> object:
        return (LyingText("go"),), a_transition(LyingTransition)


def test_what_a_deterministic_environment_says_of_its_state_is_pythons_own() -> None:
    state = answer_of(LyingState(), "reset", Observation(text="x")).state
    assert state is not None and state.understood is not None
    assert state.key == hashlib.blake2b(b"a key", digest_size=KEY_BYTES).digest()
    assert (state.saved, type(state.saved)) == (b"saved", bytes)
    assert type(state.understood.otherwise) is Transition
    assert [type(action) for action in state.understood.actions] == [str]


def test_a_task_whose_id_lies_about_its_characters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="half of a character"):
        list_tasks_in_child(
            "hostile_world:Hostile", {"tasks": "half"}, creating=True, log=tmp_path / "log"
        )


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ('{"reward": NaN, "won": true}', "ValueError: run returned reward=nan"),
        ('{"reward": 1, "won": "yes"}', "TypeError: run returned won='yes'"),
        ('{"reward": 1, "lost": true}', "TypeError: .*unexpected keyword argument 'lost'"),
        ("3", "TypeError"),
    ],
)
def test_an_outcome_that_a_program_wrote_to_the_socket_itself_is_checked_too(
    outcome: str, words: str
) -> None:
    async def play() -> None:
        pool = ProgramPool("hostile_world:Forger", {"outcome": outcome}, processes=1)
        try:
            await pool.run(TASK, NOBODY, deadline_s=SOON_S)
        finally:
            pool.close()

    with pytest.raises(EnvironmentDied, match=f"on task train/t sent no outcome: {words}"):
        asyncio.run(play())
