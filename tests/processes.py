"""Processes that have to end by themselves."""

from __future__ import annotations

import contextlib
import time

import psutil

PATIENCE_S = 30.0  # a busy machine takes its time to end what was killed


def wait_until_gone(pid: int) -> None:
    """Also content with one that nobody has asked yet how it ended."""
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.01)
