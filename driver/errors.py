"""What an error that came out of another process says to a person: its bottom cause, in one
line.
"""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError

from printable import UserError

DIED = "died: its process was killed, ran out of memory, or crashed"
CAUSE_CHARACTERS = 1000  # of a cause; the log has all of it


class ComponentFailed(UserError, RuntimeError):
    """A part of the run failed; the message is its name, its own error and where its log is."""


class Stopped(KeyboardInterrupt):
    """Somebody asked the run to stop; the message says how it ended."""


def cause_of(error: BaseException) -> BaseException:
    """What was raised at the bottom: Ray wraps it, once for each process it came through, and so do
    task groups.
    """
    while True:
        # of a worker's loops: the first one is why the others ended
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
            error = error.cause
        else:
            return error


def describe_cause(error: BaseException) -> str:
    """Return the type and the whole message of the bottom cause, in one line.

    Ray passes on only the traceback of an actor that could not be made.
    """
    cause = cause_of(error)
    if isinstance(cause, RayActorError) and not cause.actor_init_failed:
        return DIED
    if isinstance(cause, RayTaskError | RayActorError):
        text = _raised_at_the_end(str(cause))
    else:
        text = f"{type(cause).__name__}: {cause}"
    text = " ".join(text.split())
    half = CAUSE_CHARACTERS // 2
    return text if len(text) <= CAUSE_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def _raised_at_the_end(traceback: str) -> str:
    """What stands behind the last frame, whose own lines are indented; the type without its
    module.
    """
    lines = traceback.splitlines()
    frames = [place for place, line in enumerate(lines) if line.lstrip().startswith('File "')]
    behind = lines[frames[-1] + 1 :] if frames else lines
    while len(behind) > 1 and behind[0].startswith(" "):
        behind = behind[1:]
    name, colon, message = "\n".join(behind).partition(": ")
    return name.rpartition(".")[2] + colon + message
