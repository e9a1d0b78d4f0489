"""Processes that have to end by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

PATIENCE_S = 30.0  # a busy machine takes its time to end what was killed


def end_with_their_owner(owner: subprocess.Popen[bytes], *, pid_file: Path, stopped: bool) -> None:
    """Kills `owner` once `pid_file` has the numbers of its child and of that one's; `stopped`: its child is, before."""
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
    """Also content with one that nobody has asked yet how it ended."""
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.01)
