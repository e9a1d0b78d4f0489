"""The directory of a private Ray: its sockets, its logs and its token, which no other user may
reach.

    directory = make_ray_directory(run)       # of a run, or of a replay of it
    remove_ray_directories(run)               # what processes left behind that were killed

Loads nothing but the store: who asks how a run is, or stops it, needs no Ray.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from store import READ_WRITE, StoreError, parse_object, read_run_file, write_atomically

# of all private Rays: names of sockets must be short, and /run/user ends with a login
RAY_DIRECTORIES = Path("/tmp")
RAY_DIRECTORY = "gigpo-ray-"
OWNER_FILE = "owner.json"  # in each of them: the run that it is of, and the process that made it
ENDED = "ZX"  # states of a process that only its parent still has to ask about


def started_ticks(pid: int) -> int | None:
    """Return when a process was started, in the kernel's clock ticks; None if there is none, or it
    has ended.

    Counted from the machine's start: a time of day would be another one as soon as somebody sets
    the clock.
    """
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # behind the name, in which anything may stand
    state, *numbers = about.rpartition(")")[2].split()
    return None if state in ENDED else int(numbers[18])


def make_ray_directory(run: Path) -> Path:
    """Make the directory of a private Ray for this run, which only this user can enter. Raises
    StoreError.
    """
    try:
        directory = Path(
            tempfile.mkdtemp(prefix=f"{RAY_DIRECTORY}{os.getpid()}-", dir=RAY_DIRECTORIES)
        )
    except OSError as error:
        raise StoreError(
            f"cannot make a directory in {RAY_DIRECTORIES}: {error.strerror}; free space there"
        ) from error
    owner = {**_of(run), "pid": os.getpid(), "started_ticks": started_ticks(os.getpid())}
    try:
        write_atomically(
            directory / OWNER_FILE, json.dumps(owner).encode(), mode=READ_WRITE, beneath=directory
        )
    except StoreError:
        directory.rmdir()
        raise
    return directory


def remove_ray_directories(run: Path) -> None:
    """Remove what `make_ray_directory` made for this run in this process, or in one that has ended.

    Nothing that stands in a run's directory is asked: it could name any directory of this user.
    """
    for path in RAY_DIRECTORIES.glob(f"{RAY_DIRECTORY}*"):
        # another user's, gone meanwhile, or not finished
        with suppress(OSError, ValueError, StoreError):
            if _is_left(path, run):
                shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path, run: Path) -> bool:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        return False
    owner = parse_object(read_run_file(path, OWNER_FILE))
    if any(owner.get(name) != value for name, value in _of(run).items()):
        return False
    # missing in what an older release made, of which only the driver of the run could be the maker
    pid = owner.get("pid")
    return (
        not isinstance(pid, int)
        or pid == os.getpid()
        or started_ticks(pid) != owner.get("started_ticks")
    )


def _of(run: Path) -> dict[str, str]:
    return {"host": socket.gethostname(), "run": str(run.resolve())}
