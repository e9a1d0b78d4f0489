"""A run seen from outside: who drives it, and that only its own leftovers are removed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from unittest import mock

import psutil
import pytest
from rich.console import Console

import configs
from cli.__main__ import main
from driver import run_control as runs
from driver import run_lock
from driver.interrupt import REPEAT_S, Interrupt
from driver.run_lock import RUN_MARK, driver_of, driving, make_run_directory, remove_leftovers
from learner import make_ray_directory, replay, started_ticks
from learner.distributed import private_ray
from store import (
    DRIVER_FILE,
    DRIVER_LOCK,
    Catalog,
    RunLayout,
    StoreError,
    VersionRecord,
    export,
    write_open_sql,
)
from store.clock import now_us
from tests.support.neighbours import Neighbour
from tests.support.store_damage import no_file_may_grow
from tests.support.store_runs import make_run, rewrite

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleep_with(
    mark: Path | None, sleepers: list[subprocess.Popen[bytes]]
) -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if name != RUN_MARK}
    if mark is not None:
        environ[RUN_MARK] = str(mark.resolve())
    sleepers.append(subprocess.Popen(SLEEP, env=environ))
    return sleepers[-1]


def driven_by(
    pid: int,
    ticks: int | None,
    *,
    host: str = HOST,
    ray_session: Path | None = None,
    run: Path = Path("/nowhere"),
) -> str:
    """A stranger may also name a Ray session."""
    session = None if ray_session is None else str(ray_session)
    known = {"pid": pid, "started_ticks": ticks, "host": host, "ray_session": session}
    return json.dumps({**known, "run": str(run)})


def drive(run: Path, sleepers: list[subprocess.Popen[bytes]]) -> psutil.Process:
    """Start another process that drives the run, as far as can be seen from outside."""
    code = """
import sys, time
from pathlib import Path
from driver.run_lock import driving
with driving(Path(sys.argv[1])):
    print("drives", flush=True)
    time.sleep(600)
"""
    sleepers.append(
        subprocess.Popen([sys.executable, "-c", code, str(run)], cwd=ROOT, stdout=subprocess.PIPE)
    )
    assert sleepers[-1].stdout is not None and sleepers[-1].stdout.readline() == b"drives\n"
    return psutil.Process(sleepers[-1].pid)


def test_leftovers_are_those_that_carry_the_runs_mark(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    ours = [sleep_with(tmp_path / "run", sleepers) for _ in range(2)]
    others = [sleep_with(tmp_path / "run2", sleepers), sleep_with(None, sleepers)]
    assert remove_leftovers(tmp_path / "run") == 2
    # how it ended, whoever asks first is told
    assert all(process.wait(timeout=10) is not None for process in ours)
    assert [process.poll() for process in others] == [None, None]


def test_this_process_and_its_parents_are_no_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as a driver's own environment has it
    monkeypatch.setenv(RUN_MARK, str((tmp_path / "run").resolve()))
    assert remove_leftovers(tmp_path / "run") == 0


def test_one_process_drives_a_run_at_a_time(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with driving(run) as n_removed:
        assert n_removed == 0
        driver = driver_of(run)
        assert driver is not None and driver.pid == os.getpid()
    assert driver_of(run) is None
    other = drive(run, sleepers)
    with pytest.raises(StoreError, match=rf"process {other.pid} drives .*gigpo stop"), driving(run):
        pass
    assert other.is_running()


def test_of_two_that_begin_at_once_one_drives_and_loses_nothing_to_the_other(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """Both have seen that nobody drives the run. The first looks for leftovers for a moment."""
    code = """
import os, sys, time
from pathlib import Path
from driver import run_lock
from store import StoreError
real_check, real_removal = run_lock.check_idle, run_lock.remove_leftovers
def check(run, **words):
    real_check(run, **words)
    print("idle", flush=True)
    sys.stdin.readline()
    run_lock.check_idle = real_check
def remove(run):
    time.sleep(0.5)
    return real_removal(run)
run_lock.check_idle, run_lock.remove_leftovers = check, remove
try:
    with run_lock.driving(Path(sys.argv[1])):
        print("drives", flush=True)
        sys.stdin.readline()
