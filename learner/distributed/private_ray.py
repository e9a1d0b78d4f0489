"""Keep Ray private: its sockets, logs and token lie where no other user can enter.

    directory = make_ray_directory(run)
    with ray_token(directory):                # a Ray started inside answers only to this token
        with on_the_loopback() as given:      # and to no other machine
            ray.init(job_config=own_imports(), **given, ...)
    remove_ray_directories(run)               # left behind by killed processes

Ray itself is imported inside functions only: the status of a run needs no Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from store import READ_WRITE, StoreError, parse_object, read_run_file, write_atomically

# Socket paths must be short, and /run/user is removed at logout.
RAY_DIRECTORIES = Path("/tmp")
RAY_DIRECTORY = "gigpo-ray-"
OWNER_FILE = "owner.json"  # in each directory: its run, and the process that made it
ENDED = "ZX"  # states in /proc of a process that has ended but was not reaped yet
# Ray 2.60 leaves CUDA_VISIBLE_DEVICES as it is in an actor with num_gpus=0. With this variable in
# the environment it is set to "" there before the actor's class is loaded, so torch sees no GPU.
RAY_HIDES_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
# The token is passed in a file: `ps` would show it on a command line.
RAY_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_BYTES = 32
LOOPBACK = "127.0.0.1"
START_TICKS = 22  # field of /proc/PID/stat, counted from 1; the state is field 3


@contextmanager
def ray_token(directory: Path) -> Iterator[None]:
    """Make a Ray started in this block answer only to a new token, kept in a file of `directory`.

    Ray's ports are open to every user of the machine, and to the network. By default Ray uses one
    token for all clusters, from a file in the home directory that others may be able to read.
    End Ray before the block ends.
    """
    path = directory / "token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    before = {name: os.environ.pop(name) for name in RAY_TOKEN if name in os.environ}
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    _reload_ray_settings()
    try:
        yield
    finally:
        for name in RAY_TOKEN:
            os.environ.pop(name, None)
        os.environ.update(before)
        _reload_ray_settings()


@contextmanager
def on_the_loopback() -> Iterator[dict[str, str]]:
    """Make a Ray that is started in this block listen on the loopback only. Yield its argument.

    A token alone does not protect it: one request between nodes needs none, and ends Ray if it
    lacks a header. Ray replaces the loopback by the machine's address on the network, even where
    the loopback is asked for. So the function that does this is replaced meanwhile.
    """
    from ray._private import services

    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield {"_node_ip_address": LOOPBACK}
    finally:
        services.resolve_ip_for_localhost = resolve


class _OwnDirectories(list[str]):
    """Directories from which this process imports; `extend` leaves out all others."""

    def extend(self, directories: Iterable[str]) -> None:
        own = {os.path.abspath(directory) for directory in sys.path}
        super().extend(one for one in directories if os.path.abspath(one) in own)


def own_imports() -> Any:
    """Return a JobConfig for `ray.init`: Ray's processes import from nowhere but this one does.

    Ray would have them import from the current directory first, before all others. That may be a
    stranger's run, or one in which everybody may write, such as /tmp.
    """
    from ray.job_config import JobConfig

    config = JobConfig()
    config._py_driver_sys_path = _OwnDirectories()
    return config


def _reload_ray_settings() -> None:
    """Make Ray read the environment again. It caches the values of its import."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
    from ray._raylet import Config as RaySettings  # type: ignore[attr-defined]

    RaySettings.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def started_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks; None if it does not exist or has ended.

    The kernel counts from the machine's start, so setting the clock changes nothing.
    """
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The process name comes first and may contain any character, also ")".
    fields = about.rpartition(")")[2].split()
    return None if fields[0] in ENDED else int(fields[START_TICKS - 3])


def make_ray_directory(run: Path) -> Path:
    """Make a directory for a private Ray of this run, for this user alone. Raises StoreError."""
    prefix = f"{RAY_DIRECTORY}{os.getpid()}-"
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=RAY_DIRECTORIES))
    except OSError as error:
        raise StoreError(
            f"cannot make a directory in {RAY_DIRECTORIES}: {error.strerror}; free space there"
        ) from error
    owner = {**_run_identity(run), "pid": os.getpid(), "started_ticks": started_ticks(os.getpid())}
    try:
        write_atomically(
            directory / OWNER_FILE, json.dumps(owner).encode(), mode=READ_WRITE, beneath=directory
        )
    except StoreError:
        directory.rmdir()
        raise
    return directory


def remove_ray_directories(run: Path) -> None:
    """Remove the directories made for this run by this process or by processes that have ended.

    Paths are found in RAY_DIRECTORIES only. A path read from the run's directory could name any
    directory of this user.
    """
    for path in RAY_DIRECTORIES.glob(f"{RAY_DIRECTORY}*"):
        # A directory may be another user's, vanish meanwhile, or be unfinished.
        with suppress(OSError, ValueError, StoreError):
            if _is_left_over(path, run):
                shutil.rmtree(path, ignore_errors=True)


def _is_left_over(path: Path, run: Path) -> bool:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        return False
    owner = parse_object(read_run_file(path, OWNER_FILE))
    if any(owner.get(name) != value for name, value in _run_identity(run).items()):
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return True
    return started_ticks(pid) != owner.get("started_ticks")


def _run_identity(run: Path) -> dict[str, str]:
    return {"host": socket.gethostname(), "run": str(run.resolve())}
