"""A failing environment or program is one line: its error, the line of the author's file, the task,
and the log.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import configs
from cli.__main__ import main
from configs import Config, ConfigError, EnvConfig
from driver.environment_check import FAILURE_LOG, check_tasks, try_tasks
from driver.preflight import check_writable, make_or_open_run
from envs import (
    ClientSettings,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentPool,
    OptionsError,
    ProgramPool,
    Task,
    list_tasks,
    list_tasks_in_child,
    try_environment,
)
from envs.options import Options
from store import DRIVER_LOCK

KEY_ROOM = str(Path(__file__).parents[2] / "configs" / "key_room.yaml")
HANGS_S = 1.0  # a hung environment costs a test as much
TASK = Task(id="one", env_name="broken", split="train", seed=0)
NOBODY = ClientSettings(base_url="", api_key="")

# `env.options.how` says what is done, and where. Every kind of trouble is on a line of its own,
# which is looked up below.
BROKEN = """
import ctypes, os, sys, time
from envs import Observation, Outcome, Task, Transition

def trouble(what):
    print("about to", what)
    if what == "raise": {}["door"]
    if what == "sysexit": sys.exit("enough")
    if what == "exit": os._exit(3)
    if what == "segv": ctypes.string_at(0)
    if what == "hang": time.sleep(3600)

class Broken:
    def __init__(self, options):
        self.options = options
        if options.get("how", "").startswith("init-"): trouble(options["how"][5:])
    @classmethod
    def tasks(cls, split, options):
        how = options.get("how", "")
        tasks = [Task(id=f"{split}-{n}", env_name="broken", split=split, seed=n) for n in range(2)]
        if how.startswith("tasks-"): trouble(how[6:])
        if how == "missing option": options["size"]
        return {
            "a dict": {task.id: task for task in tasks}, "dicts": [{"id": "a"}], "texts": ["a"],
            "nothing": None, "a number": 3, "a generator": broken_generator(tasks),
            "a good generator": iter(tasks),
            "another split": [Task(id="a", env_name="broken", split="test", seed=0)],
            "a number's id": [Task(id=1, env_name="broken", split=split, seed=0)],
            "a long id": [Task(id="a" * 4097, env_name="broken", split=split, seed=0)],
            "a text's seed": [Task(id="a", env_name="broken", split=split, seed="0")],
            "a large seed": [Task(id="a", env_name="broken", split=split, seed=2**63)],
            "a number's data": [
                Task(id="a", env_name="broken", split=split, seed=0, data={"size": 3})],
            "a list's data": [Task(id="a", env_name="broken", split=split, seed=0, data=["size"])],
            "half a character": [Task(id=chr(0xD800), env_name="broken", split=split, seed=0)],
        }.get(how, tasks)
    def reset(self, task):
        if task.id.startswith("size"): self.options["size"]
        if task.id.startswith("a text"): return "a room"
        trouble(task.id)
        return Observation(text=task.id)
    def step(self, action):
        if action == "a tuple": return (Observation(text="x"), 0.0, False, {})
        if action == "interrupt": raise KeyboardInterrupt
        trouble(action)
        return Transition(
            observation=Observation(text="x"),
            reward=0.0, terminated=False, truncated=False, won=False)
    def close(self): pass

def broken_generator(tasks):
    yield from tasks
    raise RuntimeError("no more tasks")

class Awaited(Broken):
    async def reset(self, task): return Broken.reset(self, task)
    async def step(self, action): return Broken.step(self, action)

class Agent:
    def __init__(self, options):
        if "how" in options: trouble(options["how"])
        self.size = options["size"]
    tasks = Broken.tasks
    def run(self, task, client): trouble(task.id)
"""


def line_of(text: str) -> int:
    """Return the number of the only line of BROKEN that begins with `text`."""
    (number,) = [
        n for n, line in enumerate(BROKEN.splitlines(), start=1) if line.strip().startswith(text)
    ]
    return number


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of the module `broken_world`."""
    (tmp_path / "broken_world.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_world", raising=False)  # of another test's folder
    return str(tmp_path / "broken_world.py")


