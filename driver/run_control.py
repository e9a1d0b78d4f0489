"""Control a run from another process: its status, its end, its number of workers.

gigpo status RUN             progress, and the state of every component
gigpo stop RUN               end it in order, and remove what a killed one left
gigpo workers RUN N          N workers from now on
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import configs
import store
from analysis import progress_lines
from configs import ConfigError
from driver.run_lock import driver_of, has_ended, hides_its_files, remove_leftovers
from printable import printable
from store import (
    DRIVER_FILE,
    READ_WRITE,
    STOPPING_FILE,
    WANTED_WORKERS_FILE,
    RunLayout,
    StoreError,
    check_own_run,
    read_run_file,
    write_atomically,
)

# A driver that ends says every few seconds what it waits for, except while it closes things.
STOP_SILENCE_S = 180.0
STOP_POLL_S = 0.2  # between two looks whether the driver has ended
SHOWN_ROWS = 1000  # more workers than a cluster has

# A component that left for good is still in the view.
COMPONENTS = """
SELECT name, waiting_on, last_beat_at FROM components
WHERE waiting_on IS DISTINCT FROM 'gone' ORDER BY name
"""


def status(run: Path, console: Console) -> None:
    """Show a run's progress, its groups and its components.

    While its base policy is cloned, show that run. Raises StoreError.
    """
    driver = driver_of(run)
    process = driver.process() if driver is not None else None
    is_elsewhere = driver is not None and driver.host != socket.gethostname()
    is_driven = process is not None or is_elsewhere
    if process is not None:
        driven = f"process {process.pid} drives it ({process.status()})"
    elif driver is not None and is_elsewhere:
        driven = f"process {driver.pid} of {printable(driver.host)} drives it"
    else:
        driven = "nobody drives it"
    cloned = run / "base"
    if cloned.is_symlink():
        raise StoreError(f"{cloned} is a symbolic link, and a run has none; remove it")
    if is_driven and not RunLayout.exists(run):
        console.print(f"{run}: {driven}; it starts, and nothing of the run is there yet")
    elif RunLayout.exists(cloned) and not (cloned / "policy").is_dir():
        doing = "it clones" if is_driven else "it was to clone"
        console.print(f"{run}: {driven}; {doing} the base policy first, in {cloned}")
        _show_store(cloned, driven="a run of its own", is_driven=is_driven, console=console)
    else:
        _show_store(run, driven=driven, is_driven=is_driven, console=console)


def stop(run: Path, console: Console) -> None:
    """End the run in order, and remove what is left of it.

    Raises StoreError if its driver is another machine's or another user's, or does not end, and for
    another user's directory that this one does not trust.
    """
    _check_may_steer(run)
    driver = driver_of(run)
    if driver is None:
        RunLayout.open(run)  # raises for a directory that is no run
    process = driver.process() if driver is not None else None
    if driver is not None and driver.host != socket.gethostname():
        raise StoreError(f"{run} is driven by process {driver.pid} of {driver.host}; stop it there")
    if process is not None:
        # driver.json may name any process, such as an agent that holds keys.
        if driver is not None and hides_its_files(driver):
            raise StoreError(
                f"{run} is driven by process {process.pid} of {process.username()}, or so its "
                f"{DRIVER_FILE} says: the process does not show its files. Stop it as that user"
            )
        # A second signal would end it at once, not in order.
        if not (run / STOPPING_FILE).exists():
            console.print(f"asking process {process.pid} to end {run}")
            process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # it may be stopped
        _wait_until_ended(process, run, console=console)
        how = "is stopped"
    else:
        how = "is driven by nobody, or by a process that has just begun"
    n_removed = remove_leftovers(run)
    left = f"; removed {n_removed} leftover processes" if n_removed else ""
    console.print(f"{run} {how}{left}. Its gigpo train command goes on from here")


def ask_for_workers(run: Path, n_workers: int) -> None:
    """Ask the run's driver for a number of workers.

    Raises StoreError if there is no run or nobody drives it, and for another user's directory that
    this one does not trust; ConfigError if it has no workers.
    """
    _check_may_steer(run)
    if RunLayout.exists(run):
        config = configs.from_yaml(RunLayout.open(run).info.config_yaml)
        if configs.is_offline(config):
            raise ConfigError(f"{run} plays nothing (offline.share=1), so it has no workers")
    driver = driver_of(run)
    if driver is None or (driver.host == socket.gethostname() and driver.process() is None):
        RunLayout.open(run)  # it says so if there is no run
        raise StoreError(f"nobody drives {run}; start it with actors.workers={n_workers}")
    write_atomically(
        run / WANTED_WORKERS_FILE, str(n_workers).encode(), mode=READ_WRITE, beneath=run
    )


def wanted_workers(run: Path) -> int | None:
    """Return the number of workers asked for since the run was started, None if there is none."""
    try:
        return int(read_run_file(run, WANTED_WORKERS_FILE))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(
            f"{run / WANTED_WORKERS_FILE} is no number of workers ({error}); remove it"
        ) from None


def say_stopping(run: Path, text: str) -> None:
    """Tell a waiting `gigpo stop` what the driver waits for while it ends the run."""
    with contextlib.suppress(StoreError):  # a full disk must not keep a run from ending in order
        write_atomically(run / STOPPING_FILE, text.encode(), mode=READ_WRITE, beneath=run)


def clear_stopping(run: Path) -> None:
    """Remove the stopping line of the cloning, so that the training can be stopped in turn."""
    (run / STOPPING_FILE).unlink(missing_ok=True)


def _check_may_steer(run: Path) -> None:
    """Raise StoreError if no run is there, or another user could exchange it while we look.

    They could put a link to another run, or to any file, in its place.
    """
    if not run.exists():
        RunLayout.open(run)  # raises
    check_own_run(run, instead="ask that user to do it")


def _show_store(run: Path, *, driven: str, is_driven: bool, console: Console) -> None:
    """Show what the run's views say.

    Raises StoreError, also for values that no run has: the views may be a stranger's.
    """
    try:
        with store.open_run(run) as reader:
            progress = progress_lines(run, reader, is_driven=is_driven)
            groups = reader.rows(
                "SELECT state, count(*) AS n FROM groups WHERE split = 'train' GROUP BY state "
                "ORDER BY state"
            )
            table = _components_table(reader.rows(COMPONENTS), is_driven=is_driven)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise StoreError(
            f"{run}: its views hold what no run has ({error}); gigpo fsck --repair {run}"
        ) from error
    console.print(f"{run}: {driven}")
    for line in progress:
        console.print(line)
    counts = ", ".join(f"{row['n']} {row['state']}" for row in groups[:SHOWN_ROWS])
    console.print(f"groups: {printable(counts)}")
    console.print(table)


def _components_table(components: Sequence[Mapping[str, Any]], *, is_driven: bool) -> Table:
    table = Table("component", "waits for", "last heard of")
    now = datetime.now(UTC).replace(tzinfo=None)  # the store's times have no zone
    for row in components[:SHOWN_ROWS]:
        silent_s = max(0.0, (now - row["last_beat_at"]).total_seconds())
        doing = row["waiting_on"] or "(works)"
        table.add_row(
            printable(row["name"]),
            printable(doing) if is_driven else "(ended)",
            f"{silent_s:.0f} s ago",
        )
    return table


def _wait_until_ended(process: psutil.Process, run: Path, *, console: Console) -> None:
    """Wait for as long as the driver says what it waits for: a learner step may take an hour.

    Raises StoreError after STOP_SILENCE_S without news.
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
                f"s{last}. kill -9 {process.pid} ends it not in order: learner steps since the "
                "newest checkpoint are trained again, nothing that was committed is lost; then "
                "stop again"
            )
        time.sleep(STOP_POLL_S)
