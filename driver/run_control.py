"""A run seen from outside: who drives it, how it is, how to stop it, and what a killed one left
behind.

    python cli/train.py --status RUN             how far it is, and what every component does
    python cli/train.py --stop RUN               ends it in order, and removes what is left of it
    python cli/train.py --workers RUN N          N workers from now on

Every process of a run carries RUN_MARK with the run's directory in its environment. That is how its
leftovers are told from everything else on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import psutil
from rich.console import Console
from rich.table import Table

import store
from analysis import progress_lines
from driver.shutdown import stop_held_back
from learner import remove_ray_directories, started_ticks
from printable import printable
from store import READ_WRITE, RunLayout, StoreError, read_run_file, write_atomically

RUN_MARK = "ASYNC_GIGPO_RUN"
DRIVER_FILE, WANTED_FILE, STOPPING_FILE = "driver.json", "workers.wanted", "stopping"
# What may be in a run's directory that was killed before it was one, or while its file system was
# new.
BEFORE_IT_IS_ONE = (
    *(
        "run.json",
        "signed.json",
        "segments",
        "export",
        "weights",
        "checkpoints",
        "logs",
        "lost+found",
    ),
    *(DRIVER_FILE, WANTED_FILE, STOPPING_FILE),
)
# a driver that ends says every few seconds what it waits for; while it closes things it is silent
STOP_SILENCE_S = 180.0
STOP_POLL_S = 0.2
SHOWN_ROWS = 1000  # of --status: more workers than a cluster has
TRACKERS_END_WITHIN_S = 5.0

# Who left for good is still in the view.
COMPONENTS = "SELECT name, waiting_on, last_beat_at FROM components WHERE waiting_on IS DISTINCT FROM 'gone' ORDER BY name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """The process that runs cli/train.py for a run."""

    pid: int
    started_ticks: int  # numbers of processes are used again
    host: str
    run: str  # resolved, on that host: a copy of the directory has this file too

    def process(self) -> psutil.Process | None:
        """Return the process that drives the run; None if it is gone, or another machine's.

        Any process may be named in the file. The driver is the one that has the file open for
        writing, see `driving`. A process of another user hides that; it cannot be signalled either.
        """
        if self.host != socket.gethostname() or started_ticks(self.pid) != self.started_ticks:
            return None
        try:
            if not writes(self.pid, Path(self.run) / DRIVER_FILE):
                return None
        except PermissionError:  # another user's process hides its files
            pass
        except OSError:  # it ended meanwhile
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid)
        return None


def writes(pid: int, path: Path) -> bool:
    """Return whether a process has the file open for writing. Raises OSError: it is gone, or it is
    another user's.
    """
    wanted = path.stat()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found = descriptor.stat()  # of the file behind the link
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                about = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text()
                flags = next(
                    line.split()[1] for line in about.splitlines() if line.startswith("flags:")
                )
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


@contextlib.contextmanager
def driving(run: Path) -> Iterator[int]:
    """This process drives the run, and nobody else does. Gives the number of leftover processes it
    removed first.

    Raises StoreError if another process does, or if the directory cannot be made.
    """
    other = driver_of(run)
    if other is not None and other.process() is not None and other.pid != os.getpid():
        raise StoreError(
            f"process {other.pid} drives {run}; stop it (python cli/train.py --stop {run}), or "
            "choose another run_dir"
        )
    n_removed = remove_leftovers(run)
    is_new = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
        for left in (WANTED_FILE, STOPPING_FILE):
            (run / left).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the run directory {run}: {error.strerror}; give another run_dir"
        ) from error
    me, ticks = os.getpid(), started_ticks(os.getpid())
    assert ticks is not None
    driver = Driver(pid=me, started_ticks=ticks, host=socket.gethostname(), run=str(run.resolve()))
    # open for as long as it drives: `Driver.process` looks
    with _written(run / DRIVER_FILE, json.dumps(asdict(driver))):
        try:
            yield n_removed
        finally:
            with stop_held_back():  # half a clean-up would leave processes and files
                # what environments started apart from everything else, which no component knows of
                remove_leftovers(run)
                for mine in (DRIVER_FILE, STOPPING_FILE):
                    (run / mine).unlink(missing_ok=True)
                if is_new:
                    # there is something in it: the run has begun
                    with contextlib.suppress(OSError):
                        run.rmdir()


def check_idle(run: Path, *, instead: str) -> None:
    """Raise StoreError if another process of this machine drives the run; name it, and what to do
    `instead`.

    The catalog's lock would name the coordinator, which nobody can stop by itself.
    """
    driver = driver_of(run)
    if driver is not None and driver.pid != os.getpid() and driver.process() is not None:
        raise StoreError(
            f"process {driver.pid} drives {run}; {instead}, or stop it: python cli/train.py --stop "
            f"{run}"
        )


def say_stopping(run: Path, text: str) -> None:
    """Tell whoever asked with --stop what the driver waits for while it ends the run."""
    with contextlib.suppress(StoreError):  # a full disk must not keep a run from ending in order
        write_atomically(run / STOPPING_FILE, text.encode(), mode=READ_WRITE, beneath=run)


def goes_on(run: Path) -> None:
    """What the driver ended was a part of the run: it can be asked to stop again."""
    (run / STOPPING_FILE).unlink(missing_ok=True)


def driver_of(run: Path) -> Driver | None:
    """Return who drives the run, or did when it was killed. Raises StoreError for what no driver
    wrote.

    Who drives another run, of which this is a copy, has nothing to do with it.
    """
    here = str(run.resolve())
    try:
        # an older driver's lacks `run`
        known = {"run": here, **store.parse_object(read_run_file(run, DRIVER_FILE))}
        driver = Driver(
            pid=store.whole(known, "pid"),
            started_ticks=store.whole(known, "started_ticks"),
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


def stop(run: Path, console: Console) -> None:
    """Ends the run in order, or what is left of it. Raises StoreError if its driver is another
    machine's, or does not end.
    """
    driver = driver_of(run)
    if driver is None:
        RunLayout.open(run)  # raises for what is no run
    process = driver.process() if driver is not None else None
    if driver is not None and driver.host != socket.gethostname():
        raise StoreError(f"{run} is driven by process {driver.pid} of {driver.host}; stop it there")
    if process is not None:
        try:
            # a second signal would end it at once, not in order
            if not (run / STOPPING_FILE).exists():
                console.print(f"asking process {process.pid} to end {run}")
                process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # it may be stopped
        except psutil.AccessDenied:
            raise StoreError(
                f"{run} is driven by process {process.pid} of {process.username()}; stop it as "
                "that user"
            ) from None
        _wait_until_ended(process, run, console)
    n_removed = remove_leftovers(run)
    left = f"; removed {n_removed} leftover processes" if n_removed else ""
    how = (
        "is stopped"
        if process is not None
        else "is driven by nobody, or by a process that has just begun"
    )
    console.print(f"{run} {how}{left}. Its cli/train.py command goes on from here")


def status(run: Path, console: Console) -> None:
    """Show how far the run is, its groups, and every component with the age of its last sign of
    life.

    While its base policy is cloned, show that run. Raises StoreError.
    """
    driver = driver_of(run)
    process = driver.process() if driver is not None else None
    is_driven = process is not None or (driver is not None and driver.host != socket.gethostname())
    if process is not None:
        driven = f"process {process.pid} drives it ({process.status()})"
    else:
        driven = (
            f"process {driver.pid} of {printable(driver.host)} drives it"
            if driver and is_driven
            else "nobody drives it"
        )
    cloned = run / "base"
    if cloned.is_symlink():
        raise StoreError(f"{cloned} is a symbolic link, and a run has none; remove it")
    if is_driven and not RunLayout.exists(run):
        console.print(f"{run}: {driven}; it starts, and nothing of the run is there yet")
    elif RunLayout.exists(cloned) and not (cloned / "policy").is_dir():
        console.print(
            f"{run}: {driven}; {'it clones' if is_driven else 'it was to clone'} the base policy "
            f"first, in {cloned}"
        )
        _show_store(cloned, driven="a run of its own", is_driven=is_driven, console=console)
    else:
        _show_store(run, driven=driven, is_driven=is_driven, console=console)


def _show_store(run: Path, *, driven: str, is_driven: bool, console: Console) -> None:
    """Show what the run's views say. Raises StoreError, also for values that no run has: the views
    may be a stranger's.
    """
    try:
        with store.open_run(run) as reader:
            standing = progress_lines(run, reader, is_driven=is_driven)
            groups = reader.rows(
                "SELECT state, count(*) AS n FROM groups WHERE split = 'train' GROUP BY state "
                "ORDER BY state"
            )
            table = _components_table(reader.rows(COMPONENTS), is_driven=is_driven)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise StoreError(
            f"{run}: its views hold what no run has ({error}); python -m store fsck --repair {run}"
        ) from error
    console.print(f"{run}: {driven}")
    for line in standing:
        console.print(line, markup=False)
    console.print(
        "groups: "
        + printable(", ".join(f"{row['n']} {row['state']}" for row in groups[:SHOWN_ROWS]))
    )
    console.print(table)


def _components_table(components: Sequence[Mapping[str, Any]], *, is_driven: bool) -> Table:
    table = Table("component", "waits for", "last heard of")
    now = datetime.now(UTC).replace(tzinfo=None)  # as the store has its times
    for row in components[:SHOWN_ROWS]:
        silent_s = max(0.0, (now - row["last_beat_at"]).total_seconds())
        doing = row["waiting_on"] or "(works)"
        table.add_row(
            printable(row["name"]),
            printable(doing) if is_driven else "(ended)",
            f"{silent_s:.0f} s ago",
        )
    return table


def ask_for_workers(run: Path, n_workers: int) -> None:
    """The run's driver starts or stops workers until there are so many. Raises StoreError if nobody
    drives it.
    """
    driver = driver_of(run)
    if driver is None or (driver.host == socket.gethostname() and driver.process() is None):
        raise StoreError(f"nobody drives {run}; start it with actors.workers={n_workers}")
    write_atomically(run / WANTED_FILE, str(n_workers).encode(), mode=READ_WRITE, beneath=run)


def wanted_workers(run: Path) -> int | None:
    """What was asked for since the run was started; None if nothing was."""
    try:
        return int(read_run_file(run, WANTED_FILE))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(
            f"{run / WANTED_FILE} is no number of workers ({error}); remove it"
        ) from None


def remove_leftovers(run: Path) -> int:
    """Kills processes of this run that outlived their driver, and removes its Ray session; how many
    processes.

    Call it only where no driver lives. Python's resource trackers remove the semaphores of those
    that are gone, then end by themselves: killed first, they would leave them in /dev/shm.
    """
    mark = str(run.resolve())
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    leftovers, trackers = [], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile, or is another user's
            if process.pid not in spared and process.environ().get(RUN_MARK) == mark:
                if any("resource_tracker" in word for word in process.cmdline()):
                    trackers.append(process)
                else:
                    process.kill()
                    leftovers.append(process)
    psutil.wait_procs(leftovers, timeout=10.0)
    _, stuck = psutil.wait_procs(trackers, timeout=TRACKERS_END_WITHIN_S)
    for process in stuck:
        with contextlib.suppress(psutil.Error):
            process.kill()
    remove_ray_directories(run)
    driver = driver_of(run)
    if driver is not None and driver.host == socket.gethostname():
        (run / DRIVER_FILE).unlink(missing_ok=True)
    return len(leftovers)


def _wait_until_ended(process: psutil.Process, run: Path, console: Console) -> None:
    """As long as the driver says what it waits for: a learner step may take an hour. Raises
    StoreError if it says nothing.
    """
    said, heard_at = "", time.monotonic()
    while not has_ended(process):
        with contextlib.suppress(OSError, StoreError):
            text = read_run_file(run, STOPPING_FILE)
            if text != said:
                said, heard_at = text, time.monotonic()
                console.print(printable(text))
        if time.monotonic() - heard_at > STOP_SILENCE_S:
            last = f"; the last it said was: {said}" if said else ""
            raise StoreError(
                f"process {process.pid}, which ends {run}, has said nothing for {STOP_SILENCE_S:g} "
                f"s{last}. "
                f"kill -9 {process.pid} ends it not in order: learner steps since the newest "
                "checkpoint are trained again, "
                "nothing that was committed is lost; then stop again"
            )
        time.sleep(STOP_POLL_S)


def has_ended(process: psutil.Process) -> bool:
    """Also one whose parent has not asked yet how."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _written(path: Path, text: str) -> TextIO:
    """Write a file whole or not at all, and return it still open. A link that lies there is not
    followed. Raises StoreError.
    """
    # nobody can know it before
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
            with contextlib.suppress(OSError):  # it writes once more, to the same disk
                file.close()
            raise
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; free space or fix the permissions, then retry"
        ) from error
    return file
