"""Define the errors that end a run, and find the cause of an error from another process."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError

from printable import UserError, one_line

DIED = "died: its process was killed, ran out of memory, or crashed"
CAUSE_CHARACTERS = 1000  # of a cause that is shown; the log has all of it


class ComponentFailed(UserError, RuntimeError):
    """A process of the run failed; the message names it, its error and its log."""


class Stopped(KeyboardInterrupt):
    """The run was stopped by Ctrl-C or a signal; the message says how it ended."""


def cause_of(error: BaseException) -> BaseException:
    """Return the error at the bottom of Ray's wrappers and of exception groups.

    Ray wraps an error once for each process that it passes through.
    """
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]  # the first task to fail is why the others ended
        elif isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
            error = error.cause
        else:
            return error


def describe_cause(error: BaseException) -> str:
    """Return the type and the message of the bottom cause, in one line."""
    cause = cause_of(error)
    if isinstance(cause, RayActorError) and not cause.actor_init_failed:
        return DIED
    if isinstance(cause, RayTaskError | RayActorError):
        # Ray passes on only the traceback of an actor whose constructor failed.
        text = _last_error(str(cause))
    else:
        text = f"{type(cause).__name__}: {cause}"
    text = one_line(text)
    half = CAUSE_CHARACTERS // 2
    return text if len(text) <= CAUSE_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _last_error(traceback: str) -> str:
    """Return the error after the last frame of a traceback, its type without the module."""
    lines = traceback.splitlines()
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith('File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    while len(after) > 1 and after[0].startswith(" "):  # source lines of the frame
        after = after[1:]
    name, colon, message = "\n".join(after).partition(": ")
    return name.rpartition(".")[2] + colon + message
