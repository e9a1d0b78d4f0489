"""Turn SIGINT and SIGTERM into a KeyboardInterrupt, which a block of code may hold back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout` and Slurm signal a process and then its group: these two signals are one request.
REPEAT_S = 1.0


class Interrupt:
    """Raise KeyboardInterrupt at a signal, and ignore more signals within REPEAT_S."""

    def __init__(self) -> None:
        self._received_at_s = float("-inf")

    def listen(self) -> None:
        """Install the signal handlers."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_repeat, self._received_at_s = now_s - self._received_at_s < REPEAT_S, now_s
        if not is_repeat:
            raise KeyboardInterrupt


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a signal only at the end of the block.

    A second signal, REPEAT_S or more after the first, raises at once.
    """
    received_at_s: list[float] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        if received_at_s and time.monotonic() - received_at_s[-1] >= REPEAT_S:
            raise KeyboardInterrupt
        received_at_s.append(time.monotonic())

    before = {number: signal.signal(number, hold) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received_at_s:
        raise KeyboardInterrupt
