"""Play tasks that may end their process in a process where no other task is played meanwhile.

    async with suspects.environments_for(task, usual) as objects:
        ...    # of `usual`, or of the process for suspects

One process holds the environments of many episodes, and its end fails them all. The episode whose
request was being answered is blamed, also if a thread of another one did it. So the task that is
blamed is only a suspect: its episodes are played next in a process of their own, one suspect at a
time. What happens there is its own doing. A suspect that leaves that process whole is none any
more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from envs.base import Task
from envs.errors import EnvironmentDied

Objects = TypeVar("Objects")
_Key = tuple[str, str, int]


class SuspectTasks(Generic[Objects]):
    """The tasks that were blamed for the end of a process, and whose turn it is."""

    def __init__(self, apart: Objects) -> None:
        self._apart = apart
        self._suspects: set[_Key] = set()
        self._playing: _Key | None = None  # the suspect whose turn it is
        self._n_playing = 0  # its episodes
        self._has_ended = False  # the process, in this turn
        self._turn_over = asyncio.Event()  # replaced at the end of each turn

    @asynccontextmanager
    async def environments_for(self, task: Task, usual: Objects) -> AsyncIterator[Objects]:
        """Give where to play an episode: `usual`, or the process for suspects when it is free.

        An EnvironmentDied that the episode raises makes its task a suspect if it is at fault.
        """
        key = (task.id, task.split, task.seed)
        is_apart = key in self._suspects
        if is_apart:
            await self._take_turn(key)
        try:
            yield self._apart if is_apart else usual
        except EnvironmentDied as error:
            if error.ended_process and is_apart:
                self._has_ended = True
            elif error.ended_process and error.at_fault:
                self._suspects.add(key)
            raise
        finally:
            if is_apart:
                self._leave(key)

    async def _take_turn(self, key: _Key) -> None:
        while self._playing not in (None, key):
            await self._turn_over.wait()
        self._playing = key
        self._n_playing += 1

    def _leave(self, key: _Key) -> None:
        self._n_playing -= 1
        if self._n_playing:
            return
        if not self._has_ended:
            self._suspects.discard(key)
        self._playing, self._has_ended = None, False
        self._turn_over.set()
        self._turn_over = asyncio.Event()
