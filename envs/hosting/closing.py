"""Closing environments, which may be too broken for it: that is nobody's error, and goes to the
log.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Coroutine
from typing import Any

from envs.base import Environment
from printable import printable

CLOSE_TIMEOUT_S = 5.0

_CLOSING: set[asyncio.Task[None]] = set()  # a loop forgets a task that nobody holds


def close_safely(environment: Environment) -> None:
    """Prints its error, if it raises one."""
    try:
        environment.close()
    except Exception:  # noqa: BLE001 - the border to a user's own code
        print(printable(traceback.format_exc(), lines=True), end="", file=sys.stderr, flush=True)


def close_soon(closing: Coroutine[Any, Any, object], *, what: str) -> None:
    """For a `close` that has to be awaited, as the contract's is not: it ends by itself, if its
    event loop lives so long.

    Prints one line if it raises, or takes longer than CLOSE_TIMEOUT_S. `what` is closed.
    """
    try:
        task = asyncio.get_running_loop().create_task(_closed(closing, what))
    except RuntimeError:  # the loop is gone, and its connections with it
        closing.close()
    else:
        _CLOSING.add(task)
        task.add_done_callback(_CLOSING.discard)


async def _closed(closing: Coroutine[Any, Any, object], what: str) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await closing
    except Exception as error:  # noqa: BLE001 - nobody waits for it
        why = (
            f"no answer within {CLOSE_TIMEOUT_S:g} s"
            if isinstance(error, TimeoutError)
            else repr(error)
        )
        print(printable(f"{what} was not closed: {why}"), file=sys.stderr, flush=True)
