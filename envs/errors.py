"""Define the errors of environments and agent programs."""

from __future__ import annotations

from functools import partial
from typing import Any

from printable import UserError


class EnvironmentDied(RuntimeError):
    """An environment raised, returned nonsense, hung, or lost its process during an episode.

    `at_fault` is False for an episode that only shared the process of the failing one.
    `ended_process`: all episodes in that process have to be played again.
    """

    def __init__(self, message: str, *, at_fault: bool, ended_process: bool = False) -> None:
        super().__init__(message)
        self.at_fault = at_fault
        self.ended_process = ended_process

    def __reduce__(self) -> tuple[Any, ...]:
        # Python pickles only the positional arguments of an exception.
        made = partial(EnvironmentDied, at_fault=self.at_fault, ended_process=self.ended_process)
        return made, (str(self),)


class EnvironmentStuckError(RuntimeError):
    """An environment's coroutine goes on though it was cancelled. The worker has to end."""


class EnvironmentFailed(UserError, RuntimeError):
    """An environment cannot be used. The one-line message names it, the fault and the fix.

    `may_work_elsewhere`: this machine lacks something that another may have. A dry run then only
    reports it.
    """

    may_work_elsewhere = False
