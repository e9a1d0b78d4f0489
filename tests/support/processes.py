"""Processes that have to end by themselves, and what they may leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from driver.run_lock import has_ended

PATIENCE_S = 60.0  # a busy machine takes its time to end what was killed
SHARED_MEMORY = Path("/dev/shm")
LOOK_AGAIN_S = 1.0


def end_with_their_owner(owner: subprocess.Popen[bytes], *, pid_file: Path, stopped: bool) -> None:
    """Kills `owner` once `pid_file` has the numbers of its child and of that one's; `stopped`: its
    child is, before.
    """
    try:
        while not (pid_file.exists() and pid_file.read_text()):
            assert owner.poll() is None
            time.sleep(0.02)
        child, grandchild = map(int, pid_file.read_text().split())
        if stopped:
            os.kill(child, signal.SIGSTOP)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    wait_until_gone(child)
    wait_until_gone(grandchild)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while not has_ended(process):
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.01)


def children(word: str, *, of: int | None = None, recursive: bool = False) -> list[psutil.Process]:
    """Return the living children of process `of` with `word` in their command.

    None stands for this process.
    """
    found = []
    for child in psutil.Process(of).children(recursive=recursive):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def unused_shared_memory() -> frozenset[str]:
    """Files in /dev/shm that no living process has mapped or open.

    Not directories, which are the tests' own; nor semaphores of Python's processes, a page each.
    """
    names = {
        path.name
        for path in SHARED_MEMORY.iterdir()
        if path.is_file() and not path.name.startswith("sem.")
    }
    return frozenset(names - _used_shared_memory())


def litter(before: frozenset[str]) -> frozenset[str]:
    """Return shared memory that became unused since `before`, and stays so for PATIENCE_S.

    Others on this machine end too: what a process of theirs has just let go of is removed soon, on
    a busy machine after more than 5 s.
    """
    found = unused_shared_memory() - before
    deadline = time.monotonic() + PATIENCE_S
    while found and time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_S)
        found &= unused_shared_memory()
    return found


def _used_shared_memory() -> set[str]:
    used = set()
    for process in psutil.process_iter():
        of_process = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            used |= {
                line.split(maxsplit=5)[-1]
                for line in (of_process / "maps").read_text().splitlines()
            }
            for fd in list((of_process / "fd").iterdir()):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    used.add(os.readlink(fd))
    prefix = f"{SHARED_MEMORY}/"
    return {path.removeprefix(prefix) for path in used if path.startswith(prefix)}
