"""Allow one driver per run: record the driver process, and remove the leftovers of a dead one.

Every process of a run has RUN_MARK with the run's directory in its environment. The mark tells its
leftovers from everything else on the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import psutil

import store
from driver.interrupt import hold_interrupts
from learner import remove_ray_directories, started_ticks
from store import (
    DRIVER_FILE,
    DRIVER_LOCK,
    STOPPING_FILE,
    WANTED_WORKERS_FILE,
    StoreError,
    check_own_directory,
    check_own_run,
    keep_private,
    open_file,
    read_run_file,
)

RUN_MARK = "ASYNC_GIGPO_RUN"
KILLED_WITHIN_S = 10.0  # for killed processes to be gone
TRACKERS_END_WITHIN_S = 5.0  # for trackers to end by themselves; then they are killed
TURN_WITHIN_S = 30.0  # to wait for another start of the same run, which takes half of it
TURN_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """The process that drives a run, as driver.json names it."""

    pid: int
    started_ticks: int  # pids are used again
    host: str
    run: str  # resolved, on that host: a copy of the directory has this file too

    def process(self) -> psutil.Process | None:
        """Return the process, None if it has ended or runs on another machine.

        The file may name any process. The driver is the one that has the file open for writing, see
        `driving`. A process that hides its files counts as the driver, so that no second one
        starts; `stop` signals none of these, see `hides_its_files`.
        """
        if self.host != socket.gethostname() or started_ticks(self.pid) != self.started_ticks:
            return None
        try:
            if not _writes(self.pid, Path(self.run) / DRIVER_FILE):
                return None
        except PermissionError:  # another user's process hides its files, and an ssh-agent does
            pass
        except OSError:  # it ended meanwhile
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid)
        return None


def hides_its_files(driver: Driver) -> bool:
    """Return whether this user cannot see if the process has the run's driver.json open."""
    try:
        _writes(driver.pid, Path(driver.run) / DRIVER_FILE)
    except PermissionError:
        return True
    except OSError:  # it ended meanwhile
        return False
    return False


@contextlib.contextmanager
def driving(run: Path, *, private: bool = False) -> Iterator[int]:
    """Drive a run alone. Yields the number of leftover processes that were removed first.

    If `private`, nobody else may enter its directory, from the first file in it. Raises StoreError
    if another process drives it, and if the directory cannot be made, or is another user's and no
    run that this one made or trusts.
    """
    check_idle(run, instead="choose another run_dir")
    is_new = not run.exists()
    make_run_directory(run, private=private)
    # The file stays open while this process drives the run: `Driver.process` looks for that.
    with contextlib.ExitStack() as opened:
        with _taking_turns(run):
            check_idle(run, instead="choose another run_dir")  # one that began since
            n_removed = remove_leftovers(run)
            for left in (WANTED_WORKERS_FILE, STOPPING_FILE):
                (run / left).unlink(missing_ok=True)
            me, ticks = os.getpid(), started_ticks(os.getpid())
            assert ticks is not None
            driver = Driver(
                pid=me, started_ticks=ticks, host=socket.gethostname(), run=str(run.resolve())
            )
            opened.enter_context(_open_written(run / DRIVER_FILE, json.dumps(asdict(driver))))
        try:
            yield n_removed
        finally:
            # Half a clean-up would leave processes and files. A disk that fails has raised its own
            # error already, and a driver.json of an ended process harms nobody.
            with hold_interrupts(), contextlib.suppress(OSError), _taking_turns(run):
                # An environment may have started processes that no component knows.
                remove_leftovers(run)
                for mine in (DRIVER_FILE, STOPPING_FILE):
                    (run / mine).unlink(missing_ok=True)
                if os.listdir(run) == [DRIVER_LOCK]:  # the run has not begun
                    (run / DRIVER_LOCK).unlink()
                    if is_new:
                        run.rmdir()