def trouble_line(what: str) -> int:
    return line_of(f'if what == "{what}"')


# Trouble -> its error, and a text of the log.
TROUBLES = {
    "raise": ("KeyError: 'door', at {place}", "Traceback"),
    "sysexit": ("SystemExit: enough, at {place}", "Traceback"),
    "exit": ("with exit code 3", "with exit code 3"),
    "segv": (
        r"with exit code -11 \(SIGSEGV\).*, at {place}",
        "Fatal Python error: Segmentation fault",
    ),
}
HANGS = {"hang": ("and was killed.*, at {place}", "most recent call first")}


def said(what: str, broken: str) -> str:
    """Return the regular expression of what is said when `trouble(what)` is called."""
    return (TROUBLES | HANGS)[what][0].format(
        place=f"{re.escape(broken)}:{trouble_line(what)} in trouble"
    )


def check_log(log: Path, what: str) -> None:
    text = log.read_text()
    assert (TROUBLES | HANGS)[what][1] in text
    assert f"about to {what}\n" in text, "what it printed is in the log too"


@pytest.mark.parametrize("method", ["init", "reset", "step"])
def test_each_trouble_of_an_environment_is_one_line_with_its_place_task_and_log(
    broken: str, tmp_path: Path, method: str
) -> None:
    logs = {what: tmp_path / "logs" / f"{what}.log" for what in TROUBLES | HANGS}

    async def play(what: str) -> None:
        options = {"how": f"init-{what}"} if method == "init" else {}
        pool = EnvironmentPool(
            "broken_world:Broken", options, processes=1, answer_timeout_s=HANGS_S, log=logs[what]
        )
        try:
            async with pool.environment() as environment:
                await environment.reset(replace(TASK, id=what if method == "reset" else "t"))
                await environment.step(what)
        finally:
            pool.close()

    for what in TROUBLES | HANGS if method == "step" else TROUBLES:
        with pytest.raises(EnvironmentDied, match=said(what, broken)) as failed:
            asyncio.run(play(what))
        message = str(failed.value)
        assert message.endswith(f"; log: {logs[what]}") and "\n" not in message
        assert {
            "init": "in its start" in message or "in reset of task train/t" in message,
            "reset": f"in reset of task train/{what}" in message,
            "step": f"in step '{what}' of task train/t" in message,
        }[method], message
        check_log(logs[what], what)


@pytest.mark.parametrize("kind", ["Broken", "Awaited"])
@pytest.mark.parametrize(
    ("task_id", "action", "words"),
    [
        (
            "a text",
            "",
            "TypeError: reset returned str 'a room'; it must return an Observation, at "
            "{file}:{line} in reset",
        ),
        (
            "t",
            "a tuple",
            "TypeError: step returned tuple .*; it must return a Transition, at {file}:{line} in "
            "step",
        ),
        (
            "size",
            "",
            r"MissingOption: option 'size' is missing \(given: door\); set env.options.size=..., "
            "at {file}:{line}",
        ),
    ],
)
def test_nonsense_is_said_to_be_of_the_method_that_returned_it(
    broken: str, tmp_path: Path, kind: str, task_id: str, action: str, words: str
) -> None:
    log = tmp_path / "a.log"

    async def play() -> None:
        pool = EnvironmentPool(
            f"broken_world:{kind}", {"door": 1}, processes=1, answer_timeout_s=20.0, log=log
        )
        try:
            async with pool.environment() as environment:
                await environment.reset(replace(TASK, id=task_id))
                await environment.step(action)
        finally:
            pool.close()

    method = {"a text": "def reset", "t": "def step"}.get(task_id)
    line = line_of('if task.id.startswith("size")') if method is None else line_of(method)
    if kind == "Awaited" and method is not None:
        line = line_of("async " + method)
    with pytest.raises(
        EnvironmentDied, match=words.format(file=re.escape(broken), line=line)
    ) as failed:
        asyncio.run(play())
    assert str(failed.value).endswith(f"; log: {log}") and "Traceback" in log.read_text()


