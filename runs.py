"""A run seen from outside: who drives it, how it is, how to stop it, and what a killed one left behind.

    python train.py --status RUN             what every component does, and when it was heard of
    python train.py --stop RUN               ends it in order, and removes what is left of it
    python train.py --workers RUN N          N workers from now on

Every process of a run carries RUN_MARK with the run's directory in its environment. That is how its leftovers are told from
everything else on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import store
from store import StoreError

RUN_MARK = "ASYNC_GIGPO_RUN"
DRIVER_FILE, WANTED_FILE = "driver.json", "workers.wanted"
RAY_SESSIONS = Path("/tmp/ray")  # where Ray keeps what it needs while it runs
STOP_TIMEOUT_S = 180.0  # the learner finishes its batch and writes a checkpoint
STOP_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """The process that runs train.py for a run."""

    pid: int
    started_s: float  # as the operating system has it: numbers of processes are used again
    host: str

    def process(self) -> psutil.Process | None:
        """None if it is gone, or another machine's."""
        if self.host != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return None
        return process if abs(process.create_time() - self.started_s) < 1.0 else None


@contextlib.contextmanager
def driving(run: Path) -> Iterator[int]:
    """This process drives the run, and nobody else does. Gives the number of leftover processes it removed first.

    Raises StoreError if another process does.
    """
    other = driver_of(run)
    if other is not None and other.process() is not None and other.pid != os.getpid():
        raise StoreError(f"process {other.pid} drives {run}; stop it (python train.py --stop {run}), or choose another run_dir")
    n_removed = remove_leftovers(run)
    (run / WANTED_FILE).unlink(missing_ok=True)
    me = psutil.Process()
    run.mkdir(parents=True, exist_ok=True)
    driver = Driver(pid=me.pid, started_s=me.create_time(), host=socket.gethostname())
    (run / DRIVER_FILE).write_text(json.dumps(asdict(driver)))
    try:
        yield n_removed
    finally:
        (run / DRIVER_FILE).unlink(missing_ok=True)


def driver_of(run: Path) -> Driver | None:
    """Who drives the run, or did when it was killed."""
    try:
        return Driver(**json.loads((run / DRIVER_FILE).read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise StoreError(f"{run / DRIVER_FILE} is not readable ({error}); remove it if nothing runs there") from None


def stop(run: Path, console: Console) -> None:
    """Ends the run in order, or what is left of it. Raises StoreError if its driver is another machine's, or does not end."""
    driver = driver_of(run)
    process = driver.process() if driver is not None else None
    if driver is not None and driver.host != socket.gethostname():
        raise StoreError(f"{run} is driven by process {driver.pid} of {driver.host}; stop it there")
    if process is not None:
        console.print(f"asking process {process.pid} to end {run}")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # it may be stopped
        if not _ended(process, within_s=STOP_TIMEOUT_S):
            raise StoreError(
                f"process {process.pid} has not ended {run} within {STOP_TIMEOUT_S:g} s; kill -9 {process.pid}, then stop again"
            )
    n_removed = remove_leftovers(run)
    left = f"; removed {n_removed} leftover processes" if n_removed else ""
    console.print(f"{run} is stopped{left}. Its train.py command goes on from here")


def status(run: Path, console: Console) -> None:
    """What the store says of the run: its figures, and every component with the age of its last sign of life."""
    driver = driver_of(run)
    process = driver.process() if driver is not None else None
    driven = "nobody drives it" if process is None else f"process {process.pid} drives it ({process.status()})"
    with store.open(run) as reader:
        (newest,) = reader.sql(
            """SELECT (SELECT coalesce(max(learner_step), 0) FROM lineage WHERE batch_state = 'trained' AND live) AS step,
                      (SELECT max(version) FROM versions) AS version"""
        ).to_pylist()
        groups = reader.sql("SELECT state, count(*) AS n FROM groups WHERE split = 'train' GROUP BY state ORDER BY state")
        components = reader.sql("SELECT name, waiting_on, last_beat_at FROM components ORDER BY name")
    console.print(f"{run}: {driven}; learner step {newest['step']}, newest version {newest['version']}")
    console.print("groups: " + ", ".join(f"{row['n']} {row['state']}" for row in groups.to_pylist()))
    table = Table("component", "waits for", "last heard of")
    now = datetime.now(UTC).replace(tzinfo=None)  # as the store has its times
    for row in components.to_pylist():
        silent_s = max(0.0, (now - row["last_beat_at"]).total_seconds())
        table.add_row(row["name"], row["waiting_on"] or "(works)", f"{silent_s:.0f} s ago")
    console.print(table)


def ask_for_workers(run: Path, n_workers: int) -> None:
    """The run's driver starts or stops workers until there are so many. Raises StoreError if nobody drives it."""
    driver = driver_of(run)
    if driver is None or (driver.host == socket.gethostname() and driver.process() is None):
        raise StoreError(f"nobody drives {run}; start it with actors.workers={n_workers}")
    unfinished = run / f"{WANTED_FILE}.{os.getpid()}"
    unfinished.write_text(str(n_workers))
    unfinished.rename(run / WANTED_FILE)


def wanted_workers(run: Path) -> int | None:
    """What was asked for since the run was started; None if nothing was."""
    try:
        return int((run / WANTED_FILE).read_text())
    except FileNotFoundError:
        return None


def remove_leftovers(run: Path) -> int:
    """Kills processes of this run that outlived their driver, and removes its Ray session; how many processes.

    Call it only where no driver lives.
    """
    mark = str(run.resolve())
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    leftovers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile, or is another user's
            if process.pid not in spared and process.environ().get(RUN_MARK) == mark:
                process.kill()
                leftovers.append(process)
    psutil.wait_procs(leftovers, timeout=10.0)
    driver = driver_of(run)
    if driver is not None and driver.host == socket.gethostname():
        for session in RAY_SESSIONS.glob(f"session_*_{driver.pid}"):  # the name ends with the driver's number
            shutil.rmtree(session, ignore_errors=True)
        (run / DRIVER_FILE).unlink(missing_ok=True)
    return len(leftovers)


def _ended(process: psutil.Process, *, within_s: float) -> bool:
    """Whether it ended by then; also one whose parent has not asked yet how."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(STOP_POLL_S)
    return True