@contextlib.contextmanager
def _taking_turns(run: Path) -> Iterator[None]:
    """Hold the run's lock while this process begins to drive it, or ends.

    Of two that begin at once, each would take what the other starts for leftovers, and kill it. The
    block is entered without the lock if the file cannot be opened, because another member of the
    run's group made it, if the file system has no locks, and after TURN_WITHIN_S.
    """
    descriptor = _locked(run / DRIVER_LOCK, run=run)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _locked(path: Path, *, run: Path) -> int | None:
    """Return the descriptor of a locked file, None if it cannot be opened."""
    while True:
        try:
            # For its owner alone: whoever may open the file can lock it.
            descriptor = open_file(path, root=run, flags=os.O_RDWR | os.O_CREAT, mode=0o600)
        except OSError:  # at the end somebody may have removed the directory
            return None
        with contextlib.suppress(OSError):
            _wait_for(descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        os.close(descriptor)  # a lock on a removed file excludes nobody


def _wait_for(descriptor: int) -> None:
    """Lock a file, or give up after TURN_WITHIN_S. Raises OSError where there are no locks."""
    give_up_at = time.monotonic() + TURN_WITHIN_S
    while time.monotonic() < give_up_at:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(TURN_POLL_S)


def make_run_directory(run: Path, *, private: bool) -> None:
    """Make the directory of a run, unless it is there. If `private`, nobody else may enter it.

    Raises StoreError if it cannot be made, or is another user's, who may have made it since the
    settings were checked.
    """
    instead = "give a directory of your own"
    check_own_directory(run, may_be_anothers=True, is_made=False, instead=instead)
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the run directory {run}: {error.strerror}; give another run_dir"
        ) from error
    check_own_run(run, instead=instead)
    if private:
        keep_private(run)


def check_idle(run: Path, *, instead: str) -> None:
    """Raise StoreError if another process of this machine drives the run.

    The message says what to do `instead`. The catalog's lock would name the coordinator, which
    nobody can stop by itself.
    """
    driver = driver_of(run)
    if driver is not None and driver.pid != os.getpid() and driver.process() is not None:
        raise StoreError(
            f"process {driver.pid} drives {run}; {instead}, or stop it: gigpo stop {run}"
        )


def driver_of(run: Path) -> Driver | None:
    """Return the current driver of the run, or the last one if it was killed.

    Returns None for the driver of another run, of which this one is a copy. Raises StoreError for a
    file that no driver wrote.
    """
    here = str(run.resolve())
    try:
        known = store.parse_object(read_run_file(run, DRIVER_FILE))
        driver = Driver(
            pid=store.integer(known, "pid"),
            started_ticks=store.integer(known, "started_ticks"),
            host=store.text(known, "host"),
            run=store.text(known, "run"),
        )
        return None if driver.host == socket.gethostname() and driver.run != here else driver
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise StoreError(
            f"{run / DRIVER_FILE} is not readable ({error}); remove it if nothing runs there"
        ) from None


def remove_leftovers(run: Path) -> int:
    """Kill the processes that outlived their driver, and remove its Ray session.

    Returns the number of processes. Call it only where no driver lives.
    """
    n_killed = _kill_marked(str(run.resolve()))
    remove_ray_directories(run)
    driver = driver_of(run)
    if driver is not None and driver.host == socket.gethostname():
        (run / DRIVER_FILE).unlink(missing_ok=True)
    return n_killed


def _kill_marked(mark: str) -> int:
    """Kill the processes with this mark, but for the caller and its parents; return their number.

    Python's resource trackers are not counted. They remove the semaphores of ended processes from
    /dev/shm, and then end by themselves.
    """
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    leftovers, trackers = [], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile, or is another user's
            if process.pid in spared or not has_mark(process.pid, mark):
                continue
            if any("resource_tracker" in word for word in process.cmdline()):
                trackers.append(process)
            else:
                process.kill()
                leftovers.append(process)
    psutil.wait_procs(leftovers, timeout=KILLED_WITHIN_S)
    _, stuck = psutil.wait_procs(trackers, timeout=TRACKERS_END_WITHIN_S)
    for process in stuck:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(leftovers)


def has_mark(pid: int, mark: str) -> bool:
    """Return whether a process has RUN_MARK with this value. Raises OSError if it has ended."""
    # psutil finds no variables in a process that changed its title, as Ray's agents do.
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return f"{RUN_MARK}={mark}".encode() in variables


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, also if its parent has not waited for it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _writes(pid: int, path: Path) -> bool:
    """Return whether a process has the file open for writing.

    Raises OSError if it has ended or is another user's.
    """
    wanted = path.lstat()  # a link to /dev/null would make a driver of almost any process
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found = descriptor.stat()  # of the file behind the link
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                about = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text().splitlines()
                flags = next(line.split()[1] for line in about if line.startswith("flags:"))
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def _open_written(path: Path, text: str) -> TextIO:
    """Write a file whole or not at all, and return it open. Does not follow a link at `path`.

    Raises StoreError.
    """
    # A random name: nobody can put a link there beforehand.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        file = open(descriptor, "w")  # noqa: SIM115 - the caller closes it
        try:
            file.write(text)
            file.flush()
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # closing writes again, to the same full disk
                file.close()
            raise
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; free space or fix the permissions, then retry"
        ) from error
    return file