def test_an_interrupt_of_its_own_costs_the_episode_and_not_the_process(
    broken: str, tmp_path: Path
) -> None:
    line = line_of('if action == "interrupt"')
    raised = f"{broken}:{line}"
    words = f"failed in step 'interrupt' of task train/t: KeyboardInterrupt, at {raised} in step"

    async def play() -> None:
        pool = EnvironmentPool(
            "broken_world:Broken", {}, processes=1, answer_timeout_s=20.0, log=tmp_path / "a.log"
        )
        try:
            async with pool.environment() as environment, pool.environment() as other:
                await environment.reset(replace(TASK, id="t"))
                await other.reset(replace(TASK, id="other"))
                with pytest.raises(EnvironmentDied, match=re.escape(words)):
                    await environment.step("interrupt")
                assert (await other.step("go")).observation.text == "x"
        finally:
            pool.close()

    asyncio.run(play())


def test_each_trouble_of_a_program_is_one_line_with_its_place_task_and_log(
    broken: str, tmp_path: Path
) -> None:
    async def play(what: str, log: Path) -> None:
        pool = ProgramPool("broken_world:Agent", {"size": 1}, processes=1, log=log)
        try:
            await pool.run(replace(TASK, id=what), NOBODY, deadline_s=HANGS_S)
        finally:
            pool.close()

    for what in TROUBLES | HANGS:
        log = tmp_path / "logs" / f"{what}.log"
        with pytest.raises(EnvironmentDied, match=said(what, broken)) as failed:
            asyncio.run(play(what, log))
        message = str(failed.value)
        assert message.startswith(f"program 'broken_world:Agent' on task train/{what}")
        assert message.endswith(f"; log: {log}") and "\n" not in message
        check_log(log, what)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("a dict", r"tasks\('train'\) returned dict .*; it must return a list of Task, at {tasks}"),
        (
            "nothing",
            r"tasks\('train'\) returned NoneType None; it must return a list of Task, at {tasks}",
        ),
        ("a number", r"tasks\('train'\) returned int 3; it must return a list of Task, at {tasks}"),
        ("dicts", r"has dict {{'id': 'a'}} at index 0; each must be an envs.Task, at {tasks}"),
        ("texts", r"has str 'a' at index 0; each must be an envs.Task, at {tasks}"),
        ("a generator", "RuntimeError: no more tasks, at {raised} in broken_generator"),
        ("another split", "has task 'a' with split='test'; it must be 'train', at {tasks}"),
        ("a number's id", "has a task with id=1 at index 0; it must be text, at {tasks}"),
        ("a long id", "has a task whose id has 4,097 characters at index 0; at most 4,096 can"),
        ("a text's seed", "has task 'a' with seed='0'; it must be an int, at {tasks}"),
        (
            "a large seed",
            "has task 'a' with a seed of 64 bits; it must be between -9223372036854775807",
        ),
        ("a number's data", r"has task 'a' with data\['size'\]=3; it must be text, at {tasks}"),
        ("a list's data", "has task 'a' with data=list .*; it must be a dict of text, at {tasks}"),
        ("half a character", r"returned text with '\\ud800' in it, half of a character"),
        ("missing option", r"option 'size' is missing \(given: how\); set env.options.size=...$"),
    ],
)
def test_a_list_of_tasks_that_is_none_is_refused(broken: str, how: str, words: str) -> None:
    file = re.escape(broken)
    raised = f"{file}:{line_of('raise RuntimeError')}"
    tasks = rf"{file}:{line_of('@classmethod')} in tasks"
    with pytest.raises(EnvironmentFailed, match=words.format(tasks=tasks, raised=raised)) as failed:
        list_tasks("broken_world:Broken", {"how": how})
    assert "\n" not in str(failed.value)


def test_a_generator_of_tasks_is_as_good_as_a_list(broken: str) -> None:
    assert [
        task.id for task in list_tasks("broken_world:Broken", {"how": "a good generator"})["train"]
    ] == [
        "train-0",
        "train-1",
    ]