except StoreError as error:
    print(error, flush=True)
"""
    run = tmp_path / "run"
    run.mkdir()
    for _ in range(2):
        sleepers.append(
            subprocess.Popen(
                [sys.executable, "-c", code, str(run)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
    for process in sleepers:
        assert process.stdout is not None and process.stdout.readline() == b"idle\n"
    for process in sleepers:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    said = {process.stdout.readline().decode() for process in sleepers if process.stdout}
    driver = driver_of(run)
    assert driver is not None and driver.process() is not None
    refused = f"process {driver.pid} drives {run}; choose another run_dir, or stop it: gigpo stop"
    assert said == {"drives\n", f"{refused} {run}\n"}


def test_who_may_only_read_a_run_keeps_it_from_no_start(tmp_path: Path) -> None:
    """Whoever may open a directory or a file can lock it."""
    run = tmp_path / "run"
    run.mkdir()
    held = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with driving(run):
            assert stat.S_IMODE((run / DRIVER_LOCK).stat().st_mode) == 0o600
    finally:
        os.close(held)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/motd")])
def test_another_thing_in_the_place_of_the_lock_is_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    make(run / DRIVER_LOCK)
    with driving(run):
        assert driver_of(run) is not None


def test_nobody_drives_a_run_in_a_directory_that_another_user_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: it was made between the check of run_dir and this, and got links later."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    Neighbour(monkeypatch).gets(run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # the session's key is root's
    with (
        pytest.raises(StoreError, match=r"run belongs to another user \(uid 65534\)"),
        driving(run),
    ):
        pass
    assert [path.name for path in run.iterdir()] == ["run.json"]


def test_nobody_drives_a_run_beneath_a_directory_that_another_user_made_in_one_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: they read run_dir=/tmp/new/run in the command line, and make /tmp/new."""
    for_all, run = tmp_path / "for_all", tmp_path / "for_all" / "new" / "run"
    run.parent.mkdir(parents=True)
    for_all.chmod(0o1777)
    Neighbour(monkeypatch).gets(run.parent)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # the session's key is root's
    with (
        pytest.raises(StoreError, match=r"new belongs to another user \(uid 65534\)"),
        driving(run),
    ):
        pass
    assert not (run / DRIVER_FILE).exists()
    (tmp_path / "link").symlink_to(run.parent)
    with (
        pytest.raises(StoreError, match="belongs to another user"),
        driving(tmp_path / "link" / "a"),
    ):
        pass
    for_all.chmod(0o755)  # a folder that a colleague made where not everybody may
    with driving(run):
        assert (run / DRIVER_FILE).exists()


def test_a_run_of_ours_behind_a_link_of_another_user_is_neither_driven_nor_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the link led to a run of the user's, and to another place after the check."""
    run, link = tmp_path / "run", tmp_path / "link"
    RunLayout.create(run, config_yaml="")
    link.symlink_to(run)
    neighbour = Neighbour(monkeypatch)
    monkeypatch.setattr("store.untrusted.trust.is_trusted", lambda _: True)
    with driving(link):
        assert (run / DRIVER_FILE).exists(), "a link of root's, or of this user's"
    neighbour.gets(link)
    with pytest.raises(StoreError, match=r"link belongs to another user"), driving(link):
        pass
    with pytest.raises(StoreError, match=r"link belongs to another user"):
        runs.stop(link, Console())
    neighbour.gets(run)
    with driving(run):
        assert (run / DRIVER_FILE).exists(), "a run that this user trusts"
    # The attack: a link to such a run, exchanged with a directory of theirs while it was looked at.
    tmp_path.chmod(0o1777)
    with pytest.raises(StoreError, match=r"run belongs to another user"), driving(run):
        pass
    with pytest.raises(StoreError, match=r"run belongs to another user"):
        runs.stop(run, Console())


