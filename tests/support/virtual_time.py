"""Run an event loop in virtual time: nobody sleeps, so hours of waiting take no time.

with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
    runner.run(simulation())
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Advance the clock to the next timer instead of waiting for it; run threads' work at once.

    Only for tasks that wait for timers: a socket or a process gets no time to answer. Raises
    RuntimeError when every task waits for ever.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now_s

    def _jump(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            raise RuntimeError(
                f"after {self._now_s:g} virtual seconds every task waits, and no timer will wake "
                "one"
            )
        self._now_s += timeout_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  a thread would pass it on too
            done.set_exception(error)
        return done


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout != 0:
            self._jump(timeout)
        return ready