@pytest.mark.parametrize("what", list(TROUBLES))
def test_trouble_in_listing_the_tasks_leaves_the_caller_alive(
    broken: str, tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs" / "a.log"
    with pytest.raises(EnvironmentFailed, match=said(what, broken)) as failed:
        list_tasks_in_child("broken_world:Broken", {"how": f"tasks-{what}"}, creating=True, log=log)
    assert str(failed.value).startswith("env.name=broken_world:Broken: listing its tasks ")
    assert str(failed.value).endswith(f"; log: {log}")
    assert TROUBLES[what][1] in log.read_text()
    assert f"about to {what}\n" in capfd.readouterr().out, "progress of its own is for the terminal"
    assert "broken_world" not in sys.modules


def test_a_list_of_tasks_of_any_length_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the author's code wrote a message of 2^62 bytes to the socket of the answer."""
    (tmp_path / "endless.py").write_text(
        """
import os, struct, sys


class Endless:
    def __init__(self, options):
        pass

    def reset(self, task):
        raise NotImplementedError

    step = close = reset

    @staticmethod
    def tasks(split, options):
        os.write(int(sys.argv[1]), struct.pack("!i", -1) + struct.pack("!Q", 1 << 62) + b"x" * 99)
        return []
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvironmentFailed, match="env.name=endless:Endless: listing its tasks"):
        list_tasks_in_child("endless:Endless", {}, creating=True, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("how", "words"), [({}, "option 'size' is missing"), ({"how": "segv"}, "SIGSEGV")]
)
def test_a_program_that_cannot_be_made_is_refused_at_the_start(
    broken: str, tmp_path: Path, how: Mapping[str, object], words: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=words):
        list_tasks_in_child("broken_world:Agent", how, creating=True, log=tmp_path / "a.log")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "x = (1,",
            r"importing 'odd_module' failed: SyntaxError: '\(' was never closed .*, at {file}:1",
        ),
        (
            "import no_such_package_at_all",
            "failed: ModuleNotFoundError: No module named 'no_such_package_at_all', at {file}:1",
        ),
        (
            "\n1 / 0",
            "importing 'odd_module' failed: ZeroDivisionError: division by zero, at {file}:2 in "
            "<module>",
        ),
        (
            "raise SystemExit('enough')",
            "importing 'odd_module' failed: SystemExit: enough, at {file}:1 in <module>",
        ),
        ("import os; os._exit(3)", "ended the process with exit code 3"),
        ("", "module 'odd_module' has no class 'Env'"),
        ("class Env: pass", "the class lacks tasks, reset, step, close"),
    ],
)
def test_a_module_that_cannot_be_used_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    words: str,
) -> None:
    """Check a start and a dry run of a training, and a start of an evaluation."""
    (tmp_path / "odd_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.delitem(sys.modules, "odd_module", raising=False)
    given = [
        KEY_ROOM,
        "env.name=odd_module:Env",
        f"model.path={tmp_path / 'model'}",
        f"run_dir={tmp_path / 'run'}",
    ]
    expected = words.format(file=re.escape(str(tmp_path / "odd_module.py")))
    for command in ("train", "evaluate"):
        for more in ([], ["--dry-run"]):
            assert main([command, *given, *more]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("error: env.name") and re.search(expected, line)
            log = re.search("; log: (.*)", line)
            assert (log is not None) == (("failed" in line) or ("exit code" in line)), (
                "else the line has all there is to know"
            )
            assert log is None or Path(log[1]).is_file()


def test_a_start_that_fails_keeps_its_log_and_the_next_one_removes_it(
    broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    log = run / "logs" / FAILURE_LOG
    asked = [
        KEY_ROOM,
        "env.name=broken_world:Broken",
        f"run_dir={run}",
        "env.options.how=init-raise",
    ]
    for _ in range(2):  # what is left is no hindrance
        assert main(["train", *asked]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            re.search(said("raise", broken), line)
            and "task train/train-0" in line
            and line.endswith(f"; log: {log}")
        )
        check_log(log, "raise")
    config = replace(Config(), run_dir=str(run), env=EnvConfig(name="broken_world:Broken"))
    check_tasks(config, Console(quiet=True))
    assert [path.name for path in run.iterdir()] == [DRIVER_LOCK]


def test_a_run_that_is_evaluated_tries_its_environment_before_anything_starts(
    broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "env.name=broken_world:Broken",
        "env.options.how=init-exit",
        f"run_dir={tmp_path / 'run'}",
    ]
    make_or_open_run(configs.load(KEY_ROOM, asked))
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    log = tmp_path / "run" / "logs" / FAILURE_LOG
    assert "does not start with task train/train-0" in line and line.endswith(
        f"with exit code 3, in its start; log: {log}"
    )
    check_log(log, "exit")


def test_a_dry_run_refuses_mistakes_and_only_says_what_may_be_elsewhere(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = replace(Config(), run_dir=str(tmp_path / "run"))
    for how in ("tasks-raise", "tasks-exit", "a dict", "missing option"):
        env = EnvConfig(name="broken_world:Broken", options={"how": how})
        with pytest.raises(EnvironmentFailed):
            try_tasks(replace(config, env=env), Console(quiet=True))
    for how in ("init-raise", ""):  # nothing is made in a dry run
        env = EnvConfig(name="broken_world:Broken", options={"how": how})
        try_tasks(replace(config, env=env), Console(quiet=True))
    kept = sorted(path.name for path in tmp_path.glob("gigpo-dry-run-*/*"))
    assert kept == [FAILURE_LOG] * 4 and len(list(tmp_path.glob("gigpo-dry-run-*"))) == 4
    assert not (tmp_path / "run").exists()


def test_the_authors_line_is_named_also_where_our_code_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subclass one of our environments. An error of ours says what to change, and has no line."""
    lines = (
        "from envs.key_room import KeyRoomEnv",
        "class Mine(KeyRoomEnv):",
        " def reset(self, task):",
        "  return super().reset(3)",
    )
    (tmp_path / "my_rooms.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        EnvironmentFailed,
        match=rf"AttributeError: .*, at {re.escape(str(tmp_path))}/my_rooms.py:4 in reset$",
    ):
        try_environment("my_rooms:Mine", {}, TASK, answer_timeout_s=20.0)
    with pytest.raises(EnvironmentFailed, match=r"gives no tasks: .*is it up\?$"):
        list_tasks("remote", {"url": "http://127.0.0.1:1"})


def test_a_missing_option_may_still_be_caught_as_a_missing_key(broken: str) -> None:
    options = Options({"door": 1})
    for kind in (OptionsError, KeyError):
        with pytest.raises(kind, match="^option 'size' is missing"):
            options["size"]
    assert (options["door"], options.get("size"), "size" in options) == (1, None, False)


def test_an_asynchronous_environment_keeps_its_traceback_too(broken: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    with pytest.raises(EnvironmentFailed, match=said("raise", broken)) as failed:
        try_environment(
            "broken_world:Awaited", {}, replace(TASK, id="raise"), answer_timeout_s=20.0, log=log
        )
    assert str(failed.value).endswith(f"; log: {log}") and "task train/raise" in str(failed.value)
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("run_dir", "why"),
    [
        ("/proc/x/y", "No such file"),
        ("{tmp}/" + "a" * 300, "name too long"),
        ("{tmp}/file/x", "no directory"),
    ],
)
def test_a_run_dir_that_cannot_be_written_is_one_line(
    command: str, run_dir: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "config.json").write_text("{}")
    given = [f"model.path={tmp_path}", f"run_dir={run_dir.format(tmp=tmp_path)}"]
    assert main([command, KEY_ROOM, *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("error: run_dir=")
        and why in line
        and line.endswith("e.g. run_dir=runs/mine")
    )


def test_a_run_dir_without_the_right_to_write_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    check_writable(replace(Config(), run_dir=str(tmp_path / "a" / "b")))
    assert not os.listdir(tmp_path), "it is looked at only"
    (tmp_path / "there").mkdir()
    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    for name in ("there", "not"):
        with pytest.raises(ConfigError, match="cannot be written: Permission denied; give another"):
            check_writable(replace(Config(), run_dir=str(tmp_path / name)))
    assert os.listdir(tmp_path) == ["there"]
