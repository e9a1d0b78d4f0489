"""What an error that came out of another process says to a person: its bottom cause, in one line."""

from __future__ import annotations

from pathlib import Path

from ray.exceptions import RayActorError, RayTaskError

DIED = "died: its process was killed, ran out of memory, or crashed"
CAUSE_CHARACTERS = 1000  # of a cause; the log has all of it


class ComponentFailed(RuntimeError):
    """A part of the run failed; the message is its name, its own error and where its log is."""


class Stopped(KeyboardInterrupt):
    """Somebody asked the run to stop; the message says how it ended."""


def cause_of(error: BaseException) -> BaseException:
    """What was raised at the bottom: Ray wraps it, once for each process it came through, and so do task groups."""
    while True:
        if isinstance(error, BaseExceptionGroup):  # of a worker's loops: the first one is why the others ended
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
            error = error.cause
        else:
            return error


def one_line(error: BaseException) -> str:
    """The bottom cause's type and whole message. Of an actor that could not be made, Ray passes on only the traceback."""
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


def log_hint(log: Path) -> str:
    """Where to read on; "" if the process ended before it had a log."""
    return f" (log: {log})" if log.exists() else ""


def with_log(text: str, log: Path) -> str:
    """Add the log to a message that does not name it yet."""
    return text if str(log) in text else text + log_hint(log)


def _raised_at_the_end(traceback: str) -> str:
    """What stands behind the last frame, whose own lines are indented; the type without its module."""
    lines = traceback.splitlines()
    frames = [place for place, line in enumerate(lines) if line.lstrip().startswith('File "')]
    behind = lines[frames[-1] + 1 :] if frames else lines
    while len(behind) > 1 and behind[0].startswith(" "):
        behind = behind[1:]
    name, colon, message = "\n".join(behind).partition(": ")
    return name.rpartition(".")[2] + colon + message