def test_no_run_directory_is_made_behind_a_link_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, link = tmp_path / "private", tmp_path / "link"
    private.mkdir()
    link.symlink_to(private)
    Neighbour(monkeypatch).gets(link)
    with pytest.raises(StoreError, match="link belongs to another user"):
        make_run_directory(link / "sub" / "run", private=False)
    assert list(private.iterdir()) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_nobody_else_enters_the_directory_of_a_private_run(tmp_path: Path, is_there: bool) -> None:
    """The attack: what an environment said, with a key in it, was read in logs/."""
    run = tmp_path / "run"
    if is_there:
        run.mkdir()
    with driving(run, private=True):
        assert stat.S_IMODE(run.stat().st_mode) == 0o700


def test_a_directory_of_another_user_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """The attack: they exchange it with a link to another run while `gigpo stop` looks."""
    run = tmp_path / "run"
    RunLayout.create(run, config_yaml="")
    worker = sleep_with(run, sleepers)
    Neighbour(monkeypatch).gets(run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # the session's key is root's
    for ask in (lambda: runs.stop(run, Console()), lambda: runs.ask_for_workers(run, 3)):
        with pytest.raises(StoreError, match=r"uid 65534\).*; ask that user to do it"):
            ask()
    assert worker.poll() is None


def test_a_link_in_place_of_driver_json_makes_no_process_the_driver(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """The attack: a process whose output goes to /dev/null was ended as the driver of a run."""
    run = tmp_path / "run"
    run.mkdir()
    other = sleep_with(None, sleepers)
    ticks = started_ticks(other.pid)
    (run / DRIVER_FILE).write_text(driven_by(other.pid, ticks, run=run))
    driver = driver_of(run)
    (run / DRIVER_FILE).unlink()
    (run / DRIVER_FILE).symlink_to("/dev/null")
    assert driver is not None and driver.process() is None


def test_a_copy_of_a_run_that_is_driven_is_driven_by_nobody(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """Else it could not be gone on with, and --stop would end the other run and remove its Ray
    session.
    """
    run, copy, session = tmp_path / "run", tmp_path / "copy", tmp_path / "ray"
    for directory in (run, copy, session):
        directory.mkdir()
    other = psutil.Process(sleep_with(None, sleepers).pid)
    (copy / DRIVER_FILE).write_text(
        driven_by(other.pid, started_ticks(other.pid), ray_session=session, run=run)
    )
    RunLayout.create(copy, config_yaml="")
    runs.stop(copy, Console(file=StringIO()))
    with driving(copy):
        pass
    assert other.is_running()
    assert session.exists()


def test_a_pid_that_is_another_process_by_now_drives_nothing(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with driving(run):
        driver = driver_of(run)
    assert driver is not None
    other = psutil.Process(sleep_with(None, sleepers).pid)
    ticks = started_ticks(other.pid)
    assert ticks is not None
    (run / DRIVER_FILE).write_text(driven_by(other.pid, ticks - 1, run=run))
    with driving(run):
        assert other.is_running()


def test_when_a_process_was_started_is_counted_in_ticks_of_the_kernel(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    first, second = sleep_with(None, sleepers).pid, sleep_with(None, sleepers).pid
    ticks, later = started_ticks(first), started_ticks(second)
    assert ticks is not None and later is not None
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert 0 < ticks <= later <= since_boot_s * os.sysconf("SC_CLK_TCK") + 1
    assert started_ticks(2**22 + 1) is None  # a number no process has


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run directory"):
        runs.ask_for_workers(tmp_path, 3)
    RunLayout.create(tmp_path / "run", config_yaml="seed: 3\n")
    with pytest.raises(StoreError, match="nobody drives"):
        runs.ask_for_workers(tmp_path / "run", 3)
    (tmp_path / DRIVER_FILE).write_text("{")
    with pytest.raises(StoreError, match=r"driver\.json is not readable"):
        driver_of(tmp_path)
    (tmp_path / DRIVER_FILE).write_text(driven_by(1, 0, host="elsewhere"))
    with pytest.raises(StoreError, match="process 1 of elsewhere; stop it there"):
        runs.stop(tmp_path, Console())


def test_as_many_workers_as_were_asked_for(tmp_path: Path) -> None:
    assert runs.wanted_workers(tmp_path) is None
    with driving(tmp_path):
        runs.ask_for_workers(tmp_path, 3)
        assert runs.wanted_workers(tmp_path) == 3
    with driving(tmp_path):
        assert runs.wanted_workers(tmp_path) is None, "a new start follows its config"


def test_a_run_that_plays_nothing_takes_no_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunLayout.create(
        tmp_path / "run", config_yaml=configs.as_yaml(configs.Config(source=["runs/a"]))
    )
    with driving(tmp_path / "run"):
        assert main(["workers", str(tmp_path / "run"), "3"]) == 2
        assert runs.wanted_workers(tmp_path / "run") is None
    assert "plays nothing (offline.share=1)" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (
        no_file_may_grow(0),
        pytest.raises(StoreError, match=r"cannot write .*driver.json: File too large; free space"),
    ):
        driving(run).__enter__()
    with driving(run):
        with no_file_may_grow(0):
            runs.say_stopping(run, "ends")  # nobody hears it, and the run ends in order
            with pytest.raises(StoreError, match=r"cannot write .*: File too large; free space"):
                runs.ask_for_workers(run, 2)
        assert sorted(path.name for path in run.iterdir()) == [DRIVER_FILE, DRIVER_LOCK]
    assert not list(run.iterdir())


def test_a_disk_that_fails_at_the_end_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that became read-only said driver.json, and not what had failed on it."""
    run = tmp_path / "run"

    def read_only(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", str(path))

    def fail() -> None:
        monkeypatch.setattr(Path, "unlink", read_only)
        raise StoreError("the cause")

    with pytest.raises(StoreError, match="the cause"), driving(run):
        fail()
    monkeypatch.undo()
    with driving(run):  # what is left is of an ended process
        pass


def test_only_the_ray_directories_of_the_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    mine, others = make_ray_directory(tmp_path / "run"), make_ray_directory(tmp_path / "run2")
    try:
        assert mine.stat().st_mode & 0o777 == 0o700
        remove_leftovers(tmp_path / "run")
        assert not mine.exists() and others.exists()
    finally:
        remove_leftovers(tmp_path / "run2")
    assert not others.exists()


MAKE = """
import sys, time
from pathlib import Path
from learner import make_ray_directory
from learner.distributed import private_ray
private_ray.RAY_DIRECTORIES = Path(sys.argv[1])
print(make_ray_directory(Path(sys.argv[2])), flush=True)
time.sleep(600)
"""


def private_ray_directories(here: Path, run: Path, sleepers: list[subprocess.Popen[bytes]]) -> Path:
    """Return the directory that a process made which is still there."""
    sleepers.append(
        subprocess.Popen(
            [sys.executable, "-c", MAKE, str(here), str(run)], stdout=subprocess.PIPE, cwd=ROOT
        )
    )
    assert sleepers[-1].stdout is not None
    return Path(sleepers[-1].stdout.readline().decode().strip())


@pytest.mark.parametrize("is_reaped", [True, False])
def test_what_a_killed_replay_left_is_removed_by_the_next_one_and_by_a_stop(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sleepers: list[subprocess.Popen[bytes]],
    is_reaped: bool,
) -> None:
    """Not what a replay has that is still at work, or one of another run."""
    monkeypatch.setattr(private_ray, "RAY_DIRECTORIES", tmp_path)
    run, seen = tmp_path / "run", []

    def of_a_replay(**options: object) -> None:
        (mine,) = tmp_path.glob(f"{private_ray.RAY_DIRECTORY}{os.getpid()}-*")
        assert (
            mine.stat().st_mode & 0o777 == 0o700
            and (mine / "owner.json").is_file()
            and (mine / "token").is_file()
        )
        seen.append(mine)

    def replays() -> None:
        with replay._private_ray(run):
            pass
        assert not seen.pop().exists()

    monkeypatch.setattr(replay.ray, "init", of_a_replay)
    for removes in (replays, lambda: remove_leftovers(run)):
        left, others = (
            private_ray_directories(tmp_path, of, sleepers) for of in (run, tmp_path / "run2")
        )
        removes()
        assert left.is_dir() and others.is_dir()
        sleepers[-2].kill()
        if is_reaped:
            sleepers[-2].wait()
        else:  # a process that has ended, and that its parent has not asked yet how
            os.waitid(os.P_PID, sleepers[-2].pid, os.WEXITED | os.WNOWAIT)
        removes()
        assert not left.exists() and others.is_dir()


def test_a_full_disk_at_a_ray_directory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_ray, "RAY_DIRECTORIES", tmp_path)
    with (
        no_file_may_grow(0),
        pytest.raises(StoreError, match=r"cannot write .*owner.json: File too large; free space"),
    ):
        make_ray_directory(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_ray_directory_that_another_user_made_or_that_is_a_link_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_ray, "RAY_DIRECTORIES", tmp_path)
    open_to_all = make_ray_directory(tmp_path / "run")
    open_to_all.chmod(0o777)
    elsewhere = tmp_path / "precious"
    make_ray_directory(tmp_path / "run").rename(elsewhere)
    link = tmp_path / f"{private_ray.RAY_DIRECTORY}1-link"
    link.symlink_to(elsewhere)
    foreign = make_ray_directory(tmp_path / "run")
    if os.geteuid() == 0:
        os.chown(foreign, 65534, 65534)
    else:
        foreign.chmod(0o755)
    remove_leftovers(tmp_path / "run")
    assert open_to_all.exists() and elsewhere.exists() and link.is_symlink() and foreign.exists()


@pytest.mark.parametrize(
    "asks", [lambda run: runs.stop(run, Console(file=StringIO())), remove_leftovers]
)
def test_a_strangers_run_cannot_name_a_directory_to_be_removed(
    tmp_path: Path, asks: Callable[[Path], object]
) -> None:
    # a number no process has
    run, precious, gone = tmp_path / "run", tmp_path / "precious", 2**22 + 1
    RunLayout.create(run, config_yaml="")
    precious.mkdir()
    (run / DRIVER_FILE).write_text(driven_by(gone, 0, ray_session=precious, run=run))
    asks(run)
    assert precious.exists()


def test_a_strangers_run_cannot_name_a_process_to_be_ended(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """With its right start time, and although it reads the file just now."""
    run = tmp_path / "run"
    RunLayout.create(run, config_yaml="")
    (run / DRIVER_FILE).touch()
    with (run / DRIVER_FILE).open() as reading:
        sleepers.append(subprocess.Popen(SLEEP, stdin=reading))
    other = sleepers[-1]
    (run / DRIVER_FILE).write_text(driven_by(other.pid, started_ticks(other.pid), run=run))
    runs.stop(run, Console(file=StringIO()))
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=0.5)


def test_a_process_that_hides_its_files_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """An ssh-agent of this very user hides them, and driver.json may name it."""
    run = tmp_path / "run"
    RunLayout.create(run, config_yaml="")
    sleepers.append(subprocess.Popen(SLEEP))
    other = sleepers[-1]
    (run / DRIVER_FILE).write_text(driven_by(other.pid, started_ticks(other.pid), run=run))

    def hidden(pid: int, path: Path) -> bool:
        raise PermissionError(f"/proc/{pid}/fd")

    monkeypatch.setattr(run_lock, "_writes", hidden)
    with pytest.raises(StoreError, match="does not show its files. Stop it as that user"):
        runs.stop(run, Console(file=StringIO()))
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=0.5)


@pytest.mark.parametrize(
    "text",
    [
        driven_by(-1, 0),
        driven_by(2**70, 0),
        driven_by("self/../1", 0),  # type: ignore[arg-type]
        driven_by(1, 0, host=["a"]),  # type: ignore[arg-type]
        "[" * 100_000,
        "[1]",
        "7" * 5000,
    ],
)
def test_a_strangers_driver_file_is_an_error_of_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / DRIVER_FILE).write_text(text)
    with pytest.raises(StoreError, match=r"driver\.json is not readable") as refused:
        driver_of(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_pipe_or_a_link_in_the_place_of_the_driver_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / DRIVER_FILE)
    with pytest.raises(StoreError, match=r"driver\.json is no regular file"):
        driver_of(tmp_path)
    (tmp_path / DRIVER_FILE).unlink()
    (tmp_path / DRIVER_FILE).symlink_to("/proc/self/environ")
    with pytest.raises(StoreError, match=r"driver\.json is or lies behind a symbolic link"):
        driver_of(tmp_path)


def test_a_link_that_waits_for_a_file_of_the_driver_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (DRIVER_FILE, runs.STOPPING_FILE):
        (tmp_path / f"{name}.{os.getpid()}").symlink_to(precious)
        (tmp_path / name).symlink_to(precious)
    (tmp_path / DRIVER_FILE).unlink()
    with driving(tmp_path):
        runs.say_stopping(tmp_path, "stopping")
    assert precious.read_text() == "mine"


class Ending:
    """A driver that says `texts` one after the other, one a minute, and ends with the last; nobody
    sleeps.
    """

    never_ends = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path, texts: list[str]) -> None:
        self.now_s, self.signals, self.pid, self.run, self.texts = 0.0, [], 7, run, texts
        run.mkdir()
        (run / DRIVER_FILE).write_text(driven_by(self.pid, 0, run=run))
        monkeypatch.setattr(run_lock.Driver, "process", lambda driver: self)
        monkeypatch.setattr(runs, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += 60.0
        if self.texts:
            runs.say_stopping(self.run, self.texts.pop(0))

    def is_running(self) -> bool:
        return bool(self.texts) or self.never_ends

    def status(self) -> str:
        return "running"

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


def test_a_stop_waits_for_as_long_as_the_driver_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = Ending(
        monkeypatch,
        tmp_path / "run",
        [f"waiting for learner, {minute} min" for minute in range(30)],
    )
    output = StringIO()
    runs.stop(tmp_path / "run", Console(file=output, soft_wrap=True))
    assert ending.now_s > 10 * runs.STOP_SILENCE_S / 2
    assert "waiting for learner, 28 min" in output.getvalue()
    assert output.getvalue().endswith("Its gigpo train command goes on from here\n")
    assert ending.signals == [signal.SIGTERM, signal.SIGCONT]


def test_a_driver_that_says_nothing_more_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = Ending(monkeypatch, tmp_path / "run", ["waiting for worker-0"])
    ending.never_ends = True
    with pytest.raises(
        StoreError,
        match=r"nothing for 180 s; the last it said was: waiting for worker-0\. kill -9 7 ends",
    ):
        runs.stop(tmp_path / "run", Console(file=StringIO()))


def test_a_second_stop_is_no_second_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send no second SIGTERM: it would end the run at once, not in order."""
    ending = Ending(monkeypatch, tmp_path / "run", ["waiting for learner", "still"])
    runs.say_stopping(tmp_path / "run", "stopping")
    runs.stop(tmp_path / "run", Console(file=StringIO()))
    assert ending.signals == [signal.SIGCONT]


def test_the_status_shows_who_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    layout = RunLayout.create(run, config_yaml="", storage_uri="")
    write_open_sql(layout, macros=[], max_staleness=1)
    with Catalog.open(layout) as catalog:
        with mock.patch("store.catalog.database.now_us", return_value=now_us() - 600_000_000):
            catalog.heartbeats({"driver": None})
        catalog.heartbeats({"worker-0": None, "learner": "groups", "worker-1": "gone"})
        export(catalog, layout)
    with driving(run):
        shown = status_of(run)
        assert "(works)" in shown and "groups" in shown
        assert "worker-0" in shown and "worker-1" not in shown, "it has left"
        assert "driver" in shown, "also one that is stopped, and has not been heard of for long"
    ended = status_of(run)
    assert "nobody drives it" in ended and "(ended)" in ended and "(works)" not in ended


def test_the_status_of_a_run_that_has_just_begun_is_what_it_does_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with driving(run):
        assert "drives it" in status_of(run) and "nothing of the run is there yet" in status_of(run)
        cloning = "{learner: {steps: 7}, loss: {policy: behaviour_cloning}}"
        for root, config_yaml in ((run, ""), (run / "base", cloning)):
            write_open_sql(
                RunLayout.create(root, config_yaml=config_yaml, storage_uri=""),
                macros=[],
                max_staleness=1,
            )
        with Catalog.open(RunLayout.open(run / "base")) as catalog:
            catalog.record_version(
                VersionRecord(version=7, path="weights/v7", digest="d", learner_step=None)
            )
            catalog.heartbeats({"worker-0": "admission"})
            export(catalog, RunLayout.open(run / "base"))
        first, second, third, *_ = status_of(run).splitlines()
        assert first.startswith(f"{run}: process {os.getpid()} drives it")
        assert first.endswith(f"it clones the base policy first, in {run}/base")
        assert second == f"{run}/base: a run of its own"
        assert third == "cloning: learner step 0 of 7, newest version 7; time left: not known yet"
        assert "admission" in status_of(run)
        (run / "base" / "policy").mkdir()
        assert status_of(run).startswith(
            f"{run}: process {os.getpid()} drives it"
        ) and "base" not in status_of(run)


def status_of(run: Path) -> str:
    output = StringIO()
    runs.status(run, Console(file=output, width=500))
    return output.getvalue()


def test_a_stop_of_what_is_no_run_is_an_error_and_of_one_that_nobody_drives_says_so(
    tmp_path: Path,
) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        runs.stop(tmp_path / "nowhere", Console(file=StringIO()))
    RunLayout.create(tmp_path / "run", config_yaml="")
    output = StringIO()
    runs.stop(tmp_path / "run", Console(file=output, soft_wrap=True))
    assert "is driven by nobody, or by a process that has just begun" in output.getvalue()


def test_a_driver_that_fails_before_the_run_has_begun_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a typo"), driving(tmp_path / "run"):
        raise ValueError("a typo")
    assert not (tmp_path / "run").exists()


def test_a_driver_ends_what_the_environments_of_its_run_started(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    with driving(tmp_path / "run"):
        forked = sleep_with(tmp_path / "run", sleepers)
    forked.wait(timeout=10)


def test_semaphores_of_a_leftover_go_with_it(tmp_path: Path) -> None:
    code = """
import multiprocessing, time
made = multiprocessing.get_context("spawn").Semaphore()
print(made._semlock.name, flush=True)
time.sleep(99)
"""
    environ = {**os.environ, RUN_MARK: str((tmp_path / "run").resolve())}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        semaphore = Path("/dev/shm") / f"sem.{process.stdout.readline().strip().removeprefix('/')}"
        assert semaphore.exists()
        while not any(
            "resource_tracker" in " ".join(child.cmdline())
            for child in psutil.Process(process.pid).children()
        ):
            # a tracker that has only just been forked looks like nothing that one should wait for
            time.sleep(0.01)
        assert remove_leftovers(tmp_path / "run") == 1
    assert not semaphore.exists()


def test_signals_in_quick_succession_are_one_wish_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("driver.interrupt.time.monotonic", lambda: now_s[0])
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt._receive(signal.SIGTERM, None)
    now_s[0] += REPEAT_S / 2
    interrupt._receive(signal.SIGINT, None)  # the group's
    now_s[0] += REPEAT_S
    with pytest.raises(KeyboardInterrupt):
        interrupt._receive(signal.SIGINT, None)


@pytest.mark.parametrize(
    "view",
    [
        "components AS SELECT 'a' AS name, 'x' AS waiting_on, 'never' AS last_beat_at",
        "components AS SELECT 'a' AS name, 'x' AS waiting_on, 'infinity'::TIMESTAMP AS "
        "last_beat_at",
        "components AS SELECT 'a' AS name, 'x' AS waiting_on, now()::TIMESTAMP AS last_beat_at "
        "FROM range(30_000_000)",
        "versions AS SELECT 'many' AS version",
        "lineage AS SELECT [] AS learner_step, 'trained' AS batch_state, true AS live, "
        "'infinity'::TIMESTAMP AS trained_at",
    ],
)
def test_the_status_of_a_run_with_views_of_a_stranger_is_shown_or_is_one_line(
    tmp_path: Path, view: str
) -> None:
    layout = make_run(tmp_path / "run")
    text = layout.open_sql.read_text()
    rewrite(layout.open_sql, f"{text}\nCREATE OR REPLACE VIEW {view};\n".encode())
    with pytest.raises(StoreError) as problem:
        runs.status(layout.root, Console(file=StringIO()))
    assert "\n" not in str(problem.value)
